"""Steps that others have made, as a worker takes them over: a mean in place of its own, or a whole state in place of an update."""

from collections.abc import Callable, Sequence

from torch import Tensor

from ttlaunch.membership.messages import Begin, Seat
from ttlaunch.runtime.comm.protocol import EpochOverError
from ttlaunch.runtime.elastic.feed import Mean
from ttlaunch.runtime.elastic.following import Count, Follower, FollowerWays
from ttlaunch.runtime.elastic.giving import pull_mean
from ttlaunch.runtime.elastic.state_transfer import LaterState, Puller, ReplicaState


class CatchingUp:
    """What a worker has got for the step that its loop makes, until the loop has made its update.

    Attributes:
        values: N, the values of a mean gradient, where this worker may follow others before it takes part; None where it may not.
        follower: Gets steps from members while this worker is none, and knows from whom it did; None if it takes part with what
            they have made, or never followed them.
    """

    def __init__(self, *, count: Count, pull_state: Callable[..., object]) -> None:
        """Have got nothing yet.

        Args:
            count: Counts what others have given.
            pull_state: Fills a state with that from which an epoch starts.
        """
        self.values: int | None = None
        self.follower: Follower | None = None
        self._replica: ReplicaState | None = None
        self._count, self._pull_state = count, pull_state
        self._later: tuple[LaterState, int] | None = None  # and its step
        self._numbers: Sequence[float] | None = None  # that belong to the state after the step

    @property
    def replica(self) -> ReplicaState:
        """The state that steps change, once it is known."""
        assert self._replica is not None  # noqa: S101 - `ElasticMember.join` comes first
        return self._replica

    @property
    def has_replica(self) -> bool:
        """Whether steps change a state of this worker's own."""
        return self._replica is not None

    def use(self, replica: ReplicaState | None) -> None:
        """Let steps change this state; None: another object or another member has it."""
        self._replica = replica

    def begin_to_follow(self, own: Seat, ways: FollowerWays) -> int | None:
        """Get the state from members that go on; returns its step, or None if this worker has to take part without."""
        self.follower = Follower(own, self.replica, ways, values=self.values or 0)
        try:
            applied = self.follower.begin()
        except EpochOverError:
            applied = None
        if applied is None:
            self.stop_following()
        return applied

    def follow(self, step: int, into_N: Tensor) -> Mean | None:
        """Wait for the mean of a step that members make; None if a whole state came instead; see `Follower.mean`."""
        assert self.follower is not None  # noqa: S101 - it follows
        mean = self.follower.mean(step, into_N)
        if mean is None:
            self._later, self.follower.later = self.follower.later, None
        else:
            self._numbers = self.follower.numbers
        return mean

    def get(self, begin: Begin, puller: Puller, *, step: int, into_N: Tensor) -> Mean | None:
        """Get the mean of a step that holders of an epoch have made; None if the whole state came, because nobody has the mean."""
        pulled = pull_mean(puller, begin, self.replica, into_N=into_N) if step == begin.applied else None
        if pulled is not None:
            self._numbers = pulled.numbers
            self._count(pulled.bytes_of, is_state=False)
            return pulled.mean
        if self.follower is not None:  # those that it has followed may still have what they give to followers
            mean = self.follower.held_mean(step, into_N, members=begin.seats)
            if mean is not None:
                self._numbers = self.follower.numbers
                return mean
        later = LaterState(self.replica)
        self._pull_state(begin, later)
        self._later = later, begin.applied
        return None

    def put(self, step: int) -> tuple[int, bool]:
        """Put what came in place, after the loop has made its update; returns the step of the state, and whether that is the loop's."""
        (later, reached), self._later = self._later or (None, step), None
        numbers, self._numbers = self._numbers, None
        if later is not None:
            later.put()
        elif numbers is not None:
            self.replica.take_numbers(numbers)
        return reached, later is None

    def stop_following(self) -> None:
        """Get nothing more from those that this worker has followed."""
        follower, self.follower = self.follower, None
        if follower is not None:
            follower.close()
