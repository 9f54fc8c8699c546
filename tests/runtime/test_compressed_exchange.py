"""C17, D8: data parallelism with compressed gradients: equal replicas, exact resume, near the loss of whole gradients."""

import math

import pytest
import torch
from safetensors import safe_open

from tests.runtime.layouts import LAYOUTS, RECIPES, train
from tests.runtime.test_resume_layouts import HALF, PLAN, STEPS, config, start_of
from ttlaunch import contract
from ttlaunch.recipe import CompressionConfig, payload_bytes
from ttlaunch.running.checkpoints.complete import complete_checkpoints
from ttlaunch.running.checkpoints.resume import verify
from ttlaunch.running.report import combine_digests
from ttlaunch.runtime.comm.reduction import contiguous_blocks
from ttlaunch.runtime.model.flat import digests
from ttlaunch.runtime.parallel.compression.powersgd import matrices_in
from ttlaunch.spec.recipe.importing import import_recipe_module
from ttlaunch.train import build_codec, build_model, build_optimizer, differentiate, global_norm, micro_batches

KINDS = {
    "bf16": {},
    "int8": {"block_size": 64},
    "top_k": {"k": 0.1},
    "powersgd": {"rank": 2},
}
WORKERS = len(LAYOUTS["data parallel"][1])


def compressed(kind, training=None, **keys):
    section = {"compression_config": {"kind": kind, **KINDS.get(kind, {}), **keys}}
    return config(**(training or {})) | section


def weights_after(cfg, ctx, workers):
    """What this many workers should end with, computed in one process: gradients pass through codecs, weights do not."""
    model = build_model(cfg, ctx)
    optimizer = build_optimizer(cfg, model, total_steps=ctx.data(cfg).total_steps)
    parameters = list(model.parameters())
    matrices = matrices_in([p.shape for p in parameters], [p.storage_offset() for p in parameters])
    codecs = [build_codec(cfg.compression_config, len(model.grads_N), matrices=matrices) for _ in range(workers)]
    for step in range(1, ctx.data(cfg).total_steps + 1):
        found, tokens = [], 0
        for codec, block in zip(codecs, contiguous_blocks(cfg.training_config.micro_batches, workers), strict=True):
            for index, x_BT, y_BT in micro_batches(cfg, ctx, step):
                if index in block:
                    tokens += differentiate(model, x_BT, y_BT, masks=model.masks(step, index))[1]
            found.append(torch.empty_like(model.grads_N))
            codec.decode(codec.encode(model.take_gradients()), found[-1])
            model.zero_grad()
        model.grads_N.copy_(sum(found[1:], start=found[0]) / tokens)
        optimizer.step(step, norm=global_norm(optimizer.squared_norms()))
    return model


@pytest.mark.parametrize("kind", KINDS)
def test_workers_send_gradients_through_codecs_and_never_parameters(tmp_path, make_context, kind):
    """Bug 28: replicas are equal to the bit (`sha256` says if not), and their weights were never rounded."""
    values = compressed(kind)
    run = train("data parallel", tmp_path / "run", values, data=None)
    cfg = import_recipe_module(RECIPES / "data_parallel", "recipe").RECIPE.config.model_validate(values)
    expected = weights_after(cfg, make_context(cfg), WORKERS)
    assert combine_digests([digests(expected.named_parameters())])[0] == run.sha256


@pytest.mark.parametrize("kind", ["int8", "powersgd"])
def test_an_interrupted_training_goes_on_to_the_same_bits(tmp_path, kind):
    """What each worker owes is in the checkpoint; without it the next gradients would be others."""
    whole = train("data parallel", tmp_path / "whole", compressed(kind), data=None, saves=True)
    assert [HALF, STEPS] == sorted(complete_checkpoints(tmp_path / "whole", PLAN, run_id="run"))
    checkpoint = verify(tmp_path / "whole" / contract.checkpoint_dir(HALF))
    resumed = train("data parallel", tmp_path / "again", compressed(kind), data=None, start=start_of(checkpoint))
    assert whole.sha256 == resumed.sha256
    owed = {name for name in names_in(checkpoint) if "residual" in name}
    assert {f"optimizer.codec.{worker}.residual" for worker in range(WORKERS)} == owed
    forgotten = train(
        "data parallel", tmp_path / "other", compressed(kind), data=None, start=start_of(without(checkpoint))
    )
    assert whole.sha256 != forgotten.sha256


def names_in(checkpoint):
    found = set()
    for entry in start_of(checkpoint)["files"]:
        with safe_open(entry["path"], framework="pt") as file:
            found |= set(file.keys())
    return found


def without(checkpoint):
    """The same checkpoint, with only the first rank's file."""
    files = dict(list(checkpoint.manifest["files"].items())[:1])
    return type(checkpoint)(checkpoint.path, checkpoint.manifest | {"files": files})


@pytest.mark.parametrize(("before", "after"), [("data parallel", "single"), ("single", "data parallel")])
def test_a_checkpoint_of_other_senders_is_one_to_go_on_from(tmp_path, before, after):
    """The weights are the same; who was not there owes nothing."""
    first = train(
        before, tmp_path / "first", compressed("int8") if before != "single" else config(), data=None, saves=True
    )
    complete_checkpoints(tmp_path / "first", PLAN, run_id="run")
    checkpoint = verify(tmp_path / "first" / contract.checkpoint_dir(HALF))
    second = train(
        after,
        tmp_path / "next",
        compressed("int8") if after != "single" else config(),
        data=None,
        start=start_of(checkpoint),
    )
    assert first.by_step(contract.KIND_STEP, "loss").keys() > second.by_step(contract.KIND_STEP, "loss").keys()
    assert HALF + 1 == min(second.by_step(contract.KIND_STEP, "loss"))


def test_int8_with_error_feedback_learns_as_whole_gradients_do(tmp_path):
    """C17: the loss is within 0.5 %."""
    longer = {"steps": 24, "batch_size": 6, "gradient_accumulation_steps": 1, "learning_rate": 5e-3}
    losses = {
        kind: train("data parallel", tmp_path / kind, compressed(kind, longer), data=None).by_step(
            contract.KIND_VALIDATION, "loss"
        )
        for kind in ("none", "int8")
    }
    assert losses["none"][24] < 0.9 * losses["none"][0]
    assert losses["none"][24] == pytest.approx(losses["int8"][24], rel=0.005)
    assert losses["none"][24] != losses["int8"][24]


@pytest.mark.parametrize("kind", ["none", *KINDS])
@pytest.mark.parametrize("values", [0, 1, 255, 256, 1000, 12345])
def test_the_formula_and_the_codec_agree(kind, values):
    cfg = CompressionConfig(kind=kind, **KINDS.get(kind, {}))
    codec = build_codec(cfg, values)
    side = math.isqrt(values)
    other = values // side if side else 0
    is_factored = cfg.rank * (side + other) < side * other
    keys = {"sides": side + other, "factored": side * other} if is_factored else {}
    assert codec.payload_bytes(values) == payload_bytes(cfg, values, **keys)
