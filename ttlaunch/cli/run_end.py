"""What a command that watched a run prints at the end: what came out, or that its supervisor was killed."""

import signal
from collections.abc import Callable, Sequence

from ttlaunch import contract
from ttlaunch.app.cut_off import cut_off
from ttlaunch.app.outcome import Outcome
from ttlaunch.app.restarts import exit_status_of, given_up
from ttlaunch.cli.console import print_json, show_diagnostics
from ttlaunch.cli.summary import tell
from ttlaunch.cli.watching import Watched
from ttlaunch.diagnostics import Diagnostic, Format

_ORDERS = {signal.SIGINT: contract.STATUS_INTERRUPTED, signal.SIGTERM: contract.STATUS_TERMINATED}
"""What ends a supervisor that has nothing to end in order."""


def report_end(
    watched: Watched, *, form: Format, judge: Callable[[Outcome], Sequence[Diagnostic]] = lambda _: ()
) -> int:
    """Say what came of a run; returns the exit status.

    Args:
        watched: How watching it ended.
        form: Of what is printed.
        judge: What else is to be said of the last outcome.
    """
    if watched.was_cut_off:
        return _report_cut_off(watched, form=form)
    outcomes, status = watched.outcomes, watched.exit_status
    if watched.is_reported and status is not None and status < 0:
        return status_without_run(status, form=form, who=f"the supervisor of {watched.last.name}")
    if status is None or status < 0:  # killed when all had been said
        status = exit_status_of(outcomes)
    if not watched.is_reported:
        more = [*given_up(outcomes), *judge(outcomes[-1])]
        tell(outcomes[-1], form=form, restarts=outcomes[:-1], more=more, exit_status=status)
    return status


def status_without_run(status: int, *, form: Format, who: str = "the supervisor") -> int:
    """The exit status where a supervisor has ended while no ranks were running; says so if it was killed.

    Args:
        status: Its own, or minus the signal that ended it.
        form: Of what is printed.
        who: What it is called.
    """
    if status >= 0:
        return status
    number = signal.Signals(-status)
    if number in _ORDERS:
        return _ORDERS[number]
    found = Diagnostic("R050", f"{who} was killed by {number.name}", notes=("no ranks were running",))
    if form is Format.JSON:
        print_json({"diagnostics": [found.as_json()]})
    show_diagnostics([found], form=form)
    return contract.STATUS_RANK_FAILED


def _report_cut_off(watched: Watched, *, form: Format) -> int:
    """The supervisor ended before its run did; of a bug in it, it has spoken itself."""
    if watched.exit_status is not None and watched.exit_status >= 0:
        return watched.exit_status
    found = cut_off(watched.last, watched.exit_status)
    if form is Format.JSON:
        print_json({"run_id": watched.last.name, "diagnostics": [found.as_json()]})
    show_diagnostics([found], form=form)
    return contract.STATUS_RANK_FAILED
