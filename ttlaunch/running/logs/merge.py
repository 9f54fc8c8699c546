r"""Record the order in which all ranks print, while the run is active.

The ranks' own files do not change. For each stretch of one of these files, `logs/merged.jsonl` gets a line with rank, stream,
time, offset and length. The stretches cover each file without gap or overlap, and a stretch ends at the end of a line, so a
reader that shows them one after the other neither splits nor loses a line. There are two exceptions: a stretch may end at
the last state of a progress bar (`\r`) that has not ended its line for a while, and at the end of a stream without a line
end. For output that a host could not keep, because its disk was full, the file ends with lines that have rank, stream, time
and the number of bytes.
"""

import contextlib
import json
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import IO, NamedTuple, Self

from ttlaunch import contract
from ttlaunch.quick_dataclass import dataclass
from ttlaunch.records.endings import RankExit, read_output_note
from ttlaunch.records.parser import BadRecord, read
from ttlaunch.records.regular_files import next_data, open_regular
from ttlaunch.running.bad_records import good_records
from ttlaunch.running.runs.files import Tail, read_file, size_of
from ttlaunch.running.watch import Phase, Watch, look_bytes

MERGED_FILE = f"{contract.LOGS_DIR}/merged.jsonl"
"""The file with the stretches of all ranks' output in the order in which they were printed, relative to the run folder."""
_PIECE = 1 << 20
_TOGETHER_S = 0.05
_STATE_EVERY_S = 2.0
_MOST_HELD = 10_000


_Key = tuple[int, str]
"""Rank and stream."""


@dataclass(frozen=True)
class Stretch:
    """Consecutive bytes of a rank's file, usually whole lines; its fields are those of a line of `logs/merged.jsonl`."""

    rank: int
    stream: str
    time: float
    offset: int
    length: int

    @property
    def end(self) -> int:
        return self.offset + self.length


@dataclass(frozen=True)
class Unkept:
    """Output of a rank that could not be written to its file; the fields are those of a line of `logs/merged.jsonl`.

    Attributes:
        unkept: The number of bytes.
    """

    rank: int
    stream: str
    time: float
    unkept: int


@dataclass
class _Stream:
    r"""How far a file of a rank has been searched for lines and divided into stretches.

    Attributes:
        taken: Everything before this offset is in a stretch.
        seen: Everything before this offset has been searched for ends of lines.
        state_end: The offset of the last `\r` after `taken`, where a whole state of a progress bar ends; 0 if there is none.
        since: When the first byte after `taken` was found, on the monotonic clock; 0 if there is none.
    """

    path: Path
    taken: int = 0
    seen: int = 0
    state_end: int = 0
    since: float = 0.0


class _Note(NamedTuple):
    """A shim's note on the length of a stream's file at a time of this machine's clock.

    Attributes:
        end: The length of the file.
        is_over: Whether the stream had ended.
    """

    time: float
    key: _Key
    end: int
    is_over: bool


class RankOutputs:
    """Follows the output files of all ranks of a run; each call of `poll` returns new stretches in the order of their times."""

    def __init__(
        self, folder: Path, ranks: Iterable[int], *, covered: Mapping[tuple[int, str], int] | None = None
    ) -> None:
        """Begin at the first byte of each file, or where `covered` ends.

        Args:
            folder: The run's folder.
            ranks: All ranks of the run.
            covered: By rank and stream, the offset up to which a file is already in stretches.
        """
        self._streams: dict[_Key, _Stream] = {}
        self._times: dict[int, Tail] = {}
        self._held: list[_Note] = []  # notes whose bytes have not arrived yet
        for rank in ranks:
            self._times[rank] = Tail(folder / contract.times_file(rank))
            for stream, name in (("stdout", contract.stdout_file(rank)), ("stderr", contract.stderr_file(rank))):
                begin = (covered or {}).get((rank, stream), 0)
                self._streams[rank, stream] = _Stream(folder / name, begin, begin)

    def poll(
        self, offsets_s: Mapping[int, float] | None = None, *, among: Iterable[int] | None = None
    ) -> list[Stretch]:
        """Return the stretches that are new since the last call; of a rank with very many notes, the next calls return the rest.

        Args:
            offsets_s: By rank, the seconds by which its host's clock is ahead of this machine's.
            among: The ranks that can have printed anything; None: all.
        """
        return self._take_new(offsets_s or {}, among=among, most=look_bytes(len(self._times)))

    def _take_new(
        self, offsets_s: Mapping[int, float], *, among: Iterable[int] | None, most: int | None
    ) -> list[Stretch]:
        notes = self._held
        for rank in self._times if among is None else among:
            notes += self._new_notes(rank, offsets_s.get(rank, 0.0), most=most)
        notes.sort(key=lambda note: note.time)
        found, self._held = [], []
        for note in notes:
            stretches = self._follow(note)
            if stretches is None:
                # Files of a host arrive one by one, so a note may come before its bytes. Bytes without a note get a later time.
                self._held += [note] if len(self._held) < _MOST_HELD else []
            else:
                found += stretches
        found += self._states()
        return _joined(found)

    def finish(
        self, offsets_s: Mapping[int, float] | None = None, *, unknown_time: float | None = None
    ) -> list[Stretch]:
        """Return all remaining stretches; call it when no rank writes any more.

        Args:
            offsets_s: As for `poll`.
            unknown_time: The time of stretches without a note; the present if not given.
        """
        found = self._take_new(offsets_s or {}, among=None, most=None)
        now = time.time() if unknown_time is None else unknown_time
        for key, one in self._streams.items():
            if (size := size_of(one.path)) > one.taken:
                found += self._look(key, size, when=now) + self._rest(key, when=now)
        self._held = []
        return found

    def _new_notes(self, rank: int, behind_s: float, *, most: int | None) -> list[_Note]:
        file = contract.times_file(rank)
        notes = good_records(self._times[rank], read_output_note, rank=rank, file=file, most=most)
        return [_Note(note.time - behind_s, (rank, note.stream), note.end, note.is_over) for note in notes]

    def _follow(self, note: _Note) -> list[Stretch] | None:
        """Return the stretches up to the length in a note; None if the bytes have not arrived yet."""
        one = self._streams[note.key]
        if note.end > one.seen and size_of(one.path) < note.end:
            return None
        found = self._look(note.key, note.end, when=note.time)
        return [*found, *self._rest(note.key, when=note.time)] if note.is_over else found

    def _look(self, key: _Key, end: int, *, when: float) -> list[Stretch]:
        """Search a file up to `end` for ends of lines, and return the stretch up to the last one, if there is any."""
        one = self._streams[key]
        last_line_end = 0
        if end <= one.seen:
            return []
        one.since = one.since or time.monotonic()
        with open_regular(one.path) as file:
            while one.seen < end:
                one.seen = min(next_data(file, one.seen), end)
                file.seek(one.seen)
                data = file.read(min(_PIECE, end - one.seen))
                if not data:
                    break
                newline, state = data.rfind(b"\n"), data.rfind(b"\r")
                if newline >= 0:
                    last_line_end, one.state_end = one.seen + newline + 1, 0
                if state > newline:
                    one.state_end = one.seen + state
                one.seen += len(data)
        return self._take(key, last_line_end, when=when)

    def _rest(self, key: _Key, *, when: float) -> list[Stretch]:
        return self._take(key, self._streams[key].seen, when=when)

    def _take(self, key: _Key, end: int, *, when: float) -> list[Stretch]:
        one = self._streams[key]
        if end <= one.taken:
            return []
        stretch = Stretch(*key, round(when, 6), one.taken, end - one.taken)
        one.taken, one.since = end, time.monotonic() if one.seen > end else 0.0
        one.state_end = one.state_end if one.state_end > end else 0
        return [stretch]

    def _states(self) -> list[Stretch]:
        """Return stretches up to the last states of progress bars that have not ended their line for a while."""
        now, found = time.monotonic(), []
        for key, one in self._streams.items():
            if one.state_end > one.taken and now - one.since >= _STATE_EVERY_S:
                found += self._take(key, one.state_end, when=time.time())
        return found


class MergedWriter:
    """Writes `logs/merged.jsonl` of an active run."""

    def __init__(self, folder: Path, watch: Watch) -> None:
        self._folder = folder
        self._path = folder / MERGED_FILE
        self._watch = watch
        self._outputs = RankOutputs(folder, [state.row.rank for state in watch.ranks])
        self._file: IO[str] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._file is not None:
            with contextlib.suppress(OSError):
                self._file.close()

    def poll(self) -> None:
        """Write the new stretches.

        Raises:
            OSError: The file cannot be written, or a rank's file cannot be read.
        """
        present = [state.row.rank for state in self._watch.ranks if state.phase is not Phase.ABSENT]
        self._write(self._outputs.poll(self._watch.clock_offsets(), among=present))

    def finish(self) -> None:
        """Write all remaining stretches, and what could not be kept; call it when no rank writes any more.

        Raises:
            OSError: The file cannot be written, or a rank's file cannot be read.
        """
        self._write(self._outputs.finish(self._watch.clock_offsets()))
        behind = self._watch.clock_offsets()
        self._write([one for rank in behind for one in read_unkept(self._folder, rank, behind_s=behind[rank])])

    def _write(self, stretches: Sequence[Stretch | Unkept]) -> None:
        if not stretches:
            return
        if self._file is None:
            self._file = self._path.open("w", encoding="utf-8")
        self._file.write("".join(json.dumps(asdict(stretch)) + "\n" for stretch in stretches))
        self._file.flush()


def read_unkept(folder: Path, rank: int, *, behind_s: float) -> list[Unkept]:
    """Return how many bytes of each stream of a rank its shim could not write."""
    record = read(RankExit, read_file(folder / contract.exit_file(rank)) or b"{}")
    if isinstance(record, BadRecord):  # `Watch` reports it
        return []
    when = round(record.time - behind_s, 6)
    return [Unkept(rank, stream, when, length) for stream, length in record.unkept_output.items()]


def _joined(stretches: list[Stretch]) -> list[Stretch]:
    """Join stretches of one stream that follow each other within `_TOGETHER_S`."""
    joined: list[Stretch] = []
    for one in stretches:
        last = joined[-1] if joined else None
        if (
            last
            and (last.rank, last.stream, last.end) == (one.rank, one.stream, one.offset)
            and one.time - last.time < _TOGETHER_S
        ):
            joined[-1] = Stretch(last.rank, last.stream, last.time, last.offset, last.length + one.length)
        else:
            joined.append(one)
    return joined
