"""A worker of an elastic run as a state machine: what it may do, and what it answers. `runtime/elastic/` carries it out."""

from dataclasses import dataclass, replace

from ttlaunch.membership.messages import Answered, Begin, Member, Prepare, Progressed

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
    """

    member: Member
    epoch: int = 0
    begin: Begin | None = None
    applied: int | None = None
    held: tuple[Leaves, ...] = ()
    validated: int | None = None
    is_done: bool = False

    @property
    def place(self) -> int:
        """Its rank in the epoch in which it acts."""
        assert self.begin is not None  # noqa: S101 - it acts
        return self.begin.numbers.index(self.member.number)

    @property
    def is_first_step(self) -> bool:
        """Whether the step that it makes is the epoch's first, whose leaves are divided by `kept` and `todo`."""
        return self.begin is not None and self.applied == self.begin.applied


def prepare(state: WorkerState, order: Prepare) -> WorkerState:
    """Stop acting; an order of an epoch that is over changes nothing. `answer` says what to report."""
    if order.epoch <= state.epoch:
        return state
    return replace(state, epoch=order.epoch, begin=None)


def answer(state: WorkerState) -> Answered:
    """Say what this worker has."""
    return Answered(state.member, state.epoch, state.applied, state.held, state.validated, state.is_done)


def begin(state: WorkerState, order: Begin) -> WorkerState:
    """Act in an epoch, with those of the held nodes that count; an order of another epoch, or a second one, changes nothing.

    If `order.behind` names this worker, it must get what it lacks from `order.holders`, and then call `catch_up`.
    """
    if order.epoch != state.epoch or state.begin is not None or state.member.number not in order.numbers:
        return state
    place = order.numbers.index(state.member.number)
    held = order.kept[place] if state.applied == order.applied else ()
    return replace(state, begin=order, held=held)


def catch_up(state: WorkerState) -> WorkerState:
    """Note that the weights now are those that the epoch starts from, and with them what followed that step, if it is over."""
    assert state.begin is not None  # noqa: S101 - it acts
    applied = state.begin.applied
    return replace(state, applied=applied, held=(), validated=state.validated if state.begin.validates else applied)


def hold(state: WorkerState, nodes: tuple[Leaves, ...]) -> WorkerState:
    """Note the nodes of step `applied` + 1 that this worker has."""
    return replace(state, held=nodes)


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
    return replace(state, applied=state.applied + 1, held=())


def end_step(state: WorkerState, *, is_done: bool) -> WorkerState:
    """Note that what follows the update of a step is done, its validation if one is due, and whether the step was the last."""
    return replace(state, validated=state.applied, is_done=is_done)


def progress(state: WorkerState, *, pace_s: float | None) -> Progressed:
    """Say how far this worker is."""
    assert state.applied is not None  # noqa: S101 - it acts
    return Progressed(state.member, state.epoch, state.applied, pace_s, state.is_done)
