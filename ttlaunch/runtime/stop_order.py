"""The order to stop, at a rank: all ranks leave after the same step, although the order reaches them in different steps.

SIGUSR1 is the order to stop. A thread of the rank receives it at once, even while the main thread waits. It writes down the step
to which the rank is committed, and the rank begins no further step. When all ranks have written theirs, the launcher writes the
largest of these steps to the run folder and signals again. Every rank continues to the end of that step and stops. What a rank
writes does not depend on the progress of another rank, so no ranks wait for each other in a circle. Without an order, this costs
one comparison in each step and no message. Between an order and the rank's answer, at most one step begins.
"""

import json
import signal
import threading
from collections.abc import Callable
from pathlib import Path

from ttlaunch import contract


class StopOrder:
    """What a rank knows of the order, shared by its main thread and the thread that receives the signal."""

    def __init__(self, *, steps_done: int = 0) -> None:
        """Begin without an order; `steps_done` steps were made before."""
        self._begun = steps_done
        self._last: int | None = None
        self._is_ordered = False
        self._decided = threading.Condition()

    def ends_after(self, step: int) -> bool:
        """Whether the rank stops after a step, which it has begun; the same on all ranks, however often it is asked.

        After an order, this waits until the last step is decided. Without an order, the rank is now committed to the next step.
        """
        with self._decided:
            if step < self._begun:
                return False
            self._decided.wait_for(lambda: not self._is_ordered or self._last is not None)
            if self._last is not None and step >= self._last:
                return True
            self._begun = step + 1
            return False

    def has_ended(self, step: int) -> bool:
        """Whether the run ends after a step or before it, as far as is known now; this never waits."""
        with self._decided:
            return self._last is not None and step >= self._last

    def freeze(self) -> int:
        """Begin no further step until `decide`; returns the last one that has begun or must begin."""
        with self._decided:
            self._is_ordered = True
            return self._begun

    def decide(self, last_step: int) -> None:
        """Say after which step all ranks stop: the largest that any of them has returned from `freeze`."""
        with self._decided:
            self._last = last_step
            self._decided.notify_all()


def hold_stop_signals() -> None:
    """Keep SIGUSR1 for the thread that takes it; call before any other thread starts, since they inherit this."""
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})
    signal.signal(signal.SIGUSR1, signal.SIG_DFL)  # an ignored one would not wait


def take_stop_signals(order: StopOrder, *, run_dir: Path, answer: Callable[[int], object]) -> None:
    """Take every SIGUSR1 in a thread, which ends with the process.

    Args:
        order: Receives what the signals mean.
        run_dir: Where the launcher writes the last step.
        answer: Called once with the step that `order` was frozen in.
    """
    threading.Thread(target=_take_signals, args=(order, run_dir, answer), daemon=True).start()


def _take_signals(order: StopOrder, run_dir: Path, answer: Callable[[int], object]) -> None:
    signal.sigwait({signal.SIGUSR1})
    answer(order.freeze())
    while (last_step := read_last_step(run_dir)) is None:
        signal.sigwait({signal.SIGUSR1})
    order.decide(last_step)


def read_last_step(run_dir: Path) -> int | None:
    """The step after which all ranks stop, from the launcher's file; None if there is none yet."""
    try:
        word = json.loads((run_dir / contract.ENDING_FILE).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    return None if word["after_step"] is None else int(word["after_step"])
