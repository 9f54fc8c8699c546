"""How many ranks of a plan compute at the same time, which is how many copies of them go on rehearsing."""

import time
from collections import Counter
from dataclasses import dataclass, field

from ttlaunch.runtime.comm.virtual_clock import Spent, VirtualClock
from ttlaunch.runtime.world import Rank

_SETTLED, _FEWEST = 1, 3


@dataclass
class Concurrency:
    """Watches one copy of all ranks, and decides once whether it goes on.

    A core that has nothing to do lets the others run faster, so as many copies should compute as ranks of the plan do: the stages of a
    pipeline all do most of the time, but a rank that adds up gradients computes while the workers wait for it.

    Attributes:
        clock: The clock of the copy's ranks.
        ranks: All of them, also those that count no steps.
        copy: Which copy this is; the first one always goes on.
        copies: How many there are.
        decides_at: When it decides, on the monotonic clock, if some rank has done a few steps.
        is_spare: Whether fewer ranks compute at a time than there are copies up to this one.
        counts_from: When steps have to begin that count: before, copies computed that have ended.
    """

    clock: VirtualClock
    ranks: tuple[Rank, ...]
    copy: int
    copies: int
    decides_at: float
    is_spare: bool = False
    counts_from: float = 0.0
    _is_decided: bool = False
    _steps: Counter[Rank] = field(default_factory=Counter)
    _before: dict[Rank, Spent] = field(default_factory=dict)

    def note(self, rank: Rank) -> None:
        """Note that a rank has done a step, and decide if it is time to."""
        if self._is_decided:
            return
        self._steps[rank] += 1
        now = time.monotonic()
        if self._steps[rank] == _SETTLED and not self._before:
            self._before = {one: self.clock.spent(one) for one in self.ranks}
        elif now >= self.decides_at and self._steps[rank] >= _FEWEST:
            self._is_decided = True
            going_on = max(1, round(self.at_a_time()))
            self.is_spare = self.copy >= going_on
            self.counts_from = now if going_on < self.copies else 0.0

    def at_a_time(self) -> float:
        """Return how many ranks have computed at a time, on average since the first step was done."""
        spent = [self.clock.spent(one).since(before) for one, before in self._before.items()]
        return sum(one.computing_s for one in spent) / max(one.all_s for one in spent)
