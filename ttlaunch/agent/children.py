"""For scripts that change a host: read frames from the launching machine, and run commands that end with the script.

When its standard input ends, the script kills the command that it runs and ends at once, because no launcher waits for
it any more. Python 3.9 and the standard library only.
"""

from __future__ import annotations

import contextlib
import os
import queue
import signal
import subprocess
import threading
import time

from ttlaunch import contract
from ttlaunch.agent.parent_death import end_with_parent

TYPE_CHECKING = False  # what typing.TYPE_CHECKING is, without the time to import it
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from typing import Any

    Record = dict[str, Any]

_POLL_S = 0.3
_KEPT_FRAMES = 8


class FailedError(Exception):
    """The script cannot continue; the exception has the fields of the script's last frame to the launching machine."""

    def __init__(self, what: str, **fields: Any) -> None:
        super().__init__(what)
        self.what = what
        self.fields = fields


class Listener:
    """Reads frames in a thread, a few ahead of `next_frame`, and ends this process when standard input ends."""

    def __init__(self) -> None:
        self._frames: queue.Queue[tuple[Record, bytes]] = queue.Queue(_KEPT_FRAMES)
        self._child: subprocess.Popen[bytes] | None = None
        threading.Thread(target=self._read, daemon=True).start()

    def next_frame(self) -> tuple[Record, bytes]:
        return self._frames.get()

    def run(
        self,
        command: Sequence[str],
        *,
        folder: str,
        stdin: bytes = b"",
        variables: Mapping[str, str] | None = None,
        deadline_s: float,
        watch: Callable[[int], None] | None = None,
    ) -> tuple[int, str]:
        """Run a command to its end; returns its status, and what it printed to both streams.

        Args:
            command: The program and its arguments.
            folder: The command's working folder.
            stdin: The command's standard input.
            variables: Variables to set in its environment, which otherwise is ours without `PYTHON…`.
            deadline_s: Seconds after which the command is killed.
            watch: Called with its process id a few times a second.
        """
        environment = {k: v for k, v in os.environ.items() if not k.startswith("PYTHON")}
        child = subprocess.Popen(
            command,
            cwd=folder,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env={**environment, "LC_ALL": "C.UTF-8", **(variables or {})},
            start_new_session=True,
            preexec_fn=lambda: end_with_parent(signal.SIGKILL),
        )
        self._child = child
        deadline = time.monotonic() + deadline_s
        unsent: bytes | None = stdin
        while True:
            try:
                printed, _ = child.communicate(unsent, timeout=_POLL_S)
            except subprocess.TimeoutExpired:
                unsent = None  # a repeated `communicate` continues with the input of the first one
            else:
                return child.returncode, printed.decode("utf-8", "replace")
            if time.monotonic() > deadline:
                self._end_child()
            elif watch:
                watch(child.pid)

    def _read(self) -> None:
        try:
            while frame := contract.read_frame(lambda size: os.read(0, size)):
                self._frames.put(frame)
        finally:
            self._end_child()
            os._exit(1)

    def _end_child(self) -> None:
        child = self._child
        if child is not None and child.poll() is None:
            with contextlib.suppress(OSError):
                os.killpg(child.pid, signal.SIGKILL)
