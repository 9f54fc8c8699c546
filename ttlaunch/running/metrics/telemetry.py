"""Read the telemetry of a run's ranks: what each sent to whom, how long it waited, the parts of its steps, its memory."""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from ttlaunch import contract
from ttlaunch.records.telemetry import Sent, Stretch, read_stretch
from ttlaunch.running.bad_records import Complain, good_records, pass_over
from ttlaunch.running.runs.files import Tail

_STEP = "step"
OUTSIDE_STEPS = frozenset({"start", "after"})
"""Phases that are not part of a step: what comes before the first, and validations between steps."""


@dataclass
class RankTelemetry:
    """All telemetry of one rank.

    Attributes:
        is_written: Whether the rank has written anything.
        last: The last step it is about.
        facts: Numbers about the rank that formulas of traffic need.
        waits: Microseconds by step, for each operation, within steps.
        phases: Microseconds by step, for each phase of a step.
        steps: Microseconds of each step.
    """

    rank: int
    is_written: bool = False
    last: int = 0
    facts: dict[str, int] = field(default_factory=dict)
    sent: list[Sent] = field(default_factory=list)
    waits: dict[str, dict[int, int]] = field(default_factory=lambda: defaultdict(dict))
    phases: dict[str, dict[int, int]] = field(default_factory=lambda: defaultdict(dict))
    steps: dict[int, int] = field(default_factory=dict)


@dataclass
class StepTelemetry:
    """One step of one rank, as far as one line of its telemetry covers it.

    Attributes:
        step: 0 stands for everything before the first one.
        times: Seconds: `step_s` is all of the step, the others are its phases.
        operations: For each operation, the `messages` and `bytes` that the rank sent, and `waited_s`, in which it could
            only wait.
    """

    step: int
    times: dict[str, float] = field(default_factory=dict)
    operations: dict[str, dict[str, float]] = field(default_factory=dict)

    def add(self, operation: str, name: str, value: float) -> None:
        """Add to what an operation did in this step."""
        known = self.operations.setdefault(operation, {"messages": 0, "bytes": 0, "waited_s": 0.0})
        known[name] += value


class TelemetryReader:
    """Reads the telemetry file of one rank as it grows; each call has what is new."""

    def __init__(self, folder: Path, rank: int, *, world_size: int, complain: Complain = pass_over) -> None:
        self._rank, self._name = rank, contract.traffic_file(rank)
        self._read = partial(read_stretch, world_size=world_size)
        self._tail = Tail(folder / self._name)
        self._complain = complain

    def stretches(self) -> Iterator[Stretch]:
        """The lines that can be used; one that a killed rank did not finish is passed over."""
        return good_records(self._tail, self._read, rank=self._rank, file=self._name, complain=self._complain)

    def steps(self) -> Iterator[StepTelemetry]:
        """Yield the telemetry of each step, in order, from the lines that can be used."""
        for stretch in self.stretches():
            found = _by_step(stretch)
            yield from (found[step] for step in sorted(found))


def read_telemetry(folder: Path, *, world_size: int, complain: Complain = pass_over) -> list[RankTelemetry] | None:
    """The telemetry of all ranks, as far as it is written; None if a rank has left none."""
    found = []
    for rank in range(world_size):
        entry, stretches = RankTelemetry(rank), TelemetryReader(folder, rank, world_size=world_size, complain=complain)
        for stretch in stretches.stretches():
            _take(entry, stretch)
        found.append(entry)
    return found if all(entry.is_written for entry in found) else None


def measured(telemetry: Sequence[RankTelemetry], *, until: int) -> dict[tuple[str, int, int], tuple[int, int]]:
    """Messages and bytes by operation, source and destination, of all steps up to one."""
    found: dict[tuple[str, int, int], tuple[int, int]] = {}
    for entry in telemetry:
        for row in entry.sent:
            steps = row.steps_until(until)
            messages, size = found.get((row.operation, entry.rank, row.dest), (0, 0))
            if steps:
                total = (messages + steps * row.messages, size + steps * row.size)
                found[row.operation, entry.rank, row.dest] = total
    return found


def _take(entry: RankTelemetry, stretch: Stretch) -> None:
    entry.sent += stretch.sent
    entry.facts |= stretch.facts
    _add_times(entry.waits, ((name, times) for name, phase, times in stretch.waited if phase not in OUTSIDE_STEPS))
    _add_times(entry.phases, ((name, times) for name, times in stretch.spent if name not in {*OUTSIDE_STEPS, _STEP}))
    for name, times in stretch.spent:
        entry.steps |= times if name == _STEP else {}
    entry.is_written, entry.last = True, stretch.last


def _add_times(into: dict[str, dict[int, int]], found: Iterable[tuple[str, Mapping[int, int]]]) -> None:
    for name, times in found:
        known = into[name]
        for step, microseconds in times.items():
            known[step] = known.get(step, 0) + microseconds


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


KINDS = ("parameters", "gradients", "optimizer", "buffers", "activations")
"""The kinds of tensors that a rank distinguishes; see `ttlaunch/runtime/telemetry/memory.py`."""


@dataclass(frozen=True)
class RankMemory:
    """The memory that the tensors of one rank took in the step that counted it.

    Attributes:
        step: The step in which it was counted.
        sizes: The most bytes of each kind at any moment of the step.
        peak: The most bytes of all together at one moment; at most the sum of the sizes.
    """

    rank: int
    step: int
    sizes: dict[str, int]
    peak: int

    def as_json(self) -> dict[str, Any]:
        return dict(vars(self))


def memory_of_ranks(telemetry: Sequence[RankTelemetry]) -> list[RankMemory]:
    """The memory of the ranks that counted it, in order; a rank counts it only if the run was asked to."""
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
