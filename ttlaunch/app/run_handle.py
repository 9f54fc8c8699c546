"""A run as an object for Python programs: `ttlaunch.Run`."""

import contextlib
import math
import os
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Self

from ttlaunch import contract
from ttlaunch.app.cut_off import cut_off
from ttlaunch.app.named_run import unreadable_run
from ttlaunch.app.outcome import Outcome
from ttlaunch.app.report import Report
from ttlaunch.app.restarts import exit_status_of, given_up
from ttlaunch.app.sinks import judge_sinks
from ttlaunch.app.stop import interrupt
from ttlaunch.diagnostics import Diagnostic, LaunchError, usage_error
from ttlaunch.diagnostics.html import table_html
from ttlaunch.diagnostics.transfer import unpack_diagnostics
from ttlaunch.quick_dataclass import dataclass
from ttlaunch.running.report import Report as RecordedReport
from ttlaunch.running.report import read_report
from ttlaunch.running.restarts import read_follow_up
from ttlaunch.running.runs.facts import read_facts, read_ranks
from ttlaunch.running.runs.launcher import Launcher, is_running, read_launcher
from ttlaunch.running.runs.run_folder import RunFolder

if TYPE_CHECKING:
    from types import TracebackType

    import pandas as pd

    from ttlaunch.app.spawn import Supervisor
    from ttlaunch.planning.launch_plan import RankRow
    from ttlaunch.running.logs.merged import Line
    from ttlaunch.running.metrics.event_log import Event

_TICK_S = 0.1
_MOST_STARTS = 10_000
"""The largest number of starts of a run that are followed: each folder names the next, and forged folders may form a cycle."""


@dataclass(frozen=True)
class LogLine:
    """A line that a rank has printed.

    Attributes:
        stream: "stdout" or "stderr".
        time: Seconds since the epoch, corrected for the clock of the rank's host.
        text: The line without its line break; bytes that are not UTF-8 are replaced.
    """

    rank: int
    role: str
    host: str
    stream: str
    time: float
    text: str


class Metrics(list["Event"]):
    """Everything that a run has measured, in the order of time: a list of events."""

    def to_pandas(self) -> "pd.DataFrame":
        """Return a table: a row for each event, with time, kind, rank, step, and a column for each number or text.

        Raises:
            ImportError: pandas is not installed.
        """
        import pandas as pd

        rows = []
        for event in self:
            measured = event.values  # noqa: PD011 - of an event, not of a table
            values = {name: value for name, value in measured.items() if isinstance(value, int | float | str)}
            rows.append({**values, "time": event.time, "kind": event.kind, "rank": event.rank, "step": event.step})
        first = ["time", "kind", "rank", "step"]
        others = dict.fromkeys(name for row in rows for name in row if name not in first)
        return pd.DataFrame(rows, columns=[*first, *others])

    def _repr_html_(self) -> str:
        """Show in a notebook how many events of each kind there are."""
        kinds = dict.fromkeys(event.kind for event in self)
        return table_html(("kind", "events"), [(kind, sum(event.kind == kind for event in self)) for kind in kinds])


class Run:
    """A run that is running or has ended. Its methods may be called from any thread.

    As a context manager, it calls `stop()` at the end of the block if the run is still active, unless the run was started
    with `detach=True`.

    Attributes:
        warnings: The warnings of the checks before the start.
    """

    def __init__(
        self,
        folder: Path,
        *,
        supervisor: "Supervisor | None" = None,
        launcher: Launcher | None = None,
        warnings: Sequence[Diagnostic] = (),
        detached: bool = False,
    ) -> None:
        """Do not call this: `ttlaunch.start` (with a supervisor) and `ttlaunch.attach` (with a launcher) return runs."""
        self.warnings = tuple(warnings)
        self._first = folder
        self._started = supervisor
        self._launcher = launcher
        self._is_detached = detached
        self._report: Report | None = None

    @property
    def _supervisor(self) -> "Supervisor | None":
        """The supervisor if this process started it, else None; a forked child uses the run's folder instead."""
        return self._started if self._started is not None and self._started.owner == os.getpid() else None

    @property
    def id(self) -> str:
        """The run's id; after a restart, that of the newest start."""
        return self.folder.name

    @property
    def folder(self) -> Path:
        """The run's folder; after a restart, that of the newest start."""
        return self._starts()[-1]

    @property
    def is_running(self) -> bool:
        """Whether the run, or a restart of it, is running."""
        if self._supervisor is not None:
            return self._supervisor.poll() is None
        launcher = self._launcher or read_launcher(self._first)
        return launcher.is_alive if launcher is not None else is_running(self.folder)

    @property
    def report(self) -> Report | None:
        """The result of the run; None while it is running.

        Raises:
            LaunchError: The run's folder cannot be read any more, or the supervisor was killed.
        """
        return None if self.is_running else self.wait()

    def wait(self, timeout: float | None = None) -> Report:
        """Wait until the run and its restarts have ended.

        Args:
            timeout: The largest number of seconds to wait; None for no limit.

        Raises:
            TimeoutError: The run has not ended in this time; it continues.
            ValueError: `timeout` is not a number.
            LaunchError: The supervisor was killed, so the result is unknown; or the run's folder is gone.
        """
        if timeout is not None and not timeout > -math.inf:
            raise ValueError(f"timeout is {timeout!r}, and a number of seconds was expected")
        status = self._wait_for_end(timeout)
        if self._report is None:
            self._report = self._make_report(status)
        return self._report

    def stop(self, *, grace: float | None = None, now: bool = False) -> Report:
        """End the run as Ctrl-C does, and wait for its end; ranks finish the current step and save a checkpoint first.

        If the run has ended already, only return its report.

        Args:
            grace: Seconds between the first and the second interrupt, which leaves ranks 5 s; None to wait for as long as the
                run's own grace period lasts.
            now: Whether to end the run without waiting for a step.

        Raises:
            LaunchError: The run has not ended after three interrupts, or its result is unknown, see `wait`.
        """
        if grace is not None and not grace >= 0:
            raise usage_error(f"`grace={grace!r}`: a number of at least 0 was expected")
        launcher = self._launcher or read_launcher(self._first)
        if self.is_running and launcher is not None and not interrupt(launcher, grace_s=grace, now=now):
            message = f"the run {self.id} was asked to stop and has not ended"
            hint = f"`kill -9 {launcher.pid}` ends its launcher, and its ranks with it"
            raise LaunchError([Diagnostic("R048", message, hints=(hint,))])
        return self.wait()

    def logs(
        self, *, follow: bool = False, only: str | Sequence[str] = (), stream: str | None = None
    ) -> Iterator[LogLine]:
        """Iterate over the lines that ranks have printed, in the order in which they were printed.

        Args:
            follow: Whether to wait for further lines until the run has ended.
            only: The ranks: `role=R`, `rank=N`, `host=H`, or several of these; empty for all ranks.
            stream: "stdout" or "stderr"; None for both.

        Raises:
            LaunchError: `only` or `stream` names nothing in the run, or the run's folder is gone. The call itself raises it,
                not the iteration.
        """
        from ttlaunch.app.logs import chosen_ranks, chosen_streams, read_lines

        folder = self.folder
        try:
            rows = read_ranks(folder)
        except (OSError, ValueError) as error:
            raise unreadable_run(folder, error) from error
        chosen = [only] if isinstance(only, str) else [str(one) for one in only or ()]
        ranks, streams = chosen_ranks(chosen, rows), chosen_streams(None if stream is None else str(stream))
        found = read_lines(folder, rows, only=ranks, streams=streams, follow=follow)
        return (_log_line(line, rows[line.rank]) for lines in found for line in lines)

    def metrics(self) -> Metrics:
        """Return everything that the run has measured so far.

        Raises:
            LaunchError: The run's folder is gone.
        """
        from ttlaunch.running.metrics.event_log import EventLog

        try:
            return Metrics(EventLog(self.folder).poll())
        except (OSError, ValueError) as error:
            raise unreadable_run(self.folder, error) from error

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: "TracebackType | None"
    ) -> None:
        if not self._is_detached and self.is_running:
            with contextlib.suppress(LaunchError):  # the report says how the run ended
                self.stop()

    def __repr__(self) -> str:
        state = "running" if self.is_running else "ended"
        return f"<Run {self.id}: {state}>"

    def _repr_mimebundle_(self, **_: object) -> dict[str, str]:
        """Show the run as it is now: state, step, loss and ranks, as text and for notebooks."""
        from ttlaunch.app.notebook import NotebookView

        try:
            return NotebookView(self.folder).bundle()
        except (OSError, ValueError):  # the folder is gone
            return {"text/plain": repr(self)}

    def _ipython_display_(self) -> None:
        """Show the run in a notebook, and go on showing it until it has ended; the cell itself returns at once."""
        from IPython.display import display

        from ttlaunch.app.notebook import NotebookView, show_while

        try:
            view = NotebookView(self.folder)
        except (OSError, ValueError):
            display({"text/plain": repr(self)}, raw=True)
        else:
            show_while(view, lambda: self.is_running, display)

    def _starts(self) -> list[Path]:
        """Return the folders of all starts so far, oldest first."""
        folders = [self._first]
        while isinstance(following := read_follow_up(folders[-1]).get("next"), str) and len(folders) < _MOST_STARTS:
            folders.append(Path(following))
        return folders

    def _wait_for_end(self, timeout: float | None) -> int | None:
        """Wait for the run's end and return the supervisor's exit status; None if it is not a child of this process."""
        if self._supervisor is not None:
            return self._supervisor.exit_status(timeout_s=timeout)
        deadline = None if timeout is None else time.monotonic() + timeout
        while self.is_running:
            if deadline is not None and time.monotonic() >= deadline:
                raise TimeoutError(f"the run is still running after {timeout:g} s")
            time.sleep(_TICK_S)
        return None

    def _make_report(self, status: int | None) -> Report:
        outcomes = []
        folders = self._starts()
        for folder in folders:
            try:
                recorded = self._recorded(folder)
                if recorded is None:
                    break
                outcomes.append(Outcome(recorded, read_facts(folder), RunFolder(folder.name, folder)))
            except (OSError, ValueError) as error:
                raise unreadable_run(folder, error) from error
        if len(outcomes) < len(folders):
            raise LaunchError([cut_off(folders[-1], status)], status=contract.STATUS_RANK_FAILED)
        messages = self._supervisor.messages if self._supervisor else lambda _: []
        more = [*given_up(outcomes), *judge_sinks(outcomes[-1])]
        packed = (*messages("warnings"), *messages("refused"))
        more += [one for diagnostics in packed for one in unpack_diagnostics(diagnostics)]
        return Report.of(outcomes, more=more, status=exit_status_of(outcomes))

    def _recorded(self, folder: Path) -> RecordedReport | None:
        """Return the report from the folder, or from the supervisor if the folder's disk was full; None if there is none.

        Raises:
            OSError, ValueError: The folder is gone, or the file is no report.
        """
        if (folder / contract.REPORT_FILE).is_file():
            return read_report(folder)
        folder.stat()
        reports = self._supervisor.messages("report") if self._supervisor else []
        return RecordedReport.from_json(reports[-1]) if reports else None


def _log_line(line: "Line", row: "RankRow") -> LogLine:
    text = line.text.decode("utf-8", "replace")
    return LogLine(line.rank, row.role, row.host, line.stream, line.time, text)
