"""Decide whether a run that broke starts again: only if its failure need not come again, and while it gets further.

A host that was lost may still run its ranks, cut off from us, until its lease has run out; nobody takes their places
before that, and the next attempt does without it.
"""

import contextlib
import json
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ttlaunch import contract
from ttlaunch.diagnostics import listed
from ttlaunch.running.checkpoints.complete import newest_step
from ttlaunch.running.report import Report
from ttlaunch.running.runs.files import read_object_if_any, write_whole

_FOLLOW_UP = "restart.json"
FRUITLESS = 2
"""So many restarts in a row that make no step end the attempts."""

_STATUSES = {contract.STATUS_RANK_FAILED, contract.STATUS_HUNG, contract.STATUS_HOST_LOST}


@dataclass(frozen=True)
class Attempt:
    """One start of a run.

    Attributes:
        comes_again: Whether a new start would meet the same failure again.
        steps: The last step that was done, counted from the beginning of training; None for a program that counts none.
        lost: Hosts that were lost, with their last sign of life, seconds since the epoch.
    """

    folder: Path
    exit_status: int
    comes_again: bool
    steps: int | None
    lost: Mapping[str, float] = field(default_factory=dict)

    @property
    def has_checkpoint(self) -> bool:
        return newest_step(self.folder) is not None


@dataclass(frozen=True)
class Restart:
    """The decision to start again.

    Attributes:
        resume: The run from whose newest checkpoint it goes on; None: from where the first attempt began.
        without: Hosts that were lost just now and are not to be used this time.
        not_before: When these have ended their ranks for certain, seconds since the epoch; 0 if there are none.
        most_s: The longest time to wait for that, in case the clock is set back meanwhile.
    """

    resume: Path | None
    without: tuple[str, ...] = ()
    not_before: float = 0.0
    most_s: float = 0.0


@dataclass(frozen=True)
class GiveUp:
    """The decision to start no more.

    Attributes:
        no_progress: The number of restarts in a row that made no step; 0 if that is not the reason.
    """

    no_progress: int = 0


def attempt_of(report: Report, folder: Path) -> Attempt:
    """Keep what matters for the next decision of a start that has ended."""
    comes_again = report.failure is not None and report.failure.comes_again
    steps = None if report.layout is None else report.steps
    return Attempt(folder, report.exit_status, comes_again, steps, report.lost_hosts)


def plan_restart(attempts: Sequence[Attempt], *, most: int, lease_s: float = contract.LEASE_S) -> Restart | GiveUp:
    """Decide what follows the last of the attempts.

    Args:
        attempts: All so far, at least one.
        most: Restarts that the user allows.
        lease_s: How long ranks of a host that was lost may have run on.
    """
    last = attempts[-1]
    if last.exit_status not in _STATUSES or last.comes_again or not most:
        return GiveUp()
    fruitless = _fruitless(attempts)
    if fruitless >= FRUITLESS:
        return GiveUp(no_progress=fruitless)
    if len(attempts) > most:
        return GiveUp()
    resume = next((one.folder for one in reversed(attempts) if one.has_checkpoint), None)
    if not last.lost:
        return Restart(resume)
    fenced_s = lease_s + contract.AFTER_LEASE_S
    return Restart(resume, tuple(sorted(last.lost)), max(last.lost.values()) + fenced_s, fenced_s)


def wait_for_lease(decision: Restart, *, say: Callable[[str], None]) -> None:
    """Wait until hosts that were lost have ended their ranks by themselves.

    Args:
        decision: Names the hosts and the time.
        say: Told what is waited for.
    """
    left_s = min(decision.not_before - time.time(), decision.most_s)
    if left_s <= 0:
        return
    hosts = listed(decision.without, last="and", quote="")
    has, its = ("has", "its") if len(decision.without) == 1 else ("have", "their")
    say(f"waiting {left_s:.0f} s until {hosts} {has} ended {its} ranks for certain; Ctrl-C cancels the restart")
    threading.Event().wait(left_s)


def write_follow_up(folder: Path, **values: Any) -> None:
    """Write what follows a run into its folder, for its views; nothing if the folder cannot be written.

    Args:
        folder: The folder of the run that has ended.
        values: `again`: that it is to be started again; `waiting`: what for, in a sentence; then `number` of the restart, `most` of them, `resume`: name of
            the run that it goes on from, or None, `change`: what is different; then `next`: its folder. Or `no_progress`,
            and nothing follows.
    """
    path = folder / _FOLLOW_UP
    with contextlib.suppress(OSError):
        write_whole(path, json.dumps({**read_object_if_any(path), **values}) + "\n")


def read_follow_up(folder: Path) -> dict[str, Any]:
    """Read what `write_follow_up` has written; empty if nothing."""
    return read_object_if_any(folder / _FOLLOW_UP)


def _fruitless(attempts: Sequence[Attempt]) -> int:
    """Count the restarts at the end of the list that came no further than all before them."""
    steps = [one.steps for one in attempts if one.steps is not None]
    return next(
        (back for back in range(len(steps) - 1) if steps[-1 - back] > max(steps[: -1 - back])), max(0, len(steps) - 1)
    )
