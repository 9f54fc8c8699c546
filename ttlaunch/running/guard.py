"""Start the guard that cleans up after a run whose supervisor is killed; see `agent/guard.py`."""

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from ttlaunch import contract
from ttlaunch.agent import GUARD

_GOODBYE_S = 5.0


@contextlib.contextmanager
def guarded(run_id: str, scratch: Path, *, daemons: Sequence[str] = ()) -> Iterator[None]:
    """Keep a guard beside a run for as long as this process supervises it.

    The guard starts at the same time as the run, which does not wait for it. ttlaunch ends the processes that have the run's id in
    their environment; the guard does not have it, and has its own session, so it outlives the run's other processes. If the guard
    cannot be started, the run continues without it. `daemons` are the names of the engine's processes, which the guard kills after
    the ranks.
    """
    environment = {name: value for name, value in os.environ.items() if not name.startswith(contract.PREFIX)}
    try:
        guard = subprocess.Popen(
            [sys.executable, "-I", "-S", GUARD],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env=environment,
            cwd="/",
            start_new_session=True,
        )
    except OSError:
        yield
        return
    assert guard.stdin is not None  # noqa: S101 - it is a pipe
    with contextlib.suppress(OSError):
        order = {"run_id": run_id, "scratch": str(scratch), "daemons": list(daemons)}
        guard.stdin.write(json.dumps(order).encode() + b"\n")
        guard.stdin.flush()
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            # Any byte says that this process has cleaned up itself. If the pipe ends without one, this process was killed.
            guard.stdin.write(b".")
            guard.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            guard.wait(_GOODBYE_S)
