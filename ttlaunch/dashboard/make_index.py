"""Read the whole of a long run once, at low priority: `python -m ttlaunch.dashboard.make_index RUN PLACE PARENT`.

Writes the run's numbers and then the parts of its report that need all telemetry into the folder PLACE, and how far it is. Ends when
the process PARENT is gone.
"""

import contextlib
import os
import resource
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Final

from ttlaunch.app.measured import report_as_json
from ttlaunch.dashboard.cache import (
    FORMAT,
    INDEX_FILE,
    MEASURED_FILE,
    PROGRESS_FILE,
    read_json,
    size_of_records,
    write_json,
)
from ttlaunch.dashboard.numbers import finite
from ttlaunch.dashboard.stored import PointsWriter
from ttlaunch.records.telemetry import Stretch
from ttlaunch.running.metrics.event_log import Column, EventLog, read_logged_run
from ttlaunch.running.metrics.log_place import LogPlace
from ttlaunch.running.metrics.telemetry import RankTelemetry, add_stretch
from ttlaunch.running.readers.recorded import read_run
from ttlaunch.running.runs.facts import read_facts
from ttlaunch.running.watch import RankState

MEASURED = ("traffic", "communication", "memory", "times", "served", "start_times")
"""What only all telemetry of a run tells, by its names in the report."""

_LOOK = 200
_SHARE_OF_POINTS = 0.9
_MOST_PROCESSES: Final = 4
_BEHIND_EVERYTHING: Final = 2**62
"""Where a file begins of which nothing is read."""


def make_index(path: Path, place: Path, *, parent: int) -> None:
    """Make what `Cache` reads.

    Args:
        path: The run's folder.
        place: The folder for the result.
        parent: The process for which this is done.

    Raises:
        OSError, ValueError: The run cannot be read, or the result cannot be written.
    """
    before = str(read_json(place / INDEX_FILE).get("points", ""))
    folder = next(name for name in ("points-a", "points-b") if name != before)  # readers of the old ones go on
    shutil.rmtree(place / folder, ignore_errors=True)
    (place / folder).mkdir()
    parts = _read_parts(path, place / folder, share_file=place / PROGRESS_FILE, parent=parent)
    place_behind, states = _joined(parts)
    blocks = [[f"{folder}/{part.file}", part.blocks] for part in parts]
    write_json(
        place / INDEX_FILE, {"format": FORMAT, "points": folder, "blocks": blocks, "place": place_behind.as_json()}
    )
    recorded = read_run(path, ranks=states, telemetry=_joined_telemetry(parts, planned=len(read_facts(path).ranks)))
    report = report_as_json(recorded)
    peak = resource.getrusage(resource.RUSAGE_SELF)
    used = {"peak_bytes": peak.ru_maxrss * 1024, "processor_s": peak.ru_utime + peak.ru_stime}
    measured = finite({name: report[name] for name in MEASURED if name in report})
    write_json(place / MEASURED_FILE, {"report": measured, "used": used})
    write_json(place / PROGRESS_FILE, {"share": 1.0})


@dataclass(frozen=True)
class _Part:
    """What one process has made of some ranks."""

    ranks: frozenset[int]
    file: str
    blocks: list[list[Any]]
    place: LogPlace
    states: list[RankState]
    telemetry: dict[int, RankTelemetry]


def _read_parts(path: Path, folder: Path, *, share_file: Path, parent: int) -> list[_Part]:
    """Read the records of all ranks, in as many processes as there are processors, and at most as there are ranks."""
    rows = read_logged_run(path).ranks
    count = max(1, min(len(os.sched_getaffinity(0)), len(rows), _MOST_PROCESSES))
    context = get_context("fork")
    begun = []
    for number in range(1, count):
        ours, theirs = context.Pipe(duplex=False)
        some = frozenset(row.rank for row in rows[number::count])
        child = context.Process(
            target=_send_part, args=(theirs, path, folder), kwargs={"ranks": some, "parent": os.getpid()}, daemon=True
        )
        child.start()
        theirs.close()
        begun.append(ours)
    first = frozenset(row.rank for row in rows[::count])
    own = _read_part(path, folder, first, parent=parent, share_file=share_file)
    try:
        return [own, *(one.recv() for one in begun)]
    except EOFError as error:
        raise OSError("a process that reads the run has ended early") from error


def _send_part(end: Connection, path: Path, folder: Path, *, ranks: frozenset[int], parent: int) -> None:
    with contextlib.suppress(OSError, ValueError):  # the other end sees that nothing comes
        end.send(_read_part(path, folder, ranks, parent=parent))


def _read_part(
    path: Path, folder: Path, ranks: frozenset[int], *, parent: int, share_file: Path | None = None
) -> _Part:
    """Read the records and the telemetry of some ranks, and write their numbers into a file."""
    rows = read_logged_run(path).ranks
    skipped = {str(row.rank): _BEHIND_EVERYTHING for row in rows if row.rank not in ranks}
    log = EventLog(path, place=LogPlace(skipped, skipped, {}, {}, {}, {}, ()))
    skipped_bytes = 2 * len(skipped) * _BEHIND_EVERYTHING
    size = size_of_records(path, tuple(row for row in rows if row.rank in ranks)) or 1
    writer = PointsWriter(folder / f"points-{min(ranks, default=0)}")
    telemetry = {rank: RankTelemetry(rank) for rank in ranks}

    def note(rank: int, stretch: Stretch) -> None:
        if rank in ranks:
            add_stretch(telemetry[rank], stretch, world_size=len(rows))

    for number, found in enumerate(log.unordered_in_columns(note)):
        if number % _LOOK == 0:
            if os.getppid() != parent:
                raise InterruptedError("the process that wanted the index is gone")
            if share_file is not None:
                share = min(1.0, (log.place_in_bytes - skipped_bytes) / size)
                write_json(share_file, {"share": round(_SHARE_OF_POINTS * share, 3)})
        if found.rank not in ranks:
            continue
        if isinstance(found, Column):
            writer.add_column(found)
        else:
            writer.add(found)
    return _Part(ranks, writer.path.name, writer.finish(), log.place, log.states, telemetry)


def _joined(parts: Sequence[_Part]) -> tuple[LogPlace, list[RankState]]:
    """Return where the reader of all ranks stands, and the states of all ranks."""

    def each(name: str) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for part in parts:
            found |= {rank: one for rank, one in getattr(part.place, name).items() if int(rank) in part.ranks}
        return found

    names = ("progress", "telemetry", "states", "step_times", "first_times", "reported")
    exited = sorted({rank for part in parts for rank in part.place.exited if rank in part.ranks})
    states = {state.row.rank: state for part in parts for state in part.states if state.row.rank in part.ranks}
    return LogPlace(**{name: each(name) for name in names}, exited=exited), [states[rank] for rank in sorted(states)]


def _joined_telemetry(parts: Sequence[_Part], *, planned: int) -> list[RankTelemetry] | None:
    """Return the telemetry of all ranks; None if one has written none, and where workers have joined, whom other readers do not count."""
    found = {rank: entry for part in parts for rank, entry in part.telemetry.items() if entry.is_written}
    is_whole = len(found) == planned == sum(len(part.ranks) for part in parts)
    return [found[rank] for rank in sorted(found)] if is_whole else None


def main(path: str, place: str, parent: str) -> None:
    """Do what the module is for; a run that cannot be read leaves no index, and the page goes on without."""
    with contextlib.suppress(OSError, ValueError):
        make_index(Path(path), Path(place), parent=int(parent))


if __name__ == "__main__":
    main(*sys.argv[1:])
