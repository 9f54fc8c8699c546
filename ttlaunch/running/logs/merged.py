"""Read the output of all ranks of a run, line by line in the order in which it was printed, also while the run is active.

Any process can do this, because the output and its order are in the run's folder.
"""

import os
from collections.abc import Iterator, Sequence
from io import BufferedReader
from pathlib import Path
from typing import IO, Self

from ttlaunch import contract
from ttlaunch.quick_dataclass import dataclass
from ttlaunch.records.regular_files import open_regular
from ttlaunch.running.logs.merge import MERGED_FILE, RankOutputs, Stretch, Unkept
from ttlaunch.running.runs.files import Tail

_LONGEST_LINE = 4 << 20
_SKIP = 1 << 20
_MOST_OPEN = 16


@dataclass(frozen=True)
class Line:
    """A line that a rank printed.

    Attributes:
        text: The line without its end, or the last state of a progress bar. A remark replaces what follows the first 4 MiB.
        offset, length: The place of the whole line in the rank's own file.
    """

    rank: int
    stream: str
    time: float
    text: bytes
    offset: int
    length: int


class MergedLog:
    """Reads the merged log of a run; each call of `poll` yields what is new."""

    def __init__(self, folder: Path, ranks: Sequence[int]) -> None:
        self._folder = folder
        self._ranks = ranks
        self._log = Tail(folder / MERGED_FILE)
        self._covered: dict[tuple[int, str], int] = {}
        self._state: dict[tuple[int, str], bytes] = {}  # the last state shown of a line that has not ended

    def poll(self) -> Iterator[Line]:
        """Yield the lines that are new since the last call."""
        with _OpenFiles(self._folder) as files:
            for stretch in self._new_stretches():
                if isinstance(stretch, Unkept):
                    offset = self._covered.get((stretch.rank, stretch.stream), 0)
                    yield Line(stretch.rank, stretch.stream, stretch.time, unkept_remark(stretch), offset, 0)
                else:
                    yield from self._lines(stretch, files)

    def rest(self, *, unknown_time: float | None = None) -> Iterator[Line]:
        """Yield the lines whose order the launcher has not recorded, because it was killed.

        Args:
            unknown_time: The time of lines for which no shim has noted one; the present if not given.
        """
        outputs = RankOutputs(self._folder, self._ranks, covered=self._covered)
        with _OpenFiles(self._folder) as files:
            for stretch in outputs.finish(unknown_time=unknown_time):
                yield from self._lines(stretch, files)

    def _new_stretches(self) -> Iterator[Stretch | Unkept]:
        for line in self._log.read():
            stretch = parse_stretch(line)
            if isinstance(stretch, Unkept):
                yield stretch
            elif stretch is not None and stretch.offset == self._covered.get((stretch.rank, stretch.stream), 0):
                self._covered[stretch.rank, stretch.stream] = stretch.end
                yield stretch

    def _lines(self, stretch: Stretch, files: "_OpenFiles") -> Iterator[Line]:
        key, offset = (stretch.rank, stretch.stream), stretch.offset
        try:
            while offset < stretch.end:
                file = files.at(stretch, offset)  # each time: while a line is used, others may have been read
                data, length = _read_line(file, stretch.end - offset)
                if not length:
                    return
                text = last_state(data) + _remark(length - len(data))
                shown = self._state.pop(key, None)
                if not data.endswith(b"\n") and len(data) == length:
                    self._state[key] = text
                if shown is None or text not in {b"", shown}:
                    yield Line(stretch.rank, stretch.stream, stretch.time, text, offset, length)
                offset += length
        except OSError:
            return


class _OpenFiles:
    """The files of the last few ranks that were read. Ranks print in turns, and opening a file takes longer than reading a line of it."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._files: dict[tuple[int, str], BufferedReader] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for file in self._files.values():
            file.close()

    def at(self, stretch: Stretch, offset: int) -> BufferedReader:
        """Return the file of a stretch, at an offset.

        Raises:
            OSError: It cannot be read.
        """
        key = stretch.rank, stretch.stream
        file = self._files.get(key)
        if file is None:
            name = contract.stdout_file if stretch.stream == "stdout" else contract.stderr_file
            while len(self._files) >= _MOST_OPEN:
                self._files.pop(next(iter(self._files))).close()
            file = self._files[key] = BufferedReader(open_regular(self._folder / name(stretch.rank)))
        file.seek(offset)
        return file


def _read_line(file: IO[bytes], most: int) -> tuple[bytes, int]:
    """Read the beginning of the next line; also return the length of the whole line."""
    begin = file.tell()
    data = file.readline(min(most, _LONGEST_LINE))
    length = len(data)
    while data and length < most and not data.endswith(b"\n"):
        hole = min(_hole(file, begin + length), most - length)
        more = b"" if hole else file.readline(min(most - length, _SKIP))
        length += hole + len(more)
        if hole:
            file.seek(begin + length)
            continue
        if not more or more.endswith(b"\n"):
            break
    return data, length


def _hole(file: IO[bytes], offset: int) -> int:
    """Return the length of the hole of a sparse file that begins at an offset; 0 if there is data."""
    try:
        return file.seek(offset, os.SEEK_DATA) - offset
    except OSError:  # the hole reaches to the end of the file
        return max(0, file.seek(0, os.SEEK_END) - offset)


def last_state(data: bytes) -> bytes:
    """Return the part of a line that a terminal shows at the end: what follows the last carriage return."""
    return data.removesuffix(b"\n").rstrip(b"\r").rpartition(b"\r")[2]


def _remark(left_out: int) -> bytes:
    return f" … and {left_out:,} more bytes".encode() if left_out else b""


def unkept_remark(one: Unkept) -> bytes:
    return f"… {one.unkept:,} more bytes of {one.stream} could not be kept".encode()


def parse_stretch(line: bytes) -> Stretch | Unkept | None:
    """Parse a line of the merged log; None if it is damaged."""
    record = contract.read_record(line) or {}
    numbers = [record.get(name) for name in ("rank", "offset", "length", "unkept") if name in record]
    if not all(type(number) is int and number >= 0 for number in numbers) or not isinstance(
        record.get("time"), float | int
    ):
        return None
    try:
        return Unkept(**record) if "unkept" in record else Stretch(**record)
    except TypeError:
        return None
