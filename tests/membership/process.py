"""A process of the model of an elastic run: the worker's own state machine, and what it has in memory besides.

The state machine is `ttlaunch/membership/worker.py` itself. What is here is what `runtime/parallel/gradients/exchange.py` does
with tensors, without their values: which leaves a sum contains says whether it is right, since sums follow one tree.

A step of one process, for each bucket of the gradient: it sends its nodes to all members (each needs a shard of them), adds up
its own shard of all nodes, and sends the mean of it to all. With all means it applies the step.

Where the state is cut into slots, a process adds up the gradient of its slots, and sends the others no mean but its part of the
gradient's norm. With the parts of all it updates its slots.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from enum import StrEnum
from itertools import pairwise

from tests.membership.explorer import Violation
from ttlaunch.membership import coordinator, worker
from ttlaunch.membership.coordinator import Result
from ttlaunch.membership.coordinator_state import Coordinator
from ttlaunch.membership.messages import Begin, Event, Follow, Member, Prepare, Registered, Seat, Share
from ttlaunch.membership.slots import covering_cut, divide_slots, sources_of
from ttlaunch.membership.worker import WorkerState
from ttlaunch.spec.recipe.blocks import aligned_subtrees

Node = tuple[int, int, int]
"""The sum of some leaves in memory: the step, the first leaf, the one after the last."""


class Kind(StrEnum):
    """What a frame carries."""

    NODES = "nodes"
    MEAN = "mean"


@dataclass(frozen=True)
class Frame:
    """What a process sends to another one, for one bucket of a step.

    Attributes:
        nodes: Those of the sender; empty for a mean.
    """

    kind: Kind
    epoch: int
    step: int
    source: int
    bucket: int
    nodes: tuple[Node, ...] = ()


@dataclass(frozen=True)
class Process:
    """A process.

    Attributes:
        state: What the worker's state machine knows.
        is_new: It has not heard from the coordinator since it registered.
        is_alive: It has neither crashed nor ended.
        nodes: The sums of leaves that it has in memory.
        sent: Of how many buckets its nodes are on their way, in the step that it makes.
        reduced: Of how many buckets its own shard of the mean is on its way.
        inbox: The frames that it has accepted and not used up.
        means: The steps whose mean it has.
        made: The last step that it has applied by itself, or with the mean of others.
        ended: The last step after which it did what follows an update, or whose state it got from one that did.
        follows: Whether it can get the state before it takes part.
        source: From whom.
        content: The last step whose update is really in its weights, whatever it says.
        has_slots: Whether it has got its slots of this epoch.
    """

    state: WorkerState
    is_new: bool = True
    is_alive: bool = True
    nodes: frozenset[Node] = frozenset()
    sent: int = 0
    reduced: int = 0
    inbox: frozenset[Frame] = frozenset()
    means: frozenset[int] = frozenset()
    made: int | None = None
    ended: int | None = None
    follows: bool = False
    source: Follow | None = None
    content: int | None = None
    has_slots: bool = False

    @property
    def number(self) -> int:
        """Its number."""
        return self.state.member.number

    @property
    def lacks_state(self) -> bool:
        """Whether it acts in an epoch, and must first get what it lacks."""
        begin = self.state.begin
        if begin is None or not any(number == self.number for number, _ in begin.behind) or self.has_caught_up:
            return self.lacks_slots
        return True

    @property
    def lacks_slots(self) -> bool:
        """Whether it acts in an epoch in which the state is cut, and has not got its slots yet."""
        begin = self.state.begin
        return begin is not None and bool(begin.shares) and not self.has_slots

    @property
    def is_following(self) -> bool:
        """Whether it gets the state from members while it is none."""
        return self.follows and self.source is not None and not self.state.epoch

    @property
    def has_caught_up(self) -> bool:
        """Whether its weights are at least those that the epoch starts from."""
        begin, applied = self.state.begin, self.state.applied
        return begin is not None and applied is not None and applied >= begin.applied

    @property
    def is_between_steps(self) -> bool:
        """Whether what follows the last update, such as the validation, is still to be done."""
        state = self.state
        if state.begin is None or self.lacks_state or state.is_done:
            return state.begin is not None and state.is_done and not state.has_ended
        is_due = state.begin.validates or not state.is_first_step
        return is_due and state.validated != state.applied

    @property
    def makes_step(self) -> bool:
        """Whether it computes or exchanges gradients."""
        acts = self.state.begin is not None and not self.lacks_state
        return acts and not self.state.is_done and not self.is_between_steps

    @property
    def step(self) -> int:
        """The step that it makes."""
        return (self.state.applied or 0) + 1


def drop_what_arrived(process: Process) -> Process:
    """Keep only complete nodes of its own when a step is interrupted: what others have sent is sent again."""
    return replace(process, inbox=frozenset())


def is_of_its_epoch(process: Process, frame: Frame) -> bool:
    """Accept only frames of the epoch in which the process acts, or is about to."""
    return frame.epoch == process.state.epoch


def all_is_on_its_way(process: Process, buckets: int) -> bool:
    """Let a process go on to the next step only when what others need of it is on its way."""
    return process.sent == buckets and process.reduced == buckets


def forget_when_all_have_begun(process: Process, kind: Kind) -> bool:
    """Use the memory of a mean again only for a sum that every member has contributed to: all have applied that mean."""
    del process
    return kind is Kind.MEAN


def take_the_state(process: Process, step: int) -> Process:
    """Have the weights of a step, and say so."""
    state = replace(process.state, applied=step, validated=step)
    return replace(process, state=state, ended=step, content=step)


def await_all_parts(process: Process) -> bool:
    """Let a process apply a step only when it has the means, or the parts of the norm, of all."""
    del process
    return True


def keep_own_and_shadowed(share: Share) -> Share:
    """Keep the slot that a process owns and the one that it shadows."""
    return share


@dataclass(frozen=True)
class Rules:
    """The functions that decide: the production ones, and what stands for the code that handles tensors; see their names."""

    step: Callable[[Coordinator, Event], Result] = coordinator.step
    begin: Callable[[WorkerState, Begin], WorkerState] = worker.begin
    catch_up: Callable[[WorkerState], WorkerState] = worker.catch_up
    interrupt: Callable[[Process], Process] = drop_what_arrived
    accepts: Callable[[Process, Frame], bool] = is_of_its_epoch
    may_apply: Callable[[Process, int], bool] = all_is_on_its_way
    forgets_mean: Callable[[Process, Kind], bool] = forget_when_all_have_begun
    follow: Callable[[Process, int], Process] = take_the_state
    awaits_all: Callable[[Process], bool] = await_all_parts
    keeps: Callable[[Share], Share] = keep_own_and_shadowed
    take_share: Callable[[WorkerState, Share], WorkerState] = worker.take_share


@dataclass(frozen=True)
class Work:
    """What a run has to do.

    Attributes:
        steps: The last step.
        micro_batches: M.
        buckets: The buckets of a gradient.
        validates: Whether something follows each update that takes its time.
        slots: Into how many slots the state is cut, as for the coordinator.
    """

    steps: int = 1
    micro_batches: int = 2
    buckets: int = 1
    validates: bool = False
    slots: int | None = None
    rules: Rules = field(default_factory=Rules)


def report_of(process: Process) -> Event:
    """Return what a process repeats until something changes."""
    state = process.state
    if process.is_new:
        return Registered(Seat(state.member), state.applied, process.follows)
    if state.begin is None or state.applied is None:
        return worker.answer(state)
    return worker.progress(state, pace_s=None)


def stop(process: Process, epoch: int, work: Work) -> Iterator[Process]:
    """Let a process stop for an epoch; yield one for each number of micro-batches that it may have differentiated by then."""
    for count in _counts(process, work):
        nodes = process.nodes | (set(_computed(process, count)) if process.makes_step else set())
        state = worker.prepare(process.state, Prepare(epoch))
        held = sorted(node[1:] for node in nodes if node[0] == process.step and state.applied is not None)
        stopped = replace(
            process, state=worker.hold(state, tuple(held)), is_new=False, nodes=frozenset(nodes), sent=0, reduced=0
        )
        yield work.rules.interrupt(stopped)


def _counts(process: Process, work: Work) -> range:
    if not process.makes_step:
        return range(1)
    count = sum(stop - first for first, stop in worker.leaves_to_compute(process.state))
    # Buckets are sent during the last backward pass, before its node is complete.
    least = 0 if not process.sent else count if process.sent == work.buckets else max(0, count - 1)
    return range(least, count + 1)


def _computed(process: Process, count: int | None = None) -> list[Node]:
    """Return the nodes of the first micro-batches that it has to compute; by default of all."""
    found = []
    for first, last in worker.leaves_to_compute(process.state):
        size = last - first if count is None else min(last - first, count)
        count = None if count is None else count - size
        found += [(process.step, node.start, node.stop) for node in aligned_subtrees(range(first, first + size))]
    return found


def begin(process: Process, order: Begin, work: Work) -> Process:
    """Let a process act in an epoch; nodes that do not count are dropped."""
    state = work.rules.begin(process.state, order)
    held = {(process.step, *node) for node in state.held}
    return replace(process, state=state, nodes=frozenset(process.nodes & held), has_slots=False)


def end_step(process: Process, work: Work) -> Process:
    """Do what follows an update."""
    state = worker.end_step(process.state)
    state = worker.end_run(state) if state.applied == work.steps else state
    return replace(process, state=state, ended=state.applied)


def send_nodes(process: Process, work: Work) -> tuple[Process, Frame]:
    """Send the nodes of the next bucket; returns the process after it, and the frame that goes to all others."""
    state = process.state
    kept = {(process.step, *node) for node in state.held} if state.is_first_step else set()
    if not kept <= process.nodes:
        raise Violation(f"a node that counts is not in the memory of worker {process.number}: {kept - process.nodes}")
    nodes = tuple(sorted([*kept, *_computed(process)]))
    frame = Frame(Kind.NODES, state.epoch, process.step, process.number, process.sent, nodes)
    process = replace(process, sent=process.sent + 1, nodes=process.nodes | set(nodes))
    return _forget(process, Kind.NODES, work), frame


def can_reduce(process: Process) -> bool:
    """Whether it has sent the next bucket of which it needs the mean, and has what all others have sent of it."""
    return process.makes_step and process.reduced < process.sent and _has(process, Kind.NODES, process.reduced)


def reduce(process: Process, work: Work) -> tuple[Process, Frame]:
    """Add up its shard of the next bucket; returns the process after it, and the frame that goes to all others."""
    arrived = [frame.nodes for frame in _frames(process, Kind.NODES, process.reduced)]
    nodes = sorted(node for some in [tuple(process.nodes), *arrived] for node in some)
    whole = [(process.step, 0), *[(step, stop) for step, _, stop in nodes]]
    is_once = all(before == (step, first) for before, (step, first, _) in zip(whole, nodes, strict=False))
    if not is_once or whole[-1] != (process.step, work.micro_batches):
        raise Violation(f"worker {process.number} does not sum each leaf of step {process.step} once: {nodes}")
    frame = Frame(Kind.MEAN, process.state.epoch, process.step, process.number, process.reduced)
    process = _forget(replace(process, reduced=process.reduced + 1), Kind.MEAN, work)
    if work.slots is not None and process.reduced == work.buckets:
        process = replace(process, state=worker.make_ready(process.state))
    return process, frame


def can_apply(process: Process, work: Work) -> bool:
    """Whether it has the whole mean of its step."""
    if not process.makes_step or not work.rules.may_apply(process, work.buckets):
        return False
    kinds = Kind if work.rules.awaits_all(process) else [Kind.NODES]
    return all(_has(process, kind, bucket) for kind in kinds for bucket in range(work.buckets))


def apply(process: Process, work: Work) -> Process:
    """Make the update."""
    state = worker.apply(process.state)
    means = process.means | {process.step}
    rest = frozenset(frame for frame in process.inbox if frame.step > process.step)
    process = replace(
        process,
        state=state,
        nodes=frozenset(),
        sent=0,
        reduced=0,
        inbox=rest,
        means=means,
        made=process.step,
        content=process.step,
    )
    return process if work.validates else end_step(process, work)


def take(process: Process, frame: Frame, work: Work) -> Process:
    """Let a frame arrive."""
    is_used_up = process.state.applied is not None and frame.step <= process.state.applied
    if not process.is_alive or is_used_up or not work.rules.accepts(process, frame):
        return process
    return replace(process, inbox=process.inbox | {frame})


def pull(process: Process, holders: list[Process], work: Work) -> Process | None:
    """Let a process get what it lacks from those holders that live; None if it cannot yet.

    Raises:
        Violation: It needs all of the state although a holder has made the step, of which it lacks only the mean.
    """
    order = process.state.begin
    assert order is not None
    if order.shares:
        return _pull_slots(process, holders, work)
    living = [one for one in holders if one.is_alive and one.state.epoch == order.epoch]
    is_one_behind = process.state.applied == order.applied - 1
    gets_mean = is_one_behind and any(order.applied in one.means for one in living)
    if not gets_mean:
        has_stayed = not process.state.member.incarnation and not process.follows
        if is_one_behind and has_stayed and any(one.made == order.applied for one in living):
            raise Violation(f"the mean of step {order.applied} is forgotten, which worker {process.number} lacks")
        if len(living) < len(order.holders):
            return None  # 1/n comes from each
        if any(one.state.applied != order.applied for one in living):
            raise Violation(f"a holder has gone on before worker {process.number} had its state")
    state = work.rules.catch_up(process.state)
    ended = order.applied - 1 if order.validates else order.applied
    process = replace(process, state=state, nodes=frozenset(), ended=ended, content=order.applied)
    process = replace(process, means=frozenset({order.applied}), made=order.applied) if gets_mean else process
    return process if order.validates or order.applied < work.steps else end_step(process, work)


def follow(process: Process, members: list[Process], work: Work) -> Process | None:
    """Let a process get what all members have made, whether as a state or as means; None if it has that."""
    source = process.source
    assert source is not None
    acting = [one for one in members if one.is_alive and one.state.epoch == source.epoch and one.has_caught_up]
    if len(acting) < len(source.seats):
        return None
    # What a step has made is given away when the next one begins, so that of the last one never is.
    step = min(work.steps - 1, *(-1 if one.ended is None else one.ended for one in acting))
    if step <= (-1 if process.state.applied is None else process.state.applied):
        return None
    return work.rules.follow(process, step)


def give_up(process: Process) -> Process:
    """Let a process ask to take part without the state."""
    return replace(process, follows=False, source=None)


def own_share(process: Process, work: Work) -> Share:
    """Return what a process keeps in its epoch."""
    order = process.state.begin
    assert order is not None
    slots = divide_slots([seat.host for seat in order.seats], slots=work.slots or 0)
    return work.rules.keeps(slots.of(order.numbers.index(process.number)))


def _pull_slots(process: Process, others: list[Process], work: Work) -> Process | None:
    """Let a process make up a step for which it is ready, and get its slots; None if it cannot yet.

    Raises:
        Violation: A member has given up its former slots although another one still needs them.
    """
    order = process.state.begin
    assert order is not None
    state, share = process.state, own_share(process, work)
    living = {one.number: one for one in others if one.is_alive and one.state.epoch == order.epoch}
    has = order.shares[order.numbers.index(process.number)]
    assert has is not None
    for slot in _overlaps(share, has.cut) - set(has.slots):
        sources = [
            living[order.numbers[place]] for place in sources_of(slot, order.shares) if order.numbers[place] in living
        ]
        if not sources:
            return None
        if not any(slot in some.slots for one in sources for some in one.state.shares if some.cut == has.cut):
            raise Violation(f"slot {slot} of {has.cut} is given up before worker {process.number} has got it")
    if state.applied != order.applied:
        if not any(one.state.applied is not None and one.state.applied >= order.applied for one in living.values()):
            return None
        state = work.rules.catch_up(state)
        ended = order.applied - 1 if order.validates else order.applied
        process = replace(process, nodes=frozenset(), ended=ended, made=order.applied, content=order.applied)
    is_last = not order.validates and order.applied == work.steps
    process = replace(process, state=work.rules.take_share(state, share), has_slots=True)
    return end_step(process, work) if is_last and not state.is_done else process


def _overlaps(share: Share, cut: int) -> set[int]:
    """Return the slots of another cut that have something in common with some slots."""
    return {
        other
        for other in range(cut)
        for slot in share.slots
        if other * share.cut < (slot + 1) * cut and slot * cut < (other + 1) * share.cut
    }


def come_again(process: Process) -> Process:
    """Let a process that was dismissed although it lives register anew, with what it has."""
    member = Member(process.number, process.state.member.incarnation + 1)
    state = replace(process.state, member=member, begin=None)
    process = replace(process, follows=False, source=None)
    return replace(process, state=state, is_new=True, sent=0, reduced=0, inbox=frozenset())


def check_begin(order: Begin, work: Work, *, held: dict[int, tuple[tuple[int, int], ...]]) -> None:
    """Check what an order says of itself.

    Raises:
        Violation: Ranks are not places among sorted numbers, or a leaf is there not once.
    """
    if list(order.numbers) != sorted(set(order.numbers)):
        raise Violation(f"epoch {order.epoch}: members are not sorted by number: {order.numbers}")
    ends = [0, *[stop for _, stop in order.blocks]]
    if [first for first, _ in order.blocks] != ends[:-1] or ends[-1] != work.micro_batches:
        raise Violation(f"epoch {order.epoch}: blocks {order.blocks} are not all leaves in order")
    if work.slots is not None and covering_cut((share,) for share in order.shares if share is not None) is None:
        raise Violation(
            f"epoch {order.epoch} begins although nobody has some slot of step {order.applied}: {order.shares}"
        )
    if any(stop <= first for first, stop in order.blocks):
        raise Violation(f"epoch {order.epoch}: a member has no leaf: {order.blocks}")
    for number, kept in zip(order.numbers, order.kept, strict=True):
        if not set(kept) <= set(held.get(number, ())):
            raise Violation(f"epoch {order.epoch}: worker {number} does not hold {kept}")
    rows = sorted(row for rows in (*order.kept, *order.todo) for row in rows)
    joined = all(before[1] == after[0] for before, after in pairwise(rows))
    if rows and (rows[0][0] or rows[-1][1] != work.micro_batches or not joined):
        raise Violation(f"epoch {order.epoch}: kept {order.kept} and todo {order.todo} are not each leaf once")


def _forget(process: Process, kind: Kind, work: Work) -> Process:
    if not work.rules.forgets_mean(process, kind):
        return process
    return replace(process, means=process.means - {process.step - 1})


def _frames(process: Process, kind: Kind, bucket: int) -> list[Frame]:
    step = process.step
    return [one for one in process.inbox if (one.kind, one.step, one.bucket) == (kind, step, bucket)]


def _has(process: Process, kind: Kind, bucket: int) -> bool:
    order = process.state.begin
    assert order is not None
    return {frame.source for frame in _frames(process, kind, bucket)} >= set(order.numbers) - {process.number}
