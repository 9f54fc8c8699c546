"""What communication costs as a table: a line for each operation and role."""

from collections.abc import Sequence

from ttlaunch.cli.table import render_table
from ttlaunch.running.metrics.communication import OperationCost

_HEADING = (
    "operation",
    "role",
    "messages/step",
    "bytes/step",
    "waited ms",
    "p90 ms",
    "of step",
    "in flight ms",
    "MB/s",
)


def render_communication(costs: Sequence[OperationCost]) -> list[str]:
    """The table; the last two columns only where something was traced."""
    is_traced = any(cost.flight is not None for cost in costs)
    rows = [_HEADING, *map(_cells, costs)]
    shown = rows if is_traced else [row[:-2] for row in rows]
    hint = () if is_traced else ("", "`ttlaunch run … --trace-steps 5` also measures how long messages are under way")
    return [*render_table(shown, right=range(2, len(shown[0]))), *hint]


def communication_lines(costs: Sequence[OperationCost]) -> list[str]:
    """The same with tabs."""
    return ["\t".join(("communication", *_cells(cost))) for cost in costs]


def _cells(cost: OperationCost) -> tuple[str, ...]:
    waited, flight = cost.waited, cost.flight
    return (
        cost.operation,
        cost.role,
        f"{cost.messages:,.2f}".rstrip("0").rstrip("."),
        f"{cost.size:,.0f}",
        f"{waited.median * 1e3:,.2f}" if waited else "–",
        f"{waited.p90 * 1e3:,.2f}" if waited else "–",
        f"{waited.share:.1%}" if waited else "–",
        f"{flight.median_s * 1e3:,.2f}" if flight else "–",
        f"{flight.bytes_per_s / 1e6:,.0f}" if flight else "–",
    )
