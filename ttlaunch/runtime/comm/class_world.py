"""One rank of each class of ranks with equal shares on a virtual clock, each with a script: rows of messages between whole classes.

It does what `VirtualWorld` does for ranks that are folded, for scripts alone, and handles all that happens at one time together: each
exchange is C^2 flows, all of which begin within a few moments. Shapes: C = classes.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import numpy as np

from ttlaunch.runtime.comm.class_flows import Between, ClassFlows, Ints
from ttlaunch.runtime.comm.class_pairs import ClassPairs
from ttlaunch.runtime.comm.turns import Script, Turns
from ttlaunch.runtime.comm.virtual_clock import Link, VirtualClock
from ttlaunch.runtime.comm.virtual_world import Classes, NotAlikeError
from ttlaunch.runtime.world import Rank


class Messages(NamedTuple):
    """Messages with all ranks of some classes, without the rank itself; K classes.

    Attributes:
        others: The places of those classes, shape (K,).
        sizes: The bytes of each message, shape (K,).
    """

    others: Ints
    sizes: Ints


@dataclass(eq=False, slots=True)
class _Wait:
    rank: Rank
    left: int
    ended_s: float = 0.0


class _Groups:
    """Messages of a rank that began together, for which it waits together; by number.

    Attributes:
        posted_s: When each began.
        left: How many of its flows are not done.
    """

    def __init__(self) -> None:
        self._count = 0
        self.posted_s, self.left = np.zeros(64), np.zeros(64, dtype=np.intp)

    def add(self, count: int, now_s: float) -> int:
        """Return the number of a new group of so many flows."""
        number, self._count = self._count, self._count + 1
        if number == len(self.left):
            self.posted_s = np.concatenate((self.posted_s, np.zeros_like(self.posted_s)))
            self.left = np.concatenate((self.left, np.zeros_like(self.left)))
        self.posted_s[number], self.left[number] = now_s, count
        return number


class ClassWorld:
    """The first ranks of all classes, their messages on the way, and whose turn it is."""

    def __init__(self, classes: Classes, clock: VirtualClock, link: Link) -> None:
        """Begin without messages.

        Args:
            classes: The classes; every rank is in one.
            clock: The clocks of their first ranks.
            link: What messages cost; ranks do not share links.
        """
        self._clock, self._link = clock, link
        self._first = [ranks[0] for ranks in classes]
        self._turns = Turns(self._first, when_stuck=self._go_on)
        self._pairs, self._flows = ClassPairs(len(classes)), ClassFlows(classes, link)
        self._groups = _Groups()
        self._waits: dict[int, _Wait] = {}  # by group
        self._starting: dict[float, list[Between]] = defaultdict(list)
        self._is_shared = True  # whether all messages under way have their rates
        self._shares = 0  # how often they got some
        self._error: NotAlikeError | None = None

    def run(self, scripts: Mapping[Rank, Script]) -> None:
        """Run the scripts of all classes to their ends; call this once.

        Raises:
            NotAlikeError: Messages do not match, so ranks do not do what their scripts say.
        """
        self._turns.run({}, scripts)
        if self._error is not None:
            raise self._error
        for error in self._turns.errors.values():
            raise NotAlikeError(f"{type(error).__name__}: {error}")
        if not self._pairs.is_complete:
            raise NotAlikeError("messages have no counterpart")

    def enter_step(self, rank: Rank, *, is_step: bool) -> None:
        """Do nothing: whoever has written the scripts knows what belongs to a step."""

    def compute_each(self, rank: Rank, each_s: Sequence[float]) -> None:
        """Let a rank compute several things, one after the other."""
        self._clock.compute_each(rank, each_s)

    def begin(self, place: int, messages: Messages, *, tag: int, is_send: bool) -> int:
        """Begin messages of the class at a place with whole classes, all at once; return the number of their group.

        Raises:
            NotAlikeError: The other end of one has another size, or one has no bytes.
        """
        now_s, others = self._clock.now_s(self._first[place]), messages.others
        if not messages.sizes.all():
            raise NotAlikeError(f"a message under tag {tag} has no bytes")
        group = self._groups.add(len(others), now_s)
        where = (place, others) if is_send else (others, place)
        found, theirs = self._pairs.pair(where, group, messages.sizes, tag=tag, is_send=is_send)
        if len(found):
            own = np.full(len(found), place), np.full(len(found), group)
            (source, sends), (dest, receives) = (own, (others[found], theirs))[:: 1 if is_send else -1]
            self._start(Between(source, dest, sends, receives, messages.sizes[found]))
        return group

    def pauses(self, rank: Rank, groups: Iterable[int]) -> Iterator[None]:
        """Yield where a rank has to wait until all messages of some groups are done."""
        left = [one for one in groups if self._groups.left[one]]
        if left:
            wait = _Wait(rank, len(left))
            self._waits |= dict.fromkeys(left, wait)
            yield
            self._clock.resume(rank, wait.ended_s)

    def _go_on(self) -> bool:
        """Let events happen until a rank can continue."""
        try:
            while not self._turns.can_go_on:
                if not self._clock.advance():
                    raise NotAlikeError("ranks wait for each other")  # noqa: TRY301  as what events raise
        except NotAlikeError as error:
            self._error = error
        return self._error is None

    def _start(self, flows: Between) -> None:
        """Let flows begin as soon as both of their ends have."""
        posted_s = self._groups.posted_s
        begin_s = np.maximum(posted_s[flows.sends], posted_s[flows.receives])
        for at_s in np.unique(begin_s).tolist():
            starting = self._starting[at_s]
            if not starting:
                self._clock.at(at_s, self._begin_all)
            starting.append(flows.of(np.flatnonzero(begin_s == at_s)))

    def _begin_all(self, at_s: float) -> None:
        """Let all messages begin that begin at this time."""
        flows = Between(*map(np.concatenate, zip(*self._starting.pop(at_s), strict=True)))
        for place, count in _counted(flows.source, flows.dest):
            self._clock.begin_message(self._first[place], at_s, count=count)
        self._flows.add_all(flows, now_s=at_s)
        self._share_at(at_s)

    def _share_at(self, at_s: float) -> None:
        """Give messages their rates when everything else of this time has happened."""
        if self._is_shared:
            self._is_shared = False
            self._clock.at(at_s, self._share, is_last=True)

    def _share(self, at_s: float) -> None:
        self._is_shared = True
        self._shares += 1
        next_s, rows = self._flows.share_rows(at_s)
        if len(rows):
            self._clock.at(next_s, partial(self._pass_all, rows, self._shares))

    def _pass_all(self, rows: Ints, shares: int, at_s: float) -> None:
        """Let flows end that pass at this time, unless rates have changed since they were found: free senders, and receivers after the latency."""
        if shares != self._shares:
            return
        passed = self._flows.remove_all(rows)
        self._share_at(at_s)
        self._finish(passed.source, passed.sends, at_s)
        self._clock.at(at_s + self._link.latency_s, partial(self._finish, passed.dest, passed.receives))

    def _finish(self, places: Ints, groups: Ints, at_s: float) -> None:
        """Note that one end of each of some flows is done, and wake who waits for nothing else."""
        for place, count in _counted(places):
            self._clock.end_message(self._first[place], at_s, count=count)
        left = self._groups.left
        numbers, counts = np.unique(groups, return_counts=True)
        left[numbers] -= counts
        for group in numbers[left[numbers] == 0].tolist():
            wait = self._waits.pop(group, None)
            if wait is not None:
                wait.left -= 1
                if not wait.left:
                    wait.ended_s = at_s
                    self._turns.wake(wait.rank)


def _counted(*places: Ints) -> Iterator[tuple[int, int]]:
    """Yield which numbers there are in some arrays, and how often each."""
    counts = np.bincount(np.concatenate(places))
    found = np.flatnonzero(counts)
    yield from zip(found.tolist(), counts[found].tolist(), strict=True)
