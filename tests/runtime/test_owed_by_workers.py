"""C17, D8, D9: what the codecs of a server's workers still owe: kept in checkpoints, and given back by a step that is skipped."""

import math

import pytest
import torch

from tests.runtime.layouts import RECIPES, train_recipe
from tests.runtime.test_compressed_exchange import names_in
from tests.runtime.test_resume_layouts import HALF, PLAN, STEPS, config, start_of
from ttlaunch import contract
from ttlaunch.running.checkpoints.complete import complete_checkpoints
from ttlaunch.running.checkpoints.resume import verify
from ttlaunch.running.report import combine_digests
from ttlaunch.runtime.model.flat import digests
from ttlaunch.spec.recipe.importing import import_recipe_module
from ttlaunch.train import (
    GradientTree,
    build_codec,
    build_model,
    build_optimizer,
    contiguous_blocks,
    differentiate,
    global_norm,
    micro_batches,
)

INT8 = {"compression_config": {"kind": "int8", "block_size": 64}}


def train(recipe, workers, servers, run_dir, sections=INT8, *, saves=False, start=None):
    roles = ["worker"] * workers + ["server"] * servers
    return train_recipe(recipe, roles, run_dir, config() | sections, data=None, saves=saves, start=start)


def halfway(run):
    assert [HALF, STEPS] == sorted(complete_checkpoints(run.run_dir, PLAN, run_id="run"))
    return verify(run.run_dir / contract.checkpoint_dir(HALF))


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """Two workers and two servers, undisturbed: the run, its checkpoint, and the same without what workers wrote."""
    run = train("sync_ps", 2, 2, tmp_path_factory.mktemp("whole") / "run", saves=True)
    checkpoint = halfway(run)
    kept = {name: entry for name, entry in checkpoint.manifest["files"].items() if name >= contract.shard_file(2)}
    return run, checkpoint, type(checkpoint)(checkpoint.path, checkpoint.manifest | {"files": kept})


def test_servers_go_on_with_what_workers_owed_to_the_same_bits(whole, tmp_path):
    """3 micro-batches of 6 are two nodes, so each worker has a codec for each of them and each server."""
    run, checkpoint, forgotten = whole
    owed = {name for name in names_in(checkpoint) if "residual" in name}
    expected = {f"{worker}of2.{node}.{server}of2" for worker in (0, 1) for node in (0, 1) for server in (0, 1)}
    assert {f"optimizer.codec.{sender}.residual" for sender in expected} == owed
    assert run.sha256 == train("sync_ps", 2, 2, tmp_path / "again", start=start_of(checkpoint)).sha256
    assert run.sha256 != train("sync_ps", 2, 2, tmp_path / "other", start=start_of(forgotten)).sha256


def test_another_number_of_workers_begins_with_nothing_owed(whole, tmp_path):
    """It goes on from the weights as if the workers had left no word; so do other servers, whose parts are others."""
    _, *checkpoints = whole
    runs = [train("sync_ps", 1, 1, tmp_path / f"{at}", start=start_of(one)) for at, one in enumerate(checkpoints)]
    assert runs[0].sha256 == runs[1].sha256
    assert HALF + 1 == min(runs[0].by_step(contract.KIND_STEP, "loss"))


@pytest.mark.parametrize("recipe", ["sync_ps", "elastic_dp"])
def test_a_checkpoint_waits_for_no_worker_that_nobody_waits_for(tmp_path, recipe):
    sections = INT8 | ({"sync_ps_config": {"straggler": "drop"}} if recipe == "sync_ps" else {})
    checkpoint = halfway(train(recipe, 2, 1, tmp_path / "run", sections, saves=True))
    assert [contract.shard_file(2)] == list(checkpoint.manifest["files"])
    resumed = train(recipe, 2, 1, tmp_path / "again", sections, start=start_of(checkpoint))
    said = (
        "checkpoints of this run wait for no worker, so they lack the remainders of workers' codecs, which begin at 0"
    )
    assert [said] == [record["text"] for record in resumed.records(contract.KIND_NOTE)]


def oracle(cfg, ctx, workers, *, takes_back):
    """What servers should end with, in one process: what a skipped step was made of is owed again."""
    model = build_model(cfg, ctx)
    optimizer = build_optimizer(cfg, model, total_steps=ctx.data(cfg).total_steps)
    scaler, size = model.loss_scaler, len(model.grads_N)
    codecs = [build_codec(cfg.compression_config, size) for _ in range(workers)]
    blocks = contiguous_blocks(cfg.training_config.micro_batches, workers)
    for step in range(1, ctx.data(cfg).total_steps + 1):
        total, tokens, before, scale = torch.zeros(size), 0, [], scaler.scale
        for codec, block in zip(codecs, blocks, strict=True):
            tree = GradientTree(size)
            for index, x_BT, y_BT in micro_batches(cfg, ctx, step):
                if index in block:
                    _, count = differentiate(model, x_BT, y_BT, masks=model.masks(step, index))
                    tree.add(index, model.take_gradients(), tokens=count, loss=0.0)
                    model.zero_grad()
                    tokens += count
            (node,) = tree.subtrees()
            before.append({name: tensor.clone() for name, tensor in codec.state().items()})
            sent = torch.empty(size)
            codec.decode(codec.encode(node.gradient_N / scale), sent)
            total += sent
        model.grads_N.copy_(total / tokens * scale)
        skipped = scaler.skipped
        optimizer.step(step, norm=global_norm(optimizer.squared_norms()))
        if scaler.skipped > skipped and takes_back:
            for codec, state in zip(codecs, before, strict=True):
                codec.load_state(state)
    return combine_digests([digests(model.named_parameters())])[0], scaler.skipped


@pytest.mark.parametrize("recipe", ["sync_ps", "data_parallel"])
def test_an_overflow_is_skipped_by_all_and_what_was_sent_is_owed_again(recipe, tmp_path, make_context):
    """E12: the loss scale is doubled after every good step, so one worker's gradient overflows now and then."""
    sections = config(precision="fp16", batch_size=4, gradient_accumulation_steps=1, steps=12, learning_rate=0.02)
    sections |= INT8 | {"loss_scale_config": {"initial_power": 13, "growth_interval": 1}}
    cfg = import_recipe_module(RECIPES / recipe, "recipe").RECIPE.config.model_validate(sections)
    expected, skipped = oracle(cfg, make_context(cfg), 2, takes_back=True)
    roles = ["worker"] * 2 + (["server"] if recipe == "sync_ps" else [])
    found = train_recipe(recipe, roles, tmp_path / "run", sections, data=None)
    assert (expected, skipped) == (found.sha256, found.result("skipped steps"))
    assert all(math.isfinite(loss) for loss in found.by_step(contract.KIND_STEP, "loss").values())
    assert expected != oracle(cfg, make_context(cfg), 2, takes_back=False)[0]
