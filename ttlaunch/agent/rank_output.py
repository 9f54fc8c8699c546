"""Keep what one rank prints byte for byte, and record when each piece of it was read.

`logs/rank-N.stdout` and `logs/rank-N.stderr` have the bytes; `logs/rank-N.times` has a line for each piece that was read:
the time, the stream (1 or 2) and the length of that stream's file after it, with `end` where the stream has ended. With
these times the launching machine puts the lines of all ranks in the order in which they were printed. So output need not
pass through mpirun, which mixes lines that ranks print at the same moment.

Python 3.9 and the standard library only.
"""

from __future__ import annotations

import os
import sys
import threading
import time

from ttlaunch import contract

TYPE_CHECKING = False  # what typing.TYPE_CHECKING is, without the time to import it
if TYPE_CHECKING:
    from typing import IO, Any

    from ttlaunch.agent.script_watch import ScriptWatch

_CHUNK = 65536
_LONGEST_LINE = 65536  # a longer line is passed on in pieces; the files have it unchanged


class RankOutput:
    """Copies the two output streams of one rank into files."""

    def __init__(
        self,
        run_folder: str,
        row: dict[str, Any],
        *,
        pass_on: bool,
        script: ScriptWatch | None = None,
    ) -> None:
        """Open the files.

        Args:
            run_folder: The run's folder, absolute.
            row: The rank's row of the plan.
            pass_on: Whether the shim also prints every line itself, with the rank's name in front, because no launcher
                reads the files.
            script: What looks for numbers in the output; None for nothing.
        """
        self._script = script
        self._unkept: dict[str, int] = {}
        self._reason: str | None = None
        self._prefix = f"rank {row['rank']} {row['role']} | ".encode()
        self._pass_on = pass_on
        self._times = _open_times(os.path.join(run_folder, contract.times_file(row["rank"])))
        self._paths = {
            1: os.path.join(run_folder, contract.stdout_file(row["rank"])),
            2: os.path.join(run_folder, contract.stderr_file(row["rank"])),
        }

    def copy(self, stream: IO[bytes] | None, descriptor: int) -> threading.Thread:
        """Start a thread that copies a stream of the rank until its end; `descriptor` is 1 for stdout, 2 for stderr."""
        assert stream is not None  # noqa: S101 - both streams are pipes
        thread = threading.Thread(target=self._pump, args=(stream, descriptor), daemon=True)
        thread.start()
        return thread

    def unkept(self) -> tuple[dict[str, int], str | None]:
        """Return how many bytes of each stream could not be written so far, and why."""
        return {stream: length for stream, length in self._unkept.items() if length}, self._reason

    def _pump(self, stream: IO[bytes], descriptor: int) -> None:
        log, length, rest = self._open(descriptor), 0, b""
        while True:
            data = os.read(stream.fileno(), _CHUNK)
            if not data:
                break
            log = self._append(log, data, descriptor)
            if self._script is not None:
                self._script.hear(descriptor, data)
            length += len(data)
            if log is not None:
                self._note(descriptor, length)
            # The file has the bytes as they came; only what is passed on is cut into lines, with the rank's name in front.
            *lines, rest = (rest + data).split(b"\n")
            if len(rest) > _LONGEST_LINE:
                lines, rest = [*lines, rest], b""
            if self._pass_on or log is None:
                _forward(descriptor, b"".join(self._prefix + line + b"\n" for line in lines))
        if rest and (self._pass_on or log is None):
            _forward(descriptor, self._prefix + rest + b"\n")
        if log is not None:
            self._note(descriptor, length, end=True)
            os.close(log)

    def _open(self, descriptor: int) -> int | None:
        try:
            return _create(self._paths[descriptor])
        except OSError as error:
            self._miss(descriptor, 0, error)
            return None

    def _append(self, log: int | None, data: bytes, descriptor: int) -> int | None:
        """Write to a log; if this fails, as on a full disk, return None, and the rank runs on without that log."""
        try:
            while log is not None and data:
                data = data[os.write(log, data) :]
        except OSError as error:
            self._miss(descriptor, len(data), error)
            return None
        if log is None:
            self._miss(descriptor, len(data), None)
        return log

    def _miss(self, descriptor: int, length: int, error: OSError | None) -> None:
        name = "stdout" if descriptor == 1 else "stderr"
        self._unkept[name] = self._unkept.get(name, 0) + length
        if error is not None:
            self._reason = error.strerror
            print(f"ttlaunch shim: {self._paths[descriptor]} cannot be written: {error.strerror}", file=sys.stderr)

    def _note(self, descriptor: int, length: int, *, end: bool = False) -> None:
        """Record that a stream's file has grown, by a single write, so that lines about both streams never mix."""
        if self._times is not None:
            line = f"{time.time():.6f} {descriptor} {length}{' end' if end else ''}\n"
            try:
                os.write(self._times, line.encode())
            except OSError:  # the log itself says that the disk is full
                self._times = None


def _open_times(path: str) -> int | None:
    try:
        return _create(path)
    except OSError as error:
        print(f"ttlaunch shim: {path} cannot be written: {error.strerror}", file=sys.stderr)
        return None


def _create(path: str) -> int:
    return contract.open_private(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND)


def _forward(descriptor: int, data: bytes) -> None:
    """Pass output on to mpirun; if mpirun no longer reads it, give up: the files have everything."""
    try:
        while data:
            data = data[os.write(descriptor, data) :]
    except OSError:
        return
