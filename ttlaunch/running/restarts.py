"""Decide whether a failed run starts again: only if the same failure may not happen again, and while restarts make progress.

A lost host may still run its ranks until its lease has ended. The next attempt waits until then, and does not use this
host.
"""

import contextlib
import json
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import field
from pathlib import Path
from typing import Any

from ttlaunch import contract
from ttlaunch.diagnostics import listed, render_duration
from ttlaunch.quick_dataclass import dataclass
from ttlaunch.running.checkpoints.complete import newest_step
from ttlaunch.running.failures.causes import Cause
from ttlaunch.running.report import Report
from ttlaunch.running.runs.files import read_object_if_any, write_whole

_FOLLOW_UP = "restart.json"
MOST_FRUITLESS = 2
"""The number of successive restarts without progress after which there is no further restart."""

_STATUSES = {
    contract.STATUS_RANK_FAILED,
    contract.STATUS_HUNG,
    contract.STATUS_HOST_LOST,
    contract.STATUS_AUDIT,
}


@dataclass(frozen=True)
class Attempt:
    """One start of a run.

    Attributes:
        comes_again: Whether the same failure would occur after a restart.
        steps: The last finished step, counted from the beginning of training; None for a program without steps.
        lost: Lost hosts, with the time of the last frame from each, seconds since the epoch.
        wrong: The host that an audit has found to compute wrong; None if there is none.
    """

    folder: Path
    exit_status: int
    comes_again: bool
    steps: int | None
    lost: Mapping[str, float] = field(default_factory=dict)
    wrong: str | None = None

    @property
    def has_checkpoint(self) -> bool:
        return newest_step(self.folder) is not None


@dataclass(frozen=True)
class Restart:
    """The decision to start again.

    Attributes:
        resume: The run from whose newest checkpoint the next attempt continues; None to begin as the first attempt did.
        excluded: Hosts that the next attempt does not use: the last one has lost them, or an audit of any has found that they compute wrong.
        not_before: When all ranks of the lost hosts have ended for certain, seconds since the epoch; 0 without lost hosts.
        most_s: The longest time to wait for `not_before`, in case the clock is set back meanwhile.
    """

    resume: Path | None
    excluded: tuple[str, ...] = ()
    not_before: float = 0.0
    most_s: float = 0.0


@dataclass(frozen=True)
class GiveUp:
    """The decision not to start again.

    Attributes:
        no_progress: The number of successive restarts without progress; 0 if this is not the reason.
    """

    no_progress: int = 0


def attempt_of(report: Report, folder: Path) -> Attempt:
    """Return what the decision about a restart needs to know about a start that has ended."""
    comes_again = report.failure is not None and report.failure.comes_again
    steps = None if report.layout is None else report.steps
    failure = report.failure
    wrong = failure.host if failure is not None and failure.kind is Cause.AUDITED else None
    return Attempt(folder, report.exit_status, comes_again, steps, report.lost_hosts, wrong)


def plan_restart(
    attempts: Sequence[Attempt], *, most: int, is_elastic: bool = False, lease_s: float = contract.LEASE_S
) -> Restart | GiveUp:
    """Decide whether there is another attempt.

    Args:
        attempts: All attempts so far, at least one.
        most: The number of restarts that the user allows.
        is_elastic: Whether workers may come and go: then a run goes on without a host that an audit has named, also where the user
            allows no restart.
        lease_s: How long ranks of a lost host may have continued to run.
    """
    last = attempts[-1]
    if is_elastic:
        most += sum(one.wrong is not None for one in attempts)  # each leaves out a host for good, so there is an end
    if last.exit_status not in _STATUSES or last.comes_again or not most:
        return GiveUp()
    fruitless = _fruitless(attempts)
    if fruitless >= MOST_FRUITLESS:
        return GiveUp(no_progress=fruitless)
    if len(attempts) > most:
        return GiveUp()
    resume = next((one.folder for one in reversed(attempts) if one.has_checkpoint), None)
    wrong = {one.wrong for one in attempts if one.wrong is not None}
    if not last.lost:
        return Restart(resume, tuple(sorted(wrong)))
    fenced_s = lease_s + contract.AFTER_LEASE_S
    return Restart(resume, tuple(sorted({*last.lost, *wrong})), max(last.lost.values()) + fenced_s, fenced_s)


def wait_for_lease(decision: Restart, *, report: Callable[[str], None]) -> None:
    """Wait until the ranks of lost hosts have certainly ended.

    Args:
        decision: The decision with the hosts and the time.
        report: Called with a message for the user if there is a time to wait.
    """
    left_s = min(decision.not_before - time.time(), decision.most_s)
    if left_s <= 0:
        return
    hosts = listed(decision.excluded, last="and", quote="")
    has, its = ("has", "its") if len(decision.excluded) == 1 else ("have", "their")
    report(
        f"waiting {render_duration(left_s)} until {hosts} {has} ended {its} ranks for certain; Ctrl-C cancels the restart"
    )
    threading.Event().wait(left_s)


def write_follow_up(folder: Path, **values: Any) -> None:
    """Add values to the file that tells views of an ended run what follows it; do nothing if the file cannot be written.

    Args:
        folder: The folder of the run that has ended.
        values: A restart adds values as it proceeds. First comes `again` (true). If the restart has to wait, `waiting` is a
            message. Then come `number` (of the restart), `most` (the largest number of restarts), `resume` (the name of the
            run from which it continues, or None), `given` (the checkpoint that the first start was given, if the restart begins there) and `change` (what is different). The last one is `next` (the folder of the
            next run). If restarts made no progress, there is only `no_progress`. Instead of `number` to `change`,
            there may be `onward` (true): the run was done, and serves newer weights next.
    """
    path = folder / _FOLLOW_UP
    with contextlib.suppress(OSError):
        write_whole(path, json.dumps({**read_object_if_any(path), **values}) + "\n")


def read_follow_up(folder: Path) -> dict[str, Any]:
    """Return all values that `write_follow_up` has written for a run."""
    return read_object_if_any(folder / _FOLLOW_UP)


def _fruitless(attempts: Sequence[Attempt]) -> int:
    """Count the last attempts in a row that did not get further than the attempts before them."""
    steps = [one.steps for one in attempts if one.steps is not None]
    return next(
        (back for back in range(len(steps) - 1) if steps[-1 - back] > max(steps[: -1 - back])), max(0, len(steps) - 1)
    )
