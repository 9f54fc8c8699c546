"""The cells of the live table: a row for each rank, and the columns that fit on a terminal."""

from collections.abc import Callable, Sequence
from typing import Any

from ttlaunch import contract
from ttlaunch.diagnostics import counted, render_size
from ttlaunch.diagnostics.terminal_text import clean, clean_output
from ttlaunch.running.watch import RankState

_LAST = "last line"
_COLUMNS = (
    *("worker", "rank", "role", "host", "step", "loss", "grad norm", "ms/step", "tokens/s", "samples/s"),
    *("metrics", "CPU", "memory", "GPU", "GPU mem", "state", _LAST),
)
TEXTS = frozenset({"worker", "role", "host", "metrics", "state", _LAST})
_LEAVE = (
    "grad norm",
    "ms/step",
    "host",
    "tokens/s",
    "samples/s",
    "GPU mem",
    "memory",
    "GPU",
    "CPU",
    "metrics",
    "loss",
    _LAST,
)
"""The columns that a narrow terminal does without, the first one first."""
_LEAST_OF_LAST = 20
"""The cells that the last line of a rank gets at least; it gets what the other columns leave."""
_LONGEST_METRICS, _LONGEST_NAME, _WIDEST_PERCENT = 40, 16, 99_999
_APART = (3, 2, 1)
"""The numbers of cells between columns, tried in this order."""


def fitting_columns(
    rows: Sequence[dict[str, str]], *, width: int, num_hosts: int | None = None
) -> tuple[list[str], int]:
    """Choose the columns of the table of ranks, and how many cells apart they stand.

    Columns that say nothing are left out first: those without values, and the host if all ranks are on one. Then the columns move
    together, and on a narrow terminal those of `_LEAVE` go. The last lines of ranks are cut to the room that is left.

    Args:
        rows: The cells of each rank by column; the last lines are changed.
        width: The width of the terminal.
        num_hosts: On how many hosts all ranks are, also those without a row; None: those of the rows.
    """
    from rich.cells import cell_len

    columns = [name for name in _COLUMNS if any(row.get(name) for row in rows)]
    if (num_hosts or len({row["host"] for row in rows})) == 1:
        columns.remove("host")
    widths = {name: max(cell_len(text) for text in (name, *(row[name] for row in rows))) for name in columns}
    if _LAST in columns:
        widths[_LAST] = min(widths[_LAST], _LEAST_OF_LAST)

    def fits(apart: int) -> bool:
        return sum(widths[name] + apart for name in columns) - apart <= width

    apart = next((apart for apart in _APART if fits(apart)), _APART[-1])
    for name in _LEAVE:
        if name in columns and not fits(apart):
            columns.remove(name)
    if _LAST in columns:
        room = width - sum(widths[name] + apart for name in columns if name != _LAST)
        for row in rows:
            row[_LAST] = _cut(row[_LAST], room)
    return columns, apart


def _cut(text: str, width: int) -> str:
    """Cut a text to a number of cells of a terminal; an ellipsis stands for what is cut."""
    from rich.cells import cell_len, set_cell_size

    return text if cell_len(text) <= width else set_cell_size(text, width - 1).rstrip() + "…"


def cells_of_rank(state: RankState) -> dict[str, Any]:
    """Return a rank's cells by column; empty where it has reported no value."""
    row = state.row
    return {
        "rank": str(row.rank),
        "role": clean(row.role),
        "host": clean(row.host),
        "step": str(state.step) if state.step else "",
        "loss": "" if state.loss is None else f"{state.loss:.4f}",
        "grad norm": "" if state.grad_norm is None else f"{state.grad_norm:.3g}",
        "ms/step": "" if state.step_s is None else f"{state.step_s * 1e3:,.0f}",
        "tokens/s": _rate(state.own_per_s("tokens")),
        "samples/s": _rate(state.own_per_s("samples")),
    }


def cells_of_script(state: RankState) -> dict[str, str]:
    """Return what a rank's row has besides if the rank runs a script: what it has printed or sent, and what it uses."""
    usage = vars(state.usage) if state.usage and state.exit is None else {}
    step = state.step or state.printed_step
    metrics = ""
    for name, value in state.metrics.items():
        one = f"{_cut(clean(name), _LONGEST_NAME)}={value:.4g}"
        if len(metrics) + 1 + len(one) <= _LONGEST_METRICS:
            metrics += f" {one}" if metrics else one
    last = clean_output(state.last_line, colour=False).decode()
    return {
        "step": str(step) if step else "",
        "metrics": metrics,
        "CPU": _percent(usage.get("cpu_percent")),
        "memory": _size(usage.get("memory_bytes")),
        "GPU": _percent(usage.get("gpu_percent")),
        "GPU mem": _size(usage.get("gpu_memory_bytes")),
        _LAST: clean(last.replace("\t", " ")).strip(),
    }


def cells_of_worker(state: RankState) -> dict[str, str]:
    """Return what the row of a worker that may come and go has besides; its rank is the one of the present epoch."""
    memory = state.usage.memory_bytes if state.usage and state.exit is None else None
    return {
        "worker": contract.worker_name(state.row.rank),
        "rank": "–" if state.place is None else str(state.place),
        "memory": _size(memory),
    }


def _rate(per_s: float | None) -> str:
    return "" if per_s is None else f"{per_s:,.0f}"


def _percent(share: int | None) -> str:
    return "" if share is None else f"{min(share, _WIDEST_PERCENT)} %"


def _size(size: int | None) -> str:
    return "" if size is None else render_size(size)


def folded(ranks: Sequence[RankState]) -> str:
    """Render the ranks for which the terminal has no row in one line, with the ranges of what they report."""
    usages = [state.usage for state in ranks if state.usage is not None and state.exit is None]
    steps = [step for state in ranks if (step := state.step or state.printed_step)]
    parts = [
        f"… and {counted(len(ranks), 'more rank')}",
        _range("step", steps, str),
        _range("CPU", [usage.cpu_percent for usage in usages], _percent),
        _range("memory", [usage.memory_bytes for usage in usages], render_size),
    ]
    return ", ".join(part for part in parts if part)


def _range(name: str, values: Sequence[int], render: Callable[[int], str]) -> str:
    if not values:
        return ""
    least, most = render(min(values)), render(max(values))
    return f"{name} {least}" if least == most else f"{name} {least} to {most}"
