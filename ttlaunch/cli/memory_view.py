"""What tensors take as a table: a line for each rank."""

from collections.abc import Mapping, Sequence

from ttlaunch.cli.table import render_table
from ttlaunch.running.metrics.telemetry import KINDS, RankMemory


def render_memory(found: Sequence[RankMemory], roles: Sequence[str], processes: Mapping[int, int]) -> list[str]:
    """The table, in megabytes.

    Args:
        found: Of some ranks.
        roles: By rank.
        processes: By rank, the most that its whole process held; those that have ended.
    """
    steps = sorted({one.step for one in found})
    heading = ("rank", "role", *KINDS, "together", "process")
    rows = [(str(one.rank), roles[one.rank], *_cells(one), _megabytes(processes.get(one.rank))) for one in found]
    return [
        f"  memory of tensors in step {', '.join(map(str, steps))}, MB: the most of each at any moment",
        *render_table([heading, *rows], right=range(2, len(heading)), indent="    "),
    ]


def memory_lines(found: Sequence[RankMemory], roles: Sequence[str]) -> list[str]:
    """The same with tabs."""
    return ["\t".join(("memory", str(one.rank), roles[one.rank], *_cells(one))) for one in found]


def _cells(one: RankMemory) -> tuple[str, ...]:
    return tuple(_megabytes(size) for size in (*one.sizes.values(), one.peak))


def _megabytes(size: int | None) -> str:
    return "–" if size is None else f"{size / 1e6:,.2f}"
