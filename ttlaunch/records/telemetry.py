"""The records of a rank's messages and times: lines of its traffic file, and events of its trace.

Python 3.9 and the standard library only.
"""

from __future__ import annotations

from ttlaunch import contract
from ttlaunch.records.parser import (
    LARGEST_COUNT,
    MOST_ITEMS,
    BadRecord,
    Count,
    Flag,
    Nanoseconds,
    Rank,
    Size,
    Step,
    Tag,
    Value,
    Word,
    load,
    parse,
    read,
    record,
    shown,
)

_LONGEST_STEP = len(str(LARGEST_COUNT))
_LONGEST_STRETCH = 100_000  # the most steps that a line may cover; ranks write a line at least every 2,000 steps


@record
class Sent:
    """The messages of one rank to another in a series of equal steps.

    Attributes:
        bucket: The number of the bucket, if a vector is sent in several; None if it is sent whole.
        first, last, stride: The steps of the series, as a range with both ends; step 0 is everything before the first step.
        messages, size: The number of messages and of bytes in each step.
    """

    operation: Word
    bucket: Count | None
    phase: Word
    dest: Rank
    first: Step
    last: Step
    stride: Step
    messages: Count
    size: Size

    def steps_until(self, last: int) -> int:
        """Count the steps of the series up to and including `last`."""
        return max(0, (min(self.last, last) - self.first) // self.stride + 1)


@record
class Stretch:
    """A line of a traffic file: what a rank counted over some steps, up to `last`.

    Attributes:
        facts: Numbers about the rank that formulas of traffic need, such as `values`, the size of its part of the model.
        sent: The messages that the rank sent, with equal steps in one row.
        waited: The time in which the rank could only wait: operation, phase, and microseconds by step.
        spent: The time that phases took: phase, and microseconds by step.
    """

    last: Step
    facts: dict[str, Count]
    sent: tuple[Sent, ...]
    waited: tuple[tuple[str, str, dict[int, int]], ...]
    spent: tuple[tuple[str, dict[int, int]], ...]


@record
class _Line:
    """A line of a traffic file as it is written, see `contract.TRAFFIC_FORMAT`."""

    format: Count
    last: Step
    facts: dict[str, Size]
    sent: tuple[tuple[Word, Count | None, Word, Rank, tuple[tuple[Step, Step, Step, Count, Size], ...]], ...]
    waited: tuple[tuple[Word, Word, dict[str, Size]], ...]
    spent: tuple[tuple[Word, dict[str, Size]], ...]


def read_stretch(line: bytes, *, world_size: int, last_step: int = LARGEST_COUNT) -> Stretch | BadRecord:
    """Parse a line of a traffic file.

    Args:
        line: The line.
        world_size: The number of ranks that it may name.
        last_step: The last step that it may name.
    """
    found = read(_Line, line)
    if isinstance(found, BadRecord):
        return found
    if found.last > last_step:
        return BadRecord(f"`last` is {found.last}, after the last step {last_step}")
    if found.format != contract.TRAFFIC_FORMAT:
        return BadRecord(f"`format` is {found.format}, expected {contract.TRAFFIC_FORMAT}")
    sent, named = [], 0
    for operation, bucket, phase, dest, rows in found.sent:
        if dest >= world_size:
            return BadRecord(f"`sent` names rank {dest} of {world_size}")
        # Each step stands in one row at most, so rows together name no more steps than there are, with 0.
        of_rows = 0
        for first, last, stride, messages, size in rows:
            steps_of_row = 0 if stride < 1 else max(0, last - first) // stride + 1
            named, of_rows = named + steps_of_row, of_rows + steps_of_row
            is_long = steps_of_row > _LONGEST_STRETCH or of_rows > last_step + 1 or named > MOST_ITEMS
            if stride < 1 or not first <= last <= last_step or is_long:
                return BadRecord(f"`sent` names steps {first} to {last} by {stride}")
            steps = {"first": first, "last": last, "stride": stride}
            sent.append(
                Sent(operation=operation, bucket=bucket, phase=phase, dest=dest, messages=messages, size=size, **steps)
            )
    try:
        waited = tuple([(name, phase, _by_step(times)) for name, phase, times in found.waited])
        spent = tuple([(phase, _by_step(times)) for phase, times in found.spent])
    except ValueError:
        return BadRecord("a time stands beside something that is no step")
    return Stretch(last=found.last, facts=found.facts, sent=tuple(sent), waited=waited, spent=spent)


def _by_step(times: dict[str, int]) -> dict[int, int]:
    # Check the lengths first: `int` is slow for a thousand digits, and raises for many more.
    if times and (max(map(len, times)) > _LONGEST_STEP or not "".join(times).isdecimal()):
        raise ValueError("a name is no step")
    return dict(zip(map(int, times), times.values()))  # noqa: B905 - Python 3.9; the lengths agree


# Events of a trace, `records/rank-N.trace.jsonl`; each line is a list that begins with the event's kind.


@record
class ClockNote:
    """The offset of rank 0's clock from the writer's, and its possible error, at a local time."""

    when: Nanoseconds
    offset: Nanoseconds
    error: Nanoseconds


@record
class Span:
    """An activity of a rank with its begin and end, and facts for the timeline."""

    name: Word
    kind: Word
    began: Nanoseconds
    ended: Nanoseconds
    facts: dict[str, Value]


@record
class MessageEnd:
    """The time at which a rank began to send a message (`is_send`) or had received it; both ends have the same `number`."""

    is_send: Flag
    name: Word
    when: Nanoseconds
    peer: Tag
    tag: Tag
    number: Count
    size: Size


@record
class _MessageFacts:
    peer: Tag
    tag: Tag
    number: Count
    bytes: Size


def read_trace_event(line: bytes) -> ClockNote | Span | MessageEnd | BadRecord:
    """Parse a line of a trace."""
    content = load(line)
    if isinstance(content, BadRecord):
        return content
    what = content[0] if isinstance(content, list) and content else None
    names = _EVENTS.get(what) if isinstance(what, str) else None
    if names is None or len(content) != len(names) + 1:
        return BadRecord(f"it is {shown(content)}, expected an event of a trace")
    values = dict(zip(names, content[1:]))  # noqa: B905 - Python 3.9; the lengths agree
    if what == "clock":
        return parse(ClockNote, values)
    if what == "span":
        return parse(Span, values)
    facts = parse(_MessageFacts, values.pop("facts"))
    if isinstance(facts, BadRecord):
        return facts
    known = {"peer": facts.peer, "tag": facts.tag, "number": facts.number, "size": facts.bytes}
    return parse(MessageEnd, {"is_send": what == "send", **values, **known})


_EVENTS = {
    "clock": ("when", "offset", "error"),
    "span": ("name", "kind", "began", "ended", "facts"),
    "send": ("name", "when", "facts"),
    "recv": ("name", "when", "facts"),
}
