"""The models: size by formula, parameters that do not depend on the stage, and that they learn."""

import pytest
import torch

from ttlaunch.runtime.digests import digests
from ttlaunch.runtime.model.mlp import CONTEXT_TOKENS
from ttlaunch.train import build_model, build_optimizer, global_norm, summed_loss


@pytest.mark.parametrize(("blocks", "width", "length"), [(1, 8, 4), (3, 16, 32)])
def test_the_transformer_has_as_many_parameters_as_the_formula_says(make_cfg, make_context, blocks, width, length):
    """E5."""
    cfg = make_cfg(transformer={"num_blocks": blocks, "embedding_dim": width, "max_sequence_length": length})
    block = 12 * width**2 + 13 * width
    expected = 256 * width + length * width + blocks * block + 2 * width + 256 * width
    assert expected == sum(parameter.numel() for parameter in build_model(cfg, make_context(cfg)).parameters())


def test_the_feed_forward_model_has_as_many_parameters_as_the_formula_says(make_cfg, make_context):
    cfg = make_cfg(training={"model_type": "mlp"})
    block = 8 * 16**2 + 7 * 16
    expected = 256 * 16 + CONTEXT_TOKENS * 16**2 + 16 + 2 * block + 2 * 16 + 256 * 16
    assert expected == sum(parameter.numel() for parameter in build_model(cfg, make_context(cfg)).parameters())


@pytest.mark.parametrize("kind", ["gpt", "mlp"])
def test_stages_begin_with_the_parameters_of_the_whole_model(make_cfg, make_context, kind):
    """B10."""
    cfg = make_cfg(training={"model_type": kind}, transformer={"num_blocks": 4})
    ctx = make_context(cfg)
    whole = digests(build_model(cfg, ctx).named_parameters())
    stages = [build_model(cfg, ctx, stage=stage, blocks_per_stage=[1, 2, 1]) for stage in range(3)]
    parts = [digests(stage.named_parameters()) for stage in stages]
    assert sum(map(len, parts)) == len(whole)
    assert list(whole.items()) == [entry for part in parts for entry in part.items()]


@pytest.mark.parametrize("kind", ["gpt", "mlp"])
def test_a_model_never_sees_the_token_it_predicts(make_cfg, make_context, kind):
    cfg = make_cfg(training={"model_type": kind})
    model = build_model(cfg, make_context(cfg))
    x_BT = torch.arange(16).repeat(2, 1)
    changed_BT = x_BT.clone()
    changed_BT[:, 9] = 200
    before, after = model(x_BT), model(changed_BT)
    assert torch.equal(before[:, :9], after[:, :9])
    assert not torch.equal(before[:, 9], after[:, 9])


@pytest.mark.parametrize("kind", ["gpt", "mlp"])
@pytest.mark.parametrize("rule", ["adamw", "sgd"])
def test_it_overfits_one_batch(make_cfg, make_context, kind, rule):
    """E5, A8."""
    training = {"model_type": kind, "optimizer": rule, "learning_rate": 0.02 if rule == "adamw" else 0.3}
    cfg = make_cfg(training=training)
    ctx = make_context(cfg)
    model = build_model(cfg, ctx)
    optimizer = build_optimizer(cfg, model, total_steps=100)
    _, x_BT, y_BT = ctx.data(cfg).training_batch(1, 0)
    for step in range(1, 101):
        loss = summed_loss(model(x_BT), y_BT) / y_BT.numel()
        loss.backward()
        optimizer.step(step, norm=global_norm(optimizer.squared_norms()))
    assert loss.item() < 0.1


def test_dropout_depends_on_seed_step_micro_batch_and_layer_only(make_cfg, make_context):
    cfg = make_cfg(transformer={"dropout_prob": 0.5})
    ctx = make_context(cfg)
    model, twin = build_model(cfg, ctx), build_model(cfg, ctx)
    _, x_BT, _ = ctx.data(cfg).training_batch(1, 0)
    torch.manual_seed(1)
    once = model(x_BT, model.masks(3, 1))
    torch.manual_seed(2)
    assert torch.equal(once, twin(x_BT, twin.masks(3, 1)))
    assert not torch.equal(once, model(x_BT, model.masks(3, 2)))
    assert not torch.equal(once, model(x_BT, model.masks(4, 1)))
    assert torch.equal(model(x_BT), twin(x_BT))
