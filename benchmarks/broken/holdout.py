"""A rank for `benchmarks/chaos.py` that is hard to get rid of: `holdout.py KIND SECONDS`. With MPI, it meets the others once.

KIND is `plain`; `stubborn`: it ignores SIGTERM and SIGINT; `setsid`: it has a child in a session of its own; `forked`: it has
a grandchild whose parent has ended, in a session of its own.
"""

import os
import signal
import subprocess
import sys
import time

_LONG_S = "600"


def main() -> None:
    """Say that everything is up, and compute until the time is over, never in MPI."""
    kind, seconds = sys.argv[1], float(sys.argv[2])
    if kind == "stubborn":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    if kind == "setsid":
        subprocess.Popen(["sleep", _LONG_S], start_new_session=True)
    if kind == "forked" and os.fork() == 0:
        subprocess.Popen(["sleep", _LONG_S], start_new_session=True)
        os._exit(0)
    if "OMPI_COMM_WORLD_RANK" in os.environ:
        from mpi4py import MPI

        MPI.COMM_WORLD.allreduce(1)
    print("up", flush=True)
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        sum(range(1000))
        time.sleep(0.02)


if __name__ == "__main__":
    main()
