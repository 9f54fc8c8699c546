"""`--max-restarts`: when a run breaks, start it again from its newest checkpoint; and what is said of that."""

import signal
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from ttlaunch import contract
from ttlaunch.app.carry_out import RunOptions, carry_out
from ttlaunch.app.outcome import tell
from ttlaunch.cli.console import leave, show_diagnostics
from ttlaunch.cli.signals import handled
from ttlaunch.diagnostics import Diagnostic, Format
from ttlaunch.diagnostics.count import counted

if TYPE_CHECKING:
    from ttlaunch.app.outcome import Outcome
    from ttlaunch.app.prepare_run import PreparedRun
    from ttlaunch.app.ready_here import LaunchContext
    from ttlaunch.app.replan import Replanned
    from ttlaunch.app.resolve import RunSpec
    from ttlaunch.running.restarts import Restart
    from ttlaunch.running.runs.run_folder import RunFolder


def run_with_restarts(
    request: "RunSpec",
    prepared: "PreparedRun",
    way: RunOptions,
    *,
    most: int,
    ready: "LaunchContext | None",
    begun: "Callable[[RunFolder], None]",
) -> "list[Outcome]":
    """Start a plan until it comes to its end, or to one that another start would not change; all starts, in order.

    Args:
        request: What was typed; a restart checks and plans all of it anew, with another beginning.
        prepared: The same, checked.
        way: How it is carried out.
        most: Restarts at the most.
        ready: The hosts of the first start, if they are ready already.
        begun: Told of the folder of each start.
    """
    from ttlaunch.app.prepare_run import prepare
    from ttlaunch.running.restarts import GiveUp, attempt_of, plan_restart, write_follow_up

    outcomes = [carry_out(prepared, way, ready=ready, begun=begun)]
    while True:
        last = outcomes[-1].folder.path
        attempts = [attempt_of(one.report, one.folder.path) for one in outcomes]
        decision = plan_restart(attempts, most=most, lease_s=way.lease_s)
        if isinstance(decision, GiveUp):
            if decision.no_progress:
                write_follow_up(last, no_progress=decision.no_progress)
            return outcomes
        write_follow_up(last, again=True)
        following = _following(request, prepared, decision, outcomes, form=way.form)
        name = decision.resume.name if decision.resume else None
        write_follow_up(last, number=len(outcomes), most=most, resume=name, change=following.change)

        def note(folder: "RunFolder", before: Path = last) -> None:
            write_follow_up(before, next=str(folder.path))
            begun(folder)

        again = prepare(following.request, form=way.form, verbose=way.verbose)
        outcomes.append(carry_out(again, way, begun=note))


def _following(
    request: "RunSpec", first: "PreparedRun", decision: "Restart", outcomes: "list[Outcome]", *, form: Format
) -> "Replanned":
    """What the next attempt is asked for; leaves, after saying why, if there is none."""
    from ttlaunch.app.replan import repeatable, replan, wait_for_lease

    last, earlier = outcomes[-1], outcomes[:-1]
    try:
        with handled(dict.fromkeys((signal.SIGINT, signal.SIGTERM), _order)):
            wait_for_lease(decision, say=partial(_say_waiting, last.folder.path))
            following = replan(repeatable(request, outcomes[0].folder.path), first, decision)
    except _OrderedError as order:
        if form is Format.JSON:
            tell(last, form=form, restarts=earlier, exit_status=order.exit_status)
        leave(order.exit_status)
    if isinstance(following, Diagnostic):
        if form is Format.JSON:
            tell(last, form=form, restarts=earlier, more=[following])
        else:
            show_diagnostics([following], form=form)
        leave(last.report.exit_status)
    return following


class _OrderedError(Exception):
    """A signal has ended the attempts while no ranks were running."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.exit_status = contract.STATUS_INTERRUPTED if number == signal.SIGINT else contract.STATUS_TERMINATED


def _order(number: int) -> NoReturn:
    raise _OrderedError(number)


def _say_waiting(folder: Path, text: str) -> None:
    from ttlaunch.running.restarts import write_follow_up

    write_follow_up(folder, waiting=text)


def exit_status_of(outcomes: "Sequence[Outcome]") -> int:
    """That of the last start, unless restarts came to nothing."""
    from ttlaunch.running.restarts import read_follow_up

    if read_follow_up(outcomes[-1].folder.path).get("no_progress"):
        return contract.STATUS_NO_PROGRESS
    return outcomes[-1].report.exit_status


def given_up(outcomes: "Sequence[Outcome]") -> list[Diagnostic]:
    """That restarts came to nothing; empty if they did not, or there were none."""
    from ttlaunch.running.restarts import read_follow_up

    in_a_row = read_follow_up(outcomes[-1].folder.path).get("no_progress")
    if not isinstance(in_a_row, int) or not in_a_row:
        return []
    furthest = max(one.report.steps for one in outcomes)
    message = f"given up: {counted(in_a_row, 'restart')} in a row came no further than step {furthest}"
    return [Diagnostic("R027", message, hints=("what broke comes again; mend it, then `--resume` goes on",))]


def announce(follow_up: Mapping[str, Any], *, but: Collection[str] = ()) -> set[str]:
    """Say what a supervisor waits for, and that it starts a run again.

    Args:
        follow_up: Of the run that has ended.
        but: What has been said already.

    Returns:
        What was said now.
    """
    lines = {}
    if "waiting" in follow_up:
        lines["waiting"] = follow_up["waiting"]
    if "number" in follow_up:
        resume = follow_up.get("resume")
        where = f"from the newest checkpoint of {resume}" if resume else "from the beginning"
        lines["number"] = f"restart {follow_up['number']} of {follow_up['most']}, {where}{follow_up['change']}"
    said = {name: line for name, line in lines.items() if name not in but}
    sys.stderr.write("".join(f"{line}\n" for line in said.values()))
    sys.stderr.flush()
    return set(said)
