"""Every role runs without values, and what it holds follows from sizes that are counted by hand (E9)."""

import json

import pytest
import torch

from ttlaunch.runtime.predict import predict
from ttlaunch.runtime.world import World
from ttlaunch.spec.named_folders import built_in_folder
from ttlaunch.spec.recipe.importing import import_recipe_module

TINY = {
    "training_config": {"steps": 50, "batch_size": 8, "micro_batch_size": 1, "validation_sequences": 2},
    "transformer_config": {"embedding_dim": 16, "num_blocks": 2, "num_heads": 2, "max_sequence_length": 16},
}


def tiny_world(name, roles, **changed):
    """A plan's world for a tiny model."""
    folder = built_in_folder("recipes") / name
    values = {section: {**TINY.get(section, {}), **changed.get(section, {})} for section in {*TINY, *changed}}
    cfg = import_recipe_module(folder, "recipe").RECIPE.config.model_validate_json(json.dumps(values))
    return World(
        recipe_folder=folder,
        layout="",
        roles=tuple(roles),
        hosts=("localhost",) * len(roles),
        local_ranks=tuple(range(len(roles))),
        config=json.loads(cfg.model_dump_json()),
        data_path=None,
        data_sha256=None,
    )


def predicted(tmp_path, name, roles, **changed):
    """The prediction for a tiny model."""
    world = tiny_world(name, roles, **changed)
    (tmp_path / "records").mkdir()
    return predict(world, tmp_path)["ranks"]


def test_data_parallel_holds_what_torchs_own_adamw_holds(tmp_path):
    workers = predicted(tmp_path, "data_parallel", ["worker"] * 2)

    values, tensors = workers[0]["facts"]["values"], workers[0]["facts"]["tensors"]
    model = [
        torch.nn.Parameter(torch.zeros(values - tensors + 1)),
        *(torch.nn.Parameter(torch.zeros(1)) for _ in range(tensors - 1)),
    ]
    optimizer = torch.optim.AdamW(model)
    for parameter in model:
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    state = sum(one.nbytes for entry in optimizer.state.values() for one in entry.values())
    for one in workers:
        assert {"parameters": 4 * values, "gradients": 4 * values, "optimizer": state} == {
            kind: one["held"][kind] for kind in ("parameters", "gradients", "optimizer")
        }


def test_only_the_optimizers_rank_has_state_in_three_tiers(tmp_path):
    roles = ["worker", "worker", "aggregator", "optimizer"]
    ranks = predicted(tmp_path, "hierarchical_parallel", roles)

    has_state = [role for role, one in zip(roles, ranks, strict=True) if one["held"]["optimizer"]]
    assert ["optimizer"] == has_state
    assert ranks[2]["memory"]["activations"] < ranks[0]["memory"]["activations"] / 10


def test_ranks_of_zero_hold_the_state_of_each_value_once(tmp_path):
    ranks = predicted(tmp_path, "zero", ["worker"] * 3, zero_config={"stage": 1})

    values, tensors = ranks[0]["facts"]["values"], ranks[0]["facts"]["tensors"]
    state = sum(one["held"]["optimizer"] for one in ranks)
    assert 8 * values <= state <= 8 * values + 4 * tensors * len(ranks)  # each part of a tensor counts its updates


def test_an_asynchronous_recipe_ends_after_few_steps(tmp_path):
    workers = predicted(tmp_path, "elastic_dp", ["worker", "worker", "server"])[:2]

    assert all(1 <= one["facts"]["pushes"] <= 3 for one in workers)  # of the 50 of a whole run


def test_a_recipe_whose_ranks_need_processes_says_so(tmp_path):
    with pytest.raises(ValueError, match="needs a process for each rank"):
        predicted(tmp_path, "fully_sharded", ["worker"] * 2)


def test_ranks_that_split_matrices_add_up_all_micro_batches_of_a_step(tmp_path):
    ranks = predicted(tmp_path, "tensor_parallel", ["worker"] * 2)

    assert [8, 8] == [one["facts"]["passes"] for one in ranks]
