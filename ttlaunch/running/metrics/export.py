"""Export the events of a run to a sink, while the run is active or afterwards, and record the sink's state in a file.

The export is a process of its own (`ttlaunch metrics RUN --to …`). It reads only the run's folder, so a slow or broken sink
does not affect the run.
"""

import contextlib
import json
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from enum import StrEnum
from pathlib import Path

from ttlaunch.quick_dataclass import dataclass
from ttlaunch.running.metrics.event_log import END, EventLog
from ttlaunch.running.metrics.sinks import SINKS_DIR, Sink, SinkChoice, open_sink
from ttlaunch.running.runs.files import read_object_if_any, write_whole
from ttlaunch.running.runs.launcher import read_launcher
from ttlaunch.running.runs.run_folder import supervisor_file

_TICK_S = 0.5
_LONGEST_ERROR = 300


class SinkState(StrEnum):
    """The state of a sink."""

    WORKING = "working"
    DONE = "done"
    FAILED = "failed"


@dataclass(frozen=True)
class SinkRecord:
    """The record about a sink of a run.

    Attributes:
        place: The place to which the sink writes.
        pid: The id of the sink's process.
        events: How many events the sink had received when the record was written.
        error: Why the sink failed; None if it did not.
    """

    kind: str
    place: str
    pid: int
    state: SinkState
    events: int = 0
    error: str | None = None


def export(path: Path, choice: SinkChoice, *, follow: bool) -> SinkRecord:
    """Export all events of a run to a sink; with `follow`, continue until the run has ended.

    If the sink raises an exception, also while it is opened, the record in the result and in the run's folder describes it.

    Raises:
        OSError: The run's folder cannot be read.
        ValueError: The folder is not that of a run.
    """
    log = EventLog(path)
    record = SinkRecord(choice.kind, choice.place_in(path), os.getpid(), SinkState.WORKING)
    _write_record(path, record)
    taken = 0
    try:
        sink = open_sink(choice, log.run, folder=path)
        taken, status = _feed(log, sink, path, follow=follow)
        sink.close(status)
    except Exception as error:  # noqa: BLE001 - a sink is code of others; its mistakes are reported as such
        record = SinkRecord(choice.kind, record.place, record.pid, SinkState.FAILED, taken, _why(error))
    else:
        record = SinkRecord(choice.kind, record.place, record.pid, SinkState.DONE, taken)
    _write_record(path, record)
    return record


def _feed(log: EventLog, sink: Sink, path: Path, *, follow: bool) -> tuple[int, str]:
    """Pass events to the sink; return their number, and how the run ended."""
    taken, status = 0, "running"
    launcher = read_launcher(path) if follow else None
    while True:
        # Ask before reading events, so that the last events of a launcher that has died are still read.
        is_over = not follow or (launcher is not None and launcher.is_here and not launcher.is_alive)
        for event in log.events():
            taken += 1
            status = str(event.values.get("status")) if event.kind == END else status
            sink.take(event)
        sink.flush()
        if log.has_ended or is_over:
            return taken, "cut off" if follow and not log.has_ended else status
        time.sleep(_TICK_S)


def _why(error: Exception) -> str:
    first = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
    return f"{type(error).__name__}: {first}"[:_LONGEST_ERROR] if first else type(error).__name__


def start_sinks(path: Path, choices: Sequence[SinkChoice]) -> None:
    """Start a process for each sink of a run; it has no terminal and ends by itself after the run.

    If a process cannot be started, the record of its sink says so, and the run continues.
    """
    for choice in choices:
        record = SinkRecord(choice.kind, choice.place_in(path), 0, SinkState.WORKING)
        arguments = ["metrics", str(path), "--to", str(choice), "--follow", "--beside"]
        try:
            (path / SINKS_DIR).mkdir(exist_ok=True)
            _write_record(path, record)
            pid = _start([sys.executable, "-m", "ttlaunch", *arguments], log=path / SINKS_DIR / f"{choice.kind}.log")
            _write_record(path, replace(record, pid=pid))
        except OSError as error:
            failed = SinkRecord(choice.kind, record.place, 0, SinkState.FAILED, 0, _why(error))
            _write_record(path, failed)


def _start(argv: Sequence[str], *, log: Path) -> int:
    """Start a process in a session of its own that prints into a file, and return its id without waiting for it.

    Raises:
        OSError: The process cannot be started.
    """
    writing = os.O_WRONLY | os.O_CREAT | os.O_APPEND
    files = [
        (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
        (os.POSIX_SPAWN_OPEN, 1, str(log), writing, 0o644),
        (os.POSIX_SPAWN_OPEN, 2, str(log), writing, 0o644),
    ]
    return os.posix_spawn(argv[0], list(argv), os.environ, file_actions=files, setsid=True)


def report_failure(path: Path, record: SinkRecord) -> None:
    """Add a message about a failed sink to the supervisor's messages, so that views of the run show it at once."""
    line = f"note: the sink {record.kind} has stopped: {record.error}; the run continues without it\n"
    with contextlib.suppress(OSError), (path / supervisor_file("stderr")).open("a", encoding="utf-8") as file:
        file.write(line)


def read_sinks(path: Path) -> list[SinkRecord]:
    """Read the records about the sinks of a run, in the order of their names."""
    found = []
    for place in sorted((path / SINKS_DIR).glob("*.json")):
        content = read_object_if_any(place)
        with contextlib.suppress(KeyError, TypeError, ValueError):
            record = SinkRecord(**{**content, "state": SinkState(content["state"])})
            found.append(record)
    return found


def wait_for_sinks(path: Path, *, patience_s: float) -> list[SinkRecord]:
    """Wait until the sinks of an ended run are done, for at most `patience_s`, and return their records."""
    until = time.monotonic() + patience_s
    while True:
        found = [_settled(record, path) for record in read_sinks(path)]
        if all(one.state is not SinkState.WORKING for one in found) or time.monotonic() >= until:
            return found
        time.sleep(_TICK_S / 5)


def _settled(record: SinkRecord, path: Path) -> SinkRecord:
    """Return the record of a sink, changed to failed if the sink should be working but its process is gone."""
    if record.state is not SinkState.WORKING or not record.pid or _is_at_work(record.pid):
        return record
    latest = next((one for one in read_sinks(path) if one.kind == record.kind), record)  # it may have ended meanwhile
    if latest.state is not SinkState.WORKING:
        return latest
    return replace(
        record, state=SinkState.FAILED, error="its process was killed, or there was no room for its last record"
    )


def _is_at_work(pid: int) -> bool:
    """Whether a process exists and is no zombie."""
    try:
        state = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b") ")[2][:1]
    except OSError:
        return False
    return state not in {b"Z", b"X"}


def _write_record(path: Path, record: SinkRecord) -> None:
    """Write a sink's record in one step; do nothing if it cannot be written."""
    folder = path / SINKS_DIR
    with contextlib.suppress(OSError):
        folder.mkdir(exist_ok=True)
        write_whole(folder / f"{record.kind}.json", json.dumps(asdict(record)) + "\n")
