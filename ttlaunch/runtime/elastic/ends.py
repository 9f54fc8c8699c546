"""Why a worker of an elastic run takes part no longer, and when the whole run ends."""

from typing import Protocol


class LeftError(Exception):
    """This worker takes part no longer; its role ends, and that is no failure. The text says why."""


class FinishedError(LeftError):
    """The run has ended, and this worker has made all of its steps, too, although it knew no epoch at that moment."""


class AbandonedError(LeftError):
    """The run has lost its coordinator: this worker saves its state, and ends."""


class HasLast(Protocol):
    """The order to stop the run; see `runtime/stop_order.py`."""

    def has_ended(self, step: int) -> bool: ...
