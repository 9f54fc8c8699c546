"""Find training losses that are far above those of the steps before, by a bound that single large losses do not move."""

import math
from collections import deque
from typing import NamedTuple

_RECENT, _MOST = 32, 8
_DEVIATIONS, _SHARE = 10.0, 0.5


class LossSpike(NamedTuple):
    """A step whose training loss was far above those of the steps before.

    Attributes:
        median: The median of the losses before.
        bound: What the loss has exceeded: the median, and ten times their median absolute deviation, or a half of the median
            where that is more.
    """

    step: int
    loss: float
    median: float
    bound: float


class LossSpikes:
    """The losses of one rank, step by step.

    Attributes:
        found: The first spikes.
    """

    def __init__(self) -> None:
        self.found: list[LossSpike] = []
        self._recent: deque[float] = deque(maxlen=_RECENT)

    def add(self, step: int, loss: float) -> None:
        """Compare a loss with the last finite ones, and keep it as one of these.

        Cost: a comparison with each of them; two medians only for a loss that is above all of them.
        """
        if not math.isfinite(loss):
            return
        recent = self._recent
        if len(recent) == _RECENT and len(self.found) < _MOST and loss > max(recent):
            import statistics  # noqa: PLC0415 - takes as long as 15 other modules, and few runs have a spike

            median = statistics.median(recent)
            deviation = statistics.median(abs(one - median) for one in recent)
            bound = median + max(_DEVIATIONS * deviation, _SHARE * abs(median))
            if loss > bound:
                self.found.append(LossSpike(step, loss=loss, median=median, bound=bound))
        recent.append(loss)
