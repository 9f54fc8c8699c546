"""Read the whole of a long run once, at low priority: `python -m ttlaunch.dashboard.make_index RUN PLACE PARENT`.

Writes the run's numbers and then the parts of its report that need all telemetry into the folder PLACE, and how far it is. Ends when
the process PARENT is gone.
"""

import os
import resource
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

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
from ttlaunch.running.metrics.event_log import Event, EventLog
from ttlaunch.running.readers.recorded import read_run

MEASURED = ("traffic", "communication", "memory", "times", "served", "start_times")
"""What only all telemetry of a run tells, by its names in the report."""

_LOOK = 20_000
_SHARE_OF_POINTS = 0.7


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
    log, writer = EventLog(path), PointsWriter(place / folder)
    for event in _counted(log, path, place, parent=parent):
        writer.add(event)
    content = {"format": FORMAT, "points": folder, "blocks": writer.finish(), "place": log.place.as_json()}
    write_json(place / INDEX_FILE, content)
    recorded = read_run(path, ranks=log.states)
    report = report_as_json(recorded)
    peak = resource.getrusage(resource.RUSAGE_SELF)
    used = {"peak_bytes": peak.ru_maxrss * 1024, "processor_s": peak.ru_utime + peak.ru_stime}
    measured = finite({name: report[name] for name in MEASURED if name in report})
    write_json(place / MEASURED_FILE, {"report": measured, "used": used})
    write_json(place / PROGRESS_FILE, {"share": 1.0})


def _counted(log: EventLog, path: Path, place: Path, *, parent: int) -> Iterator[Event]:
    """Yield the events, and write now and then which share of the run they are."""
    size = size_of_records(path, log.run.ranks) or 1
    for number, event in enumerate(log.unordered()):
        if number % _LOOK == 0:
            if os.getppid() != parent:
                sys.exit(1)
            at = log.place_in_bytes
            write_json(place / PROGRESS_FILE, {"share": round(_SHARE_OF_POINTS * min(1.0, at / size), 3)})
        yield event


def main(path: str, place: str, parent: str) -> None:
    """Do what the module is for; a run that cannot be read leaves no index, and the page goes on without."""
    os.nice(19)
    try:
        make_index(Path(path), Path(place), parent=int(parent))
    except (OSError, ValueError):
        sys.exit(1)


if __name__ == "__main__":
    main(*sys.argv[1:])
