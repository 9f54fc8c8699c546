"""Waits on the launching machine while a run lasts, and cleans up after the run if its supervisor is killed.

    python -I -S guard.py    with a line of JSON on standard input: `run_id`, `scratch`, `daemons`

Standard input is a pipe that only the supervisor holds. A byte means that the supervisor needs no guard any more; the
pipe's end without a byte means that it was killed and could not clean up. The kernel signals the engine at the same moment; it
gets 2 s to end its ranks. Then everything that carries the run's id is killed, and the run's folder in shared memory is removed. Python 3.9 and the
standard library only.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys

_PACKAGE_PARENT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
sys.path.insert(0, _PACKAGE_PARENT)
from ttlaunch.agent.run_processes import kill_run_processes  # noqa: E402 - the path above makes it importable without site-packages

sys.path.remove(_PACKAGE_PARENT)

_GRACE_S = 2.0


def main() -> None:
    """Wait until the supervisor says goodbye or is gone; clean up in the second case."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(number, signal.SIG_IGN)
    line = sys.stdin.buffer.readline()
    if not line.endswith(b"\n"):  # the supervisor was killed before it had started anything
        return
    request = json.loads(line)
    if sys.stdin.buffer.read(1):
        return
    kill_run_processes(request["run_id"], grace_s=_GRACE_S, daemons=request["daemons"])
    shutil.rmtree(request["scratch"], ignore_errors=True)


if __name__ == "__main__":
    main()
    os._exit(0)  # skips the interpreter's own clean-up, which takes time and has nothing to do here
