"""What tensors take in a step, as a rank asked by `--profile-steps` counts it (D1, D3)."""

import gc

import pytest
import torch

from ttlaunch.runtime import build_model, build_optimizer, summed_loss
from ttlaunch.runtime.telemetry.ledger import Ledger
from ttlaunch.runtime.telemetry.memory import ACTIVATIONS, BUFFERS, GRADIENTS, OPTIMIZER, PARAMETERS, StepMemory
from ttlaunch.runtime.telemetry.profile import StepProfile

SIZE = 4 * 1000
"""Bytes of a tensor here."""


def look_on(block):
    """The most that a block takes of each kind, without what other tests have left."""
    gc.collect()
    with StepMemory() as before:
        pass
    with StepMemory() as memory:
        kept = block()
    del kept
    return {kind: memory.peaks[kind] - before.peaks[kind] for kind in memory.peaks}


def test_a_piece_counts_once_and_until_the_last_lets_go():
    def block():
        first = torch.zeros(1000)
        views = first.view(10, 100), first[5:], first.detach()
        second = torch.ones(1000)
        del first, views
        third = second + 1
        del second, third
        return torch.empty(500)

    assert 2 * SIZE == look_on(block)[ACTIVATIONS]


def test_what_a_backward_pass_needs_is_alive_until_it_is_over():
    """Without any name in Python: the two results that squares keep, and the gradients on their way."""
    x = torch.zeros(1000, requires_grad=True)

    def forward():
        return ((x + 1) ** 2 + 1).sum()

    kept = look_on(forward)[ACTIVATIONS]
    assert 3 * SIZE <= kept <= 3 * SIZE + 16
    with torch.no_grad():
        assert 2 * SIZE <= look_on(forward)[ACTIVATIONS] <= 2 * SIZE + 16


def test_memory_that_is_taken_away_and_given_back_counts_while_it_is_there():
    """As FSDP does with gathered parameters, without an operation of torch's."""
    gathered = torch.zeros(1000)
    gathered.untyped_storage().resize_(0)

    def block():
        gathered.untyped_storage().resize_(SIZE)
        torch.empty(1)
        gathered.untyped_storage().resize_(0)
        return torch.empty(1000)

    found = look_on(block)
    assert (SIZE, SIZE) == (found[BUFFERS], found[ACTIVATIONS])
    assert SIZE + 4 == found["peak"]  # never both at once


def test_tensors_are_told_apart_by_what_they_are_for(make_cfg, make_context):
    cfg = make_cfg()
    ctx, found = make_context(cfg), {}

    def train():
        model = build_model(cfg, ctx)
        optimizer = build_optimizer(cfg, model, total_steps=3)
        buffer, values = torch.zeros(1000), model.weights_N.numel()
        _, x_BT, y_BT = ctx.data(cfg).training_batch(1, 0)
        with StepMemory() as memory:
            summed_loss(model(x_BT), y_BT).backward()
        assert sum(tensor.numel() for _, tensor in optimizer.named_state()) > values
        found.update(memory.peaks)
        return values, buffer

    gc.collect()
    with StepMemory() as before:
        pass
    values, buffer = train()
    taken = {kind: found[kind] - before.peaks[kind] for kind in found}
    assert (4 * values, 4 * values) == (taken[PARAMETERS], taken[GRADIENTS])
    assert 8 * values * 0.97 < taken[OPTIMIZER] <= 8 * values * 1.01  # without what pads parameters
    assert buffer.nbytes <= taken[BUFFERS] < buffer.nbytes + 4096
    assert 4 * values < taken[ACTIVATIONS]


@pytest.mark.parametrize(("last", "counted"), [(4, True), (3, False)])
def test_the_step_after_the_recorded_ones_is_in_the_books(tmp_path, last, counted):
    ledger = Ledger(profile=StepProfile(tmp_path, rank=0, steps=range(3, 4)))
    held = torch.zeros(1000)
    for step in range(1, last + 1):
        ledger.begin_step(step)
        held = held + 1
        ledger.end_step()
    ledger.close()
    facts = {name: value for name, value in ledger._facts.items() if name.startswith("memory_")}
    assert counted == bool(facts)
    if counted:
        assert (4, SIZE) == (facts["memory_step"], facts["memory_activations"])
        assert facts["memory_peak"] >= 2 * SIZE
