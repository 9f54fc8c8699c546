"""Steps in a rank's progress, of which a long run has hundreds of thousands: lines with the same numbers are read together, as columns.

A line that is exactly what a rank writes for a step is recognised by a regular expression, in a tenth of the time that the parser takes for it.
Every other line goes through the parser, so nothing is accepted here that it would refuse, and no value differs from the parser's.

Python 3.9 and the standard library only.
"""

from __future__ import annotations

import json
import re

from ttlaunch import contract
from ttlaunch.records.ranks import StepDone, read_progress

TYPE_CHECKING = False  # what typing.TYPE_CHECKING is, without the time to import it
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
    from typing import Union

    from ttlaunch.records.parser import BadRecord
    from ttlaunch.records.ranks import AnyProgress

    Row = tuple[bytes, ...]
    Match = Callable[[bytes], Union[re.Match[bytes], None]]  # noqa: UP007 - Python 3.9

_MOST_TOGETHER = 1024
_MOST_NAMES, _MOST_KINDS = 64, 32
"""How many numbers a line has at most that is read so, and how many kinds of lines: a rank could invent some without end."""

# Numbers of JSON, as short as those that are written, and within the bounds of the parser. A time has no exponent.
_WHOLE = rb"(?:0|[1-9][0-9]{0,14})"
_TIME = rb"((?:0|[1-9][0-9]{0,9})(?:\.[0-9]{1,30})?)"
_NUMBER = rb"(-?(?:0|[1-9][0-9]{0,17})(?:\.[0-9]{1,30})?(?:[eE][+-]?[0-9]{1,4})?)"


class Steps:
    """Steps of one rank that follow each other in its progress and have numbers of the same names.

    Attributes:
        steps, times: Of each, its number and when it was done, seconds since the epoch.
        values: The numbers by name, in the order of the names in a line; whole numbers are integers, as in a `StepDone`.
    """

    def __init__(self, steps: Sequence[int], times: Sequence[float], values: Mapping[str, Sequence[float]]) -> None:
        self.steps, self.times, self.values = steps, times, values

    def records(self) -> Iterator[StepDone]:
        """Yield the records one by one."""
        rows = zip(*self.values.values()) if self.values else iter([()] * len(self.steps))  # noqa: B905 - Python 3.9
        for step, time, numbers in zip(self.steps, self.times, rows):  # noqa: B905 - likewise; the lengths agree
            yield StepDone(time=time, step=step, values=dict(zip(self.values, numbers)))  # noqa: B905 - likewise


def read_together(lines: Iterable[bytes]) -> Iterator[Steps | AnyProgress | BadRecord]:
    """Parse lines of a rank's progress in their order; `read_progress` reads what is no step, and the first step of each kind.

    Args:
        lines: The lines; after the one that ends some steps, these steps are yielded before anything else is read.
    """
    kinds: dict[tuple[str, ...], Match | None] = {}
    names: tuple[str, ...] = ()
    match: Match | None = None
    rows: list[Row] = []
    for line in lines:
        found = match(line) if match is not None else None
        if found is not None:
            rows.append(found.groups())
            if len(rows) < _MOST_TOGETHER:
                continue
        if rows:
            yield _in_columns(names, rows)
            rows = []
        if found is None:
            record = read_progress(line)
            if isinstance(record, StepDone):
                names = tuple(record.values)
                if names not in kinds and len(kinds) < _MOST_KINDS and len(names) <= _MOST_NAMES:
                    kinds[names] = _lines_with(names)
                match = kinds.get(names)
            yield record
    if rows:
        yield _in_columns(names, rows)


def _lines_with(names: tuple[str, ...]) -> Match:
    """Return what recognises a line of a step with some numbers, and gives its time, its step, and the numbers."""
    kind = re.escape(json.dumps({"kind": contract.KIND_STEP})[:-1]).encode()
    fields = b"".join(rb", %s: %s" % (re.escape(json.dumps(name)).encode(), _NUMBER) for name in names)
    return re.compile(rb'%s, "time": %s, "step": (%s)%s\}' % (kind, _TIME, _WHOLE, fields)).fullmatch


def _in_columns(names: tuple[str, ...], rows: list[Row]) -> Steps:
    times, steps, *values = zip(*rows)  # noqa: B905 - Python 3.9; each row is of the same expression
    return Steps(
        list(map(int, steps)),
        list(map(float, times)),
        {name: json.loads(b"[%s]" % b",".join(column)) for name, column in zip(names, values)},  # noqa: B905 - likewise
    )
