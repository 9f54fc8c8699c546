"""Restart a failed run from its newest checkpoint, as often as `--max-restarts` allows."""

import signal
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from ttlaunch import contract
from ttlaunch.app.dialogue import Dialogue
from ttlaunch.app.execute import RunOptions, execute_plan
from ttlaunch.app.outcome import Outcome
from ttlaunch.app.prepare_run import PreparedRun, prepare
from ttlaunch.app.ready_here import LaunchContext
from ttlaunch.app.signals import handled
from ttlaunch.diagnostics import Diagnostic, LaunchError, counted
from ttlaunch.running.runs.launcher import TIME_LIMIT_SIGNAL
from ttlaunch.running.runs.run_folder import RunFolder

if TYPE_CHECKING:
    from ttlaunch.app.replan import Replanned
    from ttlaunch.app.run_spec import RunSpec
    from ttlaunch.running.restarts import GiveUp, Restart

    Ended = Callable[[Outcome, bool], None]
    Onward = Callable[[Outcome], RunSpec | None]

_STATUS_AFTER = {
    int(signal.SIGINT): contract.STATUS_INTERRUPTED,
    int(signal.SIGTERM): contract.STATUS_TERMINATED,
    int(TIME_LIMIT_SIGNAL): contract.STATUS_TIME_LIMIT,
}


def run_with_restarts(
    prepared: PreparedRun,
    options: RunOptions,
    dialogue: Dialogue,
    *,
    most: int,
    ready: "LaunchContext | None",
    begun: "Callable[[RunFolder], None]",
    ended: "Ended" = lambda *_: None,
    onward: "Onward" = lambda _: None,
) -> "list[Outcome]":
    """Execute a plan, and restart it until it completes or a restart would not help; return all starts in order.

    Args:
        prepared: The plan of the first start. Each restart checks and plans everything again, with another checkpoint.
        options: How each plan is executed.
        dialogue: Informs and asks the caller.
        most: The largest number of restarts.
        ready: The hosts of the first start, if they are ready already.
        begun: Called with the folder of each start.
        ended: Called with the outcome of each start, and whether another one follows.
        onward: Returns what follows a start that is done, or None; a serving run goes on so with newer weights.

    Raises:
        LaunchError: A host is not ready, or there are no hosts for another start.
    """
    options, slurm = replace(options, most_restarts=most), prepared.description.slurm
    on_hosts: AbstractContextManager[PreparedRun] = nullcontext(prepared)
    if slurm is not None and slurm.request is not None:
        from ttlaunch.app.slurm_allocation import on_hosts_of_slurm

        options = replace(options, marks=(*options.marks, ("slurm", time.time())))
        on_hosts = on_hosts_of_slurm(prepared, slurm.request, dialogue)
    with on_hosts as placed:
        return _run_with_restarts(
            placed, options, dialogue, most=most, ready=ready, begun=begun, ended=ended, onward=onward
        )


def _run_with_restarts(
    prepared: PreparedRun,
    options: RunOptions,
    dialogue: Dialogue,
    *,
    most: int,
    ready: "LaunchContext | None",
    begun: "Callable[[RunFolder], None]",
    ended: "Ended",
    onward: "Onward",
) -> "list[Outcome]":
    outcomes = [execute_plan(prepared, options, dialogue, ready=ready, begun=begun)]
    from ttlaunch.running.restarts import Restart, write_follow_up  # the first start is over

    first = 0  # of the starts with the weights that are served now; in any other run, of all
    while True:
        last = outcomes[-1].folder.path
        is_elastic = prepared.plan.elastic is not None
        decision = _decide(outcomes[first:], options, most=most, is_elastic=is_elastic)
        newer = None if isinstance(decision, Restart) else onward(outcomes[-1])
        ended(outcomes[-1], isinstance(decision, Restart) or newer is not None)
        # Views of the failed start wait for this file, so write it before the next start is prepared.
        if isinstance(decision, Restart):
            write_follow_up(last, again=True)
            following = _following(prepared, decision, outcomes[first:], dialogue=dialogue)
            name = decision.resume.name if decision.resume else None
            request = following.request
            given = {} if name or request.resume is None else {"given": Path(request.resume).name}
            number = len(outcomes[first:])
            at_most = max(
                most, number
            )  # an elastic run leaves a host that computes wrong, also where no restart is allowed
            write_follow_up(last, number=number, most=at_most, resume=name, change=following.change, **given)
        elif newer is not None:
            first, request = len(outcomes), newer
            write_follow_up(last, again=True, onward=True)
        else:
            if decision.no_progress:
                write_follow_up(last, no_progress=decision.no_progress)
            return outcomes

        # Record the new folder before anything starts in it, so that views follow, and find a restart that is killed.
        def note(folder: RunFolder, before: Path = last) -> None:
            write_follow_up(before, next=str(folder.path))
            begun(folder)

        options = replace(options, restarts=len(outcomes) - first, marks=(("checks", time.time()),))
        again = prepare(request, dialogue)
        prepared = prepared if newer is None else again
        outcomes.append(execute_plan(again, options, dialogue, begun=note))


def _decide(outcomes: "Sequence[Outcome]", options: RunOptions, *, most: int, is_elastic: bool) -> "Restart | GiveUp":
    from ttlaunch.running.restarts import attempt_of, plan_restart

    attempts = [attempt_of(one.report, one.folder.path) for one in outcomes]
    if options.answers_at is not None:  # whoever answers makes no steps, and each start answers more
        attempts = [replace(one, steps=None) for one in attempts]
    return plan_restart(attempts, most=most, is_elastic=is_elastic, lease_s=options.lease_s)


def _following(
    first: PreparedRun, decision: "Restart", outcomes: "list[Outcome]", *, dialogue: Dialogue
) -> "Replanned":
    """Choose hosts and a checkpoint for the next attempt.

    Raises:
        LaunchError: There is no next attempt; the dialogue has reported why.
    """
    from ttlaunch.app.replan import repeatable, replan, silent_hosts  # imports pydantic, and few runs are restarted
    from ttlaunch.running.restarts import wait_for_lease

    last = outcomes[-1]
    try:
        with handled(dict.fromkeys(_STATUS_AFTER, _order)):
            wait_for_lease(decision, report=partial(_report_waiting, last.folder.path))
            again = repeatable(first.request, outcomes[0].folder.path)
            following = replan(again, first, decision, ask=lambda topology: silent_hosts(topology, dialogue))
    except _OrderedError as order:
        dialogue.gave_up(outcomes, [], status=order.exit_status)
        raise LaunchError([], status=order.exit_status, was_shown=True) from order
    if isinstance(following, Diagnostic):
        dialogue.gave_up(outcomes, [following], status=None)
        raise LaunchError([following], status=last.report.exit_status, was_shown=True)
    return following


class _OrderedError(Exception):
    """A signal has ended the restarts while no ranks were running."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.exit_status = _STATUS_AFTER[number]


def _order(number: int) -> NoReturn:
    raise _OrderedError(number)


def _report_waiting(folder: Path, text: str) -> None:
    from ttlaunch.running.restarts import write_follow_up

    write_follow_up(folder, waiting=text)


def exit_status_of(outcomes: "Sequence[Outcome]") -> int:
    """Return the exit status of the last start, or a status of its own if restarts made no progress."""
    from ttlaunch.running.restarts import read_follow_up

    if read_follow_up(outcomes[-1].folder.path).get("no_progress"):
        return contract.STATUS_NO_PROGRESS
    return outcomes[-1].report.exit_status


def given_up(outcomes: "Sequence[Outcome]") -> list[Diagnostic]:
    """Report that restarts ended because they made no progress; empty if this is not the reason."""
    from ttlaunch.running.restarts import read_follow_up

    in_a_row = read_follow_up(outcomes[-1].folder.path).get("no_progress")
    if not isinstance(in_a_row, int) or not in_a_row:
        return []
    furthest = max(one.report.steps for one in outcomes)
    message = f"given up: {counted(in_a_row, 'restart')} in a row came no further than step {furthest}"
    return [
        Diagnostic(
            "R027", message, hints=("the same failure would occur again; repair it, then continue with `--resume`",)
        )
    ]
