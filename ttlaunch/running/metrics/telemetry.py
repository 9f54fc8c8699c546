"""Read the telemetry of a run's ranks: what each sent to whom, how long it waited, the parts of its steps, its memory."""

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import field
from functools import partial
from pathlib import Path
from typing import Any

from ttlaunch import contract
from ttlaunch.quick_dataclass import dataclass
from ttlaunch.records.members import MOST_JOINED
from ttlaunch.records.parser import LARGEST_COUNT
from ttlaunch.records.telemetry import Sent, Stretch, read_stretch
from ttlaunch.running.bad_records import Complain, good_records, pass_over
from ttlaunch.running.runs.files import Tail, read_object_if_any

_STEP = "step"
_FEWEST_STEPS, _MOST_TIMES = 4096, 65_536
"""How many steps of a rank have times at least, however many ranks there are, and how many of all ranks together."""
OUTSIDE_STEPS = frozenset({"start", "after"})
"""Phases that are not part of a step: `start` is before the first step, and `after` is for validations between steps."""


@dataclass
class RankTelemetry:
    """All telemetry of one rank.

    Attributes:
        is_written: Whether the rank has written telemetry.
        last: The last step that the telemetry covers.
        facts: Numbers about the rank that formulas of traffic need.
        sent: The messages that the rank has sent, in groups of equal steps.
        num_steps: The number of steps for which the rank has recorded times.
        every: Only times of steps divisible by this number are kept: 1, or more in a long run, see `_FEWEST_STEPS`.
        waits: By operation and step, the microseconds of a step in which the rank could only wait.
        phases: By phase and step, the microseconds that the phase took.
        steps: By step, the microseconds of the whole step.
    """

    rank: int
    is_written: bool = False
    last: int = 0
    facts: dict[str, int] = field(default_factory=dict)
    sent: list[Sent] = field(default_factory=list)
    num_steps: int = 0
    every: int = 1
    waits: dict[str, dict[int, int]] = field(default_factory=lambda: defaultdict(dict))
    phases: dict[str, dict[int, int]] = field(default_factory=lambda: defaultdict(dict))
    steps: dict[int, int] = field(default_factory=dict)


@dataclass
class StepTelemetry:
    """The telemetry of one step of one rank that one line contains.

    Attributes:
        step: The step; 0 for everything before the first one.
        times: Seconds by name: `step_s` for the whole step, the others for its phases.
        operations: By operation, the `messages` and `bytes` that the rank sent, and `waited_s`, the seconds in which it could
            only wait.
    """

    step: int
    times: dict[str, float] = field(default_factory=dict)
    operations: dict[str, dict[str, float]] = field(default_factory=dict)

    def add(self, operation: str, name: str, value: float) -> None:
        """Add to one of the three numbers of an operation."""
        known = self.operations.setdefault(operation, {"messages": 0, "bytes": 0, "waited_s": 0.0})
        known[name] += value


class TelemetryReader:
    """Reads the telemetry file of one rank as it grows; each call of a method yields what is new."""

    def __init__(
        self,
        folder: Path,
        rank: int,
        *,
        world_size: int,
        is_elastic: bool = False,
        last_step: int = LARGEST_COUNT,
        complain: Complain = pass_over,
        begin: int = 0,
    ) -> None:
        """Begin with the first line, or at the byte where a line begins; in an elastic run, the rank may also send to workers that join."""
        self._rank, self._name = rank, contract.traffic_file(rank)
        self._read = partial(read_stretch, world_size=world_size + MOST_JOINED * is_elastic, last_step=last_step)
        self._tail = Tail(folder / self._name, begin=begin)
        self._complain = complain

    @property
    def place(self) -> int:
        """Where the next line to read begins, in bytes."""
        return self._tail.place

    def stretches(self) -> Iterator[Stretch]:
        """Yield the usable lines; a line that a killed rank did not finish is skipped."""
        return good_records(self._tail, self._read, rank=self._rank, file=self._name, complain=self._complain)

    def steps(self) -> Iterator[StepTelemetry]:
        """Yield the telemetry of the steps in each usable line, in order."""
        for stretch in self.stretches():
            found = _by_step(stretch)
            yield from (found[step] for step in sorted(found))


def last_step_of(config: object, *, world_size: int) -> int:
    """The last step that ranks can count by the configuration in a run's plan.

    A server that updates weights without waiting for all counts an update for each step of each other rank.
    """
    training = config.get("training_config") if isinstance(config, dict) else None
    steps = training.get("steps") if isinstance(training, dict) else None
    return min(steps * max(1, world_size), LARGEST_COUNT) if type(steps) is int and steps > 0 else LARGEST_COUNT


def read_telemetry(
    folder: Path, *, world_size: int, complain: Complain = pass_over, with_times: bool = True
) -> list[RankTelemetry] | None:
    """Read the telemetry that all ranks have written so far; None if a rank has written none.

    Args:
        folder: The run's folder.
        world_size: The number of ranks.
        complain: Called with each line that cannot be used.
        with_times: Whether to keep the times of steps.
    """
    found = [
        read_rank(folder, rank, world_size=world_size, complain=complain, with_times=with_times)
        for rank in range(world_size)
    ]
    return found if all(entry.is_written for entry in found) else None


def read_rank(
    folder: Path, rank: int, *, world_size: int, complain: Complain = pass_over, with_times: bool = True
) -> RankTelemetry:
    """Read the telemetry that one rank has written so far; arguments are those of `read_telemetry`."""
    plan = read_object_if_any(folder / contract.PLAN_FILE)
    last_step = last_step_of(plan.get("config"), world_size=world_size)
    entry = RankTelemetry(rank)
    reader = TelemetryReader(
        folder,
        rank,
        world_size=world_size,
        is_elastic=bool(plan.get("elastic")),
        last_step=last_step,
        complain=complain,
    )
    for stretch in reader.stretches():
        add_stretch(entry, stretch, world_size=world_size, with_times=with_times)
    return entry


def add_stretch(entry: RankTelemetry, stretch: Stretch, *, world_size: int, with_times: bool = True) -> None:
    """Add a line of a rank's telemetry to what is known of the rank."""
    entry.facts |= stretch.facts
    entry.is_written, entry.last = True, stretch.last
    _add_sent(entry.sent, stretch.sent)
    if with_times:
        _add_times(entry, stretch, most=max(_FEWEST_STEPS, _MOST_TIMES // max(1, world_size)))


def measured(telemetry: Sequence[RankTelemetry], *, until: int) -> dict[tuple[str, int, int], tuple[int, int]]:
    """Return messages and bytes by operation, source and destination, over all steps up to and including `until`."""
    found: dict[tuple[str, int, int], tuple[int, int]] = {}
    for entry in telemetry:
        for row in entry.sent:
            steps = row.steps_until(until)
            messages, size = found.get((row.operation, entry.rank, row.dest), (0, 0))
            if steps:
                total = (messages + steps * row.messages, size + steps * row.size)
                found[row.operation, entry.rank, row.dest] = total
    return found


def _add_sent(into: list[Sent], rows: Sequence[Sent]) -> None:
    """Add rows; one that goes on where the row at its place among the last ones ends becomes one row with it."""
    before = len(into) - len(rows)
    for place, row in enumerate(rows, before):
        last = into[place] if before >= 0 else None
        # What comes before the first step is counted by itself.
        if (
            last is not None
            and last.first > 0
            and _same_but_steps(last) == _same_but_steps(row)
            and row.first == last.last + row.stride
        ):
            into[place] = Sent(**{**vars(row), "first": last.first})
        else:
            into.append(row)


def _same_but_steps(row: Sent) -> tuple[object, ...]:
    return (row.operation, row.bucket, row.phase, row.dest, row.stride, row.messages, row.size)


def _add_times(entry: RankTelemetry, stretch: Stretch, *, most: int) -> None:
    """Add the times of some steps; if there are more than `most`, only those of every second step are kept from then on."""

    def add(into: dict[int, int], times: Mapping[int, int]) -> None:
        for step, microseconds in times.items():
            if step % entry.every == 0:
                into[step] = into.get(step, 0) + microseconds

    for name, phase, times in stretch.waited:
        if phase not in OUTSIDE_STEPS:
            add(entry.waits[name], times)
    for name, times in stretch.spent:
        if name == _STEP:
            entry.num_steps += len(times)
            entry.steps |= {step: time for step, time in times.items() if step % entry.every == 0}
        elif name not in OUTSIDE_STEPS:
            add(entry.phases[name], times)
    if len(entry.steps) > most:
        _thin(entry, most=most)


def _thin(entry: RankTelemetry, *, most: int) -> None:
    while len(entry.steps) > most:
        entry.every *= 2
        for kept in (entry.steps, *entry.waits.values(), *entry.phases.values()):
            for step in [step for step in kept if step % entry.every]:
                del kept[step]


def _by_step(stretch: Stretch) -> dict[int, StepTelemetry]:
    found: dict[int, StepTelemetry] = {}

    def at(step: int) -> StepTelemetry:
        return found.setdefault(step, StepTelemetry(step))

    for phase, times in stretch.spent:
        for step, microseconds in times.items():
            at(step).times[f"{phase}_s"] = microseconds / 1e6
    for operation, _, times in stretch.waited:
        for step, microseconds in times.items():
            at(step).add(operation, "waited_s", microseconds / 1e6)
    for row in stretch.sent:
        for step in range(row.first, row.last + 1, row.stride):
            at(step).add(row.operation, "messages", row.messages)
            at(step).add(row.operation, "bytes", row.size)
    return found


def numbers_of(stretch: Stretch) -> dict[str, dict[int, float]]:
    """Return the numbers of a line by step, with the names and the bits that the events of its steps would have as metrics."""
    found: dict[str, dict[int, float]] = {}
    for phase, times in stretch.spent:
        known = found.setdefault(f"time/{phase}_s", {})
        known.update(zip(times, [microseconds / 1e6 for microseconds in times.values()], strict=True))
    operations: dict[str, dict[str, dict[int, float]]] = {}
    for operation, _, times in stretch.waited:
        _add_up(_numbers_of(operations, operation)["waited_s"], {step: us / 1e6 for step, us in times.items()})
    for row in stretch.sent:
        steps, of_operation = range(row.first, row.last + 1, row.stride), _numbers_of(operations, row.operation)
        _add_up(of_operation["sent_messages"], dict.fromkeys(steps, row.messages))
        _add_up(of_operation["sent_bytes"], dict.fromkeys(steps, row.size))
    for operation, numbers in operations.items():
        steps_of = numbers["waited_s"].keys() | numbers["sent_bytes"].keys()
        for name, values in numbers.items():
            whole = {step: float(values.get(step, 0)) for step in steps_of}
            found[f"communication/{operation}/{name}"] = whole
    for name in _OF_OPERATION:
        every = [found[f"communication/{operation}/{name}"] for operation in operations]
        found[f"communication/{name}"] = _together(every)
    return {name: values for name, values in found.items() if values}


_OF_OPERATION = ("sent_bytes", "sent_messages", "waited_s")


def _numbers_of(operations: dict[str, dict[str, dict[int, float]]], operation: str) -> dict[str, dict[int, float]]:
    return operations.setdefault(operation, {name: {} for name in _OF_OPERATION})


def _add_up(into: dict[int, float], values: Mapping[int, float]) -> None:
    if not into:
        into.update(values)
        return
    for step, value in values.items():
        into[step] = into.get(step, 0) + value


def _together(every: Sequence[Mapping[int, float]]) -> dict[int, float]:
    """Return the exact sums over operations, rounded once."""
    if len(every) == 1:
        return dict(every[0])
    steps = set().union(*every)
    return {step: math.fsum(one[step] for one in every if step in one) for step in steps}


KINDS = ("parameters", "gradients", "optimizer", "buffers", "activations")
"""The kinds of tensors that a rank distinguishes; see `ttlaunch/runtime/telemetry/memory.py`."""


@dataclass(frozen=True)
class RankMemory:
    """The memory of one rank's tensors in the step in which the rank measured it.

    Attributes:
        step: The measured step.
        sizes: For each kind of tensor, the largest number of bytes at any moment of the step.
        peak: The largest number of bytes of all kinds together at one moment; at most the sum of the sizes.
    """

    rank: int
    step: int
    sizes: dict[str, int]
    peak: int

    def as_json(self) -> dict[str, Any]:
        return dict(vars(self))


def memory_of_ranks(telemetry: Sequence[RankTelemetry]) -> list[RankMemory]:
    """Return the memory of the ranks that measured it, in order; ranks measure it only on request."""
    return [
        RankMemory(
            entry.rank,
            entry.facts["memory_step"],
            {kind: entry.facts[f"memory_{kind}"] for kind in KINDS},
            entry.facts["memory_peak"],
        )
        for entry in telemetry
        if {"memory_step", "memory_peak", *(f"memory_{kind}" for kind in KINDS)} <= entry.facts.keys()
    ]
