"""Ranks on a virtual clock: times that are counted by hand, bytes of the recipe's own formula (S1)."""

from collections import Counter

import pytest
import torch

from ttlaunch.records.virtual import VirtualOrder
from ttlaunch.runtime.comm.in_process import InProcessWorld
from ttlaunch.runtime.comm.virtual_clock import Link, VirtualClock
from ttlaunch.runtime.virtual import run_virtually
from ttlaunch.runtime.work import UPDATE_S
from ttlaunch.spec.recipe.importing import import_recipe_module
from ttlaunch.spec.recipe.traffic import Ranks

from .test_predict import tiny_world

LATENCY_S, BYTES_PER_S = 0.25, 16.0  # so that a message of four float32 passes in 1 s
COMPUTE_S, SLOW = 0.01, 2.0


def play(*functions):
    """Run a function for each rank on a clock; each is given its communicator and what lets it compute."""
    clock = VirtualClock(len(functions), Link(LATENCY_S, BYTES_PER_S))
    world = InProcessWorld(["peer"] * len(functions), clock=clock)
    lives = {
        rank: lambda f=function, r=rank: f(world.communicator(r), lambda seconds: clock.compute(r, seconds))
        for rank, function in enumerate(functions)
    }
    outcome = world.run(lives)
    assert ({}, []) == (outcome.errors, outcome.findings)
    return clock


def test_a_message_takes_its_latency_and_its_bytes_and_the_receiver_waits_for_a_late_sender():
    def sender(comm, compute):
        compute(3.0)
        comm.send(torch.zeros(4), dest=1)

    def receiver(comm, compute):
        compute(1.0)
        comm.recv(torch.zeros(4), source=0)

    clock = play(sender, receiver)
    assert (4.0, 4.25) == (clock.now_s(0), clock.now_s(1))  # the sender is free when the last byte has left
    spent = clock.spent(1)
    assert (1.0, 1.25, 2.0) == (spent.computing_s, spent.exposed_s, spent.waiting_s)


def test_a_rank_receives_one_message_after_the_other():
    def server(comm, _compute):
        for pending in [comm.irecv(torch.zeros(4), source=rank) for rank in (1, 2, 3)]:
            pending.wait()

    def client(comm, _compute):
        comm.send(torch.zeros(4), dest=0)

    assert 3.25 == play(server, client, client, client).now_s(0)


def test_a_message_that_nobody_waits_for_costs_no_time():
    def sender(comm, compute):
        sending = comm.isend(torch.zeros(4), dest=1)
        compute(5.0)
        sending.wait()

    def receiver(comm, compute):
        receiving = comm.irecv(torch.zeros(4), source=0)
        compute(2.0)
        receiving.wait()

    clock = play(sender, receiver)
    assert (5.0, 2.0) == (clock.now_s(0), clock.now_s(1))


def test_a_timeout_ends_at_its_time():
    found = []

    def waiter(comm, _compute):
        pending = [comm.irecv(torch.zeros(4), source=1)]
        found.extend([comm.wait_any(pending, timeout_s=0.5), comm.wait_any(pending, timeout_s=9.0)])

    def late(comm, compute):
        compute(1.0)
        comm.send(torch.zeros(4), dest=0)

    clock = play(waiter, late)
    assert ([None, 0], 2.25) == (found, clock.now_s(0))
    assert 1.0 == clock.spent(0).waiting_s


def test_a_rank_that_looks_without_waiting_sees_what_has_arrived_by_its_own_time():
    found = []

    def looker(comm, compute):
        receiving = comm.irecv(torch.zeros(4), source=1)
        for _ in range(3):
            compute(0.5)
            found.append((receiving.test(), comm.wait_any([receiving], timeout_s=0)))

    def sender(comm, _compute):
        comm.send(torch.zeros(4), dest=0)

    assert 1.5 == play(looker, sender).now_s(0)
    assert [(False, None), (False, None), (True, 0)] == found  # it arrives at 1.25


@pytest.fixture(scope="module")
def two_workers():
    """Two workers of data_parallel with two micro-batches each; the second one is slow."""
    world = tiny_world("data_parallel", ["worker"] * 2, training_config={"batch_size": 4})
    order = VirtualOrder(steps=3, gflops=50.0, compute_s=COMPUTE_S, latency_s=1e-4, bytes_per_s=1e9, slow={"1": SLOW})
    return world, run_virtually(world, order)


def test_a_step_of_data_parallel_takes_what_the_closed_formula_says(two_workers):
    """f C for the passes, 2 (W - 1)/W of S in and out with two latencies, and the update; with W = 2."""
    _, found = two_workers
    values = found["ranks"][1]["facts"]["values"]
    expected = SLOW * 2 * COMPUTE_S + 4 * values / 1e9 + 2e-4 + SLOW * UPDATE_S * values
    # Only the first step also sends the size of a bucket.
    assert expected == pytest.approx(found["ranks"][1]["each_s"][2], rel=1e-9)


def test_the_time_of_steps_is_the_sum_of_its_parts_and_fast_ranks_wait_for_the_slow_one(two_workers):
    fast, slow = two_workers[1]["ranks"]
    for one in (fast, slow):
        assert sum(one["each_s"]) == pytest.approx(one["computing_s"] + one["exposed_s"] + one["waiting_s"])
    assert SLOW * fast["computing_s"] == pytest.approx(slow["computing_s"])
    assert 0 == slow["waiting_s"] < fast["waiting_s"]


def test_the_bytes_of_each_pair_are_those_of_the_recipes_formula(two_workers):
    world, found = two_workers
    recipe = import_recipe_module(world.recipe_folder, "recipe").RECIPE
    cfg = recipe.config.model_validate(world.config)
    expected = Counter()
    for one in recipe.traffic(cfg, Ranks(list(world.roles), [one["facts"] for one in found["ranks"]])):
        expected[one.source, one.dest] += 3 * one.per_step + one.in_first_step
    assert expected == {(one["source"], one["dest"]): one["step_bytes"] for one in found["edges"]}
