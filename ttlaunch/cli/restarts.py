"""`--max-restarts`: when a run breaks, say so, and start it again from its newest checkpoint."""

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING

from ttlaunch import contract
from ttlaunch.cli.carry_out import Outcome, tell
from ttlaunch.cli.console import show_diagnostics
from ttlaunch.diagnostics import Diagnostic, Format
from ttlaunch.diagnostics.count import counted

if TYPE_CHECKING:
    from ttlaunch.cli.describe import Request
    from ttlaunch.cli.planning import Prepared
    from ttlaunch.cli.replan import Replanned
    from ttlaunch.launch.restarts import GiveUp, Restart


def run_with_restarts(
    request: "Request",
    prepared: "Prepared",
    *,
    most: int,
    start: Callable[["Prepared"], Outcome],
    form: Format,
    verbose: bool,
) -> int:
    """Start a plan until it comes to its end, or to one that another start would not change; returns the exit status.

    Args:
        request: What was typed; a restart checks and plans all of it anew, with another beginning.
        prepared: The same, checked.
        most: Restarts at the most.
        start: Carries a plan out.
        form: Of what is printed.
        verbose: Whether notes are shown.
    """
    from ttlaunch.cli.planning import prepare
    from ttlaunch.launch.restarts import GiveUp, attempt_of, plan_restart

    outcomes = [start(prepared)]
    while True:
        attempts = [attempt_of(one.report, one.folder.path) for one in outcomes]
        decision = plan_restart(attempts, most=most)
        if isinstance(decision, GiveUp):
            return _tell_last(outcomes, decision, form=form)
        if form is not Format.JSON:
            tell(outcomes[-1], form=form)
        following = _following(request, prepared, decision, outcomes, form=form)
        if isinstance(following, int):
            return following
        _announce(len(outcomes), most, decision, following.change)
        outcomes.append(start(prepare(following.request, form=form, verbose=verbose)))


def _following(
    request: "Request", first: "Prepared", decision: "Restart", outcomes: list[Outcome], *, form: Format
) -> "Replanned | int":
    """What the next attempt is asked for; or the exit status, after saying why there is none."""
    from ttlaunch.cli.replan import replan, wait_for_lease

    last, earlier = outcomes[-1], outcomes[:-1]
    try:
        wait_for_lease(decision)
        following = replan(request, first, decision)
    except KeyboardInterrupt:
        if form is not Format.JSON:
            raise
        tell(last, form=form, restarts=earlier, exit_status=contract.STATUS_INTERRUPTED)
        return contract.STATUS_INTERRUPTED
    if not isinstance(following, Diagnostic):
        return following
    if form is Format.JSON:
        tell(last, form=form, restarts=earlier, more=[following])
    else:
        show_diagnostics([following], form=form)
    return last.report.exit_status


def _tell_last(outcomes: list[Outcome], decision: "GiveUp", *, form: Format) -> int:
    last = outcomes[-1]
    if not decision.no_progress:
        tell(last, form=form, restarts=outcomes[:-1])
        return last.report.exit_status
    furthest = max(one.report.steps for one in outcomes)
    message = f"given up: {counted(decision.no_progress, 'restart')} in a row came no further than step {furthest}"
    hints = ("what broke comes again; mend it, then `--resume` goes on",)
    status = contract.STATUS_NO_PROGRESS
    tell(last, form=form, restarts=outcomes[:-1], more=[Diagnostic("R027", message, hints=hints)], exit_status=status)
    return status


def _announce(number: int, most: int, decision: "Restart", change: str) -> None:
    where = f"from the newest checkpoint of {decision.resume.name}" if decision.resume else "from the beginning"
    sys.stderr.write(f"restart {number} of {most}, {where}{change}\n")
    sys.stderr.flush()
