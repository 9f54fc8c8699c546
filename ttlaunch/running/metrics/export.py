"""Export the events of a run to a sink, while the run is active or afterwards, and record the sink's state in a file.

The export is a process of its own (`ttlaunch metrics RUN --to …`). It reads only the run's folder, so a slow or broken sink
does not affect the run.
"""

import contextlib
import json
import os
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, replace
from enum import StrEnum
from itertools import islice
from pathlib import Path
from typing import Any

from ttlaunch import contract
from ttlaunch.diagnostics import shown
from ttlaunch.errors import TtlaunchError
from ttlaunch.quick_dataclass import dataclass
from ttlaunch.running.metrics.event_log import END, Event, EventLog
from ttlaunch.running.metrics.sinks import Sink, SinkChoice, open_sink
from ttlaunch.running.runs.files import read_object_if_any, write_whole
from ttlaunch.running.runs.launcher import read_launcher
from ttlaunch.running.runs.run_folder import supervisor_file

_TICK_S = 0.5
_SHARE, _LONGEST_REST_S = 0.005, 2.0
"""The part of a core that a sink takes while there is not too much to send: after it has worked, it rests for so much longer."""
_TOGETHER = 1000
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
        error: Why the sink failed, or why the server of a working sink has not taken everything; None if there is no reason.
        lines: How many lines of ranks a server or file has confirmed; 0 for sinks that take only metrics.
    """

    kind: str
    place: str
    pid: int
    state: SinkState
    events: int = 0
    error: str | None = None
    lines: int = 0


def export(path: Path, choice: SinkChoice, *, follow: bool) -> SinkRecord:
    """Export all events of a run to a sink; with `follow`, continue until the run has ended.

    If the sink raises an exception, also while it is opened, the record in the result and in the run's folder describes it.

    Raises:
        OSError: The run's folder cannot be read.
        ValueError: The folder is not that of a run.
    """
    log = EventLog(path)
    feeder = _Feeder(
        path, SinkRecord(choice.kind, choice.place_in(path), os.getpid(), SinkState.WORKING), follow=follow
    )
    sink: Sink | None = None
    try:
        sink = open_sink(choice, log.run, folder=path)
        sink.close(feeder.feed(log, sink))
    except Exception as error:  # noqa: BLE001 - a sink is code of others; its mistakes are reported as such
        record = replace(feeder.record, state=SinkState.FAILED, error=_why(error))
    else:
        record = replace(feeder.record, state=SinkState.DONE, error=None)
    record = replace(record, lines=getattr(sink, "confirmed", 0))
    _write_record(path, record)
    return record


class _Feeder:
    """Passes the events of a run to a sink, and keeps the record about it."""

    def __init__(self, path: Path, record: SinkRecord, *, follow: bool) -> None:
        self.record = record
        self._path, self._follow = path, follow
        self._launcher = read_launcher(path) if follow else None
        _write_record(path, record)

    def feed(self, log: EventLog, sink: Sink) -> str:
        """Pass events to the sink until the run has ended, and return how it ended.

        If the sink's server does not take what it has, no more events are read; they stay in the run's folder.
        """
        status = "running"
        while True:
            began_s = time.process_time()
            # Ask before reading events, so that the last events of a launcher that has died are still read.
            is_over = not self._follow or self._launcher_is_gone()
            for some in _batched(log.events()):
                for event in some:
                    status = str(event.values.get("status")) if event.kind == END else status
                    sink.take(event)
                self._flush(sink)
                self._note(events=self.record.events + len(some))
            self._flush(sink)
            if not self._path.is_dir():
                raise TtlaunchError("the run's folder was removed")
            if log.has_ended or is_over:
                return "cut off" if self._follow and not log.has_ended else status
            self._rest((time.process_time() - began_s) / _SHARE)

    def _rest(self, seconds: float) -> None:
        """Leave the processor to the ranks, for fewer but fuller requests; the end of the run is noticed all the same."""
        until = time.monotonic() + min(max(_TICK_S, seconds), _LONGEST_REST_S)
        while (left := until - time.monotonic()) > 0:
            time.sleep(min(_TICK_S, left))
            if self._is_over():
                return

    def _is_over(self) -> bool:
        return self._launcher_is_gone() or (self._path / contract.REPORT_FILE).exists() or not self._path.is_dir()

    def _flush(self, sink: Sink) -> None:
        """Flush a sink; wait as long as its server takes nothing while the run is active, and let `close` wait afterwards."""
        while (problem := sink.flush()) is not None:
            self._note(error=problem)
            if not self._follow or self._is_over():
                return
            time.sleep(_TICK_S)
        self._note(error=None)

    def _note(self, **changes: Any) -> None:
        changed = replace(self.record, **changes)
        is_new = changed.error != self.record.error
        self.record = changed
        if is_new:
            _write_record(self._path, changed)

    def _launcher_is_gone(self) -> bool:
        return self._launcher is not None and self._launcher.is_here and not self._launcher.is_alive


def _batched(events: Iterable[Event]) -> Iterator[list[Event]]:
    """Yield events in lists of at most a thousand."""
    iterator = iter(events)
    while some := list(islice(iterator, _TOGETHER)):
        yield some


def _why(error: Exception) -> str:
    first = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
    if isinstance(error, TtlaunchError):  # our own words
        return first[:_LONGEST_ERROR]
    if isinstance(error, OSError) and error.strerror and error.filename:
        return f"{shown(error.filename)} cannot be written: {error.strerror.lower()}"[:_LONGEST_ERROR]
    return f"{type(error).__name__}: {first}"[:_LONGEST_ERROR] if first else type(error).__name__


def start_sinks(path: Path, choices: Sequence[SinkChoice]) -> None:
    """Start a process for each sink of a run; it has no terminal and ends by itself after the run.

    If a process cannot be started, the record of its sink says so, and the run continues.
    """
    for choice in choices:
        record = SinkRecord(choice.kind, choice.place_in(path), 0, SinkState.WORKING)
        arguments = ["metrics", str(path), "--to", str(choice), "--follow", "--beside"]
        try:
            (path / contract.SINKS_DIR).mkdir(exist_ok=True)
            _write_record(path, record)
            pid = _start(
                [sys.executable, "-m", "ttlaunch", *arguments], log=path / contract.SINKS_DIR / f"{choice.kind}.log"
            )
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
    for place in sorted((path / contract.SINKS_DIR).glob("*.json")):
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
    folder = path / contract.SINKS_DIR
    with contextlib.suppress(OSError):
        folder.mkdir(exist_ok=True)
        write_whole(folder / f"{record.kind}.json", json.dumps(asdict(record)) + "\n")
