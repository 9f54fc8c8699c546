"""Merge everything that a run measures into one log: reports and telemetry of ranks, and the launcher's history.

Each source is a file of its own in the run's folder with one writer, so that no writer waits for another. This module reads
the files as they grow and makes events of one shape (`docs/how-to/look-at-metrics.md`). The launcher writes the events to
`metrics.jsonl` when a run ends; a sink reads the same events while the run is active.
"""

import contextlib
import math
import os
from array import array
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import field
from heapq import merge
from itertools import islice, pairwise
from operator import itemgetter, lt
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

from ttlaunch import contract
from ttlaunch.planning.launch_plan import RankRow
from ttlaunch.quick_dataclass import dataclass
from ttlaunch.records.audits import Digests
from ttlaunch.records.ranks import AnyProgress, Parameters, StepDone, kind_of, measured_values, step_of
from ttlaunch.records.steps import Steps
from ttlaunch.records.telemetry import Stretch
from ttlaunch.records.updates import Update
from ttlaunch.running.metrics.log_place import LogPlace, restore_state, state_as_json
from ttlaunch.running.metrics.telemetry import TelemetryReader, last_step_of, numbers_of
from ttlaunch.running.runs.facts import read_facts, with_joined
from ttlaunch.running.runs.files import Tail, read_object, read_object_if_any, write_whole
from ttlaunch.running.runs.run_folder import RunFolder, read_event
from ttlaunch.running.watch import RankState, Watch

EVENT_LOG_FORMAT = 1
"""The version of the format; increase it when a change could make existing readers misread a log."""

_COUNTED = tuple(prefix + name for prefix in ("", contract.OWN) for name in contract.COUNTED)
_DERIVED = frozenset({"step_time_s", *(f"{name}_per_s" for name in _COUNTED)})
"""What the event of a step has besides the rank's own numbers."""
_WITHOUT_EVENT = (Parameters, Digests, Update)
_HELD_EVENTS = 10_000
_HELD_STEPS = 65_536
_KEPT_STEPS = 4096
_PIECE = 16_384

RUN, END, LAUNCHER = "run", "end", "launcher"
"""Kinds of events that no rank writes: the first event, the last one, and events from the launcher's `events.jsonl`."""

TIMES, TRAFFIC, EXITED = "times", "traffic", "exited"
"""Kinds of events from a rank's telemetry, one of each per step; and the rank's end, as its shim recorded it."""

_OF_REPORT = (
    "status",
    "exit_status",
    "duration_s",
    "steps",
    "first_validation",
    "last_validation",
    "last_perplexity",
    "tokens_per_s",
    "samples_per_s",
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
        rank: The rank of the event; None for an event of the whole run.
        step: The step of the event, 0 for anything before the first step; None for an event without a step.
        values: The values by name.
    """

    time: float
    kind: str
    rank: int | None = None
    step: int | None = None
    values: Mapping[str, Any] = field(default_factory=dict)

    def as_json(self) -> dict[str, Any]:
        """Return the event as a JSON object, without fields that are None."""
        known = {"time": self.time, "kind": self.kind, "rank": self.rank, "step": self.step}
        return {**{name: value for name, value in known.items() if value is not None}, "values": dict(self.values)}


@dataclass(frozen=True)
class LoggedRun:
    """The facts about a run that its plan fixes.

    Attributes:
        recipe: The name of the recipe, or of the program.
        config: The resolved training file; empty for a program that is no recipe.
    """

    run_id: str
    recipe: str
    layout: str | None
    plan_hash: str
    ranks: tuple[RankRow, ...]
    config: Mapping[str, Any]


def read_logged_run(path: Path) -> LoggedRun:
    """Read the facts about a run from its plan.

    Raises:
        OSError: The plan cannot be read.
        ValueError: The file is not a plan.
    """
    plan, facts = read_object(path / contract.PLAN_FILE), read_facts(path)
    config = plan.get("config") or {}
    ranks = with_joined(facts, path).ranks
    return LoggedRun(path.name, facts.name, plan.get("layout"), str(plan.get("hash", "")), ranks, config)


@dataclass(frozen=True)
class Column:
    """One number of a rank over some steps, in their order.

    Attributes:
        name: The number's name among the metrics, see `names.py`.
        steps, times: The steps, and when the rank reported them, seconds since the epoch.
    """

    rank: int
    name: str
    steps: "array[int]"
    times: "array[float]"
    values: "array[float]"


class EventLog:
    """Reads the events of one run from its folder; each call of `events`, `lines` or `poll` returns what is new."""

    def __init__(self, path: Path, *, place: LogPlace | None = None) -> None:
        """Begin with the first event of the run in a folder, or at a place.

        Raises:
            OSError: The run's plan cannot be read.
            ValueError: The file is not a plan.
        """
        self.run = read_logged_run(path)
        self._path = path
        begin = {int(rank): at for rank, at in place.progress.items()} if place else None
        self._watch = Watch(self.run, RunFolder(path.name, path), begin=begin)
        size = len(self.run.ranks)
        last_step = last_step_of(self.run.config, world_size=size)
        self._telemetry = [
            TelemetryReader(
                path,
                row.rank,
                world_size=size,
                is_elastic=any(row.later for row in self.run.ranks),
                last_step=last_step,
                begin=place.telemetry.get(str(row.rank), 0) if place else 0,
            )
            for row in self.run.ranks
        ]
        self._launcher = Tail(path / contract.EVENTS_FILE)
        self._step_times: dict[int, tuple[int, float]] = {}
        self._first_times: dict[int, float] = {}
        self._reported = [_ReportTimes() for _ in self.run.ranks]
        self._exited: set[int] = set()
        self._has_begun = self._has_ended = False
        self._latest = 0.0
        if place is not None:
            self._go_to(place)

    @property
    def place(self) -> LogPlace:
        """Where another reader can go on: behind the events that have been read, all of which must have been taken."""
        ranks = range(len(self.run.ranks))
        return LogPlace(
            progress={str(rank): at for rank, at in self._watch.places().items()},
            telemetry={str(rank): self._telemetry[rank].place for rank in ranks},
            states={str(state.row.rank): state_as_json(state) for state in self._watch.ranks},
            step_times={str(rank): known for rank, known in self._step_times.items()},
            first_times={str(rank): time for rank, time in self._first_times.items()},
            reported={str(rank): self._reported[rank].last(_KEPT_STEPS) for rank in ranks},
            exited=sorted(self._exited),
        )

    @property
    def place_in_bytes(self) -> int:
        """How many bytes of records and telemetry have been read."""
        return sum(self._watch.places().values()) + sum(one.place for one in self._telemetry)

    def _go_to(self, place: LogPlace) -> None:
        for state in self._watch.ranks:
            restore_state(state, place.states.get(str(state.row.rank), {}))
        self._step_times = {int(rank): (int(step), time) for rank, (step, time) in place.step_times.items()}
        self._first_times = {int(rank): time for rank, time in place.first_times.items()}
        for rank, known in place.reported.items():
            for step, time in known:
                self._reported[int(rank)].add(int(step), time)
        self._exited = set(place.exited)

    @property
    def has_ended(self) -> bool:
        """Whether the event of the run's end is among those that `poll` has returned."""
        return self._has_ended

    @property
    def states(self) -> list[RankState]:
        """The states of all ranks, as far as their events have been read."""
        return self._watch.ranks

    def poll(self) -> list[Event]:
        """Return the new events of a run that is known to be short."""
        return list(self.events())

    def events(self) -> Iterator[Event]:
        """Yield the new events sorted by time; if there are many, they are sorted on disk."""
        return (_read_line(one) if isinstance(one, str) else one for one in self._ordered())

    def unordered(self) -> Iterator[Event]:
        """Yield the new events of ranks, those of each rank and kind in order, without the time that sorting all of them takes."""
        return (event for event in self._new_events() if event.rank is not None)

    def unordered_in_columns(self, note: Callable[[int, Stretch], None] | None = None) -> Iterator[Event | Column]:
        """Yield what `unordered` does, but steps and telemetry as columns, for which a fifth of the time is needed.

        Args:
            note: Called with each rank and line of telemetry, for those who want to know more of it.
        """
        for state, found in self._watch.unordered():
            if isinstance(found, Steps):
                yield from self._columns_of_steps(state, found)
            elif not isinstance(found, _WITHOUT_EVENT):
                yield self._of_record(state, found)
        for row in self.run.ranks:
            for stretch in self._telemetry[row.rank].stretches():
                if note is not None:
                    note(row.rank, stretch)
                yield from self._columns_of(row.rank, stretch)
        yield from self._of_exits()

    def lines(self) -> Iterator[str]:
        """Yield the new events as `events` does, but as lines of the log."""
        return (one if isinstance(one, str) else event_line(one) for one in self._ordered())

    def _ordered(self) -> Iterator[Event | str]:
        """Yield the new events sorted by time, or lines of the log if there are too many events for memory."""
        # Read the report first: it is written last, so if it exists now, the records below are complete.
        report = read_object_if_any(self._path / contract.REPORT_FILE)
        for time, one in in_order_of_time(self._new_events(), scratch=self._path):
            if not self._has_begun:
                self._has_begun = True
                yield self._begin(time)
            self._latest = max(self._latest, time)
            yield one
        if report and not self._has_ended:
            self._has_ended = True
            yield self._end(report)

    def _new_events(self) -> Iterator[Event]:
        """Yield new events source by source; times of steps are known once all records have been read."""
        yield from self._new_records()
        for row in self.run.ranks:
            yield from self._of_telemetry(row.rank)
        yield from self._of_launcher()
        yield from self._of_exits()

    def _new_records(self) -> Iterator[Event]:
        for state, record in self._watch.records():
            if not isinstance(record, _WITHOUT_EVENT):
                yield self._of_record(state, record)

    def _begin(self, time: float) -> Event:
        run = self.run
        ranks = [{"rank": row.rank, "role": row.role, "host": row.host} for row in run.ranks]
        values = {"format": EVENT_LOG_FORMAT, "run_id": run.run_id, "recipe": run.recipe, "layout": run.layout}
        return Event(time, RUN, values={**values, "plan_hash": run.plan_hash, "ranks": ranks, "config": run.config})

    def _end(self, report: Mapping[str, Any]) -> Event:
        return Event(self._latest, END, values={name: report.get(name) for name in _OF_REPORT})

    def _of_record(self, state: RankState, record: AnyProgress) -> Event:
        """Return the event of a rank's record; the event of a step also has the time since the rank's step before."""
        rank, time = state.row.rank, record.time
        self._first_times.setdefault(rank, time)
        values = measured_values(record)
        if isinstance(record, StepDone):
            step, before = record.step, self._step_times.get(rank)
            self._step_times[rank] = step, time
            self._reported[rank].add(step, time)
            if before is not None and before[0] < step and before[1] < time:
                step_time_s = round((time - before[1]) / (step - before[0]), 9)
                values["step_time_s"] = step_time_s
                counted = [name for name in _COUNTED if step_time_s and name in record.values]
                values |= {f"{name}_per_s": record.values[name] / step_time_s for name in counted}
        return Event(time, kind_of(record), rank, step_of(record), values)

    def _columns_of_steps(self, state: RankState, found: Steps) -> Iterator[Event | Column]:
        """Yield the numbers of some steps, the same as in their events."""
        if not _DERIVED.isdisjoint(found.values):  # a script's own names, which a step's event replaces here and there
            yield from (self._of_record(state, record) for record in found.records())
            return
        rank = state.row.rank
        self._first_times.setdefault(rank, found.times[0])
        step, time = self._step_times.get(rank, (found.steps[0], found.times[0]))
        self._step_times[rank] = found.steps[-1], found.times[-1]
        self._reported[rank].add_all(found.steps, found.times)
        numbers: dict[str, Sequence[float | None]] = dict(found.values)
        numbers["step_time_s"] = [
            round((now - then) / (at - before), 9) if before < at and then < now else None
            for at, now, before, then in zip(
                found.steps, found.times, [step, *found.steps], [time, *found.times], strict=False
            )
        ]
        for name in _COUNTED:
            if name in found.values:
                pairs = zip(found.values[name], numbers["step_time_s"], strict=True)
                numbers[f"{name}_per_s"] = [
                    number / step_time_s if step_time_s else None for number, step_time_s in pairs
                ]
        steps, times = array("q", found.steps), array("d", found.times)
        for name, values in numbers.items():
            known = [place for place, value in enumerate(values) if value is not None]
            is_whole = len(known) == len(values)
            yield Column(
                rank,
                f"train/{name}",
                steps if is_whole else array("q", map(steps.__getitem__, known)),
                times if is_whole else array("d", map(times.__getitem__, known)),
                array("d", [value for value in values if value is not None]),
            )

    def _of_telemetry(self, rank: int) -> Iterator[Event]:
        for one in self._telemetry[rank].steps():
            time = self._time_of(rank, one.step)
            if one.times:
                yield Event(time, TIMES, rank, one.step, one.times)
            if one.operations:
                yield Event(time, TRAFFIC, rank, one.step, {"operations": one.operations})

    def _time_of(self, rank: int, step: int) -> float:
        """Return when a rank reported a step; for a step that it has not reported, or that was asked for before, when it began."""
        time = self._reported[rank].pop(step)
        return self._first_times.get(rank, 0.0) if time is None else time

    def _columns_of(self, rank: int, stretch: Stretch) -> Iterator[Column]:
        """Yield the numbers of a line of telemetry, the same as in its events."""
        named = numbers_of(stretch)
        times = {step: self._time_of(rank, step) for step in sorted(set().union(*named.values()))}
        known: dict[tuple[int, ...], tuple[array[int], array[float]]] = {}  # most numbers have the same steps
        for name, values in named.items():
            steps = tuple(sorted(values))
            if steps not in known:
                known[steps] = array("q", steps), array("d", map(times.__getitem__, steps))
            yield Column(rank, name, *known[steps], array("d", map(values.__getitem__, steps)))

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
    """Write all events of a run to its `metrics.jsonl`; return None if that fails or the folder is not that of a run."""
    place = path / contract.METRICS_FILE
    try:
        write_whole(place, EventLog(path).lines())
    except (OSError, ValueError):
        return None
    return place


def event_line(event: Event) -> str:
    """Render an event as a line of the log; numbers that JSON cannot express are written as text, such as `"nan"`."""
    return contract.record_line(event.as_json())


def _read_line(line: str) -> Event:
    """Read what `event_line` wrote."""
    record = contract.read_record(line) or {}
    return Event(record["time"], record["kind"], record.get("rank"), record.get("step"), record["values"])


class _ReportTimes:
    """When a rank reported each step whose telemetry has not come yet; 16 bytes for each."""

    def __init__(self) -> None:
        self._steps, self._times = array("q"), array("d")

    def add(self, step: int, time: float) -> None:
        """Note the time of a step, which is later than all steps before."""
        if not self._steps or step > self._steps[-1]:
            self._steps.append(step)
            self._times.append(time)

    def add_all(self, steps: Sequence[int], times: Sequence[float]) -> None:
        """Note the times of some steps."""
        if all(map(lt, [self._steps[-1] if self._steps else -1, *steps], steps)):
            self._steps.extend(steps)
            self._times.extend(times)
            return
        for step, time in zip(steps, times, strict=True):
            self.add(step, time)

    def last(self, most: int) -> list[tuple[int, float]]:
        """Return the last steps that were not popped, with their times."""
        known = zip(self._steps[-most:], self._times[-most:], strict=True)
        return [(step, time) for step, time in known if not math.isnan(time)]

    def pop(self, step: int) -> float | None:
        """Return the time of a step once; None if it is not known, or was returned before."""
        at = bisect_left(self._steps, step)
        if at == len(self._steps) or self._steps[at] != step or math.isnan(self._times[at]):
            return None
        found, self._times[at] = self._times[at], math.nan
        if at >= _HELD_STEPS:  # telemetry comes in the order of steps
            del self._steps[: at + 1], self._times[: at + 1]
        return found


def in_order_of_time(events: Iterator[Event], *, scratch: Path) -> Iterator[tuple[float, Event | str]]:
    """Sort events by time; more than a few thousand are sorted in a file without a name, and come as their lines.

    Args:
        events: Any number; those of one time keep their order.
        scratch: The folder of the file; one that cannot be written is replaced by the system's for such files.
    """
    some = _sorted(islice(events, _HELD_EVENTS))
    if len(some) < _HELD_EVENTS:
        yield from some
        return
    with TemporaryFile(dir=scratch if os.access(scratch, os.W_OK) else None) as file:
        ends = [0]
        while some:
            file.writelines(f"{time!r}\t{event_line(event)}".encode() for time, event in some)
            ends.append(file.tell())
            some = _sorted(islice(events, _HELD_EVENTS))
        file.flush()
        yield from merge(*(_timed_lines(file.fileno(), *part) for part in pairwise(ends)), key=itemgetter(0))


def _sorted(events: Iterable[Event]) -> list[tuple[float, Event]]:
    return sorted(((event.time, event) for event in events), key=itemgetter(0))


def _timed_lines(descriptor: int, begin: int, end: int) -> Iterator[tuple[float, str]]:
    """Read a part of the file that `in_order_of_time` writes."""
    rest = b""
    while begin < end:
        data = os.pread(descriptor, min(_PIECE, end - begin), begin)
        begin += len(data)
        *lines, rest = (rest + data).split(b"\n")
        for line in lines:
            time, _, text = line.decode().partition("\t")
            yield float(time), text + "\n"
