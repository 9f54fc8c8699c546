"""Every recipe whose ranks share tensors reports their digests; a flipped bit in any of these tensors is found, in its rank."""

import random
from collections import Counter

import pytest
import torch

from tests.runtime.layouts import train_recipe, watch_records
from ttlaunch.runtime.checkpoint.checkpoints import held_tensors
from ttlaunch.runtime.context import RankContext

STEPS = 4
SMALL = {
    "training_config": {"steps": STEPS, "verify_interval": 2, "validation_interval": STEPS, "validation_sequences": 4},
    "transformer_config": {"num_blocks": 2, "embedding_dim": 16, "num_heads": 4, "max_sequence_length": 16},
}
TWO_STAGES = {"blocks_per_rank": [1, 1]}
KINDS = {
    "data_parallel": (["worker"] * 3, {}),
    "data_parallel with a codec": (["worker"] * 3, {"compression_config": {"kind": "int8"}}),
    "classic_dp": (["worker"] * 3, {"classic_dp_config": {"staleness_bound": 2}}),
    "zero": (["worker"] * 3, {"zero_config": {"stage": 0}}),
    "zero stage 2": (["worker"] * 3, {"zero_config": {"stage": 2}}),
    "sync_ps": (["worker"] * 3 + ["server"] * 2, {}),
    "hierarchical_parallel": (["worker"] * 2 + ["aggregator", "optimizer"], {}),
    "pipeline_parallel": (
        ["stage"] * 6,
        {"multihost_config": {"pipeline_parallel_config": TWO_STAGES | {"replicas": 3}}},
    ),
    "tensor_parallel": (["worker"] * 6, {"tensor_parallel_config": {"ranks": 2, "replicas": 3}}),
    "local_sgd": (["worker"] * 3, {"local_sgd_config": {"every": 2}}),
    "diloco": (["worker"] * 3, {"diloco_config": {"every": 2}}),
}


@pytest.fixture(params=list(KINDS))
def recipe(request, tmp_path, fox):
    """Trains a recipe in one process, and returns what the launcher sees of the ranks' records."""
    roles, sections = KINDS[request.param]
    config = {**SMALL, **sections}

    def run():
        run_dir = tmp_path / str(len(list(tmp_path.iterdir())))
        train_recipe(request.param.split()[0], roles, run_dir, config, data=fox)
        watch = watch_records(run_dir, len(roles))
        watch.replicas.settle({})
        return watch.replicas

    return run


def test_replicas_that_train_together_agree_after_every_compared_step(recipe):
    found = recipe()
    assert (None, STEPS, STEPS) == (found.difference, found.step, found.agreed)


def test_a_flipped_bit_of_a_shared_tensor_is_found_in_the_right_rank(recipe, monkeypatch):
    held = shared_tensors(recipe, monkeypatch)
    draw = random.Random(5)  # noqa: S311 - the same flips in every run
    for _ in range(3):
        name = draw.choice(sorted(held))
        rank = draw.choice(held[name])
        with monkeypatch.context() as patched:
            patched.setattr(RankContext, "compare", flipping(rank, name, draw, compare=RankContext.compare))
            found = recipe()
        assert (2, 0) == (found.step, found.agreed)
        assert found.difference.name == name
        assert found.difference.odd == ((rank,) if len(held[name]) > 2 else ())


def shared_tensors(recipe, monkeypatch):
    """The tensors that several ranks compare, with these ranks."""
    seen, compare = {}, RankContext.compare

    def noting(ctx, step, held):
        compare(ctx, step, held)
        if step == 2:
            for name, _ in held():
                seen.setdefault(name, set()).add(int(ctx.rank))

    with monkeypatch.context() as patched:
        patched.setattr(RankContext, "compare", noting)
        recipe()
    shared = {name: sorted(ranks) for name, ranks in seen.items() if len(ranks) > 1}
    assert Counter(len(ranks) > 2 for ranks in shared.values())[True]
    return shared


def flipping(rank, name, draw, *, compare):
    """Flip one bit of a tensor of one rank after the update of step 2, before the comparison."""
    place, bit = draw.random(), draw.randrange(32)

    def flip(ctx, step, held):
        tensor = dict(held()).get(name) if (ctx.rank, step) == (rank, 2) else None
        if tensor is not None:
            index = torch.unravel_index(torch.tensor(int(place * tensor.numel())), tensor.shape)
            flipped = tensor.detach()[index].reshape(1).view(torch.int32) ^ (1 << bit if bit < 31 else -(2**31))
            tensor.detach()[index] = flipped.view(torch.float32)[0]
        compare(ctx, step, held)

    return flip


def test_a_plain_module_and_optimizer_of_torch_are_compared_by_their_parameters():
    module = torch.nn.Linear(2, 2)
    held = dict(held_tensors(module, torch.optim.SGD(module.parameters())))
    assert ["weight", "bias"] == list(held)
