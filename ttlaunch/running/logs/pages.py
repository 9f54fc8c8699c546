"""Read the output of a run a page at a time from any place, forwards or backwards, without reading what is not shown.

A place is a position in `logs/merged.jsonl`, whose lines say which bytes of which rank's file come next, and a position in the
bytes of one such line. So a page near the end of a gigabyte costs as much as one near the begin.
"""

import io
import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from ttlaunch import contract, quick_dataclass
from ttlaunch.diagnostics.terminal_text import clean_output
from ttlaunch.records.regular_files import open_regular
from ttlaunch.running.logs import levels as judged
from ttlaunch.running.logs.fold import Fold
from ttlaunch.running.logs.merge import MERGED_FILE, Stretch, Unkept
from ttlaunch.running.logs.merged import Line, last_state, parse_stretch, unkept_remark
from ttlaunch.running.runs.files import size_of

LEVELS: Final = tuple(level.lower() for level in judged.LEVELS)
MOST_LINES: Final = 1000
_MOST_BYTES = 4 << 20
"""How many bytes of ranks' output one page may search, so that a filter that matches nothing still answers at once."""
_INDEX_BYTES = 64 << 10
_PIECE = 256 << 10
_BEFORE = 4 << 10
"""How many bytes before a piece are read to know whether it begins within a traceback."""
_LONGEST_SHOWN = 16 << 10


@dataclass(frozen=True)
class Place:
    """A place in the output of all ranks: before it are the lines of `merged.jsonl` before `index`, and `inner` bytes of the one there."""

    index: int = 0
    inner: int = 0

    def __str__(self) -> str:
        return f"{self.index}.{self.inner}"


def parse_place(text: str) -> Place | None:
    """Read what `str` of a place returns; None for any other text."""
    match = re.fullmatch(r"([0-9]{1,16})\.([0-9]{1,16})", text, re.ASCII)
    return Place(int(match[1]), int(match[2])) if match else None


@quick_dataclass.dataclass(frozen=True)
class JudgedLine(Line):
    """A line with its level, one of `LEVELS`."""

    level: str


@dataclass(frozen=True)
class Wanted:
    """Which lines a reader wants.

    Attributes:
        ranks, streams: The lines of these.
        least: The lowest level, an index into `LEVELS`.
        text: What a line must contain, whatever its case; empty for any.
    """

    ranks: Collection[int]
    streams: Collection[str] = ("stdout", "stderr")
    least: int = 0
    text: str = ""

    def takes(self, line: JudgedLine) -> bool:
        """Whether a line is wanted."""
        return (
            line.rank in self.ranks
            and line.stream in self.streams
            and (not self.least or LEVELS.index(line.level) >= self.least)
            and (not self.text or self.text.lower() in line.text.decode("utf-8", "replace").lower())
        )


@dataclass(frozen=True)
class Page:
    """Some lines in their order.

    Attributes:
        lines: The lines; each with the ranks that printed it, if equal ones were folded, and its place.
        before, after: The places where the pages before and after this one end and begin.
        is_first, is_last: Whether nothing is before or after this page.
    """

    lines: tuple[tuple[JudgedLine, tuple[int, ...], Place], ...]
    before: Place
    after: Place
    is_first: bool
    is_last: bool


@dataclass
class _Found:
    lines: list[tuple[JudgedLine, Place]] = field(default_factory=list)
    searched: int = 0

    def is_enough(self, most: int) -> bool:
        return len(self.lines) >= most or self.searched >= _MOST_BYTES


def shown_text(line: Line) -> str:
    """Return the text of a line as a page shows it: without control sequences, and at most 16 KiB of it."""
    text = clean_output(line.text[:_LONGEST_SHOWN], colour=False).decode("utf-8", "replace")
    left = len(line.text) - _LONGEST_SHOWN
    return f"{text} … and {left:,} more bytes" if left > 0 else text


def end_of(folder: Path) -> Place:
    """Return the place behind everything that has been printed so far."""
    return Place(size_of(folder / MERGED_FILE))


def page_before(folder: Path, place: Place, wanted: Wanted, *, most: int) -> Page:
    """Read the page that ends at a place."""
    found, at = _Found(), place
    most = min(most, MOST_LINES)
    for stretch, begin, length in _backwards(folder, place):
        end = length
        while end > 0 and not found.is_enough(most):
            piece, start = _piece_before(folder, stretch, end)
            kept = [one for one in _lines(folder, stretch, piece, start=start, begin=begin) if wanted.takes(one[0])]
            found.lines[:0] = kept
            found.searched += end - start
            end = start
            at = Place(begin, start)
        if end <= 0:
            at = Place(begin)
        if found.is_enough(most):
            break
    else:
        at = Place()
    if len(found.lines) > most:
        found.lines = found.lines[-most:]
        at = found.lines[0][1]
    last = place if place.index < size_of(folder / MERGED_FILE) else end_of(folder)
    return Page(_unfolded(found.lines), at, last, at == Place(), place.index >= size_of(folder / MERGED_FILE))


def page_after(folder: Path, place: Place, wanted: Wanted, *, most: int) -> Page:
    """Read the page that begins at a place."""
    found, at = _Found(), place
    most = min(most, MOST_LINES)
    is_last = True
    for stretch, begin, following in _forwards(folder, place):
        start = place.inner if begin == place.index else 0
        length = _length(stretch)
        while start < length and not found.is_enough(most):
            piece, end = _piece_after(folder, stretch, start)
            found.lines += [
                one for one in _lines(folder, stretch, piece, start=start, begin=begin) if wanted.takes(one[0])
            ]
            found.searched += max(1, end - start)
            start = end
        at = Place(following) if start >= length else Place(begin, start)
        if found.is_enough(most):
            is_last = False
            break
    if len(found.lines) > most:
        at = found.lines[most][1]
        found.lines = found.lines[:most]
    return Page(_unfolded(found.lines), place, at, place == Place(), is_last)


def fold_page(page: Page, *, num_ranks: int) -> Page:
    """Return a page whose equal lines of several ranks at about the same time are one."""
    clock = _LineClock()
    fold = Fold(num_ranks, clock=clock)
    known = {(line.rank, line.stream, line.offset): (line, place) for line, _, place in page.lines}
    lines = []
    for line, _, _ in page.lines:
        clock.now = max(clock.now, line.time)
        lines += fold.take()
        fold.add([line])
    lines += fold.take(everything=True)
    folded = []
    for one, ranks in lines:
        line, place = known[one.rank, one.stream, one.offset]
        folded.append((line, tuple(ranks), place))
    return Page(tuple(folded), page.before, page.after, page.is_first, page.is_last)


class _LineClock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def _unfolded(lines: list[tuple[JudgedLine, Place]]) -> tuple[tuple[JudgedLine, tuple[int, ...], Place], ...]:
    return tuple((line, (line.rank,), place) for line, place in lines)


def _length(stretch: Stretch | Unkept) -> int:
    return stretch.length if isinstance(stretch, Stretch) else 1


def _backwards(folder: Path, place: Place) -> Iterator[tuple[Stretch | Unkept, int, int]]:
    """Yield the stretches before a place, newest first, each with where its line begins and how many of its bytes are before it."""
    if place.inner:
        for stretch, begin, _ in _forwards(folder, Place(place.index)):
            if begin == place.index:
                yield stretch, begin, min(place.inner, _length(stretch))
            break
    end = min(place.index, size_of(folder / MERGED_FILE))
    rest = b""
    while end > 0:
        start = max(0, end - _INDEX_BYTES)
        block = _read(folder / MERGED_FILE, start, end - start) + rest
        lines = block.split(b"\n")
        rest = lines.pop(0) if start else b""
        offset = start + (len(rest) + 1 if start else 0)
        found = []
        for line in lines:
            one = parse_stretch(line) if line else None
            if one is not None:
                found.append((one, offset, _length(one)))
            offset += len(line) + 1
        yield from reversed(found)
        end = start


def _forwards(folder: Path, place: Place) -> Iterator[tuple[Stretch | Unkept, int, int]]:
    """Yield the stretches from a place on, each with where its line begins and ends."""
    offset, rest = place.index, b""
    while block := _read(folder / MERGED_FILE, offset + len(rest), _INDEX_BYTES):
        *lines, rest = (rest + block).split(b"\n")
        for line in lines:
            found, begin = parse_stretch(line), offset
            offset += len(line) + 1
            if found is not None:
                yield found, begin, offset


def _piece_before(folder: Path, stretch: Stretch | Unkept, end: int) -> tuple[bytes, int]:
    """Read whole lines that end `end` bytes into a stretch; also return where in the stretch they begin."""
    if isinstance(stretch, Unkept):
        return b"", 0
    start = max(0, end - _PIECE)
    data = _read(_file(folder, stretch), stretch.offset + start, end - start)
    if start and (cut := data.find(b"\n")) >= 0 and cut + 1 < len(data):
        start, data = start + cut + 1, data[cut + 1 :]
    return data, start


def _piece_after(folder: Path, stretch: Stretch | Unkept, start: int) -> tuple[bytes, int]:
    """Read whole lines that begin `start` bytes into a stretch; also return where in the stretch they end."""
    if isinstance(stretch, Unkept):
        return b"", 1
    length = min(_PIECE, stretch.length - start)
    data = _read(_file(folder, stretch), stretch.offset + start, length)
    if start + length < stretch.length and (cut := data.rfind(b"\n")) >= 0:
        data = data[: cut + 1]
        length = len(data)
    return data, start + length


def _lines(
    folder: Path, stretch: Stretch | Unkept, data: bytes, *, start: int, begin: int
) -> list[tuple[JudgedLine, Place]]:
    """Return the lines in a piece of a stretch that begins `start` bytes into it; its own line begins at `begin`."""
    if isinstance(stretch, Unkept):
        text = unkept_remark(stretch)
        level = judged.LevelJudge(stretch.stream).level(text).lower()
        return [(JudgedLine(stretch.rank, stretch.stream, stretch.time, text, -begin, 0, level), Place(begin))]
    found = []
    judge = _judge_at(folder, stretch, stretch.offset + start)
    for raw in io.BytesIO(data):  # divides at line ends only, unlike `splitlines`
        offset, text = stretch.offset + start, last_state(raw)
        level = judge.level(text).lower()
        line = JudgedLine(stretch.rank, stretch.stream, stretch.time, text, offset, len(raw), level)
        found.append((line, Place(begin, start)))
        start += len(raw)
    return found


def _judge_at(folder: Path, stretch: Stretch, offset: int) -> judged.LevelJudge:
    """Return a judge that has seen what the rank has printed before a place, as far as a traceback may have begun there."""
    judge = judged.LevelJudge(stretch.stream)
    behind = max(0, offset - _BEFORE)
    for raw in io.BytesIO(_read(_file(folder, stretch), behind, offset - behind)):
        judge.level(last_state(raw))
    return judge


def _file(folder: Path, stretch: Stretch) -> Path:
    name = contract.stdout_file if stretch.stream == "stdout" else contract.stderr_file
    return folder / name(stretch.rank)


def _read(path: Path, offset: int, length: int) -> bytes:
    try:
        with open_regular(path) as file:
            file.seek(offset)
            return file.read(length)
    except OSError:
        return b""
