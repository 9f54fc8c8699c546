"""Whether a run that broke is started again: only if it may end otherwise this time, and only while it gets further."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ttlaunch import contract
from ttlaunch.launch.checkpoints import newest_step
from ttlaunch.launch.report import Report

FRUITLESS = 2
"""So many restarts in a row that make no step end the attempts."""

_STATUSES = {contract.STATUS_RANK_FAILED, contract.STATUS_HUNG}
_COMES_AGAIN = {"R001", "R007", "R009", "R010", "R011", "R025", "R031"}
"""What a new start meets again: another MPI, a program or module that is not there, numbers that diverge, a full disk."""


@dataclass(frozen=True)
class Attempt:
    """One start of a run.

    Attributes:
        steps: The last step that was done, counted from the beginning of training; None for a program that counts none.
    """

    folder: Path
    exit_status: int
    code: str | None
    steps: int | None

    @property
    def has_checkpoint(self) -> bool:
        return newest_step(self.folder) is not None


@dataclass(frozen=True)
class Restart:
    """Start again, from the newest checkpoint of `resume`; None: from where the first attempt began."""

    resume: Path | None


@dataclass(frozen=True)
class GiveUp:
    """Start no more.

    Attributes:
        no_progress: So many restarts in a row that made no step; 0 if that is not the reason.
    """

    no_progress: int = 0


def attempt_of(report: Report, folder: Path) -> Attempt:
    """What counts of a start that has come to its end."""
    code = report.failure.code if report.failure else None
    return Attempt(folder, report.exit_status, code, None if report.layout is None else report.steps)


def plan_restart(attempts: Sequence[Attempt], *, most: int) -> Restart | GiveUp:
    """What follows the last of the attempts.

    Args:
        attempts: All so far, at least one.
        most: Restarts that the user allows.
    """
    last = attempts[-1]
    if last.exit_status not in _STATUSES or last.code in _COMES_AGAIN or not most:
        return GiveUp()
    fruitless = _fruitless(attempts)
    if fruitless >= FRUITLESS:
        return GiveUp(no_progress=fruitless)
    if len(attempts) > most:
        return GiveUp()
    return Restart(next((one.folder for one in reversed(attempts) if one.has_checkpoint), None))


def _fruitless(attempts: Sequence[Attempt]) -> int:
    """How many restarts at the end of the list came no further than all before them."""
    steps = [one.steps for one in attempts if one.steps is not None]
    return next(
        (back for back in range(len(steps) - 1) if steps[-1 - back] > max(steps[: -1 - back])), max(0, len(steps) - 1)
    )
