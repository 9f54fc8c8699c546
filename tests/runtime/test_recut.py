"""Cutting the shards of a model anew: who gives what to whom, and that every value arrives."""

import pytest
import torch

from ttlaunch.membership.messages import Share
from ttlaunch.membership.slots import count_values, divide_slots, plan_transfers
from ttlaunch.runtime.parallel.zero.layout import ShardLayout, pieces_between
from ttlaunch.runtime.parallel.zero.owned import OwnedParameters
from ttlaunch.runtime.parallel.zero.slot_state import SlotState
from ttlaunch.runtime.training.optimizers import build_optimizer
from ttlaunch.runtime.training.rank_model import build_model

CHANGES = [(4, 2), (2, 3), (3, 1), (1, 4), (3, 3), (5, 4)]


@pytest.fixture
def model(make_cfg, make_context):
    cfg = make_cfg()
    return build_model(cfg, make_context(cfg))


def layouts(model, *counts):
    named = dict(model.named_parameters())
    return [ShardLayout(named, ranks=count) for count in counts]


def owner_by_value(layout):
    """Return the slot of each value, asked of the shards themselves, value by value."""
    found = {}
    for layer in layout.layers:
        for slot in range(len(layer.shards)):
            found.update(dict.fromkeys(layout.kept(layer, slot), slot))
    return found


@pytest.mark.parametrize(("before", "after"), CHANGES)
def test_pieces_are_all_values_once_in_the_slots_that_have_them(model, before, after):
    old, new = layouts(model, before, after)
    seen = {}
    for piece in pieces_between(old, new):
        for value in piece.values:
            assert value not in seen
            seen[value] = (piece.before, piece.after)
    was, is_now = owner_by_value(old), owner_by_value(new)
    assert seen == {value: (was[value], is_now[value]) for value in was}


@pytest.mark.parametrize(("before", "after"), CHANGES)
def test_each_member_gets_exactly_what_it_lacks(model, before, after):
    """The independent answer: sets of values, of what each has and needs."""
    old, new = layouts(model, before, after)
    former, slots = divide_slots(["box"] * before), divide_slots(["box"] * after)
    shares = [former.of(place) if place < before else Share(before) for place in range(after)]
    if {slot for share in shares for slot in share.slots} != set(range(before)):
        shares = [Share(before, tuple(range(before)))] * after  # too few are left: they have been given more
    transfers = plan_transfers(pieces_between(old, new), shares, slots)
    was, is_now = owner_by_value(old), owner_by_value(new)
    needs = 0
    for place in range(after):
        has = {value for value, slot in was.items() if slot in shares[place].slots}
        wants = {value for value, slot in is_now.items() if slot in slots.of(place).slots}
        got = [value for one in transfers if one.dest == place for piece in one.pieces for value in piece.values]
        assert sorted(got) == sorted(wants)
        needs += len(wants - has)
        for one in transfers:
            if one.dest == place:
                assert all(piece.before in shares[one.source].slots for piece in one.pieces)
    assert needs == count_values(transfers)


def test_a_slot_that_nobody_has_is_named(model):
    old, new = layouts(model, 3, 2)
    with pytest.raises(ValueError, match="nobody has slot 1"):
        plan_transfers(pieces_between(old, new), [Share(3, (0,)), Share(3, (2,))], divide_slots(["a", "a"]))


@pytest.mark.parametrize("zero_stage", [1, 2, 3])
@pytest.mark.parametrize(("before", "after"), [(3, 2), (2, 3)])
def test_what_slots_pack_fills_the_slots_of_another_cut(make_cfg, make_context, zero_stage, before, after):
    cfg = make_cfg()
    old, new = layouts(build_model(cfg, make_context(cfg)), before, after)

    def slots_of(layout, count):
        found = []
        for slot in range(count):
            owned = OwnedParameters(
                build_model(cfg, make_context(cfg)), layout, place=slot, zero_stage=zero_stage, is_filled_later=True
            )
            found.append(SlotState(owned, build_optimizer(cfg, owned, total_steps=9)))
        return found

    former, later = slots_of(old, before), slots_of(new, after)
    truth = {kind: torch.rand(model_size(old)) for kind in ("weight", "mean", "square")}
    for one in former:
        write(one, truth)
    for piece in pieces_between(old, new):
        packed = former[piece.before].pack([piece.values])
        assert len(packed) == later[piece.after].count_packed([piece.values])
        later[piece.after].fill([piece.values], packed)
    for one in later:
        for kind, values, tensor in tensors_of(one):
            assert torch.equal(tensor.view(-1), truth[kind][values.start : values.stop])


def model_size(layout):
    return max(layer.values.stop for layer in layout.layers)


def tensors_of(slot):
    state = dict(slot.optimizer.named_state())
    for fragment, parameter in slot.owned.fragments():
        values = fragment.part.values
        yield "weight", values, parameter.data
        for kind in ("mean", "square"):
            yield kind, values, state[f"{kind}.{fragment.name}"]


def write(slot, truth):
    for kind, values, tensor in tensors_of(slot):
        tensor.view(-1).copy_(truth[kind][values.start : values.stop])


def test_of_several_members_that_have_a_slot_not_always_the_same_one_gives_it(model):
    old, new = layouts(model, 2, 8)
    shares = [Share(2, (0, 1))] * 2 + [Share(2)] * 6
    transfers = plan_transfers(pieces_between(old, new), shares, divide_slots(["box"] * 8))
    given = {
        source: sum(len(piece.values) for one in transfers if one.source == source != one.dest for piece in one.pieces)
        for source in (0, 1)
    }
    assert min(given.values()) > 0.5 * max(given.values())
