"""Waits beside a run on the launching machine for its supervisor to be killed, and then leaves nothing of the run there.

    python -I -S guard.py    with a line of JSON on standard input: `run_id`, `scratch`, `daemons`

Standard input is a pipe that only the supervisor holds. A byte through it is goodbye; its end without one means that the
supervisor is gone and can clean up nothing. The kernel tells the engine to end at that moment too; it gets 2 s to end its ranks;
then everything that carries the run's id is killed, and the run's folder in shared memory is removed. Python 3.9 and the
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

_MOMENT_S = 2.0


def main() -> None:
    """Wait until the supervisor says goodbye or is gone; clean up in the second case."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(number, signal.SIG_IGN)
    line = sys.stdin.buffer.readline()
    if not line.endswith(b"\n"):  # the supervisor was killed before it had started anything
        return
    order = json.loads(line)
    if sys.stdin.buffer.read(1):
        return
    kill_run_processes(order["run_id"], moment_s=_MOMENT_S, daemons=order["daemons"])
    shutil.rmtree(order["scratch"], ignore_errors=True)


if __name__ == "__main__":
    main()
    os._exit(0)  # skips the interpreter's own clean-up, which takes time and has nothing to do here
