"""Views of a run while it runs: a table on a terminal, plain lines with rank and role everywhere else."""

import sys
import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TextIO

from ttlaunch.cli.console import discarding_unwritable, print_lines, print_output, rich_console
from ttlaunch.diagnostics import counted, shown
from ttlaunch.diagnostics.terminal_text import clean, clean_output
from ttlaunch.records.ranks import AnyProgress, LayerNorms, Note, StepDone, Validation
from ttlaunch.running.logs.fold import ShownOutput
from ttlaunch.running.logs.output import SilentView, View
from ttlaunch.running.runs.facts import RunFacts
from ttlaunch.running.runs.run_folder import RunFolder
from ttlaunch.running.watch import Phase, RankState, render_speed, steps_done

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.live import Live

_REDRAW_S = 0.25
_LINE_EVERY_S = 2.0
_MOST_ROWS = 24
_LONGEST_NOTE = 1000
_COLUMNS = ("rank", "role", "host", "step", "loss", "grad norm", "ms/step", "tokens/s", "samples/s", "state")


@contextmanager
def make_view(facts: RunFacts, run_id: str, *, quiet: bool = False) -> Iterator[View]:
    """Return a table if stdout is a terminal, else a view that prints lines.

    Args:
        facts: The facts about the run.
        run_id: The run's id.
        quiet: Show nothing (for JSON).
    """
    if quiet:
        yield SilentView()
    elif sys.stdout.isatty():
        from rich.live import Live

        with Live(console=rich_console(sys.stdout), auto_refresh=False, transient=False) as live:
            yield TableView(live, reports_ready=facts.is_recipe)
    else:
        with discarding_unwritable(sys.stdout):
            print_lines([f"run {run_id}: {facts.name} on {facts.topology}, {counted(len(facts.ranks), 'rank')}"])
        yield PlainView()


@contextmanager
def make_following_view(
    facts: RunFacts, folder: RunFolder, *, quiet: bool = False, only: Collection[int] | None = None
) -> Iterator[View]:
    """Make a view for a process that supervises the ranks itself: each tick also shows what they have printed."""
    chosen = range(len(facts.ranks)) if only is None else only
    output = ShownOutput(folder.path, facts.ranks, only=chosen, streams=("stdout", "stderr"))
    with make_view(facts, folder.run_id, quiet=quiet) as view:
        if quiet:
            yield view
            return
        following = FollowingView(view, output)
        try:
            yield following
        finally:
            following.finish()


class FollowingView:
    """Shows the ranks' output, read from the run's folder, on another view."""

    def __init__(self, view: View, output: ShownOutput) -> None:
        self._view = view
        self._output = output

    def output(self, stream: str, line: bytes) -> None:
        self._view.output(stream, line)

    def record(self, state: RankState, record: AnyProgress) -> None:
        self._view.record(state, record)

    def tick(self, ranks: list[RankState]) -> None:
        for stream, line in self._output.poll():
            self._view.output(stream, line)
        self._view.tick(ranks)

    def finish(self) -> None:
        """Show the output that has not been shown yet."""
        for stream, line in self._output.finish():
            self._view.output(stream, line)


class PlainView:
    """Prints the lines of the ranks as they come, and every few seconds a line about the progress."""

    def __init__(self) -> None:
        self._last_line = 0.0
        self._lead: int | None = None

    def output(self, stream: str, line: bytes) -> None:
        self._write(sys.stdout if stream == "stdout" else sys.stderr, line)

    def record(self, state: RankState, record: AnyProgress) -> None:
        text = self._text(state, record)
        if text is not None:
            self._write(sys.stdout, f"rank {state.row.rank} {clean(state.row.role)} | {text}".encode())

    def _write(self, stream: TextIO, line: bytes) -> None:
        """Write a line. If nobody reads any more (`| head`), the run continues silently; its folder has all output."""
        with discarding_unwritable(stream):
            print_output([line], to=stream)

    def tick(self, ranks: list[RankState]) -> None:
        """Do nothing: printed lines need no redrawing."""

    def _text(self, state: RankState, record: AnyProgress) -> str | None:
        if isinstance(record, Validation):
            self._lead = state.row.rank
            return f"step {record.step}: {_validation(record)}"
        if isinstance(record, Note):
            return _note(record)
        if isinstance(record, LayerNorms):
            norms = ", ".join(f"{clean(layer)} {norm:.3g}" for layer, norm in record.norms.items())
            return f"step {record.step}: gradient norms {norms}"
        lead = self._lead is None or self._lead == state.row.rank
        due = time.monotonic() - self._last_line >= _LINE_EVERY_S
        if not isinstance(record, StepDone) or not lead or not (due or record.step == state.total_steps):
            return None
        self._last_line = time.monotonic()
        total = f"/{state.total_steps}" if state.total_steps else ""
        loss = _number(
            record.loss, " loss {:.4f}"
        )  # from the record, because the rank's state may already be some steps further
        norm = _number(record.grad_norm, " gradient norm {:.3g}")
        time_of_step = "" if state.step_s is None else f" {state.step_s * 1e3:,.0f} ms/step"
        speed = render_speed(state)
        return f"step {record.step}{total}{loss}{norm}{time_of_step}{f' {speed}' if speed else ''}"


class TableView:
    """Draws a table with one row per rank a few times a second; the ranks' output is printed above it."""

    def __init__(self, live: "Live", *, reports_ready: bool) -> None:
        """Make an empty table.

        Args:
            live: The display on the terminal.
            reports_ready: Whether ranks report when their packages are imported, see `RankState.condition`.
        """
        self._live = live
        self._reports_ready = reports_ready
        self._started = time.monotonic()
        self._last_drawn = 0.0

    def output(self, stream: str, line: bytes) -> None:  # noqa: ARG002 - both streams scroll by in one place
        from rich.text import Text

        self._live.console.print(Text.from_ansi(clean_output(line, colour=True).decode()))

    def record(self, state: RankState, record: AnyProgress) -> None:
        """Print a note above the table; the next tick draws all other changes."""
        if isinstance(record, Note):
            self.output("stdout", f"rank {state.row.rank} {clean(state.row.role)} | {_note(record)}".encode())

    def tick(self, ranks: list[RankState]) -> None:
        over = all(state.phase in {Phase.DONE, Phase.FAILED, Phase.STOPPED} for state in ranks)
        if not over and time.monotonic() - self._last_drawn < _REDRAW_S:
            return
        self._last_drawn = time.monotonic()
        self._live.update(self._draw(ranks), refresh=True)

    def _draw(self, ranks: list[RankState]) -> "RenderableType":
        from rich.console import Group
        from rich.table import Table
        from rich.text import Text

        table = Table(box=None, pad_edge=False, padding=(0, 3, 0, 0))
        optional = {  # programs report neither value, and not every rank knows the gradient norm
            "grad norm": any(state.grad_norm is not None for state in ranks),
            "ms/step": any(state.step_s is not None for state in ranks),
            "tokens/s": not any(state.samples_per_s for state in ranks),
            "samples/s": any(state.samples_per_s for state in ranks),
        }
        shown_columns = [name for name in _COLUMNS if optional.get(name, True)]
        for heading in shown_columns:
            table.add_column(heading, justify="left" if heading in {"role", "host", "state"} else "right")
        for state in ranks[:_MOST_ROWS]:
            style = {Phase.FAILED: "bold red", Phase.DONE: "green"}.get(state.phase, "")
            cells = _cells(state) | {"state": Text(state.condition(reports_ready=self._reports_ready), style=style)}
            table.add_row(*(cells[name] for name in shown_columns))
        rest = len(ranks) - _MOST_ROWS
        more = [Text(f"… and {counted(rest, 'more rank')}")] if rest > 0 else []
        return Group(table, *more, self._progress(ranks))

    def _progress(self, ranks: list[RankState]) -> "RenderableType":
        from rich.progress_bar import ProgressBar
        from rich.table import Table

        total = max((state.total_steps or 0 for state in ranks), default=0)
        done = steps_done(ranks)
        validations = [v for state in ranks for v in state.validations]
        line = Table.grid(padding=(0, 2, 0, 0))
        elapsed = time.monotonic() - self._started
        cells: list[Any] = [f"{elapsed:.0f} s"]
        if total:
            cells = [
                ProgressBar(total=total, completed=done, width=30),
                f"{done}/{total}",
                *cells,
                _left(ranks, done, total),
            ]
        if validations:
            cells.append(_validation(validations[-1]))
        line.add_row(*cells)
        return line


def _cells(state: RankState) -> dict[str, Any]:
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
        "tokens/s": "" if state.tokens_per_s is None else f"{state.tokens_per_s:,.0f}",
        "samples/s": "" if state.samples_per_s is None else f"{state.samples_per_s:,.0f}",
    }


def _number(value: float | None, form: str) -> str:
    """Format a value that a rank may have reported."""
    return "" if value is None else form.format(value)


def _note(record: Note) -> str:
    return shown(record.text, longest=_LONGEST_NOTE)


def _validation(record: Validation) -> str:
    """Render the loss of a validation, and its accuracy or perplexity if there is one."""
    loss, perplexity, accuracy = record.loss, record.perplexity, record.accuracy
    text = "validation loss " + (f"{loss:.4f}" if isinstance(loss, float) else str(loss))
    if accuracy is not None:
        return f"{text}, accuracy {accuracy:.1%}"
    return text if perplexity is None else f"{text}, perplexity {perplexity:,.4g}"


def _left(ranks: list[RankState], done: int, total: int) -> str:
    """Estimate the time left from the speed of the steps so far."""
    first = min((state.first_step_time for state in ranks if state.first_step_time), default=None)
    last = max((state.last_step_time for state in ranks if state.last_step_time), default=None)
    begun = min((state.first_step for state in ranks if state.first_step), default=0)
    if first is None or last is None or done <= begun or done >= total:
        return ""
    return f"{(last - first) / (done - begun) * (total - done):.0f} s left"
