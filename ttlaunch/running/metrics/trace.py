"""Make one timeline of all ranks, for Perfetto and Chrome, from what each rank traced on its own clock.

Every rank is a process of the timeline, its spans are slices, and an arrow connects the send and the receive of a message.
All times are converted to rank 0's clock. Each rank has measured the offset of its own clock before and after the training;
the offset in between is interpolated. The file states the possible error of each rank's times.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import field
from pathlib import Path
from typing import Any

from ttlaunch import contract
from ttlaunch.planning.launch_plan import RankRow
from ttlaunch.quick_dataclass import dataclass
from ttlaunch.records.telemetry import ClockNote, MessageEnd, Span, read_trace_event
from ttlaunch.running.bad_records import Complain, good_records, pass_over
from ttlaunch.running.runs.files import Tail

COLLECTIVE = "collective"
"""The kind of spans in which a thread of another library works, beside the rank's own spans."""

_FORMAT = "times in µs on rank 0's monotonic clock, from the first event; error_us: by how much a rank's may be wrong"


@dataclass
class RankTrace:
    """The trace of one rank.

    Attributes:
        clocks: The measured offsets of the rank's clock to rank 0's.
        spans: The rank's activities, with begin and end.
        ends: For each message, the begin of its send or the end of its receive.
    """

    row: RankRow
    clocks: list[ClockNote] = field(default_factory=list)
    spans: list[Span] = field(default_factory=list)
    ends: list[MessageEnd] = field(default_factory=list)

    @property
    def error(self) -> int:
        """The largest possible error of the rank's times on rank 0's clock, in nanoseconds."""
        return max((clock.error for clock in self.clocks), default=0)

    def on_rank_0(self, local: int) -> int:
        """Convert a time of this rank to rank 0's clock."""
        if not self.clocks:
            return local
        first, last = self.clocks[0], self.clocks[-1]
        if last.when == first.when:
            return local + first.offset
        return local + first.offset + (last.offset - first.offset) * (local - first.when) // (last.when - first.when)


def write_trace(folder: Path, rows: Sequence[RankRow], *, complain: Complain = pass_over) -> Path | None:
    """Write the traces of all ranks to `trace.json`; None if no rank has traced anything, or the disk is full."""
    traces = read_traces(folder, rows, complain=complain)
    if not any(trace.spans for trace in traces):
        return None
    path = folder / contract.TRACE_FILE
    try:
        path.write_text(json.dumps(render_trace(traces)) + "\n", encoding="utf-8")
    except OSError:
        return None
    return path


def read_traces(folder: Path, rows: Sequence[RankRow], *, complain: Complain = pass_over) -> list[RankTrace]:
    """Read the traces of all ranks of a run; those of ranks without a file are empty."""
    return [_read(folder, row, complain) for row in rows]


def messages_under_way(traces: Sequence[RankTrace]) -> Iterator[tuple[str, RankRow, int, float]]:
    """Yield each message that both ranks have traced: name, sender, bytes, and the seconds in flight.

    The time in flight is from the begin of the send to the end of the receive, so it includes waiting for a late receiver.
    """
    for sender, began, receiver, end in _messages(traces):
        nanoseconds = receiver.on_rank_0(end.when) - sender.on_rank_0(began)
        yield end.name, sender.row, end.size, max(0, nanoseconds) / 1e9


def render_trace(traces: Sequence[RankTrace]) -> dict[str, Any]:
    """Return the timeline in Chrome's trace event format."""
    times = [trace.on_rank_0(span.began) for trace in traces for span in trace.spans]
    origin = min(times, default=0)
    events = [event for trace in traces for event in _slices(trace, origin)]
    arrows = list(_arrows(traces, origin))
    clocks = [{"rank": trace.row.rank, "host": trace.row.host, "error_us": trace.error / 1e3} for trace in traces]
    about = {"format": _FORMAT, "clocks": clocks}
    return {"displayTimeUnit": "ms", "otherData": about, "traceEvents": [*events, *arrows]}


def _slices(trace: RankTrace, origin: int) -> Iterator[dict[str, Any]]:
    row = trace.row
    place = {"pid": row.rank, "tid": 0}
    yield {"ph": "M", "name": "process_name", **place, "args": {"name": f"rank {row.rank} {row.role} ({row.host})"}}
    yield {"ph": "M", "name": "process_sort_index", **place, "args": {"sort_index": row.rank}}
    for span in sorted(trace.spans, key=lambda span: (span.began, -span.ended)):
        start = trace.on_rank_0(span.began) - origin
        end = trace.on_rank_0(span.ended) - origin
        one = {"name": span.name, "cat": span.kind, **place, "ts": start / 1e3, "args": dict(span.facts)}
        if span.kind == COLLECTIVE:  # it overlaps the rank's own spans, but slices of one thread must be nested
            one["id"] = f"{row.rank}-{start}"
            yield {"ph": "b", **one}
            yield {"ph": "e", **{name: one[name] for name in ("name", "cat", "id", "pid", "tid")}, "ts": end / 1e3}
        else:
            yield {"ph": "X", **one, "dur": (end - start) / 1e3}


def _arrows(traces: Sequence[RankTrace], origin: int) -> Iterator[dict[str, Any]]:
    """Yield arrows from sends to receives: both ranks number the messages of a tag between them in the same order."""
    for number, (sender, began, trace, end) in enumerate(_messages(traces), 1):
        arrow = {"cat": "message", "name": end.name, "id": number, "tid": 0}
        yield {"ph": "s", **arrow, "pid": sender.row.rank, "ts": (sender.on_rank_0(began) - origin) / 1e3}
        moment = trace.on_rank_0(end.when) - origin
        yield {"ph": "f", "bp": "e", **arrow, "pid": trace.row.rank, "ts": moment / 1e3}


def _messages(traces: Sequence[RankTrace]) -> Iterator[tuple[RankTrace, int, RankTrace, MessageEnd]]:
    """Yield sender, begin of the send, receiver, and end of the receive of each message, in the order of the receives."""
    sends = {
        (trace.row.rank, end.peer, end.tag, end.number): (trace, end.when)
        for trace in traces
        for end in trace.ends
        if end.is_send
    }
    for trace in traces:
        for end in trace.ends:
            sent = sends.get((end.peer, trace.row.rank, end.tag, end.number))
            if not end.is_send and sent is not None:
                sender, began = sent
                yield sender, began, trace, end


def _read(folder: Path, row: RankRow, complain: Complain) -> RankTrace:
    """Read a rank's trace; a line that the rank did not finish is skipped."""
    trace, name = RankTrace(row), contract.trace_file(row.rank)
    for event in good_records(Tail(folder / name), read_trace_event, rank=row.rank, file=name, complain=complain):
        match event:
            case ClockNote():
                trace.clocks.append(event)
            case Span():
                trace.spans.append(event)
            case MessageEnd():
                trace.ends.append(event)
    return trace
