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

    The guard starts while the run does, and nobody waits for it. It carries no run's id and has a session of its own, so
    nothing that ends a run ends it. Where it cannot be started, the run goes on without. `daemons` are the names of the
    engine's processes, which it kills after the ranks.
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
            guard.stdin.write(b".")
            guard.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            guard.wait(_GOODBYE_S)
