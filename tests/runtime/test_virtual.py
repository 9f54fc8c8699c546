"""Ranks on a virtual clock: times that are counted by hand, bytes of the recipe's own formula (S1)."""

import itertools
from collections import Counter
from types import SimpleNamespace

import pytest
import torch

from ttlaunch.records.virtual import VirtualOrder
from ttlaunch.runtime import virtual
from ttlaunch.runtime.alike import edges_of, with_witnesses
from ttlaunch.runtime.comm.virtual_clock import Link, VirtualClock
from ttlaunch.runtime.comm.virtual_world import NotAlikeError, VirtualWorld
from ttlaunch.runtime.timed_steps import Jitter
from ttlaunch.runtime.virtual import run_virtually
from ttlaunch.runtime.work import UPDATE_S
from ttlaunch.spec.recipe.importing import import_recipe_module
from ttlaunch.spec.recipe.traffic import Ranks

from .test_predict import tiny_world

LATENCY_S, BYTES_PER_S = 0.25, 16.0  # so that a message of four float32 passes in 1 s
COMPUTE_S, SLOW = 0.01, 2.0


def play(*functions, classes=None):
    """Run a function for each rank on a clock; each is given its communicator and what lets it compute."""
    ranks = [ranks[0] for ranks in classes or [(rank,) for rank in range(len(functions))]]
    clock = VirtualClock(ranks)
    world = VirtualWorld(["peer"] * len(functions), clock, Link(LATENCY_S, BYTES_PER_S), classes=classes)
    lives = {
        rank: lambda f=functions[rank], r=rank: f(world.communicator(r), lambda seconds: clock.compute(r, seconds))
        for rank in ranks
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


def test_a_message_that_a_rank_carries_itself_is_exposed_communication():
    clock = VirtualClock([0, 1])
    clock.compute(0, 2.0)
    clock.carry(0, 0.5)

    assert (2.5, 0.0) == (clock.now_s(0), clock.now_s(1))
    spent = clock.spent(0)
    assert (2.0, 0.5, 0.0) == (spent.computing_s, spent.exposed_s, spent.waiting_s)


def test_messages_to_one_rank_share_its_port():
    def server(comm, _compute):
        for pending in [comm.irecv(torch.zeros(4), source=rank) for rank in (1, 2, 3)]:
            pending.wait()

    def client(comm, _compute):
        comm.send(torch.zeros(4), dest=0)

    clock = play(server, client, client, client)
    assert [3.25, 3.0, 3.0, 3.0] == [clock.now_s(rank) for rank in range(4)]
    folded = play(server, client, client, client, classes=((0,), (1, 2, 3)))
    assert (3.25, 3.0) == (folded.now_s(0), folded.now_s(1))


def test_ranks_that_receive_one_after_the_other_are_not_alike():
    def server(comm, _compute):
        for rank in (1, 2, 3):
            comm.recv(torch.zeros(4), source=rank)

    def client(comm, _compute):
        comm.send(torch.zeros(4), dest=0)

    with pytest.raises(
        NotAlikeError, match="1 messages of 16 bytes under tag 0 from rank 1 meet 1 of 16 bytes at rank 0"
    ):
        play(server, client, client, client, classes=((0,), (1, 2, 3)))


def test_a_ring_folds_to_one_rank():
    def rank_of(place):
        def peer(comm, compute):
            for _ in range(3):
                compute(1.0)
                receiving = comm.irecv(torch.zeros(4), source=(place - 1) % 5)
                comm.send(torch.zeros(4), dest=(place + 1) % 5)
                receiving.wait()

        return peer

    ring = [rank_of(place) for place in range(5)]
    everyone = play(*ring)
    assert {6.75} == {everyone.now_s(rank) for rank in range(5)}
    folded = play(*ring, classes=(tuple(range(5)),))
    assert (6.75, everyone.spent(3)) == (folded.now_s(0), folded.spent(0))


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


def test_waits_that_follow_each_other_count_the_same_in_any_order():
    """Three messages that share a port arrive at 0.1 + 0.2, and so on: floats whose sums depend on their order."""

    def spent(order):
        def receiver(comm, compute):
            compute(0.3)
            pending = [comm.irecv(torch.zeros(size), source=rank) for rank, size in ((1, 1), (2, 3), (3, 7))]
            for place in order:
                pending[place].wait()

        def sender_of(size):
            def sender(comm, compute):
                compute(size * 0.1)
                comm.send(torch.zeros(size), dest=0)

            return sender

        return play(receiver, *map(sender_of, (1, 3, 7))).spent(0)

    assert 1 == len({tuple(vars(spent(order)).values()) for order in itertools.permutations(range(3))})


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


def test_a_message_that_a_rank_no_longer_waits_for_does_not_wake_it():
    """It took the second of two messages; the first one arrives while it waits for a third one."""
    found = []

    def waiter(comm, compute):
        late, early, last = (comm.irecv(torch.zeros(4), source=rank) for rank in (1, 2, 3))
        early.wait()
        compute(0.5)
        found.append(comm.wait_any([late, early]))
        last.wait()

    def sender(delay_s):
        def send(comm, compute):
            compute(delay_s)
            comm.send(torch.zeros(4), dest=0)

        return send

    clock = play(waiter, sender(3.0), sender(0.0), sender(6.0))
    assert ([1], 7.25) == (found, clock.now_s(0))


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


KNOWN = {}
"""What operations return, which all simulations here share: the same models with the same micro-batches."""


def workers(count, *, micro_batches, fold=True, **changed):
    """Workers of data_parallel on a clock."""
    world = tiny_world("data_parallel", ["worker"] * count, training_config={"batch_size": 2 * micro_batches})
    return world, run_virtually(world, order(fold=fold, **changed), known=KNOWN)


def order(**changed):
    given = {
        "steps": 3,
        "gflops": 50.0,
        "compute_s": COMPUTE_S,
        "latency_s": 1e-4,
        "bytes_per_s": 1e9,
        "slow": {},
        "slow_links": {},
    }
    return VirtualOrder(**{**given, **changed})


def simulated(name, roles, *, micro_batches, sections=(), **changed):
    """Ranks of a recipe on a clock, for two steps, with as many micro-batches in a validation as in a step."""
    training = {"batch_size": micro_batches, "validation_sequences": micro_batches}
    world = tiny_world(name, roles, training_config=training, **dict(sections))
    return run_virtually(world, order(steps=2, **changed), known=KNOWN)


@pytest.fixture(scope="module")
def two_workers():
    """Two workers of data_parallel with two micro-batches each; the second one is slow."""
    return workers(2, micro_batches=2, slow={"1": SLOW})


def of_rank(found, rank):
    for one in found["classes"]:
        if any(span["first"] <= rank <= span["last"] for span in one["members"]):
            return {name: value for name, value in one.items() if name != "members"}
    raise LookupError(rank)


def test_a_step_of_data_parallel_takes_what_the_closed_formula_says(two_workers):
    """f C for the passes, 2 (W - 1)/W of S in and out with two latencies, and the update; with W = 2."""
    _, found = two_workers
    slow = of_rank(found, 1)
    values = slow["facts"]["values"]
    expected = SLOW * 2 * COMPUTE_S + 4 * values / 1e9 + 2e-4 + SLOW * UPDATE_S * values
    # Only the first step also sends the size of a bucket.
    assert expected == pytest.approx(slow["each_s"][2], rel=1e-9)


def test_the_time_of_steps_is_the_sum_of_its_parts_and_fast_ranks_wait_for_the_slow_one(two_workers):
    fast, slow = (of_rank(two_workers[1], rank) for rank in (0, 1))
    for one in (fast, slow):
        assert sum(one["each_s"]) == pytest.approx(one["computing_s"] + one["exposed_s"] + one["waiting_s"])
    assert SLOW * fast["computing_s"] == pytest.approx(slow["computing_s"])
    assert 0 == slow["waiting_s"] < fast["waiting_s"]


def test_the_bytes_of_each_pair_are_those_of_the_recipes_formula(two_workers):
    world, found = two_workers
    recipe = import_recipe_module(world.recipe_folder, "recipe").RECIPE
    cfg = recipe.config.model_validate(world.config)
    expected = Counter()
    for one in recipe.traffic(cfg, Ranks(list(world.roles), [of_rank(found, rank)["facts"] for rank in (0, 1)])):
        expected[one.source, one.dest] += 3 * one.per_step + one.in_first_step
    assert expected == {(one["source"], one["dest"]): one["step_bytes"] for one in found["edges"]}


def test_folded_ranks_have_exactly_the_times_of_ranks_that_all_run():
    """With blocks of one and two micro-batches, shards of two sizes, a slow rank in the middle, and a slow link."""
    different = {"slow": {"3": 1.5}, "slow_links": {"6": 2.0}}
    alike, every = (workers(8, micro_batches=12, fold=fold, steps=1, **different)[1] for fold in (True, False))
    assert (8, None) == (len(every["classes"]), alike["not_folded"])
    assert len(alike["classes"]) < 8
    assert [of_rank(every, rank) for rank in range(8)] == [of_rank(alike, rank) for rank in range(8)]


def test_a_gradient_above_96_mb_has_the_buckets_with_which_a_run_begins():
    """One of 101 MB: a run never has it in one bucket."""

    def simulated_with(**hosts):
        sizes = {"num_blocks": 2, "embedding_dim": 1024}
        world = tiny_world("data_parallel", ["worker"] * 2, transformer_config=sizes, multihost_config=hosts)
        found = run_virtually(world, order(steps=1, fold=True), known=KNOWN)
        return found["edges"][0]["messages"], found["classes"]

    begun, configured, whole = (
        simulated_with(**hosts) for hosts in ({}, {"bucket_megabytes": 32.0}, {"bucket_megabytes": 1e5})
    )
    assert begun == configured
    assert begun[0] > whole[0]


@pytest.mark.parametrize(
    ("name", "roles"),
    [
        pytest.param(
            "hierarchical_parallel", ["worker"] * 6 + ["aggregator", "optimizer"], marks=pytest.mark.slow, id="tiers"
        ),
        pytest.param("sync_ps", ["worker"] * 6 + ["server"], id="server"),
    ],
)
def test_workers_that_a_server_serves_in_turn_repeat_code_at_exactly_their_own_times(name, roles):
    """With a slow worker, whose code is the same."""
    repeated, every = (simulated(name, roles, micro_batches=6, slow={"3": 1.5}, fold=fold) for fold in (True, False))
    assert ([{"first": 1, "last": 4}], []) == (repeated["repeats"], every["repeats"])
    assert [of_rank(every, rank) for rank in range(len(roles))] == [
        of_rank(repeated, rank) for rank in range(len(roles))
    ]
    assert every["edges"] == repeated["edges"]


def test_a_slow_worker_of_an_asynchronous_server_does_fewer_tasks_and_nobody_waits_for_it():
    """What a gradient says of itself travels with it, as bytes; the sixth one comes when the slow worker brings its second."""
    world = tiny_world("elastic_dp", ["worker", "worker", "server"], training_config={"batch_size": 2})
    found = run_virtually(world, order(steps=6, slow={"1": SLOW}, fold=True), known=KNOWN)
    fast, slow = (of_rank(found, rank) for rank in (0, 1))
    assert (4, 2) == (fast["facts"]["pushes"], slow["facts"]["pushes"])
    assert [2 * COMPUTE_S] * 4 == pytest.approx(fast["each_s"], rel=0.02)
    assert [SLOW * 2 * COMPUTE_S] * 2 == pytest.approx(slow["each_s"], rel=0.02)


_SMALL = {"embedding_dim": 8, "num_heads": 1, "max_sequence_length": 16}


@pytest.mark.parametrize(
    ("ranks", "stage", "model"),
    [
        pytest.param(14, 3, {"tie_embeddings": True}, id="tied"),
        pytest.param(14, 0, {}, marks=pytest.mark.slow, id="stage 0"),
        pytest.param(14, 1, {}, marks=pytest.mark.slow, id="stage 1"),
        pytest.param(40, 3, {}, marks=pytest.mark.slow, id="shares without a part of some layers"),
        pytest.param(
            55, 3, _SMALL, marks=pytest.mark.slow, id="a layer of which no rank has a part whose code runs first"
        ),
    ],
)
def test_ranks_with_equal_shares_of_a_model_have_exactly_the_times_of_ranks_that_all_run(ranks, stage, model):
    """With a slow rank, whose times no other one has."""
    sections = {"zero_config": {"stage": stage}, "transformer_config": model}
    folded, every = (
        simulated("zero", ["worker"] * ranks, micro_batches=ranks, slow={"4": 1.5}, fold=fold, sections=sections)
        for fold in (True, False)
    )
    assert (None, ranks) == (folded["not_folded"], len(every["classes"]))
    assert len(folded["classes"]) < ranks
    assert [of_rank(every, rank) for rank in range(ranks)] == [of_rank(folded, rank) for rank in range(ranks)]
    assert pairs(every) == pairs(folded)


def pairs(found):
    """What each rank has sent to each other one, as messages, bytes and bytes within steps, from the edges of classes."""
    ranks = [
        [rank for span in one["members"] for rank in range(span["first"], span["last"] + 1)] for one in found["classes"]
    ]
    return {
        (source, dest): (edge["messages"], edge["bytes"], edge["step_bytes"])
        for edge in found["edges"]
        for source in ranks[edge["source"]]
        for dest in ranks[edge["dest"]]
        if source != dest
    }


@pytest.mark.slow
def test_the_stages_of_pipelines_fold_to_those_of_two_pipelines():
    pipelines = {"schedule": "1f1b", "replicas": 4, "blocks_per_rank": [1, 1]}
    folded, every = (
        simulated(
            "pipeline_parallel",
            ["stage"] * 8,
            micro_batches=8,
            fold=fold,
            sections={"multihost_config": {"pipeline_parallel_config": pipelines}},
        )
        for fold in (True, False)
    )
    assert [[0], [1], [2, 4], [3, 5], [6], [7]] == [
        [span["first"] for span in one["members"]] for one in folded["classes"]
    ]  # the last pipeline looks at the shortest micro-batch of a validation
    assert [of_rank(every, rank) for rank in range(8)] == [of_rank(folded, rank) for rank in range(8)]


@pytest.mark.slow
def test_pairs_of_ranks_with_shards_of_two_sizes_and_a_slow_one_fold_after_few_divisions(monkeypatch):
    """Twelve replicas of a model of two ranks; who is divided by the size of a shard takes the partner along."""
    tried, run = [], virtual._Play.run

    def noted(play, classes, *rest, **named):
        tried.append(classes)
        return run(play, classes, *rest, **named)

    def found(*, fold):
        model = {"tensor_parallel_config": {"ranks": 2, "replicas": 12}}
        return simulated(
            "tensor_parallel", ["worker"] * 24, micro_batches=12, fold=fold, sections=model, slow={"9": 1.5}
        )

    monkeypatch.setattr(virtual._Play, "run", noted)
    folded = found(fold=True)
    assert folded["not_folded"] is None
    assert len(folded["classes"]) < 12
    assert len(tried) <= 6
    every = found(fold=False)
    assert [of_rank(every, rank) for rank in range(24)] == [of_rank(folded, rank) for rank in range(24)]


@pytest.mark.slow
def test_looking_for_ranks_that_are_alike_costs_no_more_than_to_run_all_twice(monkeypatch):
    """The ranks of zero own shards of other sizes, so each division fails and gives a finer one, where nothing says what shares they have."""
    tried, run = [], virtual._Play.run

    def refuse(_play):
        raise NotAlikeError("no rule")

    monkeypatch.setattr(virtual._Play, "run_shares", refuse)

    def noted(play, classes, *rest, **named):
        tried.append(classes)
        return run(play, classes, *rest, **named)

    monkeypatch.setattr(virtual._Play, "run", noted)
    found = simulated("zero", ["worker"] * 16, micro_batches=16, fold=True)
    assert (16, True) == (len(found["classes"]), found["not_folded"] is not None)
    further = [len(with_witnesses(classes)) for classes in tried[2:] if len(classes) < 16]
    assert 0 < sum(further) <= 2 * 16  # 127 if all are tried


def test_ranks_with_equal_times_whose_partners_are_not_alike_are_not_folded():
    """Ranks 0 and 2 take as long, but the ranks to which they send, 1 and 3, do not."""
    sent = {(0, 1): 1, (1, 0): 1, (2, 3): 1, (3, 2): 1}
    outcome = SimpleNamespace(messages=sent, message_bytes=sent, step_bytes=sent)
    with pytest.raises(NotAlikeError) as found:
        edges_of(outcome, ((0, 2), (1,), (3,)))
    assert (2,) == found.value.classes  # ranks 0, 1, 2 and 3 ran, each as a class of its own
    assert [1, 1] == [one["peers"] for one in edges_of(outcome, ((0, 2), (1, 3)))]


@pytest.mark.slow
def test_ranks_with_jitter_repeat_code_too():
    roles = ["worker"] * 6 + ["server"]
    repeated, every = (simulated("sync_ps", roles, micro_batches=6, jitter=0.3, fold=fold) for fold in (True, False))
    assert [{"first": 1, "last": 4}] == repeated["repeats"]
    assert [of_rank(every, rank) for rank in range(7)] == [of_rank(repeated, rank) for rank in range(7)]


def test_jitter_is_even_around_the_usual_time_and_the_same_for_the_same_seed(two_workers):
    """The slowest of two ranks whose times are drawn evenly from 1 - j to 1 + j takes 1 + j/3 on average."""
    one, other = (workers(2, micro_batches=2, jitter=0.3, seed=5)[1] for _ in range(2))
    assert one == other
    usual, first, second = (of_rank(found, 0)["computing_s"] for found in (two_workers[1], one, other))
    assert 0.7 * usual < first == second < 1.3 * usual != first
    drawn = Jitter(0.3, seed=5)
    slowest = [max(drawn.factor(rank, step) for rank in (0, 1)) for step in range(4000)]
    assert 1.1 == pytest.approx(sum(slowest) / len(slowest), abs=0.01)
