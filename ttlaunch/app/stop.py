"""End a run from another process, as Ctrl-C in its own terminal would: first with a grace, then more firmly."""

import signal
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ttlaunch.running.runs.launcher import Launcher

_TICK_S = 0.05
_PRESS_S = 8.0
"""What a run may take after it was pressed: ranks have at most 5 s then."""
_LAST_S = 15.0


def press(
    launcher: "Launcher", *, grace_s: float | None, now: bool, say: Callable[[str], None] = lambda _: None
) -> bool:
    """Send up to three interrupts, wait after each, and return whether the run has ended.

    Args:
        launcher: The process that watches over the run.
        grace_s: Seconds to wait before the second; None: the run's own grace, however long.
        now: Do not wait for a step, as three Ctrl-C would.
        say: Told what is done, in a few words.
    """
    patience = [0.0, 0.0, _LAST_S] if now else [grace_s, _PRESS_S, _LAST_S]
    for seconds, words in zip(patience, ("told to end", "told to hurry", "told to end at once"), strict=True):
        if not launcher.signal(signal.SIGINT):
            break
        say(words)
        if _has_ended(launcher, seconds, at_least=3 * _TICK_S):
            return True
    return not launcher.is_alive


def _has_ended(launcher: "Launcher", seconds: float | None, *, at_least: float) -> bool:
    """Wait for a launcher to end, without a limit for None: it enforces its own grace. Signals in quick succession could merge."""
    deadline = None if seconds is None else time.monotonic() + max(seconds, at_least)
    while launcher.is_alive:
        if deadline is not None and time.monotonic() >= deadline:
            return False
        time.sleep(_TICK_S)
    return True
