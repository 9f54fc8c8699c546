"""The coordinator of an elastic run as a state machine: `step(state, event)` returns the next state and the orders to give.

    WAITING     until all workers that are started with the run are ready, or ended
    COLLECTING  members stop, keep what they have, and answer; who is lost meanwhile is not waited for, and who comes is asked, too
    RUNNING     the members of an epoch make steps
    FINISHED    every member has made all steps
    STRANDED    those who live do not have all of the state, unless one that was counted as lost lives and comes again with it

A worker that comes without the weights gets them from the members while these go on (`Follow`), and takes part when it says that it
has them. Where too few would make steps without it, it takes part at once and gets them at the begin of the epoch.

A change never decides about a step: any member that has applied step s has what everybody else would get, since sums follow one
tree. So the next epoch starts from the largest step that any member has applied, and nothing that was computed counts twice,
because every leaf is at exactly one member (`division.py`).

Where the state is cut into slots (`slots.py`), nobody has all of it. A member makes the update of a step only when all members have
said that they have the mean gradient of their slots, and so can make it, too. So it is still the largest step from which an epoch
starts: its slots are with the members that have applied it and with those that are ready to. If one of them is with neither, its
owner and its shadow are gone, and so is the state.

Source: the order of phases is that of view-synchronous group communication, K. Birman and T. Joseph, "Exploiting virtual
synchrony in distributed systems", SOSP 1987; that no step needs a vote follows from the fixed order of sums.
"""

from collections.abc import Collection, Iterable, Mapping
from itertools import groupby
from typing import Any

from ttlaunch.membership.coordinator_state import Coordinator, Phase, Worker
from ttlaunch.membership.division import blocks_of, step_seconds
from ttlaunch.membership.epoch_begin import begin_of, servers_of
from ttlaunch.membership.messages import (
    Answered,
    Begin,
    CutOff,
    Dismiss,
    EndOrdered,
    Event,
    Finish,
    Follow,
    LeaveAsked,
    Lost,
    Member,
    Message,
    Order,
    Prepare,
    Progressed,
    Registered,
    Tick,
)
from ttlaunch.membership.numbered import Numbered, Numbers, changed
from ttlaunch.membership.slots import covering_cut, divide_slots

_WORTH = 0.8  # work is divided anew where a step would take at most this part of its time
_SETTLED_STEPS = 16  # an epoch lasts at least so long before that: times of its first steps say little
_LOOKS = 3  # and so many looks in a row, each after another step, find it worth while: a busy moment of a host passes


_OVER = (Phase.FINISHED, Phase.STRANDED)

Result = tuple[Coordinator, list[Order]]


def step(state: Coordinator, *events: Event) -> Result:
    """Take events in the order in which they came, and return the next state and the orders that follow.

    From many at once follows what follows from one after the other, but reports in a row share one copy of what they change.

    Args:
        state: The coordinator; it is not changed.
        events: What happened. What an earlier incarnation or a worker of another epoch says changes nothing.

    Cost: of a report, the same for any number of workers; of all that come at once, references to blocks of workers in addition
    (`numbered.py`); of what stops or begins an epoch, proportional to the number of workers, and to M at its begin.
    """
    orders: list[Order] = []
    alike: Any  # all of this kind
    for kind, alike in groupby(events, type):
        take = _take_answers if kind is Answered else _take_progress if kind is Progressed else _take_others
        state, more = take(state, alike)
        orders += more
    return state, orders


def _take_others(state: Coordinator, events: Iterable[Event]) -> Result:
    orders: list[Order] = []
    for event in events:
        state, more = _take(state, event)
        orders += more
    return state, orders


def _take(state: Coordinator, event: Event) -> Result:
    match event:
        case _ if state.phase in _OVER:
            return _after_end(state, event)
        case Registered():
            return _register(state, event)
        case CutOff():
            return _begin_anew(state, event)
        case Lost(member):
            return _lose(state, member)
        case LeaveAsked(number) if number in state.workers:
            return _let_leave(state, number)
        case EndOrdered():
            return _let_end(state)
        case Tick():
            return _repeat(state)
    return state, []


def _register(state: Coordinator, event: Registered) -> Result:
    member = event.seat.member
    known = state.workers.get(member.number)
    if known is not None and known.seat.member == member:
        return _take_state(state, known, event)
    if member.incarnation <= state.seen.get(member.number, -1):
        # A late report must not bring back who has ended, was counted as lost, or has left.
        reason = "others have gone on without it" if known is None else "another process has taken this worker's place"
        return state, [Order((member,), Dismiss(reason))]
    was_member = known is not None and member.number in state.members
    worker = Worker(event.seat, event.applied, follows=event.follows)
    seen = state.seen.put(member.number, member.incarnation)
    leaving = state.leaving - {member.number}
    state = changed(state, workers=state.workers.put(member.number, worker), seen=seen, leaving=leaving)
    if worker.lacks_state and not was_member and not _is_needed(state, member.number):
        return state, _let_follow(state, [member.number])
    return _collect(state) if was_member else _admit(state, member.number)


def _is_needed(state: Coordinator, number: int) -> bool:
    """Whether a worker that lacks the weights has to take part all the same; looking at all workers is left for when few are there."""
    return len(state.members) - len(state.leaving) < state.minimum and number in _wanted(state)


def _admit(state: Coordinator, number: int) -> Result:
    """Let a worker take part that is ready to: it is asked, too, while the members answer."""
    if state.phase is not Phase.COLLECTING or not state.members:
        return _settle(state)
    if len(state.members) - len(state.leaving) >= state.terms.maximum:
        return state, []
    state = changed(state, members=Numbers(sorted((*state.members, number))))
    return state, _to_all(state, [number], Prepare(state.epoch))


def _take_state(state: Coordinator, known: Worker, event: Registered) -> Result:
    """Let a worker take part that has got the weights, or cannot get them before; otherwise it has repeated itself."""
    number = event.seat.member.number
    is_news = known.lacks_state and (event.applied is not None or not event.follows)
    if not is_news or number in state.members:
        return state, []
    worker = changed(known, applied=event.applied, follows=event.follows)
    return _admit(changed(state, workers=state.workers.put(number, worker)), number)


def _let_follow(state: Coordinator, numbers: Iterable[int]) -> list[Order]:
    """Order those of these workers that lack the weights to get them, as far as there is room for them among the members."""
    if state.begin is None:
        return []
    room = state.terms.maximum - len(state.members)
    lacking = [number for number in sorted(numbers) if number in state.workers and state.workers[number].lacks_state]
    return _to_all(state, lacking[: max(0, room)], Follow(state.epoch, state.begin.seats))


def _let_leave(state: Coordinator, number: int) -> Result:
    if number not in state.members:
        return changed(state, workers=state.workers.drop(number)), _to_all(state, [number], _farewell(state))
    state = changed(state, leaving=state.leaving | {number})
    return _begin_if_complete(state) if state.phase is Phase.COLLECTING else _settle(state)


def _farewell(state: Coordinator) -> Dismiss:
    return Dismiss("the run was ordered to stop" if state.is_ending else "it was asked to leave")


def _begin_anew(state: Coordinator, event: CutOff) -> Result:
    """Begin another epoch with the same members: their connections are opened anew where they broke."""
    known = state.workers.get(event.member.number)
    acts = known is not None and known.seat.member == event.member and event.member.number in state.members
    return _collect(state) if acts and state.phase is Phase.RUNNING and event.epoch == state.epoch else (state, [])


def _let_end(state: Coordinator) -> Result:
    """Wait for nobody who is not there: whoever lacks what others have of the last step gets it from them, before all end."""
    state = changed(state, is_ending=True)
    match state.phase:
        case Phase.COLLECTING:
            return _begin_if_complete(state)
        case Phase.WAITING:
            return _settle(state)
    return state, []


def _lose(state: Coordinator, member: Member) -> Result:
    known = state.workers.get(member.number)
    seen = state.seen.put(member.number, max(member.incarnation, state.seen.get(member.number, 0)))
    if known is None or known.seat.member != member:
        state = changed(state, seen=seen)
        return _settle(state) if state.phase is Phase.WAITING else (state, [])  # the run's begin may wait for it
    workers, leaving = state.workers.drop(member.number), state.leaving - {member.number}
    state = changed(state, workers=workers, seen=seen, leaving=leaving)
    if state.phase is not Phase.WAITING and not workers:
        return changed(state, phase=Phase.STRANDED), []
    if member.number not in state.members:
        is_same = state.phase is Phase.COLLECTING or (state.phase is Phase.RUNNING and not state.leaving)
        return (state, []) if is_same else _settle(state)
    place = state.members.index(member.number)
    members = Numbers(state.members[:place] + state.members[place + 1 :])
    if state.phase is Phase.COLLECTING and members:
        # The others have stopped, and what they have answered is still so.
        return _begin_if_complete(changed(state, members=members, answers=state.answers.drop(member.number)))
    # Whether one of those that remain has got the weights meanwhile, only its answer tells.
    return _collect(state)


def _settle(state: Coordinator) -> Result:
    """Begin an epoch if the members should be others than they are."""
    if state.phase is Phase.WAITING and not state.terms.first <= state.seen.keys():
        return state, []
    if state.phase is Phase.WAITING and state.missing:
        return state, []
    wanted = _wanted(state)
    return (state, []) if wanted == state.members else _collect(state)


def _wanted(state: Coordinator) -> Numbers:
    """Choose the members of the next epoch: the present ones, then those that wait; not those that leave, but see below."""
    members = frozenset(state.members)
    staying = state.staying
    present, waiting = sorted(staying & members), sorted(staying - members)
    ready = [number for number in waiting if not state.workers[number].lacks_state]
    lacking = [number for number in waiting if state.workers[number].lacks_state]
    chosen = [*present, *ready][: state.terms.maximum]
    # Without the weights they would keep the others waiting; but too few make no step at all.
    chosen += lacking[: max(0, state.minimum - len(chosen))]
    giving = sorted(state.leaving & members)
    if giving and not _have_state(state, chosen) and _have_state(state, [*giving, *chosen]):
        # Those who stay do not have the newest state yet, so some of those that leave give it first. The places of an epoch
        # are limited: the last of the others may have to wait until these have gone.
        for number in reversed(giving):
            others = [one for one in giving if one != number]
            giving = others if _have_state(state, [*others, *chosen]) else giving
        room = min(max(1 + len(giving), state.terms.maximum), state.terms.micro_batches + state.terms.servers)
        chosen = [*giving, *chosen[: room - len(giving)]]
    return Numbers(sorted(chosen))


def _have_state(state: Coordinator, numbers: Collection[int]) -> bool:
    """Whether some workers together have all of the state that the next epoch starts from, and one knows the step itself."""
    begin, least = state.begin, _least_needed(state)
    workers = state.workers.among(numbers)
    if not any(worker.applied is not None and worker.applied >= least for worker in workers):
        return False  # those that are ready for the step lack what only a member that has made it can tell
    if begin is not None and state.terms.slots is not None and len(state.acting) == len(state.members):
        # All have their slots of this epoch's cut: whoever has reported since the begin has got them.
        slots = divide_slots([seat.host for seat in begin.seats], slots=state.terms.slots)
        found = [(slots.of(begin.places[number]),) for number in numbers if number in begin.places]
        return covering_cut(found) is not None
    if any(worker.shares_at(least) == () for worker in workers):
        return True
    return covering_cut(shares for worker in workers if (shares := worker.shares_at(least))) is not None


def _least_needed(state: Coordinator) -> int:
    """Return the last step that somebody of the next epoch must have applied."""
    if state.begin is not None:
        return state.begin.applied  # whoever has caught up with the epoch can go on, also if others are a step ahead
    members = state.workers.among(state.members)
    return max((one.applied for one in members if one.applied is not None), default=0)


def _collect(state: Coordinator) -> Result:
    """Stop all members of the present and of the next epoch, and ask them what they have."""
    present = frozenset(state.workers).intersection(state.members)
    asked = Numbers(sorted(present.union(_wanted(state))))
    state = changed(state, phase=Phase.COLLECTING, epoch=state.epoch + 1, members=asked, answers=Numbered(), begin=None)
    state = changed(state, acting=Numbered(), done=0, worth=0, looked=None)
    return state, _to_all(state, asked, Prepare(state.epoch))


def _reporter(state: Coordinator, event: Answered | Progressed, phase: Phase) -> Worker | None:
    """Return who reports, if it takes part in the epoch of which it speaks, and the coordinator is in this phase."""
    member = event.member
    if event.epoch != state.epoch or state.phase is not phase or member.number not in state.members:
        return None
    known = state.workers.get(member.number)
    is_same = known is not None and (known.seat.member is member or known.seat.member == member)
    return known if is_same else None


def _take_answers(state: Coordinator, answers: Iterable[Answered]) -> Result:
    """Note what members have; what follows from the last answer that is awaited comes before the next one."""
    orders: list[Order] = []
    found: dict[int, Answered] = {}
    for answer in answers:
        if _reporter(state, answer, Phase.COLLECTING) is None:
            orders += _fence(state, answer.member)
            continue
        found[answer.member.number] = answer
        if len(state.answers) + len(found) >= len(state.members):  # all have answered, or some have once more
            state, more = _begin_if_complete(_with_answers(state, found))
            orders += more
            found = {}
    return _with_answers(state, found), orders


def _with_answers(state: Coordinator, answers: Mapping[int, Answered]) -> Coordinator:
    workers = {}
    for number, answer in answers.items():
        known = state.workers[number]
        if (known.applied, known.shares, known.is_ready) != (answer.applied, answer.shares, answer.is_ready):
            said = {"applied": answer.applied, "shares": answer.shares, "is_ready": answer.is_ready}
            workers[number] = changed(known, **said)
    if not answers:
        return state
    return changed(state, answers=state.answers.put_all(answers), workers=state.workers.put_all(workers))


def _begin_if_complete(state: Coordinator) -> Result:
    if not state.members or len(state.answers) < len(state.members):
        return state, []
    answers = state.answers.among(state.members)
    applied = max((answer.applied for answer in answers if answer.applied is not None), default=None)
    if applied is None or not _have_state(state, state.members):
        return changed(state, phase=Phase.STRANDED), []
    wanted = _wanted(state)
    if len(wanted) < state.minimum:
        return state, []  # they wait until somebody comes
    if not set(wanted) <= set(state.members):
        return _collect(state)  # somebody came while answers were awaited
    return _begin(state, wanted, applied)


def _begin(state: Coordinator, wanted: Numbers, applied: int) -> Result:
    order = begin_of(state, wanted, applied)
    gone = sorted(state.leaving.difference(wanted))
    dismissed, workers = _to_all(state, gone, _farewell(state)), state.workers
    for number in gone:
        workers = workers.drop(number)
    # No member is done: who is gone may have had a part in the last checkpoint.
    done = [worker for worker in workers.among(wanted) if worker.is_done]
    workers = workers.put_all({worker.seat.member.number: changed(worker, is_done=False) for worker in done})
    leaving = state.leaving.intersection(wanted)
    state = changed(state, phase=Phase.RUNNING, members=wanted, places=order.numbers, begin=order, workers=workers)
    state = changed(state, leaving=leaving)
    if state.terms.has_local_steps:
        state = changed(state, epochs=(*order.earlier, (applied, wanted)))
    waiting = frozenset(workers).difference(wanted)
    return state, [*dismissed, *_to_all(state, wanted, order), *_let_follow(state, waiting)]


def _take_progress(state: Coordinator, reports: Iterable[Progressed]) -> Result:
    """Note how far members are; what follows when one is done, or may let others go, comes before the next report."""
    orders: list[Order] = []
    acting: dict[int, None] = {}
    workers: dict[int, Worker] = {}
    for report in reports:
        known = _reporter(state, report, Phase.RUNNING)
        if known is None:
            orders += _fence(state, report.member)
            continue
        number = report.member.number
        known = workers.get(number, known)
        # Reports may overtake one another; what a member has once made, it has.
        applied, is_done = max(report.applied, known.applied or 0), report.is_done or known.is_done
        pace_s = report.pace_s or known.pace_s
        if (known.applied, known.pace_s, known.is_done) != (applied, pace_s, is_done):
            workers[number] = changed(known, applied=applied, pace_s=pace_s, is_done=is_done)
        acting[number] = None
        if is_done or state.leaving:
            state, more = _finish_or_settle(_with_progress(state, acting, workers))
            orders += more
            acting, workers = {}, {}
    return _with_progress(state, acting, workers), orders


def _with_progress(state: Coordinator, acting: Mapping[int, None], workers: Mapping[int, Worker]) -> Coordinator:
    if not acting:
        return state
    done = sum(worker.is_done and not state.workers[number].is_done for number, worker in workers.items())
    state = changed(state, workers=state.workers.put_all(workers), done=state.done + done)
    return changed(state, acting=state.acting.put_all(acting))


def _finish_or_settle(state: Coordinator) -> Result:
    if state.done == len(state.members):
        state = changed(state, phase=Phase.FINISHED)
        return state, _to_all(state, state.workers, Finish())
    # What a member has made can only let those go that were kept because they alone had it.
    return _settle(state) if state.leaving else (state, [])


def _repeat(state: Coordinator) -> Result:
    """Repeat orders that were not obeyed yet, or divide the work anew if that makes steps much shorter."""
    if state.phase is Phase.COLLECTING:
        return state, _to_all(state, state.answers.lacks(state.members), Prepare(state.epoch))
    if state.phase is Phase.RUNNING and state.begin is not None:
        begin = state.begin
        state = _look_at_paces(state, begin)
        if state.worth >= _LOOKS:
            return _collect(state)
        orders: list[Order] = []
        if len(state.acting) < len(state.members):
            orders += _to_all(state, state.acting.lacks(state.members), begin)
        if len(state.workers) > len(state.members):
            orders += _let_follow(state, (number for number in state.workers if number not in state.members))
        return state, orders
    return state, []


def _look_at_paces(state: Coordinator, begin: Begin) -> Coordinator:
    """Note whether steps would be much shorter if the work were divided anew; a look before another step is made is none."""
    servers = servers_of(state, state.members)
    first = state.workers[state.places[servers]].applied or 0
    if first - begin.applied < _SETTLED_STEPS:
        return state  # so are the steps that all have made
    workers = state.workers.among(state.places[servers:])
    paces = [worker.pace_s for worker in workers]
    known = {place: pace for place, pace in enumerate(paces) if pace}
    applied = min(worker.applied or 0 for worker in workers)
    is_early = len(known) < len(paces) or applied - begin.applied < _SETTLED_STEPS or applied == state.looked
    if is_early or state.terms.has_local_steps:
        return state
    best = step_seconds(blocks_of(state.terms.micro_batches, paces), known)
    is_worth = best <= _WORTH * step_seconds(begin.blocks[servers:], known)
    return changed(state, looked=applied, worth=state.worth + 1 if is_worth else 0)


def _after_end(state: Coordinator, event: Event) -> Result:
    match event:
        case Registered(seat) if state.phase is Phase.FINISHED:
            return state, [Order((seat.member,), Finish())]
        case Registered(applied=int()):
            return _register(changed(state, phase=Phase.COLLECTING, members=Numbers(), leaving=frozenset()), event)
        case Lost(member):
            known = state.workers.get(member.number)
            is_known = known is not None and known.seat.member == member
            workers = state.workers.drop(member.number) if is_known else state.workers
            leaving = state.leaving - {member.number} if is_known else state.leaving
            return changed(state, workers=workers, leaving=leaving), []
        case Tick() if state.phase is Phase.FINISHED:
            return state, _to_all(state, state.workers, Finish())
    return state, []


def _fence(state: Coordinator, member: Member) -> list[Order]:
    """Tell a process that others have gone on without it; nothing if it merely speaks of an earlier epoch."""
    known = state.workers.get(member.number)
    if known is not None and known.seat.member == member:
        return []
    return [Order((member,), Dismiss("others have gone on without it"))]


def _to_all(state: Coordinator, numbers: Collection[int], message: Message) -> list[Order]:
    members = tuple([worker.seat.member for worker in state.workers.among(numbers)])
    return [Order(members, message)] if members else []
