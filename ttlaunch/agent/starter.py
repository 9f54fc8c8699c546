"""The process that an agent starts the ranks of its host with, for an engine that reaches no hosts itself.

It is `start_ranks.py` of the release. The agent starts it with itself, so that its interpreter is up when the order to start comes.
The order's variables reach it through a pipe, because they may hold secrets. Python 3.9 and the standard library only.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess

from ttlaunch import contract

TYPE_CHECKING = False  # what typing.TYPE_CHECKING is, without the time to import it
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

_PIECE = 65536
_KEPT = 4096  # characters of what it printed


class Starter:
    """Starts the ranks of one host when it is ordered to, and notices their end.

    Attributes:
        status: The exit status once it has ended, or 128 + the signal that ended it; None before.
    """

    def __init__(self, command: Sequence[str], *, run_id: str, scratch: str, umask: int) -> None:
        """Start the process, which waits for `start`; it ends with this process, and its ranks with it.

        Args:
            command: The command line of `start_ranks.py`, whose first word is the ranks' interpreter.
            run_id: The run's id, by which all processes of the run are found.
            scratch: The run's folder in shared memory.
            umask: The mask that ranks have.
        """
        self.status: int | None = None
        self._said = ""
        programs = os.path.dirname(command[0])
        path = os.environ.get("PATH", os.defpath)
        own = {contract.ENV_RUN_ID: run_id, contract.ENV_SCRATCH: scratch, "PATH": f"{programs}:{path}"}
        self._process = subprocess.Popen(
            [*command, str(os.getpid()), "ordered"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env={**os.environ, **own},
            umask=umask,
        )
        assert self._process.stdout is not None  # noqa: S101 - it is a pipe
        self.output = self._process.stdout.fileno()
        os.set_blocking(self.output, False)

    def start(self, ranks: Sequence[int], variables: Mapping[str, str], later: Sequence[int]) -> None:
        """Start these ranks, whose shims get the variables of the first call; `later` are those that a later call may name.

        Once there are none, further calls do nothing.
        """
        stdin = self._process.stdin
        if stdin is None or stdin.closed:
            return
        order = {"ranks": list(ranks), "variables": dict(variables), "later": list(later)}
        with contextlib.suppress(OSError):  # it has ended, as `look` will find
            stdin.write(json.dumps(order).encode() + b"\n")
            stdin.flush()
            if not later:
                stdin.close()

    def signal(self, number: int) -> None:
        """Send it a signal: SIGTERM ends all ranks within about a second, SIGKILL at once."""
        if self.status is None:
            self._process.send_signal(number)

    def look(self) -> bool:
        """Read what it printed, and whether it has ended; returns whether there was anything new."""
        if self.status is not None:
            return False
        returncode = self._process.poll()  # before the output is read: nothing is printed later
        with contextlib.suppress(BlockingIOError):
            while piece := os.read(self.output, _PIECE):
                self._said = (self._said + piece.decode("utf-8", "replace"))[-_KEPT:]
        if returncode is not None:
            self.status = 128 - returncode if returncode < 0 else returncode
        return returncode is not None

    def frame(self) -> dict[str, object]:
        """Return the header of the frame that reports the end."""
        return {"kind": "ranks_ended", "status": self.status, "said": self._said}

    def close(self) -> None:
        """End it and its ranks, if they still run."""
        self.signal(signal.SIGKILL)
