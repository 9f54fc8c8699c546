"""The dialogue of the command line: warnings and progress go to stderr, questions to the terminal."""

import contextlib
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ttlaunch.app.dialogue import Answered
from ttlaunch.cli.console import can_redraw, print_lines, rich_console, show_diagnostics
from ttlaunch.diagnostics import Diagnostic, Format, listed, render_size
from ttlaunch.diagnostics.terminal_text import clean

if TYPE_CHECKING:
    from concurrent.futures import Future

    from ttlaunch.app.outcome import Outcome
    from ttlaunch.hosts.sync.results import Progress

_SHOW_AFTER_S, _SAY_AFTER_S = 1.0, 2.0


class TerminalDialogue:
    """Prints in the chosen format; draws progress and asks questions only on a terminal."""

    def __init__(self, form: Format, *, verbose: bool = False) -> None:
        self._form = form
        self._verbose = verbose
        self._warned: list[Diagnostic] = []

    @property
    def _is_drawn(self) -> bool:
        return self._form is not Format.JSON and can_redraw(sys.stderr)

    def warn(self, diagnostics: Sequence[Diagnostic]) -> None:
        self._warned += diagnostics
        show_diagnostics(diagnostics, form=self._form, verbose=self._verbose)

    def warnings_as_json(self) -> list[dict[str, Any]]:
        """Return all warnings so far, for the result of a command in JSON, beside which none are shown."""
        return [one.as_json() for one in self._warned]

    def recipe_code(self) -> AbstractContextManager[object]:
        return contextlib.redirect_stdout(sys.stderr)  # what a recipe.py prints must not mix with the command's results

    @contextmanager
    def connecting(self, hosts: Sequence[str]) -> Iterator[Answered]:
        """After a second, show on a terminal which hosts have not answered; elsewhere, print a line after two."""
        missing = dict.fromkeys(hosts)
        if not self._is_drawn:
            with _later(_SAY_AFTER_S, lambda: self._say_waiting(list(missing))):
                yield lambda host, _error: missing.pop(host, None)
            return
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

        columns = TextColumn("{task.description}", markup=False), BarColumn(bar_width=30), MofNCompleteColumn()
        with Progress(*columns, console=rich_console(sys.stderr), transient=True) as progress:
            task = progress.add_task(_waiting(list(missing)), total=len(hosts), visible=False)

            def answered(host: str, _error: object) -> None:
                missing.pop(host, None)
                progress.update(task, completed=len(hosts) - len(missing), description=_waiting(list(missing)))

            with _later(_SHOW_AFTER_S, lambda: progress.update(task, visible=True)):
                yield answered

    def _say_waiting(self, missing: Sequence[str]) -> None:
        if missing and self._form is not Format.JSON:
            print_lines([_waiting(missing)], to=sys.stderr)

    def waiting(self, text: str) -> None:
        if self._form is not Format.JSON:
            print_lines([text], to=sys.stderr)

    def reading(self, made: "Future[Any]", read: Sequence[int]) -> None:
        """Wait until the files have been read; after a second, show the progress on the terminal."""
        from concurrent.futures import wait

        if not self._is_drawn:
            wait([made])
            return
        if wait([made], timeout=_SHOW_AFTER_S).done:
            return
        with rich_console(sys.stderr).status("reading files") as status:
            while not wait([made], timeout=0.2).done:
                status.update(f"reading files: {read[0]}, {render_size(read[1])}")

    @contextmanager
    def sending(self, hosts: Sequence[str]) -> "Iterator[Callable[[Progress], None] | None]":
        """Draw a bar for each host that lacks files."""
        if not self._is_drawn:
            yield None
            return
        from rich.progress import BarColumn, DownloadColumn, TextColumn, TransferSpeedColumn
        from rich.progress import Progress as Bars

        columns = (
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=30),
            DownloadColumn(),
            TransferSpeedColumn(),
        )
        with Bars(*columns, console=rich_console(sys.stderr), transient=True) as bars:
            tasks = {host: bars.add_task(host, total=None, visible=False) for host in hosts}

            def advance(progress: "Progress") -> None:
                visible = progress.total > 0
                bars.update(tasks[progress.host], completed=progress.sent, total=progress.total, visible=visible)

            yield advance

    def passphrase(self, path: Path) -> str | None:
        if not (sys.stdin.isatty() and sys.stderr.isatty()):
            return None
        import getpass

        try:
            return getpass.getpass(f"passphrase of {clean(str(path))}: ")
        except (EOFError, KeyboardInterrupt):
            return None

    def agrees(self, question: Diagnostic, *, ask: str) -> bool | None:
        if self._form is Format.JSON or not (sys.stdin.isatty() and sys.stderr.isatty()):
            return None
        import typer

        show_diagnostics([question], form=self._form)
        return typer.confirm(clean(ask), err=True)

    def gave_up(self, outcomes: "Sequence[Outcome]", diagnostics: Sequence[Diagnostic], *, status: int | None) -> None:
        """With JSON, print the last start together with the diagnostics, because nothing prints it later."""
        if self._form is Format.JSON:
            from ttlaunch.cli.summary import print_result

            print_result(outcomes[-1], form=self._form, restarts=outcomes[:-1], more=diagnostics, exit_status=status)
        else:
            show_diagnostics(diagnostics, form=self._form)


@contextmanager
def _later(seconds: float, act: Callable[[], None]) -> Iterator[None]:
    """Call a function after a time, in a thread of its own, unless the context has ended before."""
    timer = threading.Timer(seconds, act)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _waiting(missing: Sequence[str]) -> str:
    return f"waiting for {'host' if len(missing) == 1 else 'hosts'} {listed(missing, last='and', quote='')}"
