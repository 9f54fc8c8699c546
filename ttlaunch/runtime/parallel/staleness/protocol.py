"""The rules of bounded staleness: when a worker may begin a step, apply a mean, and reuse the buffers of a step.

The rules are two state machines without time and without messages. `Clock` is one worker's view of the steps; `RingPart`
is its part in the all-reduce of one step. `exchange.py` only does what they allow. A test searches all orders of events
in these machines; what it proves therefore holds for the recipe, whatever the network does.

    begin s      allowed once the buffers of step s-K-1 are free, so at most K+1 steps hold buffers
    give s       this worker's gradient of step s joins the all-reduce
    complete s   the mean of step s, which has every worker's gradient, is complete on this worker
    apply s      the means are applied in the order of their steps, each of them once, as soon as it is complete
    free s       nothing reads the buffers of step s any more

The mean of step s-K-1 is complete only if every worker has given its gradient of that step. A worker that begins step s has
therefore finished at most K steps more than any other; no timeout is involved. All workers apply the same means in the
same order, so after the same step they have the same weights, bit for bit. Only the weights with which a gradient was
computed depend on time. The staleness of a gradient is the number of updates between these weights and the weights it
changes; it is at most K.

Source: Q. Ho et al., "More Effective Distributed ML via a Stale Synchronous Parallel Parameter Server", NIPS 2013, for
the bound on the lead. There, a worker applies its own updates at once. Here, it applies them together with those of all
others, which keeps the replicas equal.
"""

from dataclasses import dataclass, field, replace
from typing import Self


class ProtocolError(AssertionError):
    """An event that the protocol does not allow in this state: a mistake in the code that uses it."""


@dataclass(frozen=True)
class Clock:
    """The state of one worker's steps; each event returns the next state.

    Attributes:
        bound: K.
        begun, given, applied, freed: The last step that this event has reached.
        whole: Steps whose mean is complete and not yet applied.
        version: The number of updates in the weights when the last step began.
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
        """Return the clock of a worker that resumes from a checkpoint: all steps so far are finished."""
        return cls(bound, step, step, step, step, version=step)

    @property
    def may_begin(self) -> bool:
        """Whether the next step may begin."""
        return self.begun == self.given and self.begun - self.freed <= self.bound

    @property
    def due(self) -> int | None:
        """Return the step whose mean must be applied next, if this mean is complete; else None."""
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
        """Begin the next step, with the current weights."""
        _check(self.may_begin, f"step {self.begun + 1} may not begin: {self}")
        return replace(self, begun=self.begun + 1, version=self.applied)

    def give(self) -> Self:
        """Add the gradient of the step that has begun to the all-reduce."""
        _check(self.given == self.begun - 1, f"there is no gradient to give: {self}")
        return replace(self, given=self.begun)

    def complete(self, step: int) -> Self:
        """Note that the mean of a step is complete; means may be complete in any order."""
        _check(self.applied < step <= self.given and step not in self.whole, f"step {step} cannot be whole: {self}")
        return replace(self, whole=self.whole | {step})

    def apply(self) -> Self:
        """Apply the mean that is due."""
        _check(self.due is not None, f"no mean is due: {self}")
        return replace(self, applied=self.applied + 1, whole=self.whole - {self.applied + 1})

    def free(self) -> Self:
        """Free the buffers of the oldest step."""
        _check(self.freed < self.applied, f"the buffers of step {self.freed + 1} are in use: {self}")
        return replace(self, freed=self.freed + 1)


@dataclass(frozen=True)
class RingPart:
    """One worker's part in a ring all-reduce of W shards: hops 0 to W-2 add up, hops W-1 to 2W-3 distribute the sums.

    Attributes:
        place: The worker's position in the ring.
        workers: W.
        has_own: Whether its own vector has been given; before, it processes no message.
        received: The number of messages received from the worker before it, in the order of the hops.
    """

    place: int
    workers: int
    has_own: bool = False
    received: int = 0

    @property
    def hops(self) -> int:
        """The number of messages that every worker sends, and receives."""
        return 2 * (self.workers - 1)

    @property
    def sendable(self) -> int:
        """How many messages it may have sent: one when its own vector is given, and one more for each message received."""
        return min(self.received + 1, self.hops) if self.has_own else 0

    @property
    def may_receive(self) -> bool:
        return self.has_own and self.received < self.hops

    @property
    def is_adding(self) -> bool:
        """Whether the next message is a partial sum; otherwise it is a finished shard."""
        return self.received < self.workers - 1

    @property
    def is_whole(self) -> bool:
        return self.has_own and self.received == self.hops

    @property
    def own_shard(self) -> int:
        """The shard whose sum this worker completes."""
        return (self.place + 1) % self.workers

    def shard_to_send(self, hop: int) -> int:
        """Return the shard in this worker's message number `hop`."""
        return (self.place - hop) % self.workers

    def shard_to_receive(self, hop: int) -> int:
        """Return the shard in message number `hop` from the worker before it."""
        return (self.shard_to_send(hop) - 1) % self.workers

    def give(self) -> Self:
        """Note that its own vector has been given."""
        _check(not self.has_own, f"the vector is there already: {self}")
        return replace(self, has_own=True)

    def receive(self) -> Self:
        """Receive the next message of the worker before it."""
        _check(self.may_receive, f"no message can be taken: {self}")
        return replace(self, received=self.received + 1)


@dataclass
class Staleness:
    """Statistics of staleness, over all gradients that were applied.

    Attributes:
        gradients: The number of gradients.
        stale: The number of gradients that were computed with other weights than those they changed.
        total, maximum: The total and the maximum of their staleness.
    """

    gradients: int = 0
    stale: int = 0
    total: int = 0
    maximum: int = 0

    def count(self, staleness: int) -> None:
        """Count one gradient."""
        self.gradients += 1
        self.stale += staleness > 0
        self.total += staleness
        self.maximum = max(self.maximum, staleness)

    def results(self) -> dict[str, float]:
        """Return what the summary of a run shows."""
        return {
            "staleness average": round(self.average, 4),
            "staleness maximum": self.maximum,
            "stale gradients": self.stale,
            "gradients": self.gradients,
        }

    @property
    def average(self) -> float:
        return self.total / self.gradients if self.gradients else 0.0


def _check(is_allowed: bool, text: str) -> None:  # noqa: FBT001  a condition
    if not is_allowed:
        raise ProtocolError(text)
