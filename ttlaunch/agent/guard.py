"""Waits on the launching machine while a run lasts, and cleans up after the run if its supervisor is killed.

    python -I -S guard.py    with a line of JSON on standard input: `run_id`, `scratch`, `daemons`

Standard input is a pipe that only the supervisor holds. A byte means that the supervisor needs no guard any more; if the
pipe ends without a byte, the supervisor was killed and could not clean up. At the same moment the kernel sends the engine
its parent-death signal, and the engine has 2 s to end its ranks, or 30 s more if they save the state of an elastic run. Then the guard kills every process that carries the run's
id and removes the run's folder in shared memory. Python 3.9 and the standard library only.
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]  # `signal` without the enumerations, which take as long to import as Python takes to start
import os
import sys

_PACKAGE_PARENT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
_GRACE_S = 2.0


def main() -> None:
    """Wait until the supervisor dismisses the guard or has ended; clean up if it ended without doing so."""
    for number in (_signal.SIGINT, _signal.SIGTERM, _signal.SIGHUP, _signal.SIGQUIT):
        _signal.signal(number, _signal.SIG_IGN)
    line = sys.stdin.buffer.readline()
    if not line.endswith(b"\n"):  # the supervisor was killed before it had started anything
        return
    if not sys.stdin.buffer.read(1):
        _clean_up(line)


def _clean_up(line: bytes) -> None:
    """Kill what is left of the run that a line describes, and remove its folder in shared memory.

    All that this needs is imported here: most guards end without it, and start while the ranks of their run do.
    """
    import json  # noqa: PLC0415

    sys.path.insert(0, _PACKAGE_PARENT)
    from ttlaunch import contract  # noqa: PLC0415 - the path above makes it importable without site-packages
    from ttlaunch.agent.claims import remove_scratch  # noqa: PLC0415
    from ttlaunch.agent.run_processes import kill_run_processes  # noqa: PLC0415
    from ttlaunch.agent.worker_orders import order_to_save  # noqa: PLC0415

    request = json.loads(line)
    saving_s = contract.SAVE_S if order_to_save(request["scratch"]) else 0.0
    kill_run_processes(request["run_id"], grace_s=saving_s + _GRACE_S, daemons=request["daemons"])

    remove_scratch(request["scratch"])


if __name__ == "__main__":
    main()
    os._exit(0)  # skips the interpreter's own clean-up, which takes time and has nothing to do here
