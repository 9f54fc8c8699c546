"""The order with which an epoch begins: who gets which place, what counts of what members have, and who computes the rest."""

from collections.abc import Sequence

from ttlaunch.membership.coordinator_state import Coordinator
from ttlaunch.membership.division import blocks_of, choose_kept, divide_missing
from ttlaunch.membership.local_epochs import still_counting
from ttlaunch.membership.messages import Begin, Share
from ttlaunch.membership.slots import covering_cut


def begin_of(state: Coordinator, wanted: Sequence[int], applied: int) -> Begin:
    """Return the order with which an epoch of these members begins; all of them have answered.

    Args:
        state: The coordinator.
        wanted: Their numbers, sorted.
        applied: The step that the epoch starts from.
    """
    terms = state.terms
    places, servers = _order_places(state, wanted), servers_of(state, wanted)
    answers, known = state.answers.among(places), state.workers.among(places)
    # Where the bits follow from the members, so must the division.
    paces = [None if terms.has_local_steps else worker.pace_s for worker in known[servers:]]
    held = [answer.held if answer.applied == applied else () for answer in answers[servers:]]
    # After the run's last step nothing is left to compute: members that lack the step only catch up. And nobody else computes
    # what a worker that was lost would have done in a local step.
    said = {(answer.is_done, answer.validated) for answer in answers if answer.applied == applied}
    is_done = any(done for done, _ in said)
    count = 0 if is_done or terms.has_local_steps else terms.micro_batches
    made = [applied, *(answer.applied for answer in answers)] if terms.has_local_steps else []
    kept = choose_kept(held, micro_batches=count)
    todo = divide_missing(kept, micro_batches=count, paces=paces)
    return Begin(
        epoch=state.epoch,
        seats=tuple(worker.seat for worker in known),
        applied=applied,
        kept=((),) * servers + tuple(map(tuple, kept)),
        todo=((),) * servers + tuple(map(tuple, todo)),
        blocks=((0, 0),) * servers + tuple(blocks_of(terms.micro_batches, paces)),
        behind=tuple((one.member.number, one.applied) for one in answers if one.applied != applied),
        holders=tuple(one for one, answer in zip(places, answers, strict=True) if answer.applied == applied),
        validates=any(validated != applied for _, validated in said),
        shares=_shares_at_begin(state, places, applied) if terms.slots is not None else (),
        earlier=still_counting(state.epochs, begun=applied, made=made) if made else (),
    )


def servers_of(state: Coordinator, members: Sequence[int]) -> int:
    """Return at how many places, the first ones, these members would compute no micro-batches."""
    return min(state.terms.servers, len(members) - 1)


def _order_places(state: Coordinator, wanted: Sequence[int]) -> tuple[int, ...]:
    """Give each member a place: servers keep theirs, who has slots gets a free one first, and then who is on another host."""
    if not state.terms.servers:
        return tuple(wanted)
    count = max(2, state.terms.servers)  # with a single server, its shadow keeps its place, too
    before = state.places[:count]
    chosen = {place: number for place, number in enumerate(before) if number in wanted}
    free = [number for number in wanted if number not in chosen.values()]
    for place in range(count):
        if place not in chosen and free:
            hosts = {state.workers[number].seat.host for number in chosen.values()}
            best = min(free, key=lambda one: (not _has_slots(state, one), state.workers[one].seat.host in hosts, one))
            chosen[place] = best
            free.remove(best)
    return (*(chosen[place] for place in sorted(chosen)), *free)


def _has_slots(state: Coordinator, number: int) -> bool:
    return any(share.slots for share in state.workers[number].shares)


def _shares_at_begin(state: Coordinator, places: tuple[int, ...], applied: int) -> tuple[Share | None, ...]:
    """Return what each member has of the step that the epoch starts from, all of one cut; empty where somebody has all of it."""
    found = [worker.shares_at(applied) for worker in state.workers.among(places)]
    cut = covering_cut(shares for shares in found if shares)
    if cut is None:
        return ()
    own = [next((share for share in shares or () if share.cut == cut), Share(cut)) for shares in found]
    return tuple(None if shares == () else share for shares, share in zip(found, own, strict=True))
