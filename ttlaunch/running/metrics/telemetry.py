"""The telemetry that ranks leave of a run: what each sent to whom, how long it waited, and what its steps consisted of."""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from ttlaunch import contract
from ttlaunch.records.telemetry import Sent, Stretch, read_stretch
from ttlaunch.running.bad_records import Complain, good_records, pass_over
from ttlaunch.running.runs.tail import Tail

_STEP = "step"
OUTSIDE_STEPS = frozenset({"start", "after"})
"""Phases that are not part of a step: what comes before the first, and validations between steps."""


@dataclass
class RankTelemetry:
    """What one rank has written.

    Attributes:
        last: The last step it is about.
        facts: What the rank said of itself.
        waits: Microseconds by step, for each operation, within steps.
        phases: Microseconds by step, for each phase of a step.
        steps: Microseconds of each step.
    """

    rank: int
    last: int = 0
    facts: dict[str, int] = field(default_factory=dict)
    sent: list[Sent] = field(default_factory=list)
    waits: dict[str, dict[int, int]] = field(default_factory=lambda: defaultdict(dict))
    phases: dict[str, dict[int, int]] = field(default_factory=lambda: defaultdict(dict))
    steps: dict[int, int] = field(default_factory=dict)


def read_telemetry(folder: Path, *, world_size: int, complain: Complain = pass_over) -> list[RankTelemetry] | None:
    """The telemetry of all ranks, as far as they are written; None if a rank has left none."""
    telemetry = [_read_book(folder, rank, world_size=world_size, complain=complain) for rank in range(world_size)]
    return None if any(entry is None for entry in telemetry) else [entry for entry in telemetry if entry is not None]


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


def _read_book(folder: Path, rank: int, *, world_size: int, complain: Complain) -> RankTelemetry | None:
    """What a rank has written; a line that a killed rank did not finish is passed over."""
    name, entry = contract.ledger_file(rank), RankTelemetry(rank)
    read = partial(read_stretch, world_size=world_size)
    stretches = list(good_records(Tail(folder / name), read, rank=rank, file=name, complain=complain))
    for stretch in stretches:
        _take(entry, stretch)
    return entry if stretches else None


def _take(entry: RankTelemetry, stretch: Stretch) -> None:
    entry.sent += stretch.sent
    entry.facts |= stretch.facts
    _add_times(entry.waits, ((name, times) for name, phase, times in stretch.waited if phase not in OUTSIDE_STEPS))
    _add_times(entry.phases, ((name, times) for name, times in stretch.spent if name not in {*OUTSIDE_STEPS, _STEP}))
    for name, times in stretch.spent:
        entry.steps |= times if name == _STEP else {}
    entry.last = stretch.last


def _add_times(into: dict[str, dict[int, int]], found: Iterable[tuple[str, Mapping[int, int]]]) -> None:
    for name, times in found:
        known = into[name]
        for step, microseconds in times.items():
            known[step] = known.get(step, 0) + microseconds
