"""Measure what each operation of communication costs: messages, bytes, waiting time, and in traced runs, time in flight.

The sender counts messages and bytes. A rank measures the time in which it can only wait. The time that a message was in
flight is computed from traces (`--trace-steps`), after converting their times to one clock.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ttlaunch import contract
from ttlaunch.planning.launch_plan import RankRow
from ttlaunch.running.metrics.telemetry import OUTSIDE_STEPS, RankTelemetry
from ttlaunch.running.metrics.times import Share, share_of
from ttlaunch.running.metrics.trace import messages_under_way, read_traces


@dataclass(frozen=True)
class Flight:
    """The time of one operation's messages in flight: from the begin of a send to the end of its receive.

    Attributes:
        messages: The number of messages that were traced.
        median_s: The median time of one message.
        bytes_per_s: The sum of the messages' bytes divided by the sum of their times.
    """

    messages: int
    median_s: float
    bytes_per_s: float


@dataclass(frozen=True)
class OperationCost:
    """The cost of one operation for the ranks of one role, within steps.

    Attributes:
        messages, size: The number of messages and bytes that all these ranks together send in an average step.
        waited: The part of the steps' time in which the ranks could only wait for the operation; None if they never waited.
        flight: The times of the messages that these ranks sent; None if the messages were not traced.
    """

    operation: str
    role: str
    messages: float
    size: float
    waited: Share | None
    flight: Flight | None

    def as_json(self) -> dict[str, Any]:
        return {
            "operation": self.operation,
            "role": self.role,
            "messages_per_step": self.messages,
            "bytes_per_step": self.size,
            "waited": self.waited.as_json() if self.waited else None,
            "in_flight": vars(self.flight) if self.flight else None,
        }


def communication_costs(
    telemetry: Sequence[RankTelemetry], rows: Sequence[RankRow], *, folder: Path
) -> list[OperationCost]:
    """Measure the cost of each operation for each role that sends it or waits for it; the largest waits come first.

    Args:
        telemetry: The telemetry of all ranks.
        rows: The rows of all ranks.
        folder: The run's folder, which contains the traces.
    """
    flights = _flights(folder, rows)
    found = []
    for role in dict.fromkeys(row.role for row in rows):
        ranks = {row.rank for row in rows if row.role == role}
        of_role = [entry for entry in telemetry if entry.rank in ranks]
        sent, waits = _sent(of_role), {name for entry in of_role for name in entry.waits}
        for operation in sorted({*sent, *waits}):
            messages, size = sent.get(operation, (0.0, 0.0))
            waited = share_of(operation, of_role)
            if size or waited:
                flight = flights.get((operation, role))
                found.append(OperationCost(operation, role, messages, size, waited, flight))
    return sorted(found, key=lambda one: -(one.waited.share if one.waited else 0.0))


def _sent(telemetry: Sequence[RankTelemetry]) -> dict[str, tuple[float, float]]:
    """Return messages and bytes of each operation in an average step."""
    steps = max((entry.num_steps for entry in telemetry), default=0)
    found: dict[str, tuple[float, float]] = defaultdict(lambda: (0.0, 0.0))
    for entry in telemetry:
        for row in entry.sent:
            if steps and row.first > 0 and row.phase not in OUTSIDE_STEPS:
                count = row.steps_until(row.last) / steps
                messages, size = found[row.operation]
                found[row.operation] = messages + count * row.messages, size + count * row.size
    return dict(found)


def _flights(folder: Path, rows: Sequence[RankRow]) -> Mapping[tuple[str, str], Flight]:
    """Return the times in flight, by operation and the sender's role; empty without traces."""
    if not any((folder / contract.trace_file(row.rank)).is_file() for row in rows):
        return {}
    times: dict[tuple[str, str], list[tuple[float, int]]] = defaultdict(list)
    for name, sender, size, seconds in messages_under_way(read_traces(folder, rows)):
        times[_without_bucket(name), sender.role].append((seconds, size))
    return {key: _flight(found) for key, found in times.items()}


def _flight(found: Sequence[tuple[float, int]]) -> Flight:
    seconds = sorted(time for time, _ in found)
    whole = sum(seconds)
    rate = sum(size for _, size in found) / whole if whole > 0 else 0.0
    return Flight(len(found), seconds[len(seconds) // 2], rate)


def _without_bucket(name: str) -> str:
    operation, _, bucket = name.rpartition(" ")
    return operation if operation and bucket.isdecimal() else name
