"""A worker that gets the state while the members of a run go on, and makes their steps again, before it takes part.

    members   step 40    41    42    43    44    45 ...                  nobody waits for the follower
    follower     state after 40 ---->  41 42 43 44 | takes part          each member gives 1/n of the state and of each mean

With a state it applies the mean gradients of the steps that follow it, which is much faster than making them. When there is none left
to apply, the worker says that it is ready, and goes on so until the members change.

Shapes: N = values of the flat gradient, n = members.
"""

import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Protocol, TypeVar

import torch
from torch import Tensor

from ttlaunch.contract import worker_name
from ttlaunch.membership.messages import Follow, Seat
from ttlaunch.runtime.comm.grpc.directory import Directory
from ttlaunch.runtime.comm.grpc.shared_state import NotHeldError
from ttlaunch.runtime.comm.grpc.vectors import Key
from ttlaunch.runtime.comm.protocol import CommunicationError
from ttlaunch.runtime.elastic.feed import MEAN, NUMBERS, STATE, Mean, mean_of, numbers_of
from ttlaunch.runtime.elastic.state_transfer import LaterState, ReplicaState
from ttlaunch.runtime.world import Rank
from ttlaunch.spec.recipe.blocks import contiguous_blocks

if TYPE_CHECKING:  # ranks of every recipe import this file, also where gRPC is not installed
    from ttlaunch.runtime.comm.grpc.client import PeerClient

_LEADS = (1, 2, 4, 8, 16)
"""How many steps after the newest one the state is asked for: a longer time for the request where the one before came too late."""

_AGAIN_S = 0.02
_NEXT_ORDER_S = 60.0  # until the members have changed after one of them was lost
_CALL_S = 3600.0  # a change of the members ends calls sooner
_MOST_CALLS = 8  # at a time

_Found = TypeVar("_Found")


class Count(Protocol):
    """Counts a state or a mean that others have given."""

    def __call__(self, given: Mapping[int, int], *, is_state: bool) -> object:
        """Take how many bytes each has given, by number."""


@dataclass(frozen=True)
class FollowerWays:
    """What a follower needs of its worker.

    Attributes:
        order: Returns the newest order; None before the first.
        check: Raises `EpochOverError` when this worker has to take part, and `LeftError` when it has to end.
        directory: Returns how the given workers reach each other; the last one is this worker.
        closed_at_end: Closes a client when the block ends, or when this worker has to take part.
        count: Counts what others have given.
        ready: Says that this worker can take part, with the step that it has.
    """

    order: Callable[[], Follow | None]
    check: Callable[[], object]
    directory: Callable[[Sequence[Seat], int], Directory]
    closed_at_end: "Callable[[PeerClient], AbstractContextManager[PeerClient]]"
    count: Count
    ready: Callable[[int], object]


@dataclass
class _Givers:
    """Connections to the members of an epoch."""

    order: Follow
    clients: "list[PeerClient]"
    closing: ExitStack = field(default_factory=ExitStack)

    def are_there(self, order: Follow | None) -> bool:
        """Whether all of them are members of the newest epoch, too."""
        return order is None or set(self.order.seats) <= set(order.seats)

    def given(self, sizes: Iterable[int]) -> dict[int, int]:
        """Return how many bytes each of them has given, by number."""
        return dict(zip((seat.member.number for seat in self.order.seats), sizes, strict=True))


class Follower:
    """Gets what the members make; in the role's thread.

    Attributes:
        numbers: What belongs to the state after the last mean besides tensors.
        later: A whole state that has come in place of a mean, and its step; None otherwise.

    Cost: S bytes, and those of a mean for each step until this worker takes part; 1/n of each from each member.
    """

    def __init__(self, own: Seat, replica: ReplicaState, ways: FollowerWays, *, values: int) -> None:
        """Get nothing yet; `values` is N."""
        self.numbers: Sequence[float] | None = None
        self.later: tuple[LaterState, int] | None = None
        self._own, self._replica, self._ways, self._values = own, replica, ways, values
        self._givers: _Givers | None = None
        self._lost = 0  # the epoch of which a member was lost
        self._leads = iter(_LEADS)
        self._has_said = False
        self._pool = ThreadPoolExecutor(_MOST_CALLS, thread_name_prefix="follow")

    def begin(self) -> int | None:
        """Get a state, and return its step; None if it does not come in time, or the members are lost and do not change.

        Raises:
            EpochOverError: This worker has to take part at once; it has no state then.
        """
        return self._get_state(self._replica)

    def mean(self, step: int, into_N: Tensor) -> Mean | None:
        """Wait for the mean gradient of a step; None if `later` has come in its place.

        Raises:
            EpochOverError: This worker has to take part.
        """
        while True:
            self._ways.check()
            if self._givers is None or not self._givers.are_there(self._ways.order()):
                self._get_later(step)
                return None
            try:
                if self._givers.clients[0].ping(MEAN).step < step:
                    self._say_ready(step - 1)
                    time.sleep(_AGAIN_S)
                    continue
                return self._get_mean(step, into_N, waits=True)
            except NotHeldError:  # it was too long ago
                self._get_later(step)
                return None
            except (CommunicationError, ValueError):  # gRPC raises `ValueError` for a call on a closed channel
                self._ways.check()
                self._lost = self._givers.order.epoch
                self._get_later(step)
                return None

    def held_mean(self, step: int, into_N: Tensor, *, members: Collection[Seat]) -> Mean | None:
        """Return the mean of a step from those that this worker has followed, if all of them are members and still have it.

        Raises:
            EpochOverError: The members change.
        """
        if self._givers is None or not set(self._givers.order.seats) <= set(members):
            return None
        try:
            self._open(self._givers.order)  # its connections were closed when this worker had to take part
            return self._get_mean(step, into_N, waits=False)
        except (CommunicationError, ValueError):
            self._ways.check()
            return None

    def close(self) -> None:
        """Get nothing any more."""
        if self._givers is not None:
            self._givers.closing.close()
        self._givers = None
        self._pool.shutdown()

    def _say_ready(self, applied: int) -> None:
        if not self._has_said:
            self._has_said = True
            self._ways.ready(applied)

    def _get_later(self, step: int) -> None:
        """Get a whole state in place of the mean of a step; if none comes, wait until this worker has to take part as it is."""
        later = LaterState(self._replica)
        reached = self._get_state(later)
        if reached is not None:
            self.later = later, reached
            return
        self._say_ready(step - 1)
        while True:
            self._ways.check()
            time.sleep(_AGAIN_S)

    # The state

    def _get_state(self, into: ReplicaState | LaterState) -> int | None:
        for lead in self._leads:
            while True:
                givers = self._connect()
                if givers is None:
                    return None
                try:
                    return self._get_state_of(givers, into, lead=lead)
                except NotHeldError:
                    break
                except (CommunicationError, ValueError):
                    self._ways.check()
                    self._lost = givers.order.epoch
        return None

    def _connect(self) -> _Givers | None:
        """Connect to the members of the newest epoch, when nobody of it is known to be lost; None if it does not come."""
        deadline = time.monotonic() + _NEXT_ORDER_S
        while (order := self._ways.order()) is None or order.epoch <= self._lost:
            self._ways.check()
            if time.monotonic() > deadline:
                return None
            time.sleep(_AGAIN_S)
        if self._givers is not None and self._givers.order == order:
            return self._givers
        return self._open(order)

    def _open(self, order: Follow) -> _Givers:
        from ttlaunch.runtime.comm.grpc.client import PeerClient  # noqa: PLC0415  as above

        if self._givers is not None:
            self._givers.closing.close()
        seats = (*order.seats, self._own)
        directory, own = self._ways.directory(seats, order.epoch), Rank(len(order.seats))
        self._givers = _Givers(order, [])
        for rank in range(len(order.seats)):
            client = PeerClient(directory, own=own, rank=Rank(rank), timeout_s=_CALL_S)
            self._givers.clients.append(self._givers.closing.enter_context(self._ways.closed_at_end(client)))
        return self._givers

    def _get_state_of(self, givers: _Givers, into: ReplicaState | LaterState, *, lead: int) -> int:
        """Fill a state with that after a step to come, and ask for the means that follow.

        Raises:
            NotHeldError: The request came too late, or it took too long.
        """
        newest = self._with_all(givers, lambda place: givers.clients[place].ping(STATE).step)
        step = max(newest) + lead
        parts, values = into.parts(len(givers.clients)), contiguous_blocks(self._values, len(givers.clients))

        def get(place: int) -> Tensor:
            part = parts[place]
            key = self._key(STATE, step, part)
            content = torch.empty(len(part), dtype=torch.uint8)
            self._ask_for(givers.clients[place], key, content)
            asked = self._key(MEAN, step + 1, values[place])
            self._ask_for(givers.clients[place], asked, torch.empty(len(values[place]), dtype=torch.float32))
            self._get(givers.clients[place], key, content, waits=True)
            return content

        contents = self._with_all(givers, get)
        for part, content in zip(parts, contents, strict=True):
            into.fill(part, content)
        into.accept()
        self._ways.count(givers.given(content.nbytes for content in contents), is_state=True)
        return step

    def _ask_for(self, client: "PeerClient", key: Key, content: Tensor) -> None:
        try:
            client.pull(key, content)
        except NotHeldError:
            return  # as expected: the member has noted what is wanted

    # Means

    def _get_mean(self, step: int, into_N: Tensor, *, waits: bool) -> Mean:
        givers = self._givers
        assert givers is not None  # noqa: S101 - the callers have looked
        parts = contiguous_blocks(len(into_N), len(givers.clients))
        numbers = numbers_of(self._replica, None)

        def get(place: int) -> None:
            part = parts[place]
            into = into_N[part.start : part.stop]
            self._get(givers.clients[place], self._key(MEAN, step, part), into, waits=waits)

        self._with_all(givers, get)
        content = numbers.view(torch.uint8)
        self._get(givers.clients[0], self._key(NUMBERS, step, range(len(content))), content, waits=False)
        member = givers.order.seats[0].member
        mean, rest = mean_of(step, numbers, into_N, giver=worker_name(member.number))
        self._ways.count(givers.given(4 * len(part) for part in parts), is_state=False)
        self.numbers = rest
        return mean

    # Calls

    def _key(self, name: str, step: int, part: range) -> Key:
        return Key(name, step, part.start, part.stop, start=self._own.member.number)

    def _get(self, client: "PeerClient", key: Key, content: Tensor, *, waits: bool) -> None:
        """Get a content, when the member has ended the step.

        Raises:
            NotHeldError: It has ended the step, and does not have the content.
        """
        while waits and client.ping(key.name).step < key.step:
            self._ways.check()
            time.sleep(_AGAIN_S)
        client.pull(key, content)

    def _with_all(self, givers: _Givers, call: Callable[[int], _Found]) -> list[_Found]:
        """Call a function for each place of the members, several at a time."""
        places = range(len(givers.clients))
        if len(places) == 1:
            return [call(0)]
        return [one.result() for one in [self._pool.submit(partial(call, place)) for place in places]]
