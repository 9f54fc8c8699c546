"""A worker of an elastic run as a state machine: what it may do, and what it answers. `runtime/elastic/` carries it out."""

from dataclasses import dataclass

from ttlaunch.membership.messages import Answered, Begin, CutOff, Member, Prepare, Progressed, Share
from ttlaunch.membership.numbered import changed
from ttlaunch.membership.slots import divide_slots

Leaves = tuple[int, int]


@dataclass(frozen=True)
class WorkerState:
    """What a worker has, and the epoch in which it acts.

    Attributes:
        epoch: The newest epoch that it has heard of.
        begin: The order with which it acts in `epoch`; None while it waits for one.
        applied: The last step in its weights; None if it has none.
        held: The nodes that it has of step `applied` + 1.
        validated: The last step whose validation it has finished; equal to `applied` where none was due.
        is_done: Whether it has made the last step of the run.
        ended_in: The epoch in which it has done what follows that step, if it has in any; a later epoch asks for it again, since a
            member that is gone may not have done its part.
        shares: What it has of the state of step `applied`, as in `Answered`: its slots of the newest cut first.
        is_ready: Whether it has the mean gradient of its slots for the next step.
    """

    member: Member
    epoch: int = 0
    begin: Begin | None = None
    applied: int | None = None
    held: tuple[Leaves, ...] = ()
    validated: int | None = None
    is_done: bool = False
    ended_in: int | None = None
    shares: tuple[Share, ...] = ()
    is_ready: bool = False

    @property
    def place(self) -> int:
        """Its rank in the epoch in which it acts."""
        assert self.begin is not None  # noqa: S101 - it acts
        return self.begin.places[self.member.number]

    @property
    def has_ended(self) -> bool:
        """Whether nothing is left to do for it in this epoch."""
        return self.is_done and self.ended_in == self.epoch

    @property
    def is_first_step(self) -> bool:
        """Whether the step that it makes is the epoch's first, whose leaves are divided by `kept` and `todo`."""
        return self.begin is not None and self.applied == self.begin.applied


def prepare(state: WorkerState, order: Prepare) -> WorkerState:
    """Stop acting; an order of an epoch that is over changes nothing. `answer` says what to report."""
    if order.epoch <= state.epoch:
        return state
    return changed(state, epoch=order.epoch, begin=None)


def answer(state: WorkerState) -> Answered:
    """Say what this worker has."""
    return Answered(
        state.member,
        state.epoch,
        state.applied,
        held=state.held,
        validated=state.validated,
        is_done=state.is_done,
        shares=state.shares,
        is_ready=state.is_ready,
    )


def cut_off(state: WorkerState) -> CutOff:
    """Say that this worker cannot go on in its epoch."""
    return CutOff(state.member, state.epoch, state.applied)


def begin(state: WorkerState, order: Begin) -> WorkerState:
    """Act in an epoch, with those of the held nodes that count; an order of another epoch, or a second one, changes nothing.

    If `order.behind` names this worker, it must get what it lacks from `order.holders`, and then call `catch_up`.
    """
    if order.epoch != state.epoch or state.begin is not None or state.member.number not in order.places:
        return state
    place = order.places[state.member.number]
    starts_here = state.applied == order.applied
    held = order.kept[place] if starts_here else ()
    # What it has of the mean of a step that all make again is of a cut that is over.
    return changed(state, begin=order, held=held, is_ready=state.is_ready and not starts_here)


def catch_up(state: WorkerState) -> WorkerState:
    """Note that the weights now are those that the epoch starts from, and with them what followed that step, if it is over."""
    assert state.begin is not None  # noqa: S101 - it acts
    applied = state.begin.applied
    validated = state.validated if state.begin.validates else applied
    return changed(state, applied=applied, held=(), validated=validated, is_ready=False)


def take_share(state: WorkerState, share: Share) -> WorkerState:
    """Note that this worker has its slots of the cut of this epoch, beside those of the former one; it now may act."""
    assert state.begin is not None  # noqa: S101 - it acts
    place = state.begin.places[state.member.number]
    former = state.begin.shares[place] if state.begin.shares else None
    return changed(state, shares=(share,) if former in {None, share} else (share, former))


def with_slots(state: WorkerState, order: Begin, *, slots: int) -> WorkerState:
    """Note that this worker has all that its place in an epoch needs, also if that epoch is over by now; `slots` as in `divide_slots`."""
    place = order.places[state.member.number]
    share = divide_slots([seat.host for seat in order.seats], slots=slots).of(place)
    acting = changed(state, begin=order)
    if state.applied != order.applied:
        acting = catch_up(acting)
    return changed(take_share(acting, share), begin=state.begin)


def make_ready(state: WorkerState) -> WorkerState:
    """Note that this worker has the mean gradient of its slots for the next step.

    Every member has contributed to it, and has therefore got its slots: nobody needs those of the former cut any more.
    """
    return changed(state, shares=state.shares[:1], is_ready=True)


def hold(state: WorkerState, nodes: tuple[Leaves, ...]) -> WorkerState:
    """Note the nodes of step `applied` + 1 that this worker has."""
    return changed(state, held=nodes)


def leaves_to_compute(state: WorkerState) -> tuple[Leaves, ...]:
    """Return the leaves that this worker computes in the step after `applied`."""
    assert state.begin is not None  # noqa: S101 - it acts
    return state.begin.todo[state.place] if state.is_first_step else (state.begin.blocks[state.place],)


def nodes_of_step(state: WorkerState) -> tuple[tuple[Leaves, ...], ...]:
    """Return the leaves that each member has in the step after `applied`: kept nodes and rows that it computes."""
    assert state.begin is not None  # noqa: S101 - it acts
    order = state.begin
    if not state.is_first_step:
        return tuple((block,) for block in order.blocks)
    return tuple((*kept, *todo) for kept, todo in zip(order.kept, order.todo, strict=True))


def apply(state: WorkerState) -> WorkerState:
    """Note that the next step is in the weights. Only whoever has the whole mean of that step may call it."""
    assert state.begin is not None and state.applied is not None  # noqa: S101, PT018 - it acts
    return changed(state, applied=state.applied + 1, held=(), shares=state.shares[:1], is_ready=False)


def after_update(state: WorkerState, step: int) -> WorkerState:
    """Note that a step is in what this worker keeps, also while the members change."""
    if state.applied == step:
        return changed(state, held=())  # an epoch that has begun with this step may have given this worker other slots
    return changed(state, applied=step, held=(), shares=state.shares[:1], is_ready=False)


def end_step(state: WorkerState) -> WorkerState:
    """Note that what follows the update of a step is done: its validation, if one is due."""
    return changed(state, validated=state.applied)


def end_run(state: WorkerState) -> WorkerState:
    """Note that this worker has done, in this epoch, all that follows the last step, such as its part of the last checkpoint."""
    return changed(state, is_done=True, ended_in=state.epoch)


def progress(state: WorkerState, *, pace_s: float | None) -> Progressed:
    """Say how far this worker is."""
    return Progressed(state.member, state.epoch, state.applied or 0, pace_s, state.has_ended)
