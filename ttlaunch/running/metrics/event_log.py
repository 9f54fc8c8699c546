"""Make one log of everything that a run measures: reports and telemetry of ranks, and what the launcher did.

Each of these has its own file in the run's folder, with one writer, so that nobody waits for anybody. This module reads
them as they grow and makes events of one shape (`docs/how-to/look-at-metrics.md`). The launcher writes the events to
`metrics.jsonl` when a run ends; a sink reads the same events while the run goes on.
"""

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ttlaunch import contract
from ttlaunch.planning.launch_plan import RankRow
from ttlaunch.records.ranks import AnyProgress, Parameters, StepDone, kind_of, measured_values, step_of
from ttlaunch.running.metrics.telemetry import TelemetryReader
from ttlaunch.running.runs.facts import read_facts
from ttlaunch.running.runs.files import Tail, read_object, read_object_if_any, write_whole
from ttlaunch.running.runs.run_folder import RunFolder, read_event
from ttlaunch.running.watch import RankState, Watch

EVENT_LOG_FORMAT = 1
"""Raised when a reader of older logs could misread a newer one."""

RUN, END, LAUNCHER = "run", "end", "launcher"
"""Kinds of events that no rank writes: the first, the last, and what the launcher notes in `events.jsonl`."""

TIMES, TRAFFIC, EXITED = "times", "traffic", "exited"
"""Kinds of events from a rank's telemetry, one of each a step; and the rank's end, as its shim saw it."""

_OF_REPORT = (
    "status",
    "exit_status",
    "duration_s",
    "steps",
    "first_validation",
    "last_validation",
    "last_perplexity",
    "tokens_per_s",
    "parameters_sha256",
    "parameters_agree",
    "results",
)


@dataclass(frozen=True)
class Event:
    """One thing that was measured or happened.

    Attributes:
        time: Seconds since the epoch.
        kind: A kind of progress record (`KIND_…` of the contract) or one of the above.
        rank: The rank that it is about; None: the whole run.
        step: The step that it is about, 0 for anything before the first; None: no step.
        values: The values by name.
    """

    time: float
    kind: str
    rank: int | None = None
    step: int | None = None
    values: Mapping[str, Any] = field(default_factory=dict)

    def as_json(self) -> dict[str, Any]:
        """The event as an object of JSON, without fields that are None."""
        known = {"time": self.time, "kind": self.kind, "rank": self.rank, "step": self.step}
        return {**{name: value for name, value in known.items() if value is not None}, "values": dict(self.values)}


@dataclass(frozen=True)
class LoggedRun:
    """The facts about a run that do not change while it goes on.

    Attributes:
        recipe: Its name, or that of the program.
        config: The resolved training file; empty for a program.
    """

    run_id: str
    recipe: str
    layout: str | None
    plan_hash: str
    ranks: tuple[RankRow, ...]
    config: Mapping[str, Any]


def read_logged_run(path: Path) -> LoggedRun:
    """Read these facts from the plan of a run.

    Raises:
        OSError: Its plan cannot be read.
        ValueError: The file of its plan is not a plan.
    """
    plan, facts = read_object(path / contract.PLAN_FILE), read_facts(path)
    config = plan.get("config") or {}
    return LoggedRun(path.name, facts.name, plan.get("layout"), str(plan.get("hash", "")), facts.ranks, config)


class EventLog:
    """The events of one run, as they come; each call of `poll` has what is new."""

    def __init__(self, path: Path) -> None:
        """Begin at the beginning of the run in a folder.

        Raises:
            OSError: Its plan cannot be read.
            ValueError: The file of its plan is not a plan.
        """
        self.run = read_logged_run(path)
        self._path = path
        self._watch = Watch(self.run, RunFolder(path.name, path))
        self._telemetry = [TelemetryReader(path, row.rank, world_size=len(self.run.ranks)) for row in self.run.ranks]
        self._launcher = Tail(path / contract.EVENTS_FILE)
        self._step_times: dict[int, tuple[int, float]] = {}
        self._first_times: dict[int, float] = {}
        self._reported: dict[tuple[int, int], float] = {}
        self._exited: set[int] = set()
        self._has_begun = self._has_ended = False
        self._latest = 0.0

    @property
    def has_ended(self) -> bool:
        """Whether the event of the run's end is among those that `poll` has returned."""
        return self._has_ended

    def poll(self) -> list[Event]:
        """Return new events in the order of time, as far as it is known."""
        # The report first: it is written last, so if it is there now, the records below are complete.
        report = read_object_if_any(self._path / contract.REPORT_FILE)
        records = [pair for pair in self._watch.poll() if not isinstance(pair[1], Parameters)]
        found = [self._of_record(state, record) for state, record in records]
        found += [event for row in self.run.ranks for event in self._of_telemetry(row.rank)]
        found += [*self._of_launcher(), *self._of_exits()]
        found.sort(key=lambda event: event.time)
        self._latest = max([self._latest, *(event.time for event in found)])
        begin = [] if self._has_begun or not found else [self._begin(found[0].time)]
        self._has_begun = self._has_begun or bool(begin)
        end = [] if self._has_ended or not report else [self._end(report)]
        self._has_ended = self._has_ended or bool(end)
        return [*begin, *found, *end]

    def _begin(self, time: float) -> Event:
        run = self.run
        ranks = [{"rank": row.rank, "role": row.role, "host": row.host} for row in run.ranks]
        values = {"format": EVENT_LOG_FORMAT, "run_id": run.run_id, "recipe": run.recipe, "layout": run.layout}
        return Event(time, RUN, values={**values, "plan_hash": run.plan_hash, "ranks": ranks, "config": run.config})

    def _end(self, report: Mapping[str, Any]) -> Event:
        return Event(self._latest, END, values={name: report.get(name) for name in _OF_REPORT})

    def _of_record(self, state: RankState, record: AnyProgress) -> Event:
        """The event of a rank's own record; that of a step also has the time since the rank's last one."""
        rank, time = state.row.rank, record.time
        self._first_times.setdefault(rank, time)
        values = measured_values(record)
        if isinstance(record, StepDone):
            step, before = record.step, self._step_times.get(rank)
            self._step_times[rank] = step, time
            self._reported[rank, step] = time
            if before is not None and before[0] < step and before[1] < time:
                step_time_s = round((time - before[1]) / (step - before[0]), 9)
                values["step_time_s"] = step_time_s
                if step_time_s and "tokens" in record.values:
                    values["tokens_per_s"] = record.values["tokens"] / step_time_s
        return Event(time, kind_of(record), rank, step_of(record), values)

    def _of_telemetry(self, rank: int) -> Iterator[Event]:
        for one in self._telemetry[rank].steps():
            time = self._reported.pop((rank, one.step), self._first_times.get(rank, 0.0))
            if one.times:
                yield Event(time, TIMES, rank, one.step, one.times)
            if one.operations:
                yield Event(time, TRAFFIC, rank, one.step, {"operations": one.operations})

    def _of_launcher(self) -> Iterator[Event]:
        for line in self._launcher.read():
            with contextlib.suppress(ValueError, KeyError, TypeError):
                event = read_event(line)
                yield Event(event.pop("time"), LAUNCHER, values=event)

    def _of_exits(self) -> Iterator[Event]:
        for state in self._watch.ranks:
            if state.exit is not None and state.row.rank not in self._exited:
                self._exited.add(state.row.rank)
                names = ("status", "signal", "started", "peak_memory_bytes")
                values = {name: value for name in names if (value := getattr(state.exit, name)) is not None}
                yield Event(state.exit.time, EXITED, state.row.rank, values=values)


def write_event_log(path: Path) -> Path | None:
    """Write all events of a run into its `metrics.jsonl`; None if the disk is full, or the folder is of no run."""
    place = path / contract.METRICS_FILE
    try:
        write_whole(place, "".join(event_line(event) for event in EventLog(path).poll()))
    except (OSError, ValueError):
        return None
    return place


def event_line(event: Event) -> str:
    """An event as a line of the log; numbers that JSON does not have are written as text, such as `"nan"`."""
    return contract.record_line(event.as_json())
