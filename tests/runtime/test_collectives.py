"""Sums over any number of ranks have the bits of one process, and cost the messages and bytes that they say."""

import math
from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.examples import examples
from ttlaunch.runtime.comm.collectives import (
    all_gather,
    all_reduce,
    barrier,
    broadcast,
    chain_all_gather,
    gather,
    reduce,
    reduce_scatter,
)
from ttlaunch.runtime.comm.in_process import InProcessWorld
from ttlaunch.runtime.comm.reduction import GradientTree, aligned_subtrees, contiguous_blocks
from ttlaunch.runtime.parallel.gradients.sums import all_reduce_mean, reduce_scatter_mean

from .communicator_contract import leaf, tree_sum


def play(count, function):
    """Run `function(comm, among)` on every rank; returns results by rank and what was counted."""
    world, results = InProcessWorld(["worker"] * count), {}

    def life(rank):
        results[rank] = function(world.communicator(rank), list(range(count)))

    outcome = world.run({rank: lambda rank=rank: life(rank) for rank in range(count)})
    assert ({}, []) == (outcome.errors, outcome.findings)
    return results, outcome


def gradients_of(micro_batches, size, seed, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    scale = 10.0 ** torch.randint(-6, 6, (micro_batches, 1), generator=generator)
    return (torch.randn(micro_batches, size, generator=generator) * scale).to(dtype)


def filled_tree(gradients, block):
    tree = GradientTree(gradients.shape[1])
    for index in block:
        tree.add(index, gradients[index], tokens=index + 1, loss=0.1 * index)
    return tree


def alone(gradients):
    out_N = torch.empty(gradients.shape[1])
    tree = filled_tree(gradients, range(len(gradients)))
    return out_N, *tree.mean(out_N, micro_batches=len(gradients))


@settings(deadline=None, max_examples=examples(60))
@given(st.data(), st.integers(1, 7), st.integers(1, 70), st.integers(0, 10**6))
def test_every_form_gives_every_rank_the_bits_of_one_process(data, ranks, size, seed):
    """The spine: any number of ranks, ragged blocks and shards, fewer values than ranks."""
    micro_batches = data.draw(st.integers(ranks, 24))
    gradients = gradients_of(micro_batches, size, seed)
    expected_N, *expected = alone(gradients)
    blocks = contiguous_blocks(micro_batches, ranks)

    def everybody(comm, among):
        out_N = torch.empty(size)
        tree = filled_tree(gradients, blocks[comm.rank])
        return out_N, *all_reduce_mean(comm, tree, out_N, among=among, micro_batches=micro_batches)

    def shards(comm, among):
        tree = filled_tree(gradients, blocks[comm.rank])
        return reduce_scatter_mean(comm, tree, among=among, micro_batches=micro_batches)

    for out_N, *counts in play(ranks, everybody)[0].values():
        assert torch.equal(expected_N, out_N)
        assert expected == counts
    found = play(ranks, shards)[0]
    assert torch.equal(expected_N, torch.cat([found[rank][0] for rank in range(ranks)]))
    assert all(expected == list(found[rank][1:]) for rank in range(ranks))


@settings(deadline=None, max_examples=examples(60))
@given(st.integers(1, 9), st.integers(1, 50))
def test_a_sum_over_ranks_is_the_tree_over_their_places(ranks, size):
    vectors = [leaf(size, place) for place in range(ranks)]

    def summed(comm, among):
        vector_N = vectors[comm.rank].clone()
        all_reduce(comm, vector_N, among=among)
        return vector_N

    expected = tree_sum(vectors)
    assert all(torch.equal(expected, found) for found in play(ranks, summed)[0].values())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_gradients_of_half_precision_are_summed_in_float32(dtype):
    gradients = gradients_of(11, 40, 3, torch.float32).clamp(-1e3, 1e3).to(dtype)

    def everybody(comm, among):
        out_N = torch.empty(40)
        tree = filled_tree(gradients, contiguous_blocks(11, 3)[comm.rank])
        all_reduce_mean(comm, tree, out_N, among=among, micro_batches=11)
        return out_N

    expected = alone(gradients.float())[0]
    for found in play(3, everybody)[0].values():
        assert torch.equal(expected, found)
    naive = torch.zeros(40, dtype=dtype)
    for gradient in gradients:
        naive += gradient
    exact = gradients.double().sum(0) / 66
    assert (expected - exact).abs().max() < 1e-2 * (naive.double() / 66 - exact).abs().max()


@settings(deadline=None, max_examples=examples(40))
@given(st.data(), st.integers(1, 7))
def test_an_all_reduce_costs_what_it_says(data, ranks):
    size, micro_batches = ranks * data.draw(st.integers(1, 9)), data.draw(st.integers(ranks, 20))
    gradients = gradients_of(micro_batches, size, 1)
    blocks = contiguous_blocks(micro_batches, ranks)

    def everybody(comm, among):
        tree = filled_tree(gradients, blocks[comm.rank])
        all_reduce_mean(comm, tree, torch.empty(size), among=among, micro_batches=micro_batches)

    outcome = play(ranks, everybody)[1]
    for rank, block in enumerate(blocks):
        nodes = len(list(aligned_subtrees(block)))
        messages = sum(count for (source, _), count in outcome.messages.items() if source == rank)
        sent = sum(count for (source, _), count in outcome.message_bytes.items() if source == rank)
        assert (nodes + 2) * (ranks - 1) == messages
        assert ((nodes + 1) * 4 * size // ranks + 16 * nodes) * (ranks - 1) == sent


@pytest.mark.parametrize("ranks", [1, 2, 3, 5, 8])
def test_the_plain_sums_cost_what_they_say(ranks):
    size = 15 * ranks
    whole = 4 * size
    costs = {
        "all_reduce": (2 * (ranks - 1), 2 * (ranks - 1) * whole // ranks),
        "reduce_scatter": (ranks - 1, (ranks - 1) * whole // ranks),
        "all_gather": (ranks - 1, (ranks - 1) * whole // ranks),
    }
    verbs = {"all_reduce": all_reduce, "reduce_scatter": reduce_scatter, "all_gather": all_gather}
    for name, verb in verbs.items():
        outcome = play(ranks, lambda comm, among, verb=verb: verb(comm, torch.ones(size), among=among))[1]
        for rank in range(ranks):
            found = [
                sum(count[e] for e in count if e[0] == rank) for count in (outcome.messages, outcome.message_bytes)
            ]
            assert costs[name] == tuple(found), name
    outcome = play(ranks, lambda comm, among: reduce(comm, torch.ones(size), root=0, among=among))[1]
    assert ((ranks - 1), (ranks - 1) * whole) == (outcome.messages.total(), outcome.message_bytes.total())


def most_sent(outcome):
    """Messages and bytes of the rank that sends most."""
    counts = [Counter(), Counter()]
    for sent, of_edges in zip(counts, (outcome.messages, outcome.message_bytes), strict=True):
        for (source, _), count in of_edges.items():
            sent[source] += count
    return tuple(max(count.values(), default=0) for count in counts)


@pytest.mark.parametrize("ranks", [1, 2, 3, 5, 8])
def test_what_adds_nothing_up_costs_what_it_says(ranks):
    rounds = math.ceil(math.log2(ranks))
    root, size = ranks // 2, 28  # bytes of a tensor

    def bring(comm, among):
        return [part.tolist() for part in gather(comm, torch.full((7,), float(comm.rank)), root=root, among=among)]

    def spread(comm, among):
        tensor = torch.full((7,), float(comm.rank))
        broadcast(comm, tensor, root=root, among=among)
        return tensor.tolist()

    results, outcome = play(ranks, lambda comm, among: barrier(comm, among=among))
    assert (rounds, rounds) == most_sent(outcome)
    assert (ranks * rounds, ranks * rounds) == (outcome.messages.total(), outcome.message_bytes.total())
    results, outcome = play(ranks, bring)
    assert [[[float(rank)] * 7 for rank in range(ranks)] if at == root else [] for at in range(ranks)] == [
        results[at] for at in range(ranks)
    ]
    assert ((ranks - 1), (ranks - 1) * size) == (outcome.messages.total(), outcome.message_bytes.total())
    assert {(rank, root) for rank in range(ranks) if rank != root} == set(outcome.messages)
    results, outcome = play(ranks, spread)
    assert [[float(root)] * 7] * ranks == [results[at] for at in range(ranks)]
    assert ((ranks - 1), (ranks - 1) * size) == (outcome.messages.total(), outcome.message_bytes.total())
    assert (rounds, rounds * size) == most_sent(outcome)


@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
def test_a_chain_gathers_values_of_any_length_between_neighbours(ranks):
    values = {rank: [rank + 0.1] * (rank % 3) for rank in range(ranks)}
    results, outcome = play(ranks, lambda comm, among: chain_all_gather(comm, values[comm.rank], among=among))
    expected = [value for rank in range(ranks) for value in values[rank]]
    assert [expected] * ranks == [results[rank] for rank in range(ranks)]
    assert all(abs(source - dest) == 1 for source, dest in outcome.messages)
    assert 4 * (ranks - 1) == outcome.messages.total()
    sent = [sum(len(values[other]) for other in range(rank + 1)) for rank in range(ranks - 1)]
    assert 8 * (2 * (ranks - 1) + sum(sent) + (ranks - 1) * len(expected)) == outcome.message_bytes.total()


def test_a_tree_of_another_block_is_refused_before_anything_is_sent():
    gradients = gradients_of(6, 4, 0)

    def everybody(comm, among):
        tree = filled_tree(gradients, range(2))
        with pytest.raises(ValueError, match=f"rank {comm.rank} holds the sums over"):
            all_reduce_mean(comm, tree, torch.empty(4), among=among, micro_batches=6)

    assert 0 == play(2, everybody)[1].messages.total()
