"""A rank's telemetry step by step as they are written: the times of a step, and what each operation sent and waited for."""

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from ttlaunch import contract
from ttlaunch.records.telemetry import Stretch, read_stretch
from ttlaunch.running.bad_records import good_records
from ttlaunch.running.runs.tail import Tail


@dataclass
class Page:
    """One step of one rank, as far as one line of its ledger tells.

    Attributes:
        step: 0 is what came before the first one.
        times: Seconds: `step_s` is all of the step, the others are its phases.
        operations: By name: `messages` and `bytes` that the rank sent, `waited_s` in which it could do nothing else.
    """

    step: int
    times: dict[str, float] = field(default_factory=dict)
    operations: dict[str, dict[str, float]] = field(default_factory=dict)

    def add(self, operation: str, name: str, value: float) -> None:
        """Add to what an operation did in this step."""
        known = self.operations.setdefault(operation, {"messages": 0, "bytes": 0, "waited_s": 0.0})
        known[name] += value


class TelemetryReader:
    """Reads one rank's ledger as it grows."""

    def __init__(self, folder: Path, rank: int, *, world_size: int) -> None:
        self._rank, self._name = rank, contract.ledger_file(rank)
        self._read = partial(read_stretch, world_size=world_size)
        self._tail = Tail(folder / self._name)

    def pages(self) -> Iterator[Page]:
        """The pages of the lines that are new; a line that is none is passed over."""
        for stretch in good_records(self._tail, self._read, rank=self._rank, file=self._name):
            found = _pages(stretch)
            yield from (found[step] for step in sorted(found))


def _pages(stretch: Stretch) -> dict[int, Page]:
    found: dict[int, Page] = defaultdict(lambda: Page(0))
    for phase, times in stretch.spent:
        for step, microseconds in times.items():
            found[step].times[f"{phase}_s"] = microseconds / 1e6
    for operation, _, times in stretch.waited:
        for step, microseconds in times.items():
            found[step].add(operation, "waited_s", microseconds / 1e6)
    for row in stretch.sent:
        for step in range(row.first, row.last + 1, row.stride):
            found[step].add(row.operation, "messages", row.messages)
            found[step].add(row.operation, "bytes", row.size)
    for step, page in found.items():
        page.step = step
    return found
