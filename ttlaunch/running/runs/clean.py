"""Choose, measure and remove run folders; never that of an active run."""

import contextlib
import shutil
import time
from collections.abc import Sequence
from dataclasses import dataclass

from ttlaunch.running.runs.launcher import is_running
from ttlaunch.running.runs.overview import RunSummary

_REMOVED = ".deleted"


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
        runs: All runs, oldest first.
        older_than_s: Remove only runs that ended longer ago; None for any age. A run of unknown age stays.
        keep: The number of the newest finished runs that stay at any age.
        now: Seconds since the epoch.
    """
    now = time.time() if now is None else now
    over = [run for run in runs if run.is_over]
    over = over[: len(over) - keep] if keep else over
    if older_than_s is None:
        return over
    return [run for run in over if run.ended is not None and now - run.ended > older_than_s]


def measure(run: RunSummary) -> Removable:
    """Measure the size of a run's folder on the disk; links are not followed."""
    size = 0
    with contextlib.suppress(OSError):  # another process removes it at the same time
        for path in run.folder.rglob("*"):
            with contextlib.suppress(OSError):
                size += path.lstat().st_blocks * 512
    return Removable(run, size)


def remove(run: RunSummary) -> bool:
    """Remove the folder of a finished run; return False if the run is active or another process has removed the folder.

    The folder is renamed first, so that a half-removed one does not look like a run. If an earlier removal was killed, its
    remaining files under that name are removed too.

    Raises:
        OSError: It cannot be removed.
    """
    if run.folder.is_symlink() or is_running(run.folder):
        return False
    removed = run.folder.with_name(f"{_REMOVED}-{run.folder.name}")
    shutil.rmtree(removed, ignore_errors=True)
    try:
        run.folder.rename(removed)
    except FileNotFoundError:
        return False
    with contextlib.suppress(FileNotFoundError):  # another process has begun to remove the same folder
        shutil.rmtree(removed)
    shutil.rmtree(removed, ignore_errors=True)
    return True


def parse_age(text: str) -> float | None:
    """Parse `90s`, `30min`, `12h`, `7d` or `2w` into seconds; None for any other text."""
    units = {"s": 1, "min": 60, "h": 3600, "d": 86400, "w": 7 * 86400}
    number = text.rstrip("abcdefghijklmnopqrstuvwxyz")
    unit = units.get(text[len(number) :])
    if unit is None or not number.isdecimal() or not number.isascii():
        return None
    return float(number) * unit
