"""How ranks on a virtual clock spend their steps, and by how much their speed differs from step to step."""

import random
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

from ttlaunch.runtime.comm.virtual_clock import Spent, VirtualClock
from ttlaunch.runtime.comm.virtual_fates import Fates
from ttlaunch.runtime.comm.virtual_world import NotAlikeError
from ttlaunch.runtime.telemetry.memory import TensorOwners
from ttlaunch.runtime.telemetry.traffic_counter import TrafficCounter
from ttlaunch.runtime.world import Rank


@dataclass(frozen=True)
class Jitter:
    """By how much the speed of a rank differs from step to step.

    Attributes:
        part: The most by which a step's computing differs from the usual time, as a part of it; 0: none.
    """

    part: float
    seed: int

    def factor(self, rank: Rank, step: int) -> float:
        """Return how many times as long a rank computes in a step, drawn evenly around 1."""
        drawn = random.Random(f"jitter {self.seed} {rank} {step}").random()  # noqa: S311 - nothing secret
        return 1.0 + self.part * (2.0 * drawn - 1.0)


class _EqualShares(TrafficCounter):
    """Counts for a rank that stands for others, and ends it as soon as it is known that they are not alike."""

    def note_shares(self, place: int, /, **facts: Sequence[int]) -> None:
        """Note numbers of shares.

        Raises:
            NotAlikeError: They differ.
        """
        super().note_shares(place, **facts)
        if any(len(set(numbers)) > 1 for numbers in facts.values()):
            raise NotAlikeError("ranks own shares of unequal size")


class KnowsSteps(Protocol):
    """Where ranks live, which knows what of their traffic is within steps."""

    def enter_step(self, rank: Rank, *, is_step: bool) -> None:
        """Note whether what a rank sends from now on belongs to a step."""


class TimedSteps:
    """How one rank spends its steps; stands where a rank that is profiled has its profiler."""

    is_active = False

    def __init__(
        self,
        rank: Rank,
        warm_up: int,
        *,
        clock: VirtualClock,
        virtual: KnowsSteps,
        facts: Mapping[str, int],
        fates: Fates,
        jitter: Jitter,
        stops_at_shares: bool = False,
    ) -> None:
        """Begin before the first step.

        Args:
            rank: The rank.
            warm_up: So many steps do not count.
            clock, virtual: Where the rank lives.
            facts: Its numbers for the formula of its traffic.
            fates: What happens to it.
            jitter: By how much its speed differs.
            stops_at_shares: Whether it stands for others, which it cannot if it notes shares of unequal size.
        """
        self._warm_up = warm_up
        self.owners = TensorOwners()
        self.end = "waits"
        self.traffic = _EqualShares(profile=self) if stops_at_shares else TrafficCounter(profile=self)
        self.traffic.note(**facts)
        self._rank, self._clock, self._world = rank, clock, virtual
        self._fates, self._jitter = fates, jitter
        self._before = Spent()
        self._each_s: list[float] = []
        self._in_steps = Spent()

    def begin_step(self, step: int) -> None:
        if self._jitter.part:
            self._clock.set_jitter(self._rank, self._jitter.factor(self._rank, step))
        self._before = self._clock.spent(self._rank)
        self._world.enter_step(self._rank, is_step=True)

    def end_step(self, step: int) -> dict[str, int]:
        if step > self._warm_up:
            spent = self._clock.spent(self._rank).since(self._before)
            known = self._in_steps
            self._in_steps = Spent(
                known.computing_s + spent.computing_s,
                known.exposed_s + spent.exposed_s,
                known.waiting_s + spent.waiting_s,
            )
            self._each_s.append(spent.all_s)
        self._world.enter_step(self._rank, is_step=False)
        self._fates.report(self._rank, step)
        return {}

    def mark(self, _name: str) -> AbstractContextManager[Any]:
        return nullcontext()

    def close(self) -> None:
        """Leave nothing behind."""

    def as_json(self) -> dict[str, Any]:
        spent = self._in_steps if self._each_s else self._clock.spent(self._rank)
        return {
            "steps": len(self._each_s),
            "all_s": spent.all_s,
            **vars(spent),
            "each_s": self._each_s,
            "facts": self.traffic.facts,
            "end": "stopped" if self._rank in self._fates.halted else self.end,
            "last_step": self._fates.last_step(self._rank),
            "last_s": self._clock.now_s(self._rank),
        }
