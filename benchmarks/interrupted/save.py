"""Train nothing, and save for long when told to end; for `benchmarks/checkpoint_on_interrupt.py`.

    mpirun -n 2 python save.py SECONDS

Whatever signal asks a rank to end, all ranks agree on it at the end of a step, write a file for so many seconds, a piece
every 10 ms, and give it its name when it is whole.
"""

import os
import signal
import sys
import time
from pathlib import Path

from mpi4py import MPI

_PIECE_S = 0.01
_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)


def main() -> None:
    """Take steps until somebody is told to end, then save."""
    told: list[int] = []
    for number in _ENDING:
        signal.signal(number, lambda number, _: told.append(number))
    comm, seconds, step = MPI.COMM_WORLD, float(sys.argv[1]), 0
    while not comm.allreduce(len(told)):
        step += 1
        if step == 5:
            Path(f"up-{comm.rank}").touch()
        time.sleep(_PIECE_S)
    _save(comm.rank, seconds)


def _save(rank: int, seconds: float) -> None:
    end = time.monotonic() + seconds
    part = Path(f"checkpoint-{rank}.part")
    with part.open("wb") as file:
        while time.monotonic() < end:
            file.write(os.urandom(4096))
            file.flush()
            time.sleep(_PIECE_S)
        os.fsync(file.fileno())
    part.rename(f"checkpoint-{rank}")


if __name__ == "__main__":
    main()
