"""What the coordinator of an elastic run knows: its phase, the workers, and the epoch; `coordinator.py` changes it."""

from dataclasses import dataclass, field
from enum import StrEnum

from ttlaunch.membership.local_epochs import LocalEpoch
from ttlaunch.membership.messages import Answered, Begin, Seat, Share
from ttlaunch.membership.numbered import Numbered, Numbers


class Phase(StrEnum):
    """What the coordinator does; see `coordinator.py`."""

    WAITING = "waiting"
    COLLECTING = "collecting"
    RUNNING = "running"
    FINISHED = "finished"
    STRANDED = "stranded"


@dataclass(frozen=True)
class Terms:
    """What stays the same during a run.

    Attributes:
        minimum: An epoch begins with at least so many members.
        maximum: And with at most so many; further workers are spares.
        micro_batches: M.
        first: The numbers of the workers that are started with the run.
        slots: Into how many slots the state is cut, as `divide_slots` takes it; None: every member has all of it.
        servers: At how many places, the first ones, members compute no micro-batches. An epoch with too few members has fewer of
            them, so that one computes. Members that have slots get these places before others.
        has_local_steps: Whether workers take steps of their own, so that the bits follow from the members; see `local_epochs.py`.
    """

    minimum: int
    maximum: int
    micro_batches: int
    first: frozenset[int] = frozenset()
    slots: int | None = None
    servers: int = 0
    has_local_steps: bool = False


@dataclass(frozen=True)
class Worker:
    """What is known of a worker that is ready.

    Attributes:
        applied: The last step in its weights; None if it has none.
        pace_s: Seconds that it needs for a micro-batch, if it knows.
        is_done: Whether it has made the last step of the run, and done in this epoch what follows it.
        follows: Whether it can get the weights before it takes part.
        shares: What it has of the state of step `applied`, as its last answer said; empty: all of it, or nothing.
        is_ready: Whether it was ready, then, to make the step after `applied`.
    """

    seat: Seat
    applied: int | None
    pace_s: float | None = None
    is_done: bool = False
    follows: bool = False
    shares: tuple[Share, ...] = ()
    is_ready: bool = False

    @property
    def lacks_state(self) -> bool:
        """Whether the others had better go on without it until it has the weights."""
        return self.follows and self.applied is None

    def shares_at(self, step: int) -> tuple[Share, ...] | None:
        """Return what it has, or can make by itself, of the state of a step; empty: all of it; None: nothing."""
        if self.applied is None or self.applied + (self.is_ready and bool(self.shares)) < step:
            return None
        return self.shares


@dataclass(frozen=True)
class Coordinator:
    """The state.

    Attributes:
        workers: All that are ready, by number, whether they take part or wait.
        leaving: The numbers of the members that were asked to leave.
        seen: The largest incarnation of each number that has registered or was lost.
        members: Those that take part in `epoch`, or are asked to.
        places: The numbers of the members of the newest epoch that has begun, in the order of their places.
        answers: Of the members, in phase COLLECTING.
        begin: The order with which the epoch began, in phase RUNNING.
        acting: The members that have reported since, as keys.
        done: How many members are done, in phase RUNNING.
        worth: At how many looks in a row the work was worth dividing anew.
        looked: The step that all members had made at the last look; None before the first.
        epochs: The epochs that still count, where workers take steps of their own.
        is_ending: Whether the run was ordered to stop.
    """

    terms: Terms
    phase: Phase = Phase.WAITING
    epoch: int = 0
    workers: Numbered[Worker] = field(default_factory=Numbered)
    leaving: frozenset[int] = frozenset()
    seen: Numbered[int] = field(default_factory=Numbered)
    members: Numbers = field(default_factory=Numbers)
    places: tuple[int, ...] = ()
    answers: Numbered[Answered] = field(default_factory=Numbered)
    begin: Begin | None = None
    acting: Numbered[None] = field(default_factory=Numbered)
    done: int = 0
    worth: int = 0
    looked: int | None = None
    epochs: tuple[LocalEpoch, ...] = ()
    is_ending: bool = False

    @property
    def minimum(self) -> int:
        """How many members an epoch needs to begin."""
        terms = self.terms
        least = 1 + (
            terms.servers if terms.slots is None else 0
        )  # a server that hands out tasks computes nothing itself
        return min(terms.minimum, least) if self.is_ending else terms.minimum

    @property
    def missing(self) -> int:
        """How many workers an epoch lacks; 0 if there are enough."""
        return max(0, self.minimum - len(self.workers) + len(self.leaving))

    @property
    def staying(self) -> frozenset[int]:
        """The numbers of the workers that are ready and were not asked to leave."""
        return frozenset(self.workers) - self.leaving

    @property
    def lacks_slots(self) -> bool:
        """Whether the run cannot go on because a slot's owner and its shadow are both gone."""
        has_some = any(worker.shares for worker in self.workers.values())
        return self.phase is Phase.STRANDED and has_some
