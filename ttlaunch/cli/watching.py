r"""Show a run and its restarts until they have ended or the user leaves, then print the result.

Ctrl-C and SIGTERM are passed on to the supervisor, which ends the run. A closed terminal and Ctrl-\ end only this command,
and Ctrl-Z stops only this command.
"""

import errno
import signal
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from ttlaunch import contract
from ttlaunch.app.outcome import Outcome
from ttlaunch.app.restarts import exit_status_of, given_up
from ttlaunch.app.run_spec import short_name
from ttlaunch.app.signals import handled
from ttlaunch.cli.console import exit_with, print_json, print_lines, show_diagnostics
from ttlaunch.cli.live import make_view
from ttlaunch.cli.summary import print_result
from ttlaunch.diagnostics import Diagnostic, Format
from ttlaunch.running.pace import Pace
from ttlaunch.running.readers.follow import FollowedRun
from ttlaunch.running.report import Report, read_report
from ttlaunch.running.restarts import read_follow_up
from ttlaunch.running.runs.facts import read_facts
from ttlaunch.running.runs.launcher import TIME_LIMIT_SIGNAL
from ttlaunch.running.runs.run_folder import RunFolder

_TICK_S = 0.1
_HUNG_UP = 129


class Supervisor(Protocol):
    """The process that supervises a run, for the command that shows it; `cli/session.py` has two kinds."""

    @property
    def is_over(self) -> bool: ...

    @property
    def said(self) -> Collection[dict[str, Any]]: ...

    def wait(self, timeout_s: float) -> None: ...

    def signal(self, number: int) -> None: ...

    def set_free(self) -> None: ...

    def exit_status(self) -> int | None: ...


@dataclass(frozen=True)
class Watched:
    """The result of watching a run.

    Attributes:
        outcomes: The outcome of the run; with restarts, of each start. All but the last have been printed.
        is_reported: Whether the last outcome has been printed too, because a restart was expected to follow it.
        exit_status: The supervisor's exit status; negative if it was killed, None if it is not a child of this process.
        last: The folder of the run that was watched last.
    """

    outcomes: tuple[Outcome, ...]
    exit_status: int | None
    last: Path
    is_reported: bool = False

    @property
    def was_cut_off(self) -> bool:
        """Whether the run that was watched last has no report."""
        return not self.outcomes or self.outcomes[-1].folder.path != self.last


def watch(supervisor: Supervisor, first: Path, *, form: Format, only: Collection[int] | None = None) -> Watched:
    """Show a run until it has ended; exits if the user stops watching before.

    Args:
        supervisor: The run's supervisor.
        first: The run's folder.
        form: The form of the output.
        only: The ranks whose output is shown; None for all.
    """
    watcher = _Watcher(supervisor, form, only)
    ways: dict[int, Callable[[int], None]] = {
        signal.SIGINT: watcher.order,
        signal.SIGTERM: watcher.order,
        TIME_LIMIT_SIGNAL: watcher.order,
        signal.SIGHUP: watcher.stop,
        signal.SIGQUIT: watcher.stop,
    }
    with handled(ways):
        try:
            return watcher.watch(first)
        except OSError as error:
            if error.errno != errno.EIO:
                raise
            supervisor.set_free()  # the terminal is gone, although no signal may have come
            exit_with(_HUNG_UP)


class _EnoughError(Exception):
    """Raised by Ctrl-C after the run's end: the user does not want to see the rest of its output."""


class _Watcher:
    def __init__(self, supervisor: Supervisor, form: Format, only: Collection[int] | None) -> None:
        self._supervisor = supervisor
        self._form = form
        self._only = only
        self._stopped_by: int | None = None
        self._followed: FollowedRun | None = None
        self._is_showing = False
        self._had_enough = False

    def order(self, number: int) -> None:
        """End the run. If it has ended and only its output is still being shown, stop showing it."""
        if self._is_showing and self._followed and self._followed.has_ended:
            raise _EnoughError
        self._supervisor.signal(number)

    def stop(self, number: int) -> None:
        """Stop watching; safe in a signal handler. The terminal may be gone afterwards."""
        self._stopped_by = number
        self._supervisor.set_free()

    def watch(self, first: Path) -> Watched:
        outcomes: list[Outcome] = []
        path, is_reported = first, False
        while outcome := self._watch_one(path):
            outcomes.append(outcome)
            follow_up = self._follow_up(path)
            is_reported = "again" in follow_up
            if is_reported and self._form is not Format.JSON:
                print_result(outcome, form=self._form)
            restarted = self._next(path) if is_reported else None
            if restarted is None:
                break
            path = restarted
        status = self._supervisor.exit_status()
        self._print_messages()
        return Watched(tuple(outcomes), status, path, is_reported)

    def _watch_one(self, path: Path) -> Outcome | None:
        """Show a run from its beginning, and return its outcome; None if it has no report."""
        folder, facts, pace = RunFolder(path.name, path), read_facts(path), Pace()
        only = range(len(facts.ranks)) if self._only is None else self._only
        with make_view(facts, folder, quiet=self._form is Format.JSON) as view:
            self._followed = followed = FollowedRun(folder, facts, view, only=only)
            while not followed.has_ended and not self._supervisor.is_over and self._stopped_by is None:
                self._show(followed.poll, path)
                self._supervisor.wait(pace.wait_s)
            report = None if self._stopped_by else self._report(path)
            if self._stopped_by is None:
                self._show(lambda: followed.finish(report), path)
        self._leave_if_stopped(path)
        return Outcome(report, facts, folder) if report else None

    def _show(self, some: Callable[[], None], path: Path) -> None:
        """Call a function that prints, unless Ctrl-C has asked for no more output."""
        if self._had_enough:
            return
        try:
            self._is_showing = True
            some()
        except _EnoughError:
            self._had_enough = True
            where = f"{short_name(path, Path.cwd())}/{contract.LOGS_DIR}/"
            print_lines([f"the rest of what ranks printed is in {where}"], to=sys.stderr)
        finally:
            self._is_showing = False

    def _report(self, path: Path) -> Report | None:
        """Read the report from the run's folder, or get it from the supervisor if the folder's disk is full."""
        while True:
            is_over = self._supervisor.is_over  # asked first: the report is the last thing before its end
            if (path / contract.REPORT_FILE).is_file():
                return read_report(path)
            said = [record["report"] for record in self._supervisor.said if "report" in record]
            if said:
                return Report.from_json(said[-1])
            if is_over:
                return None
            self._supervisor.wait(_TICK_S)

    def _follow_up(self, path: Path) -> Mapping[str, Any]:
        """Wait for the decision whether a run is restarted; empty if it is not."""
        while not (found := read_follow_up(path)) and not self._supervisor.is_over:
            self._supervisor.wait(_TICK_S)
            self._leave_if_stopped(path)
        return found or read_follow_up(path)

    def _next(self, path: Path) -> Path | None:
        """Wait for the folder of a restart; None if it could not be begun."""
        announced: set[str] = set()
        while "next" not in (found := read_follow_up(path)):
            self._print_messages()
            announced |= _announce(found, but=announced)
            if self._supervisor.is_over:
                return None
            self._supervisor.wait(_TICK_S)
            self._leave_if_stopped(path)
        _announce(found, but=announced)
        return Path(found["next"])

    def _print_messages(self) -> None:
        """Print the supervisor's messages between two starts, such as why it does not restart."""
        for name, line in self._followed.messages() if self._followed else ():
            stream = sys.stdout if name == "stdout" else sys.stderr
            if name == "stdout" or self._form is not Format.JSON:
                print_lines([line.decode()], to=stream)

    def _leave_if_stopped(self, path: Path) -> None:
        if self._stopped_by is None:
            return
        if self._stopped_by == signal.SIGQUIT:
            print_lines([f"{path.name} continues; `ttlaunch attach {path.name}` shows it again"])
            exit_with(contract.STATUS_DONE)
        exit_with(_HUNG_UP)


def _announce(follow_up: Mapping[str, Any], *, but: Collection[str] = ()) -> set[str]:
    """Print what a supervisor waits for, and that it restarts the run.

    Args:
        follow_up: The values that `read_follow_up` returns for the run that has ended.
        but: The messages that have been printed already.

    Returns:
        The messages that were printed now.
    """
    lines = {}
    if "waiting" in follow_up:
        lines["waiting"] = follow_up["waiting"]
    if "onward" in follow_up:
        lines["onward"] = "newer weights follow"
    if "number" in follow_up:
        resume = follow_up.get("resume")
        start = f"from {follow_up['given']}, as before" if "given" in follow_up else "from the beginning"
        where = f"from the newest checkpoint of {resume}" if resume else start
        lines["number"] = f"restart {follow_up['number']} of {follow_up['most']}, {where}{follow_up['change']}"
    said = {name: line for name, line in lines.items() if name not in but}
    print_lines(said.values(), to=sys.stderr)
    return set(said)


_ORDERS = {
    signal.SIGINT: contract.STATUS_INTERRUPTED,
    signal.SIGTERM: contract.STATUS_TERMINATED,
    TIME_LIMIT_SIGNAL: contract.STATUS_TIME_LIMIT,
}
"""The signals that end a supervisor while no ranks are running."""


def report_end(
    watched: Watched, *, form: Format, judge: Callable[[Outcome], Sequence[Diagnostic]] = lambda _: ()
) -> int:
    """Print the result of a run, and return the exit status.

    Args:
        watched: The result of watching the run.
        form: The form of the output.
        judge: Returns further diagnostics of the last outcome.
    """
    if watched.was_cut_off:
        return _report_cut_off(watched, form=form)
    outcomes, status = watched.outcomes, watched.exit_status
    if watched.is_reported and status is not None and status < 0:
        return status_without_run(status, form=form, who=f"the supervisor of {watched.last.name}")
    if status is None or status < 0:  # the supervisor was killed after its last message
        status = exit_status_of(outcomes)
    if not watched.is_reported:
        more = [*given_up(outcomes), *judge(outcomes[-1])]
        print_result(outcomes[-1], form=form, restarts=outcomes[:-1], more=more, exit_status=status)
    return status


def status_without_run(status: int, *, form: Format, who: str = "the supervisor") -> int:
    """Return the exit status if a supervisor ended while no ranks were running; report it if it was killed.

    Args:
        status: The supervisor's exit status, or minus the signal that ended it.
        form: The form of the output.
        who: The name of the process in the message.
    """
    if status >= 0:
        return status
    number = signal.Signals(-status)
    if number in _ORDERS:
        return _ORDERS[number]
    found = Diagnostic("R050", f"{who} was killed by {number.name}", notes=("no ranks were running",))
    if form is Format.JSON:
        print_json({"diagnostics": [found.as_json()]}, schema="diagnostics")
    show_diagnostics([found], form=form)
    return contract.STATUS_RANK_FAILED


def _report_cut_off(watched: Watched, *, form: Format) -> int:
    """Report that the supervisor ended before its run did, unless it has reported a bug of its own."""
    if watched.exit_status is not None and watched.exit_status >= 0:
        return watched.exit_status
    from ttlaunch.app.cut_off import cut_off

    found = cut_off(watched.last, watched.exit_status)
    if form is Format.JSON:
        print_json({"run_id": watched.last.name, "diagnostics": [found.as_json()]}, schema="diagnostics")
    show_diagnostics([found], form=form)
    return contract.STATUS_RANK_FAILED
