"""What a worker that joins gets: any cut of the state into parts gives the same bits, and only what was asked for is given."""

import pytest
import torch

from ttlaunch.runtime.comm.grpc.shared_state import NotHeldError
from ttlaunch.runtime.comm.grpc.vectors import Key
from ttlaunch.runtime.early_stop import EarlyStop
from ttlaunch.runtime.elastic.state_transfer import ReplicaState, SharedParts
from ttlaunch.runtime.training.optimizers import build_optimizer
from ttlaunch.runtime.training.rank_model import build_model


@pytest.fixture
def replica(make_cfg, make_context):
    def make(step, **training):
        cfg = make_cfg(training={"early_stop_patience": 3, **training})
        model = build_model(cfg, make_context(cfg))
        optimizer = build_optimizer(cfg, model, total_steps=9)
        early_stop = EarlyStop(cfg.training_config)
        for done in range(1, step + 1):
            model.grads_N.fill_(done)
            optimizer.step(done, norm=1.0)
            early_stop.observe(done * cfg.training_config.validation_interval, 1.0 / done)
        return model, optimizer, early_stop

    return make


def everything(model, optimizer, early_stop):
    tensors = [*model.named_parameters(), *optimizer.named_state()]
    return {name: tensor.detach().clone() for name, tensor in tensors}, early_stop.values(), optimizer.scaler_state()


@pytest.mark.parametrize("count", [1, 2, 3, 5])
@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_parts_from_several_members_make_up_the_whole_state(replica, count, precision):
    giver, taker = replica(3, precision=precision), replica(0, precision=precision)
    source, target = ReplicaState(*giver), ReplicaState(*taker)
    parts = source.parts(count)
    sizes = list(map(len, parts))
    parameters = list(giver[0].parameters())
    values = sum(parameter.numel() for parameter in parameters)
    numbers = len(giver[2].values()) + len(giver[1].scaler_state() or {})
    # Weights and AdamW's two moments, its count of updates of each tensor, and the numbers: nothing else is sent.
    assert 3 * 4 * values + 4 * len(parameters) + 8 * numbers == source.size
    assert (source.size, target.size) == (sum(sizes), sum(sizes))
    assert max(sizes) - min(sizes) <= 0.05 * source.size / count
    for part in reversed(parts):
        target.fill(part, source.copy(part))
    target.accept()
    (expected, *expected_numbers), (found, *found_numbers) = everything(*giver), everything(*taker)
    assert expected_numbers == found_numbers
    assert expected.keys() == found.keys()
    for name, tensor in expected.items():
        assert torch.equal(tensor, found[name]), name


def test_a_copy_does_not_change_while_its_giver_trains_on(replica):
    model, optimizer, early_stop = replica(1)
    state = ReplicaState(model, optimizer, early_stop)
    copied = state.copy(range(state.size))
    before = copied.clone()
    model.grads_N.fill_(1)
    optimizer.step(2, norm=1.0)
    assert torch.equal(before, copied)
    assert not torch.equal(before, state.copy(range(state.size)))


def test_only_held_values_of_the_right_step_and_epoch_are_given():
    parts = SharedParts()
    parts.hold(Key("state", 7, 10, 14, epoch=3), torch.arange(4, dtype=torch.uint8))
    assert [1, 2] == list(parts.read(Key("state", 7, 11, 13, epoch=3)))
    assert 7 == parts.newest("state")
    assert parts.newest("mean") is None
    wrong = [
        Key("state", 6, 11, 13, epoch=3),
        Key("state", 7, 11, 13, epoch=2),
        Key("state", 7, 9, 13, epoch=3),
        Key("state", 7, 11, 15, epoch=3),
        Key("state", 7, 13, 11, epoch=3),
        Key("state", 7, 11, 13, start=1, size=1, epoch=3),
        Key("mean", 7, 11, 13, epoch=3),
    ]
    for key in wrong:
        with pytest.raises(NotHeldError):
            parts.read(key)
    parts.forget()
    with pytest.raises(NotHeldError):
        parts.read(Key("state", 7, 11, 13, epoch=3))
