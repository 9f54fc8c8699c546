"""Read the engine's output: keep it byte for byte in the run folder, and pass it to the view line by line."""

import os
import selectors
import time
from pathlib import Path
from typing import Any, Protocol, Self

from ttlaunch import contract
from ttlaunch.engines.base import EngineProcess
from ttlaunch.records.ranks import AnyProgress
from ttlaunch.running.watch import RankState

FROM_A_RANK = b"rank "
"""The prefix of lines that shims pass on from ranks; all other lines are the engine's own."""
EVERY_LINE = b""
"""A prefix that all lines have."""
_LONGEST_LINE = 1 << 20  # shims cut their lines sooner
_ENDED = "ended"
"""The selector's key for the end of the process, among the names of streams."""


class View(Protocol):
    """Shows a run; the command line has one view for terminals and one for everything else."""

    def output(self, stream: str, line: bytes) -> None:
        """Show a line that a rank or the engine wrote to `stdout` or `stderr`."""

    def record(self, state: RankState, record: AnyProgress) -> None:
        """Show a rank's report of progress."""

    def tick(self, ranks: list[RankState]) -> None:
        """Show the present states of the ranks; called a few times a second."""


class SilentView:
    """A view that shows nothing; lines and records are in the run's folder."""

    def output(self, stream: str, line: bytes) -> None:
        """Drop the line."""

    def record(self, state: RankState, record: AnyProgress) -> None:
        """Drop the record."""

    def tick(self, ranks: list[RankState]) -> None:
        """Do nothing."""


class EngineOutput:
    """Reads the two output streams of the engine's process on this machine."""

    def __init__(self, process: EngineProcess, folder: Path, view: View, *, shown: bytes = FROM_A_RANK) -> None:
        """Prepare to read; only lines with the prefix `shown` are passed to the view."""
        self._view = view
        self._shown = shown
        self._selector = selectors.DefaultSelector()
        self._rest: dict[str, bytes] = {}
        self._files: dict[str, Any] = {}
        self._streams = [stream for stream in (process.stdout, process.stderr) if stream is not None]
        # The process itself is waited for as well: a grandchild may hold the pipes open long after it has ended.
        self._process = None if process.pid is None else os.pidfd_open(process.pid)
        if self._process is not None:
            self._selector.register(self._process, selectors.EVENT_READ, _ENDED)
        for name, stream in (("stdout", process.stdout), ("stderr", process.stderr)):
            if stream is not None:
                os.set_blocking(stream.fileno(), False)
                self._selector.register(stream, selectors.EVENT_READ, name)
                self._files[name] = (folder / f"{contract.ENGINE_PROCESS}.{name}").open("wb", buffering=0)
                self._rest[name] = b""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for name, rest in self._rest.items():
            if rest:
                self._show(name, rest)
        self._selector.close()
        if self._process is not None:
            os.close(self._process)
        for stream in self._streams:
            stream.close()
        for file in self._files.values():
            file.close()

    def read(self, timeout_s: float) -> bool:
        """Wait for output or for the process's end, and pass the output on; return whether anything happened."""
        if not self._selector.get_map():
            time.sleep(timeout_s)
            return False
        events = self._selector.select(timeout_s)
        for key, _ in events:
            if key.data == _ENDED:
                self._selector.unregister(key.fileobj)
                continue
            data = os.read(key.fd, 65536)
            if not data:
                self._selector.unregister(key.fileobj)
                continue
            self._files[key.data].write(data)
            *lines, self._rest[key.data] = (self._rest[key.data] + data).split(b"\n")
            if len(self._rest[key.data]) > _LONGEST_LINE:
                lines, self._rest[key.data] = [*lines, self._rest[key.data]], b""
            for line in lines:
                self._show(key.data, line)
        return bool(events)

    def _show(self, stream: str, line: bytes) -> None:
        """Show a line that a rank wrote. The engine's own messages often blame the wrong rank, so only its log has them."""
        if line.startswith(self._shown):
            self._view.output(stream, line)

    def drain(self) -> None:
        """Read the remaining output, for a second at most: a process that the engine started may hold the pipe open."""
        deadline = time.monotonic() + 1.0
        while self._selector.get_map() and time.monotonic() < deadline and self.read(0.05):
            pass
