"""Who may begin which step, when a mean is applied, when its buffers are free: bounded staleness without any message.

`Clock` is a state machine for one worker's steps, and `RingPart` one for its part in the all-reduce of a step. Neither has a clock
time or sends a message. `exchange.py` only does what they allow. A test searches all orders of events, so what it proves of them
holds for the recipe, whatever the network does.

    begin s      allowed once the buffers of step s-K-1 are free, so at most K+1 steps hold buffers
    give s       this worker's gradient of step s joins the all-reduce
    whole s      the mean of step s, which has every worker's gradient, is here
    apply s      the means are applied in the order of their steps, each of them once, as soon as it is whole
    free s       no rank reads the buffers of step s any more

The mean of step s-K-1 is whole only if every worker has given its gradient of it. So a worker that begins step s
has finished at most K steps more than any other: what a worker waits for bounds the lead, not how long it waits. All workers apply
the same means in the same order, so after the same step all of them have the same weights, bit for bit; what depends on
time is only which weights a gradient was computed with. That is its staleness: the updates between the weights it was
computed with and those it changes, at most K.

Source: Q. Ho et al., "More Effective Distributed ML via a Stale Synchronous Parallel Parameter Server", NIPS 2013, for
the bound on the lead; there a worker sees its own updates at once; here it sees them together with those of all
workers, which keeps the replicas equal.
"""

from dataclasses import dataclass, field, replace
from typing import Self


class ProtocolError(AssertionError):
    """An event that the protocol doesn't allow in this state: a mistake in the code that carries it out."""


@dataclass(frozen=True)
class Clock:
    """One worker's steps; every event returns the clock after it.

    Attributes:
        bound: K.
        begun, given, applied, freed: For each of these events, the last step in which it has happened.
        whole: Steps whose mean is here and not yet applied.
        version: Updates that the weights had when the last step began.
    """

    bound: int
    begun: int = 0
    given: int = 0
    applied: int = 0
    freed: int = 0
    whole: frozenset[int] = field(default_factory=frozenset)
    version: int = 0

    @classmethod
    def after(cls, step: int, *, bound: int) -> Self:
        """The clock of a worker that goes on from a checkpoint: all steps so far are behind it."""
        return cls(bound, step, step, step, step, version=step)

    @property
    def may_begin(self) -> bool:
        """Whether the next step may begin."""
        return self.begun == self.given and self.begun - self.freed <= self.bound

    @property
    def due(self) -> int | None:
        """The step whose mean is to be applied next, if that is whole."""
        return self.applied + 1 if self.applied + 1 in self.whole else None

    @property
    def open_steps(self) -> range:
        """The steps that hold buffers, oldest first."""
        return range(self.freed + 1, self.begun + 1)

    @property
    def staleness(self) -> int:
        """The staleness of the last begun step's gradient: the updates between its weights and those it will change."""
        return self.begun - 1 - self.version

    def begin(self) -> Self:
        """The next step begins, with the weights of now."""
        _check(self.may_begin, f"step {self.begun + 1} may not begin: {self}")
        return replace(self, begun=self.begun + 1, version=self.applied)

    def give(self) -> Self:
        """The gradient of the step that has begun joins the all-reduce."""
        _check(self.given == self.begun - 1, f"there is no gradient to give: {self}")
        return replace(self, given=self.begun)

    def complete(self, step: int) -> Self:
        """The mean of a step is whole here; means may become so in any order."""
        _check(self.applied < step <= self.given and step not in self.whole, f"step {step} cannot be whole: {self}")
        return replace(self, whole=self.whole | {step})

    def apply(self) -> Self:
        """The mean that is due is applied."""
        _check(self.due is not None, f"no mean is due: {self}")
        return replace(self, applied=self.applied + 1, whole=self.whole - {self.applied + 1})

    def free(self) -> Self:
        """The buffers of the oldest step are free."""
        _check(self.freed < self.applied, f"the buffers of step {self.freed + 1} are in use: {self}")
        return replace(self, freed=self.freed + 1)


@dataclass(frozen=True)
class RingPart:
    """One worker's part in a ring all-reduce of W shards: hop 0 to W-2 add up, hop W-1 to 2W-3 hand round.

    Attributes:
        place: The worker's position in the ring.
        workers: W.
        has_own: Whether its own vector is there; nothing is taken before.
        received: Messages of the worker before it that were taken, in the order of the hops.
    """

    place: int
    workers: int
    has_own: bool = False
    received: int = 0

    @property
    def hops(self) -> int:
        """Messages that every worker sends, and receives."""
        return 2 * (self.workers - 1)

    @property
    def sendable(self) -> int:
        """How many messages it may have sent by now: the first with its own vector, one more for each that it has taken."""
        return min(self.received + 1, self.hops) if self.has_own else 0

    @property
    def may_receive(self) -> bool:
        return self.has_own and self.received < self.hops

    @property
    def is_adding(self) -> bool:
        """Whether the next message is a sum to add to; else it is a finished shard."""
        return self.received < self.workers - 1

    @property
    def is_whole(self) -> bool:
        return self.has_own and self.received == self.hops

    @property
    def own_shard(self) -> int:
        """The shard whose sum becomes complete here."""
        return (self.place + 1) % self.workers

    def shard_to_send(self, hop: int) -> int:
        """Which shard message `hop` of this worker has."""
        return (self.place - hop) % self.workers

    def shard_to_receive(self, hop: int) -> int:
        """Which shard message `hop` of the worker before it has."""
        return (self.shard_to_send(hop) - 1) % self.workers

    def give(self) -> Self:
        """Its own vector is there."""
        _check(not self.has_own, f"the vector is there already: {self}")
        return replace(self, has_own=True)

    def receive(self) -> Self:
        """The next message of the worker before it is taken."""
        _check(self.may_receive, f"no message can be taken: {self}")
        return replace(self, received=self.received + 1)


@dataclass
class Staleness:
    """What is known of the staleness of gradients, counted once for each gradient that was applied.

    Attributes:
        gradients: How many.
        stale: How many of them were not computed with the weights that they changed.
        total, maximum: The total and the maximum of their staleness.
    """

    gradients: int = 0
    stale: int = 0
    total: int = 0
    maximum: int = 0

    def count(self, staleness: int) -> None:
        """Enter one gradient."""
        self.gradients += 1
        self.stale += staleness > 0
        self.total += staleness
        self.maximum = max(self.maximum, staleness)

    @property
    def average(self) -> float:
        return self.total / self.gradients if self.gradients else 0.0


def _check(is_allowed: bool, text: str) -> None:  # noqa: FBT001  a condition
    if not is_allowed:
        raise ProtocolError(text)
