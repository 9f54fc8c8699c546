"""One rank of each class of ranks with equal shares on a virtual clock, each with a script: rows of messages between whole classes.

It does what `VirtualWorld` does for ranks that are folded, for scripts alone, and handles all that happens at one time together: each
exchange is C^2 flows, all of which begin within a few moments. Shapes: C = classes.
"""

from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

from ttlaunch.runtime.comm.class_flows import ClassFlows, Ints
from ttlaunch.runtime.comm.turns import Script, Turns
from ttlaunch.runtime.comm.virtual_clock import Link, VirtualClock
from ttlaunch.runtime.comm.virtual_world import Classes, NotAlikeError
from ttlaunch.runtime.world import Rank


class Begun(NamedTuple):
    """Messages with all ranks of a class, without the rank itself, that begin at once.

    Attributes:
        other: The place of that class.
        peers: How many there are.
        size: The bytes of each.
    """

    other: int
    peers: int
    size: int


@dataclass(eq=False, slots=True)
class _Wait:
    rank: Rank
    left: int
    ended_s: float = 0.0


@dataclass(eq=False, slots=True)
class Group:
    """Messages of a rank that began together, for which it waits together.

    Attributes:
        left: How many of its flows are not done.
        wait: Who waits for them now.
    """

    left: int
    wait: _Wait | None = None


class _End(NamedTuple):
    """One end of a flow that has begun."""

    posted_s: float
    peers: int
    size: int
    group: Group


class _Flow(NamedTuple):
    source: int
    dest: int
    sends: _End
    receives: _End


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
        self._sizes = [len(ranks) for ranks in classes]
        self._first = [ranks[0] for ranks in classes]
        self._turns = Turns(self._first, when_stuck=self._go_on)
        self._flows = ClassFlows(self._first, link)
        self._under_way: dict[int, _Flow] = {}  # by row
        self._unpaired: dict[tuple[int, int, int, bool], deque[_End]] = {}
        self._starting: dict[float, list[_Flow]] = defaultdict(list)
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
        if any(self._unpaired.values()):
            raise NotAlikeError("messages have no counterpart")

    def enter_step(self, rank: Rank, *, is_step: bool) -> None:
        """Do nothing: whoever has written the scripts knows what belongs to a step."""

    def compute_each(self, rank: Rank, each_s: Sequence[float]) -> None:
        """Let a rank compute several things, one after the other."""
        self._clock.compute_each(rank, each_s)

    def begin(self, place: int, batches: Sequence[Begun], *, tag: int, is_send: bool) -> Group:
        """Begin messages of the class at a place with whole classes, all at once.

        Raises:
            NotAlikeError: The other end of one has another size, or other numbers of ranks.
        """
        now_s, group = self._clock.now_s(self._first[place]), Group(len(batches))
        for other, peers, size in batches:
            end = _End(now_s, peers, size, group)
            source, dest = (place, other) if is_send else (other, place)
            waiting = self._unpaired.get((source, dest, tag, not is_send))
            if not waiting:
                self._unpaired.setdefault((source, dest, tag, is_send), deque()).append(end)
                continue
            ends = (end, waiting.popleft()) if is_send else (waiting.popleft(), end)
            self._start(_Flow(source, dest, *ends), tag)
        return group

    def pauses(self, rank: Rank, groups: Iterable[Group]) -> Iterator[None]:
        """Yield where a rank has to wait until all messages of some groups are done."""
        left = [one for one in groups if one.left]
        if left:
            wait = _Wait(rank, len(left))
            for one in left:
                one.wait = wait
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

    def _start(self, flow: _Flow, tag: int) -> None:
        """Let a flow begin as soon as both of its ends have."""
        sends, receives = flow.sends, flow.receives
        out, into = self._sizes[flow.source] * sends.peers, self._sizes[flow.dest] * receives.peers
        if out != into or sends.size != receives.size or not sends.size:
            source, dest = self._first[flow.source], self._first[flow.dest]
            raise NotAlikeError(
                f"{sends.peers} messages of {sends.size} bytes under tag {tag} from rank {source} meet {receives.peers} of "
                f"{receives.size} bytes at rank {dest}"
            )
        at_s = max(sends.posted_s, receives.posted_s)
        starting = self._starting[at_s]
        if not starting:
            self._clock.at(at_s, self._begin_all)
        starting.append(flow)

    def _begin_all(self, at_s: float) -> None:
        """Let all messages begin that begin at this time."""
        starting = self._starting.pop(at_s)
        for place, count in Counter([place for flow in starting for place in flow[:2]]).items():
            self._clock.begin_message(self._first[place], at_s, count=count)
        rows = self._flows.add_all(
            [flow[:2] for flow in starting],
            [(flow.sends.peers, flow.receives.peers) for flow in starting],
            [flow.sends.size for flow in starting],
            now_s=at_s,
        )
        self._under_way.update(zip(rows, starting, strict=True))
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
        passed = [self._under_way.pop(row) for row in rows.tolist()]
        self._flows.remove_all(rows)
        self._share_at(at_s)
        self._finish([(flow.source, flow.sends.group) for flow in passed], at_s)
        arriving = [(flow.dest, flow.receives.group) for flow in passed]
        self._clock.at(at_s + self._link.latency_s, partial(self._finish, arriving))

    def _finish(self, ends: Sequence[tuple[int, Group]], at_s: float) -> None:
        """Note that one end of each of some flows is done, and wake who waits for nothing else."""
        for place, count in Counter([place for place, _ in ends]).items():
            self._clock.end_message(self._first[place], at_s, count=count)
        for group, count in Counter([group for _, group in ends]).items():
            group.left -= count
            if not group.left and (wait := group.wait) is not None:
                wait.left -= 1
                if not wait.left:
                    wait.ended_s = at_s
                    self._turns.wake(wait.rank)
