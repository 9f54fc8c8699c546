"""Choose run folders to remove, measure and remove them; never that of a run that goes on."""

import contextlib
import shutil
import time
from collections.abc import Sequence
from dataclasses import dataclass

from ttlaunch.running.runs.launcher import is_running
from ttlaunch.running.runs.overview import RunSummary

_GOING = ".deleted"


@dataclass(frozen=True)
class Removable:
    """A run that is over, with its size on the disk."""

    run: RunSummary
    size_bytes: int


def plan_clean(
    runs: Sequence[RunSummary], *, older_than_s: float | None, keep: int, now: float | None = None
) -> list[RunSummary]:
    """Choose the runs to remove, oldest first.

    Args:
        runs: All there are, oldest first.
        older_than_s: Only those that ended longer ago; None: all that are over. One of unknown age stays.
        keep: How many of the newest that are over stay, whatever their age.
        now: Seconds since the epoch.
    """
    now = time.time() if now is None else now
    over = [run for run in runs if run.is_over]
    over = over[: len(over) - keep] if keep else over
    if older_than_s is None:
        return over
    return [run for run in over if run.ended is not None and now - run.ended > older_than_s]


def measure(run: RunSummary) -> Removable:
    """Measure the size of a run's folder on the disk; a link counts as itself."""
    size = 0
    with contextlib.suppress(OSError):  # somebody else removes it at the same time
        for path in run.folder.rglob("*"):
            with contextlib.suppress(OSError):
                size += path.lstat().st_blocks * 512
    return Removable(run, size)


def remove(run: RunSummary) -> bool:
    """Remove a run's folder if it still is over; False if it is not, or if somebody else has removed it.

    The folder is renamed first, so that a half removed one is not taken for a run. What an earlier removal has left
    under that name, because it was killed, is removed too.

    Raises:
        OSError: It cannot be removed.
    """
    if run.folder.is_symlink() or is_running(run.folder):
        return False
    going = run.folder.with_name(f"{_GOING}-{run.folder.name}")
    shutil.rmtree(going, ignore_errors=True)
    try:
        run.folder.rename(going)
    except FileNotFoundError:
        return False
    with contextlib.suppress(FileNotFoundError):  # somebody else has begun to remove the same
        shutil.rmtree(going)
    shutil.rmtree(going, ignore_errors=True)
    return True


def parse_age(text: str) -> float | None:
    """Parse `90s`, `30min`, `12h`, `7d` or `2w` into seconds; None for any other text."""
    units = {"s": 1, "min": 60, "h": 3600, "d": 86400, "w": 7 * 86400}
    number = text.rstrip("abcdefghijklmnopqrstuvwxyz")
    unit = units.get(text[len(number) :])
    if unit is None or not number.isdecimal() or not number.isascii():
        return None
    return float(number) * unit
