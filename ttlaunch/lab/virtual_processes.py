"""The processes of workers and the epochs of an elastic run on a virtual clock, and what takes time there."""

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from ttlaunch.membership.worker import Leaves, WorkerState


class Costs(Protocol):
    """What takes time, in seconds, and what travels, in bytes.

    Attributes:
        start_s: A worker, from its start until it registers.
        notice_s: The end of a process, until the coordinator knows of it.
        latency_s: A message between the coordinator and a worker.
        most_means: So many mean gradients do members keep for a worker that follows.
        state_bytes: A state: weights and what the optimizer keeps of them.
        mean_bytes: A mean gradient; the weights have as many.
        every: After so many steps workers agree; 1 where no worker takes a step of its own.
    """

    start_s: float
    notice_s: float
    latency_s: float
    most_means: int
    state_bytes: int
    mean_bytes: int
    every: int

    def step_s(self, members: Sequence[int], *, agrees: bool) -> float:
        """Return the time of a whole step of these workers, which are in the order of their places, with or without an agreement."""

    def task_s(self, number: int, members: Sequence[int]) -> float:
        """Return the time that a worker takes for a task of the server of these members, from one to the next."""

    def leaf_s(self, number: int) -> float:
        """Return the time that a worker computes for one micro-batch."""

    def transfers_s(self, gifts: Mapping[int, Mapping[int, float]]) -> Mapping[int, float]:
        """Return how long each of some workers gets what others give it at the same time, by number: of each giver so many bytes."""


def ring_s(costs: Costs, members: Sequence[int]) -> float:
    """Return how long the parts of a mean travel around a ring: 2(W - 1) times a W-th of it, from each of W members to the next."""
    if len(members) == 1:
        return 0.0
    piece = costs.mean_bytes / len(members)
    around = {dest: {giver: piece} for giver, dest in zip(members, [*members[1:], members[0]], strict=True)}
    return 2 * (len(members) - 1) * max(costs.transfers_s(around).values())


@dataclass
class Epoch:
    """An epoch, and what the change that led to it has cost; times in seconds after the begin of the first step.

    Attributes:
        members: The numbers of the workers.
        step: The step after which it began.
        at_s: When it began.
        reasons: Why.
        blocks: The micro-batches of each member in all steps but the first.
        computed_anew: How many micro-batches of the interrupted step had to be computed again.
        lost_steps: How many steps of their own went with workers that take part no more.
        tasks_again: How many tasks were handed out again that such workers had.
        steps: How many steps were made in it.
        done_s: When its first step was done; None if none was.
        lost_s: How much later that was than with one step of the new members right after the last step before; None if none was made,
            or where members do not make a step together.
    """

    epoch: int
    members: tuple[int, ...]
    step: int
    at_s: float
    reasons: tuple[str, ...]
    blocks: tuple[Leaves, ...]
    computed_anew: int = 0
    lost_steps: int = 0
    tasks_again: int = 0
    steps: int = 0
    done_s: float | None = None
    lost_s: float | None = None


@dataclass
class Process:
    """The process of a worker.

    Attributes:
        started_s: When it was started.
        ready_s: When it could take part, with or without the state; None if it never could.
        gone_s, why: When and how it ended; None while it lives.
        hung: Why it was killed, as a clause, if it made no progress; else empty.
        stopped_s: Since when it is stopped; None if it is not.
        later: What it does when it is continued.
        taken, got: How many states and how many mean gradients it has got from others, and how many bytes altogether.
        reported: The last step that it has made as a member, as far as the launcher knows.
        lost_s: When the coordinator knew that it had ended, or treated it so.
        has_left: Whether it was dismissed, as one that was asked to leave.
        attempts: How often it has tried to follow the others.
    """

    state: WorkerState
    host: str
    started_s: float
    ready_s: float | None = None
    gone_s: float | None = None
    why: str = ""
    hung: str = ""
    stopped_s: float | None = None
    later: deque[Callable[[], None]] = field(default_factory=deque)
    lost_s: float | None = None
    has_left: bool = False
    taken: list[int] = field(default_factory=lambda: [0, 0])
    got: int = 0
    reported: int = 0
    attempts: int = 0

    @property
    def acts(self) -> bool:
        """Whether it can do anything."""
        return self.gone_s is None and self.stopped_s is None

    def count(self, size: int, *, is_mean: bool) -> None:
        """Note that it has got a state, or a mean gradient, of so many bytes."""
        self.taken[is_mean] += 1
        self.got += size
