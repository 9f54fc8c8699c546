"""A rank's books step by step as they are written: the times of a step, and what each operation sent and waited for."""

import json
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ttlaunch import contract
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


class BookReader:
    """Reads one rank's ledger as it grows."""

    def __init__(self, path: Path) -> None:
        self._tail = Tail(path)

    def pages(self) -> Iterator[Page]:
        """The pages of the lines that are new; a line that is none is passed over."""
        for line in self._tail.read():
            try:
                stretch = json.loads(line)
                found = _pages(stretch) if stretch["format"] == contract.LEDGER_FORMAT else {}
            except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
                continue
            yield from (found[step] for step in sorted(found))


def _pages(stretch: Mapping[str, Any]) -> dict[int, Page]:
    found: dict[int, Page] = defaultdict(lambda: Page(0))
    for phase, times in stretch["spent"]:
        for step, microseconds in times.items():
            found[int(step)].times[f"{phase}_s"] = microseconds / 1e6
    for operation, _, times in stretch["waited"]:
        for step, microseconds in times.items():
            found[int(step)].add(operation, "waited_s", microseconds / 1e6)
    for operation, _, _, _, rows in stretch["sent"]:
        for first, last, stride, messages, size in rows:
            for step in range(first, last + 1, stride):
                found[step].add(operation, "messages", messages)
                found[step].add(operation, "bytes", size)
    for step, page in found.items():
        page.step = step
    return found
