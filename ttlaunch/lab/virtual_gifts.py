"""What members of an elastic run get from one another at the begin of an epoch, by the rules that real workers follow.

all have all of the state           who lacks the last step gets its mean gradient, or the state; an equal part from each that has it
two keep what the optimizer keeps   a new one of both gets the state from whoever has it; a worker that lacks the weights gets these
all own slots, and shadow others    each gets what of its new slots it has not had, from owners and shadows of the former ones
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ttlaunch.lab.virtual_processes import Costs
from ttlaunch.membership.messages import Begin, Share
from ttlaunch.membership.slots import Piece, divide_slots, plan_transfers, sources_of_state
from ttlaunch.membership.worker import WorkerState
from ttlaunch.planning.launch_plan import ElasticLimits
from ttlaunch.spec.recipe.blocks import contiguous_blocks

_KEEPERS = 2  # the first places of an epoch, which keep a state that is not cut among all
_VALUE_BYTES = 4


@dataclass(frozen=True)
class Gift:
    """What a worker gets.

    Attributes:
        sizes: How many bytes from each giver, by number.
        is_mean: Whether it is a mean gradient, and no state.
    """

    sizes: Mapping[int, float]
    is_mean: bool = False


def has_slots(limits: ElasticLimits) -> bool:
    """Whether not every worker keeps all of the state."""
    return limits.slots is not None and limits.shadow_bytes > 0


def gifts_at(
    begin: Begin, states: Mapping[int, WorkerState], *, limits: ElasticLimits, costs: Costs
) -> Mapping[int, Gift]:
    """Return what each member gets at the begin of an epoch, by number; those who get nothing are left out.

    Args:
        begin: The order.
        states: What the members have before it, by number.
        limits: Who keeps which part of the state.
        costs: The sizes.
    """
    if has_slots(limits) and not limits.slots and begin.shares:
        return _of_new_cut(begin, costs)
    if has_slots(limits) and limits.slots:
        return _of_keepers(begin, states, costs)
    found = {}
    for number, applied in begin.behind:
        is_mean = applied is not None and applied + 1 == begin.applied
        size = costs.mean_bytes if is_mean else costs.state_bytes
        found[number] = Gift(equal_parts(size, begin.holders), is_mean=is_mean)
    return found


def equal_parts(size: int, givers: Sequence[int]) -> dict[int, float]:
    """Return an equal part of so many bytes for each giver."""
    return dict.fromkeys(givers, size / max(1, len(givers)))


def _of_keepers(begin: Begin, states: Mapping[int, WorkerState], costs: Costs) -> dict[int, Gift]:
    sources, behind, found = sources_of_state(begin), dict(begin.behind), {}
    for place, number in enumerate(begin.numbers):
        if place < _KEEPERS and number not in sources:
            found[number] = Gift(equal_parts(costs.state_bytes, sources))
        elif number in behind and states[number].applied != begin.applied:
            found[number] = Gift(equal_parts(costs.mean_bytes, sources))
    return found


def _of_new_cut(begin: Begin, costs: Costs) -> dict[int, Gift]:
    """Cut the state equally; of a model, cuts are next to those places, between rows of each layer."""
    slots = divide_slots([seat.host for seat in begin.seats])
    former = next(share.cut for share in begin.shares if isinstance(share, Share))
    values = costs.mean_bytes // _VALUE_BYTES
    each = costs.state_bytes / max(1, costs.mean_bytes) * _VALUE_BYTES
    found: dict[int, dict[int, float]] = {}
    for one in plan_transfers(_pieces(values, former, slots.cut), begin.shares, slots):
        if one.source != one.dest:
            sizes = found.setdefault(begin.numbers[one.dest], {})
            sizes[begin.numbers[one.source]] = each * sum(len(piece.values) for piece in one.pieces)
    return {number: Gift(sizes) for number, sizes in found.items()}


def _pieces(values: int, before: int, after: int) -> list[Piece]:
    found = []
    for slot, kept in enumerate(contiguous_blocks(values, before)):
        for new, wanted in enumerate(contiguous_blocks(values, after)):
            both = range(max(kept.start, wanted.start), min(kept.stop, wanted.stop))
            if both:
                found.append(Piece(slot, new, both))
    return found
