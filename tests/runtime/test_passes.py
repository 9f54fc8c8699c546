"""The passes of a step: one gradient for all micro-batches, and padding in which nothing counts."""

import pytest
import torch
from torch import nn
from torch.nn import functional

from ttlaunch.runtime.comm.reduction import GradientTree
from ttlaunch.runtime.data.batches import micro_batches
from ttlaunch.runtime.model.losses import IGNORED
from ttlaunch.runtime.training.passes import in_step, mean_gradient
from ttlaunch.train import build_model, differentiate


def batch(index, *, sequences):
    x_BT = torch.arange(4 * sequences).reshape(sequences, 4) + 100 * index
    return index, x_BT, x_BT + 1


@pytest.mark.parametrize(("own", "passes", "padding"), [(2, 4, 2), (0, 1, 1), (3, 3, 0), (3, 2, 0)])
def test_a_shorter_block_is_padded_with_single_sequences_in_which_no_target_counts(own, passes, padding):
    batches = [batch(index, sequences=2) for index in range(own)]
    found = list(in_step(batches, passes=passes, any_batch=lambda: batch(7, sequences=3)))
    assert own + padding == len(found)
    assert all(given is kept for given, kept in zip(batches, found, strict=False))
    for index, x_BT, y_BT in found[own:]:
        assert (7, [[700, 701, 702, 703]], [[IGNORED] * 4]) == (index, x_BT.tolist(), y_BT.tolist())


def test_the_gradient_of_a_step_is_that_of_all_its_tokens_at_once(make_cfg, make_context):
    cfg = make_cfg()
    ctx = make_context(cfg)
    model = build_model(cfg, ctx)
    x_BT, y_BT = (torch.cat([part[place] for part in micro_batches(cfg, ctx, 3)]) for place in (1, 2))
    expected = functional.cross_entropy(model(x_BT).flatten(0, 1), y_BT.flatten())
    expected.backward()
    expected_N = model.take_gradients().clone()
    model.zero_grad()
    loss, tokens = mean_gradient(cfg, ctx, 3, model=model, sums=GradientTree(len(expected_N)))
    assert (pytest.approx(expected.item()), 8 * 16) == (loss, tokens)
    torch.testing.assert_close(expected_N, model.grads_N, rtol=1e-4, atol=1e-6)


def test_tokens_and_loss_are_told_between_the_passes(make_cfg, make_context):
    cfg = make_cfg()
    ctx = make_context(cfg)
    model, told = build_model(cfg, ctx), []

    def tell(*, tokens, loss):
        told.append((loss, tokens, bool(model.take_gradients().any())))

    _, x_BT, y_BT = next(iter(micro_batches(cfg, ctx, 1)))
    loss, tokens = differentiate(model, x_BT, y_BT, masks=model.masks(1, 0), before_backward=tell)
    assert [(loss, tokens, False)] == told
    assert model.take_gradients().any()


def test_what_stands_in_for_a_model_is_differentiated_with_the_loss_scale_of_the_model(make_cfg, make_context):
    class StandIn(nn.Module):
        def __init__(self, module):
            super().__init__()
            self.module = module

        def forward(self, x_BT, masks):
            return self.module(x_BT, masks)

    cfg = make_cfg(training={"precision": "fp16"}, loss_scale_config={"initial_power": 3})
    ctx = make_context(cfg)
    _, x_BT, y_BT = next(iter(micro_batches(cfg, ctx, 1)))
    found = []
    for scale in (8.0, 1.0):
        model = build_model(cfg, ctx)
        model.loss_scaler.scale = scale
        differentiate(StandIn(model), x_BT, y_BT, masks=model.masks(1, 0))
        found.append(model.take_gradients().clone())
    torch.testing.assert_close(found[0] / 8, found[1], rtol=1e-2, atol=1e-3)
    assert found[1].any()
