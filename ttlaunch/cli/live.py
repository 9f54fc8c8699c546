"""Views of a run while it runs: a table on a terminal that can redraw it, else plain lines with rank and role."""

import sys
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Literal, TextIO

from ttlaunch.cli.console import (
    can_redraw,
    discarding_unwritable,
    keeping_whole,
    print_lines,
    print_output,
    rich_console,
)
from ttlaunch.cli.live_cells import TEXTS, cells_of_rank, cells_of_script, cells_of_worker, fitting_columns, folded
from ttlaunch.contract import START_STAGES
from ttlaunch.diagnostics import counted, listed, render_duration, shown
from ttlaunch.diagnostics.terminal_text import clean, clean_output
from ttlaunch.records.ranks import AnyProgress, LayerNorms, Note, StepDone, Validation
from ttlaunch.running.logs.fold import ShownOutput, name_of, render_ranks
from ttlaunch.running.logs.output import SilentView, View
from ttlaunch.running.runs.facts import RunFacts
from ttlaunch.running.runs.run_folder import RunFolder, read_events, start_time
from ttlaunch.running.speed import render_speed
from ttlaunch.running.watch import Phase, RankState, start_up_end, steps_done

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.live import Live

_REDRAW_S = 0.25
_LINE_EVERY_S = 2.0
_SLOW_START_S = 5.0
_MOST_ROWS = 24
_ROWS_BESIDE = 6
"""The rows that a terminal needs besides the rows of ranks: headings, progress, and the line of the prompt."""
_BAR, _SHORTEST_BAR = 30, 8
_WIDEST_PROGRESS = 80
"""Lines below the table are not wider, so that a wide terminal can become narrower without breaking lines that are drawn."""
_LONGEST_NOTE = 1000


@contextmanager
def make_view(facts: RunFacts, folder: RunFolder, *, quiet: bool = False) -> Iterator[View]:
    """Print the run's id, and return a table if stdout is a terminal that can redraw it, else a view that prints lines.

    Args:
        facts: The facts about the run.
        folder: The run's folder.
        quiet: Show nothing (for JSON).
    """
    if quiet:
        yield SilentView()
        return
    # A folder that was renamed has another name than the run's id, but still the run's history.
    noted = (event["time"] for event in read_events(folder.path))
    began = start_time(folder.run_id) or next(noted, time.time())
    first = f"run {folder.run_id}: {facts.name} on {facts.topology}, {counted(len([row for row in facts.ranks if not row.later]), 'rank')}"
    with discarding_unwritable(sys.stdout):
        print_lines([first])
    if can_redraw(sys.stdout):
        from rich.live import Live

        with (
            keeping_whole(sys.stdout),
            Live(console=rich_console(sys.stdout), auto_refresh=False, transient=False) as live,
        ):
            yield TableView(
                live,
                began=began,
                engine_start=_engine_start(folder),
                reports_ready=facts.is_recipe,
                is_elastic=facts.is_elastic,
            )
    else:
        yield PlainView(began=began, reports_ready=facts.is_recipe, is_elastic=facts.is_elastic)


def _engine_start(folder: RunFolder) -> Callable[[], float | None]:
    """Return a function that tells when the engine started the ranks; None before it has."""
    known: list[float] = []

    def tell() -> float | None:
        if not known:
            known.extend(event["time"] for event in read_events(folder.path) if event.get("event") == "start")
        return known[0] if known else None

    return tell


@contextmanager
def make_following_view(
    facts: RunFacts, folder: RunFolder, *, quiet: bool = False, only: Collection[int] | None = None
) -> Iterator[View]:
    """Make a view for a process that supervises the ranks itself: each tick also shows what they have printed."""
    chosen = range(len(facts.ranks)) if only is None else only
    output = ShownOutput(folder.path, facts.ranks, only=chosen, streams=("stdout", "stderr"))
    with make_view(facts, folder, quiet=quiet) as view:
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
        self._output.note_last(ranks)
        self._view.tick(ranks)

    def finish(self) -> None:
        """Show the output that has not been shown yet."""
        for stream, line in self._output.finish():
            self._view.output(stream, line)


class PlainView:
    """Prints the lines of the ranks as they come, and every few seconds a line about the progress."""

    def __init__(self, *, began: float, reports_ready: bool, is_elastic: bool = False) -> None:
        """Prepare to print.

        Args:
            began: When the run began, seconds since the epoch.
            reports_ready: Whether ranks report when their role is called, see `RankState.condition`.
            is_elastic: Whether ranks are workers that come and go.
        """
        self._is_elastic = is_elastic
        self._began = began
        self._reports_ready = reports_ready
        self._last_line = 0.0
        self._lead: int | None = None
        self._reason, self._next_reason_s = "", _SLOW_START_S

    def output(self, stream: str, line: bytes) -> None:
        self._write(sys.stdout if stream == "stdout" else sys.stderr, line)

    def record(self, state: RankState, record: AnyProgress) -> None:
        text = self._text(state, record)
        if text is not None:
            self._write(sys.stdout, f"{name_of(state.row, is_elastic=self._is_elastic)} | {text}".encode())

    def _write(self, stream: TextIO, line: bytes) -> None:
        """Write a line. If nobody reads any more (`| head`), the run continues silently; its folder has all output."""
        with discarding_unwritable(stream):
            print_output([line], to=stream)

    def tick(self, ranks: list[RankState]) -> None:
        """Every few seconds of start-up, print what it waits for if that has changed; let another one lead if its worker has ended."""
        if self._is_elastic and any(one.row.rank == self._lead and one.exit is not None for one in ranks):
            self._lead = None
        waited = time.time() - self._began
        if waited < self._next_reason_s:
            return
        reason = slow_start(ranks, reports_ready=self._reports_ready)
        if reason and reason != self._reason:
            self._write(sys.stdout, f"start-up, {render_duration(waited)}: {reason}".encode())
            self._reason, self._next_reason_s = reason, waited + _SLOW_START_S

    def _text(self, state: RankState, record: AnyProgress) -> str | None:
        if isinstance(record, Validation):
            self._lead = state.row.rank
            return f"step {record.step}: {_validation(record)}"
        if isinstance(record, Note):
            return _note(record)
        if isinstance(record, LayerNorms):
            norms = ", ".join(f"{clean(layer)} {norm:.3g}" for layer, norm in record.norms.items())
            return f"step {record.step}: gradient norms {norms}"
        if self._is_elastic and self._lead is None and isinstance(record, StepDone) and record.counted[1]:
            self._lead = state.row.rank  # until another one reports a validation, which may be long in coming
        lead = self._lead == state.row.rank or (self._lead is None and not self._is_elastic)
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

    def __init__(
        self,
        live: "Live",
        *,
        began: float,
        reports_ready: bool,
        engine_start: Callable[[], float | None] = lambda: None,
        is_elastic: bool = False,
    ) -> None:
        """Make an empty table.

        Args:
            live: The display on the terminal.
            began: When the run began, seconds since the epoch.
            reports_ready: Whether ranks report when their role is called, see `RankState.condition`.
            engine_start: Tells when the engine started the ranks, or None. The summary counts from there, so the table does too.
            is_elastic: Whether ranks are workers that come and go.
        """
        self._is_elastic = is_elastic
        self._live = live
        self._began = began
        self._engine_start = engine_start
        self._reports_ready = reports_ready
        self._last_drawn = 0.0

    def output(self, stream: str, line: bytes) -> None:  # noqa: ARG002 - both streams scroll by in one place
        from rich.text import Text

        self._live.console.print(Text.from_ansi(clean_output(line, colour=True).decode()))

    def record(self, state: RankState, record: AnyProgress) -> None:
        """Print a note above the table; the next tick draws all other changes."""
        if isinstance(record, Note):
            self.output("stdout", f"{name_of(state.row, is_elastic=self._is_elastic)} | {_note(record)}".encode())

    def tick(self, ranks: list[RankState]) -> None:
        if not _are_over(ranks) and time.monotonic() - self._last_drawn < _REDRAW_S:
            return
        self._last_drawn = time.monotonic()
        present = [state for state in ranks if state.phase is not Phase.ABSENT]
        self._live.update(self._draw(present), refresh=True)

    def _draw(self, ranks: list[RankState]) -> "RenderableType":
        from rich.console import Group
        from rich.table import Table
        from rich.text import Text

        console = self._live.console
        most = max(1, min(_MOST_ROWS, console.height - _ROWS_BESIDE))
        seen = ranks[:most]  # cells of all of a thousand ranks would take a twentieth of a core
        rows = [cells_of_rank(state) | {"state": state.condition(reports_ready=self._reports_ready)} for state in seen]
        if not self._reports_ready:
            rows = [cells | cells_of_script(state) for cells, state in zip(rows, seen, strict=True)]
        if self._is_elastic:
            rows = [cells | cells_of_worker(state) for cells, state in zip(rows, seen, strict=True)]
        num_hosts = len({state.row.host for state in ranks})
        columns, apart = fitting_columns(rows, width=console.width, num_hosts=num_hosts)
        table = Table(box=None, pad_edge=False, padding=(0, apart, 0, 0))
        for heading in columns:
            side: Literal["left", "right"] = "left" if heading in TEXTS else "right"
            table.add_column(heading, justify=side, no_wrap=True)
        for state, cells in zip(seen, rows, strict=True):
            style = {Phase.FAILED: "bold red", Phase.DONE: "green"}.get(state.phase, "")
            table.add_row(*(Text(cells[name], style=style if name == "state" else "") for name in columns))
        more = [Text(folded(ranks[most:]))] if ranks[most:] else []
        return Group(table, *more, *self._progress(ranks, width=min(console.width, _WIDEST_PROGRESS)))

    def _progress(self, ranks: list[RankState], *, width: int) -> "list[RenderableType]":
        """Render the progress below the table, in as many lines as its parts need."""
        from rich.progress_bar import ProgressBar
        from rich.table import Table
        from rich.text import Text

        total, done = max((state.total_steps or 0 for state in ranks), default=0), steps_done(ranks)
        validations = [v for state in ranks for v in state.validations]
        left = "" if _are_over(ranks) else _left(ranks, done, total)
        parts = [f"{done}/{total}", left] if total else []
        parts += [self._times(ranks), *map(_validation, validations[-1:])]
        first, *others = _filled([part for part in parts if part], width=width - (_SHORTEST_BAR + 2 if total else 0))
        bar = min(_BAR, width - len(first) - 2)
        if not total or bar < _SHORTEST_BAR:
            return [Text(line) for line in (first, *others)]
        line = Table.grid(padding=(0, 2, 0, 0))
        line.add_row(ProgressBar(total=total, completed=done, width=bar), Text(first))
        return [line, *map(Text, others)]

    def _times(self, ranks: list[RankState]) -> str:
        """Render how long the start-up took and the time since, and what a start-up that still lasts waits for."""
        ends = [state.exit.time for state in ranks if state.exit]
        end = max(ends) if len(ends) == len(ranks) else time.time()
        up = start_up_end(ranks, reports_ready=self._reports_ready)
        start = f"start-up {render_duration(max(0.0, (up or end) - (self._engine_start() or self._began)))}"
        if up is not None:
            return f"{start}, {'training' if self._reports_ready else 'running'} {render_duration(max(0.0, end - up))}"
        reason = slow_start(ranks, reports_ready=self._reports_ready)
        return f"{start}: {reason}" if reason and len(ends) < len(ranks) else start


def slow_start(ranks: Sequence[RankState], *, reports_ready: bool) -> str:
    """Describe what the start-up waits for: ranks that are not started, or the stage of those that are least far.

    Args:
        ranks: The states of all ranks.
        reports_ready: Whether ranks report when their role is called, see `RankState.condition`.

    Returns:
        Such as `waiting for host b` or `importing torch (rank 0-3)`; empty once every rank is up or one has ended.
    """
    begun = {Phase.ABSENT, Phase.WAITING, Phase.STARTING, Phase.RUNNING}
    if start_up_end(ranks, reports_ready=reports_ready) is not None or any(s.phase not in begun for s in ranks):
        return ""
    ranks = [state for state in ranks if state.phase is not Phase.ABSENT]
    hosts = list(dict.fromkeys(clean(state.row.host) for state in ranks))
    missing = list(dict.fromkeys(clean(state.row.host) for state in ranks if state.phase is Phase.WAITING))
    if len(missing) == len(hosts):
        return "starting the ranks"
    if missing:
        return f"waiting for {'host' if len(missing) == 1 else 'hosts'} {listed(missing, last='and', quote='')}"
    progress = {stage: number for number, stage in enumerate(START_STAGES)}
    starting = [state for state in ranks if state.ready_time is None]
    if not starting:  # a rank is ready, but its shim's record of the start has not come
        return ""
    least = min(progress.get(state.stage, -1) for state in starting)
    behind = [state for state in starting if progress.get(state.stage, -1) == least]
    where = list(dict.fromkeys(clean(state.row.host) for state in behind))
    on_host = f" on {where[0]}" if len(where) == 1 < len(hosts) else ""
    what = START_STAGES[least] if least >= 0 else "starting Python"
    return f"{what} (rank {render_ranks([state.row.rank for state in behind])}{on_host})"


def _filled(parts: Sequence[str], *, width: int) -> list[str]:
    """Put parts into lines of at most a width, two spaces apart; a part that is too wide has a line of its own."""
    lines = [parts[0]]
    for part in parts[1:]:
        if len(lines[-1]) + 2 + len(part) <= width:
            lines[-1] += f"  {part}"
        else:
            lines.append(part)
    return lines


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


def _are_over(ranks: list[RankState]) -> bool:
    return all(state.phase in {Phase.ABSENT, Phase.DONE, Phase.FAILED, Phase.STOPPED} for state in ranks)


def _left(ranks: list[RankState], done: int, total: int) -> str:
    """Estimate the time left from the speed of the steps so far."""
    first = min((state.first_step_time for state in ranks if state.first_step_time), default=None)
    last = max((state.last_step_time for state in ranks if state.last_step_time), default=None)
    begun = min((state.first_step for state in ranks if state.first_step), default=0)
    if first is None or last is None or done <= begun or done >= total:
        return ""
    return f"{render_duration((last - first) / (done - begun) * (total - done))} left"
