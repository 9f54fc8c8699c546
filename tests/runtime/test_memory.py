"""What tensors take in a step, as a rank asked by `--profile-steps` counts it (D1, D3)."""

from functools import partial

import numpy as np
import pytest
import torch

from ttlaunch.runtime.context import RankContext
from ttlaunch.runtime.telemetry.memory import (
    ACTIVATIONS,
    BUFFERS,
    GRADIENTS,
    OPTIMIZER,
    PARAMETERS,
    StepMemory,
    TensorOwners,
)
from ttlaunch.runtime.telemetry.profile import StepProfile
from ttlaunch.runtime.telemetry.traffic_counter import TrafficCounter
from ttlaunch.train import build_model, build_optimizer, summed_loss

SIZE = 4 * 1000
"""Bytes of a tensor here."""


def look_on(block, owners=None):
    """The most that a block takes of each kind; what it returns is alive until it has been counted."""
    with StepMemory(owners or TensorOwners()) as memory:
        kept = block()
    del kept
    return memory.peaks


class Holder:
    def __init__(self, **tensors):
        self.tensors = tensors

    def held_tensors(self):
        yield from self.tensors.items()


def owned(**tensors):
    """Somebody who holds tensors of these kinds, and the owners that know it."""
    owners, holder = TensorOwners(), Holder(**tensors)
    owners.add(holder, Holder.held_tensors)
    return owners, holder


def test_small_pieces_stay_with_the_process_and_large_ones_do_not():
    with StepMemory(TensorOwners(), mapped_from=SIZE) as memory:
        small = [torch.zeros(900) for _ in range(3)]
        del small
        large = torch.zeros(2000)
        del large
        kept = torch.zeros(1000)
    del kept

    assert 3 * 3600 == memory.peaks["peak"]
    assert (2 * SIZE + 3 * 3600, SIZE + 3 * 3600) == (memory.extent, memory.left)


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
    owners, holder = owned(buffers=gathered)

    def block():
        gathered.untyped_storage().resize_(SIZE)
        torch.empty(1)
        gathered.untyped_storage().resize_(0)
        return torch.empty(1000)

    found = look_on(block, owners)
    del holder
    assert (SIZE, SIZE) == (found[BUFFERS], found[ACTIVATIONS])
    assert SIZE + 4 == found["peak"]  # never both at once


def test_what_an_owner_holds_counts_although_no_operation_uses_it():
    owners, holder = owned(parameters=torch.zeros(1000), buffers=torch.zeros(500))
    found = look_on(lambda: torch.ones(1000), owners)
    assert (SIZE, SIZE // 2, SIZE) == (found[PARAMETERS], found[BUFFERS], found[ACTIVATIONS])
    assert 2 * SIZE + SIZE // 2 == found["peak"]
    del holder
    assert 0 == look_on(lambda: None, owners)["peak"]  # nobody is kept alive by being known


def test_memory_of_two_kinds_counts_as_the_first_of_them():
    weights = torch.zeros(1000)
    owners, holder = owned(buffers=weights.view(10, 100), parameters=weights)
    found = look_on(lambda: None, owners)
    assert (SIZE, 0) == (holder.tensors["parameters"].nbytes, found[BUFFERS])
    assert SIZE == found[PARAMETERS] == found["peak"]


def test_what_nobody_owns_is_a_buffer_from_the_beginning_if_it_outlives_the_step():
    """Also of the moments before an operation has used it, here the one in which the step takes most."""
    older = torch.zeros(1000)

    def block():
        torch.zeros(3000)
        older.add_(1)

    found = look_on(block)
    assert (SIZE, 3 * SIZE, 4 * SIZE) == (found[BUFFERS], found[ACTIVATIONS], found["peak"])


def test_what_nobody_owns_and_does_not_outlive_the_step_is_an_activation():
    """As memory that FSDP takes within one of its own operations; and a micro-batch, which is numpy's, does not count."""
    hidden, batch = [torch.zeros(1000)], torch.from_numpy(np.zeros(1000))

    def block():
        one = hidden.pop()
        one.add_(1)
        torch.add(batch, 1, out=torch.empty(250, dtype=torch.float64).resize_(1000))
        del one

    found = look_on(block)
    assert 0 == found[BUFFERS]
    assert SIZE <= found[ACTIVATIONS]


def test_tensors_are_told_apart_by_what_they_are_for(make_cfg, make_context, tmp_path):
    cfg = make_cfg()
    profile = StepProfile(tmp_path, rank=0, steps=range(1, 2))
    ctx = make_context(cfg)
    ctx.traffic, ctx.watch = TrafficCounter(profile=profile), partial(RankContext.watch, ctx)
    model = build_model(cfg, ctx)
    optimizer = build_optimizer(cfg, model, total_steps=3)
    buffer, values = torch.zeros(1000), model.weights_N.numel()
    _, x_BT, y_BT = ctx.data(cfg).training_batch(1, 0)
    with StepMemory(profile.owners) as memory:
        summed_loss(model(x_BT), y_BT).backward()
        buffer.add_(1)
    assert sum(tensor.numel() for _, tensor in optimizer.named_state()) > values
    found = memory.peaks
    assert (4 * values, 4 * values) == (found[PARAMETERS], found[GRADIENTS])
    assert 8 * values * 0.97 < found[OPTIMIZER] <= 8 * values * 1.01  # without what pads parameters
    assert buffer.nbytes <= found[BUFFERS] < buffer.nbytes + 4096
    assert 4 * values < found[ACTIVATIONS]


@pytest.mark.parametrize(("last", "counted"), [(4, True), (3, False)])
def test_the_step_after_the_recorded_ones_is_in_the_books(tmp_path, last, counted):
    traffic = TrafficCounter(profile=StepProfile(tmp_path, rank=0, steps=range(3, 4)))
    held = torch.zeros(1000)
    for step in range(1, last + 1):
        traffic.begin_step(step)
        made = held + 1
        traffic.end_step()
    traffic.close()
    del made
    facts = {name: value for name, value in traffic._facts.items() if name.startswith("memory_")}
    assert counted == bool(facts)
    if counted:
        assert (4, SIZE) == (facts["memory_step"], facts["memory_activations"])
        assert facts["memory_peak"] >= 2 * SIZE
