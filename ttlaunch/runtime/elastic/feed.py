"""What a member gives to workers that follow it: a part of the state after one step, and of the mean gradients of the steps after that.

    a follower asks for the state after step 40, bytes 0 .. S/2, and for the means from step 41 on, values 0 .. N/2
    the member copies its part of the state when step 40 is over, and its part of each mean after it, and trains on

A step is given away when the next one begins, so what follows an update, such as a validation, is in it.

Shapes: N = values of the flat gradient, S = bytes of the state.
"""

import threading
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ttlaunch.runtime.comm.grpc.shared_state import NotHeldError, StateSource
from ttlaunch.runtime.comm.grpc.vectors import Key, bytes_of
from ttlaunch.runtime.comm.protocol import CommunicationError
from ttlaunch.runtime.elastic.state_transfer import ReplicaState

STATE, MEAN, NUMBERS = "followed state", "followed mean", "followed numbers"
"""The vectors of a step; `Key.start` is the number of the follower that they are for."""

LEAST_MEANS, MOST_MEANS, MEANS_BYTES = 4, 32, 256 * 2**20
"""A member keeps at most so many means for one follower, and fewer, but at least the first number, if they take more memory."""

_MOST_TOKENS = 2**53  # a float holds every smaller number exactly
_MOST_FOLLOWERS = 16
_PATIENCE = 64  # steps after which a follower that asks for nothing is forgotten


@dataclass(frozen=True)
class Mean:
    """The mean gradient of a step, with what the step's report needs.

    Attributes:
        mean_N: Shape `(N,)`, float32; the exchange overwrites it when all members make the next step.
    """

    step: int
    loss: float
    tokens: int
    mean_N: Tensor


@dataclass
class _Demand:
    """What one follower wants.

    Attributes:
        step: The step of which it wants the state; means follow.
        state: The bytes of the state.
        mean: The values of each mean; None as long as it has not asked for one.
        asked: The newest step when it last asked.
        contents: What it can have, by name and step.
    """

    step: int
    state: range
    asked: int
    mean: range | None = None
    contents: dict[tuple[str, int], Tensor] = field(default_factory=dict)

    def room(self) -> int:
        """Return how many means may be kept."""
        size = 4 * len(self.mean or ())
        return max(LEAST_MEANS, min(MOST_MEANS, MEANS_BYTES // max(1, size)))

    def forget(self, *, before: int) -> None:
        self.contents = {key: content for key, content in self.contents.items() if key[1] >= before}


class Feed:
    """A `StateSource` for followers. Any thread may call any method, except `end_step`.

    Memory: for each follower the bytes of the state that it wants from this member, until it has them, and at most
        `max(MEANS_BYTES, 4 * LEAST_MEANS * values)` bytes of means.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._demands: dict[int, _Demand] = {}
        self._newest = -1

    def end_step(self, step: int, replica: ReplicaState, mean: Mean | None) -> None:
        """Copy what followers want of a step that is over; only the thread that makes steps calls this.

        Args:
            step: The last step in the weights.
            replica: The state after it.
            mean: Its mean gradient, as long as its memory holds it.

        Cost: none without followers; else a copy of the wanted part of the state once, and of the mean of each step.
        """
        with self._lock:
            demands = dict(self._demands)
        for follower, demand in demands.items():
            found = None if step - demand.asked > _PATIENCE else _contents(demand, replica, mean, step=step)
            with self._lock:
                if self._demands.get(follower) is not demand:
                    continue
                demand.contents.update(found or {})
                means = sum(name == MEAN for name, _ in demand.contents)
                if found is None or means > demand.room():
                    del self._demands[follower]  # it finds out that it is not held any more
        with self._lock:
            self._newest = step

    def newest(self, name: str) -> int | None:
        """Return the last step that is over."""
        del name
        with self._lock:
            return max(0, self._newest)

    def read(self, key: Key) -> memoryview:
        """Return what a follower asks for, or note that it wants it of a step that is to come."""
        with self._lock:
            demand = self._demands.get(key.start)
            if key.name == STATE and (demand is None or demand.step != key.step):
                demand = self._note(key)
            if demand is not None:
                demand.asked = max(demand.asked, self._newest)
                if key.name == MEAN:
                    demand.mean = demand.mean or range(key.first, key.last)
                demand.forget(before=key.step)
            content = None if demand is None else demand.contents.get((key.name, key.step))
            if demand is None or content is None or _range_of(key, demand, content) != range(key.first, key.last):
                raise NotHeldError(f"`{key.name}` of step {key.step} is not held; the newest step is {self._newest}")
        return bytes_of(content)

    def _note(self, key: Key) -> _Demand | None:
        if key.step <= self._newest or (len(self._demands) >= _MOST_FOLLOWERS and key.start not in self._demands):
            return None
        self._demands[key.start] = _Demand(key.step, range(key.first, key.last), asked=self._newest)
        return self._demands[key.start]


class Sources:
    """What a worker gives away: to followers from its feed, to members that are behind from other sources."""

    def __init__(self, feed: Feed, others: StateSource) -> None:
        self._feed, self._others = feed, others

    def newest(self, name: str) -> int | None:
        return self._of(name).newest(name)

    def read(self, key: Key) -> memoryview:
        return self._of(key.name).read(key)

    def _of(self, name: str) -> StateSource:
        return self._feed if name in {STATE, MEAN, NUMBERS} else self._others


def numbers_of(replica: ReplicaState, mean: Mean | None) -> Tensor:
    """Return what a step has besides tensors, float64: whether the mean is known, its loss and its tokens, and the state's numbers."""
    known = [0.0, 0.0, 0.0] if mean is None else [1.0, mean.loss, float(mean.tokens)]
    return torch.tensor([*known, *replica.numbers()], dtype=torch.float64)


def mean_of(step: int, numbers: Tensor, mean_N: Tensor, *, giver: str) -> tuple[Mean, list[float]]:
    """Return a mean that another worker gives, and the numbers of the state after it, from its `numbers_of`.

    Raises:
        CommunicationError: It says what cannot be.
    """
    _, loss, tokens, *rest = numbers.tolist()
    if not 0 <= tokens < _MOST_TOKENS:
        raise CommunicationError(f"{giver} says that step {step} had {tokens:g} tokens")
    return Mean(step, loss, int(tokens), mean_N), rest


def _contents(
    demand: _Demand, replica: ReplicaState, mean: Mean | None, *, step: int
) -> dict[tuple[str, int], Tensor] | None:
    """Return what a follower wants of a step; None if it cannot be had."""
    if step < demand.step:
        return {}
    if step == demand.step:
        is_there = demand.state.stop <= replica.size
        return {(STATE, step): replica.copy(demand.state)} if is_there else None
    if mean is None or mean.step != step or demand.mean is None or demand.mean.stop > len(mean.mean_N):
        return None
    part = mean.mean_N[demand.mean.start : demand.mean.stop].detach().cpu().clone()
    return {(MEAN, step): part, (NUMBERS, step): numbers_of(replica, mean).view(torch.uint8)}


def _range_of(key: Key, demand: _Demand, content: Tensor) -> range | None:
    return {STATE: demand.state, MEAN: demand.mean}.get(key.name, range(len(content)))
