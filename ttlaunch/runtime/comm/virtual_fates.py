"""What happens to ranks on a virtual clock by order: they end, are stopped and continued, at a time or when ranks have reported a step.

An order takes effect as a signal does in a run: what a rank had begun to send when it ended does not arrive, a stopped rank goes on where
it was, and only a hard end reaches a rank that is stopped.
"""

import math
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from enum import StrEnum
from functools import partial

from ttlaunch.runtime.comm.virtual_clock import VirtualClock
from ttlaunch.runtime.world import Rank


class RankEndedError(BaseException):
    """Ends a rank whose process has ended; not an `Exception`, so that no recipe handles it."""


class Deed(StrEnum):
    """What an order does to its ranks."""

    END = "end"
    ASK = "ask"  # end them as soon as they are not stopped
    STOP = "stop"
    CONTINUE = "continue"
    NOTE = "note"  # nothing: only when its moment came is to be known


@dataclass(frozen=True)
class FateOrder:
    """What is to happen.

    Attributes:
        index: Its number, for `Made`.
        ranks: Which ranks it hits; none with `Deed.NOTE`.
        step: It happens when one of its ranks, or without any one of all ranks, has reported this step; 0: at the time `at_s`.
    """

    index: int
    deed: Deed
    ranks: frozenset[Rank]
    step: int = 0
    at_s: float = 0.0


@dataclass(frozen=True)
class Made:
    """An order whose moment has come.

    Attributes:
        step: The largest step that one of its ranks, or without any one of all ranks, had reported.
        ranks: Those of the ranks that it hit that had not ended.
    """

    index: int
    at_s: float
    step: int
    ranks: tuple[Rank, ...]


class Fates:
    """When ranks end and stand still; only ranks that run are known here.

    Attributes:
        made: What has happened, in order.
        has_orders: Whether anything is ever to happen.
    """

    def __init__(self, orders: Iterable[FateOrder], ranks: Collection[Rank], clock: VirtualClock) -> None:
        """Know what is to happen to these ranks."""
        self._pending = list(orders)
        self.has_orders = bool(self._pending)
        self._ranks, self._clock = frozenset(ranks), clock
        self._steps = dict.fromkeys(ranks, 0)
        self._ends: dict[Rank, float] = {}
        self._halts: dict[Rank, float] = {}  # since when a stopped rank stands still
        self._goes_on: dict[Rank, float] = {}  # when a rank that was stopped is continued
        self.made: list[Made] = []
        self._wake: Callable[[Rank, float], None] = lambda _rank, _at_s: None
        self._is_over: Callable[[Rank], bool] = lambda _: False

    @property
    def is_broken(self) -> bool:
        """Whether a rank has ended early or stands still, so that others may wait for it in vain."""
        return bool(self._ends or self._halts)

    def begin(self, wake: Callable[[Rank, float], None], is_over: Callable[[Rank], bool]) -> None:
        """Begin to wait for the moments.

        Args:
            wake: Ends the wait of a rank at a time, if it waits or stands still.
            is_over: Whether a rank has come to its end.
        """
        self._wake, self._is_over = wake, is_over
        for order in self._pending:
            if not order.step:
                self._clock.at(order.at_s, partial(self._make, order))

    def report(self, rank: Rank, step: int) -> None:
        """Note that a rank has reported a step."""
        self._steps[rank] = step
        for order in list(self._pending):
            if order.step and step >= order.step and (not order.ranks or rank in order.ranks):
                self._make(order, self._clock.now_s(rank))

    def come_to_now(self, rank: Rank) -> None:
        """Let happen what was to happen at a time that the clock of a rank, whose turn it is, has passed while it computed."""
        now_s = self._clock.now_s(rank)
        due = [
            one for one in self._pending if not one.step and one.at_s <= now_s and (not one.ranks or rank in one.ranks)
        ]
        for order in sorted(due, key=lambda one: one.at_s):
            self._make(order, order.at_s)

    @property
    def halted(self) -> Collection[Rank]:
        """The ranks that stand still."""
        return self._halts

    def last_step(self, rank: Rank) -> int:
        return self._steps[rank]

    def has_ended(self, rank: Rank, at_s: float) -> bool:
        """Whether a rank ended before a time; one that stands still and was asked to end has not."""
        return rank not in self._halts and self._ends.get(rank, math.inf) < at_s

    def is_ending(self, rank: Rank) -> bool:
        """Whether the rank, which runs and is not stopped, ends now."""
        return self._ends.get(rank, math.inf) <= self._clock.now_s(rank)

    def halted_s(self, rank: Rank) -> float | None:
        """Return since when the rank, whose turn it is, stands still; None if it does not."""
        since_s = self._halts.get(rank)
        return since_s if since_s is not None and since_s <= self._clock.now_s(rank) else None

    def end_halt(self, rank: Rank) -> float | None:
        """Return when a rank that stood still was continued, and forget it; None if it was not."""
        return self._goes_on.pop(rank, None)

    def _make(self, order: FateOrder, at_s: float) -> None:
        if order not in self._pending:
            return
        self._pending.remove(order)
        hit = order.ranks & self._ranks
        alive = sorted(rank for rank in hit if not self._is_over(rank) and not self.has_ended(rank, at_s))
        if order.ranks and not alive:
            return
        step = max(self._steps[rank] for rank in (hit or self._ranks))
        self.made.append(Made(order.index, at_s, step, tuple(alive)))
        for rank in alive:
            if order.deed in {Deed.END, Deed.ASK}:
                self._ends[rank] = min(at_s, self._ends.get(rank, math.inf))
                self._clock.at(at_s, partial(self._end, rank, is_hard=order.deed is Deed.END))
            elif order.deed is Deed.STOP:
                self._halts.setdefault(rank, at_s)
            elif order.deed is Deed.CONTINUE and rank in self._halts:
                self._clock.at(at_s, partial(self._continue, rank))

    def _end(self, rank: Rank, at_s: float, *, is_hard: bool) -> None:
        if is_hard:
            self._halts.pop(rank, None)
        if rank not in self._halts:
            self._wake(rank, at_s)

    def _continue(self, rank: Rank, at_s: float) -> None:
        if self._halts.pop(rank, None) is not None:
            self._goes_on[rank] = at_s
            self._wake(rank, at_s)
