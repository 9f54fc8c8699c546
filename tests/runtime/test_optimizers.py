"""Update rules, schedule and clipping, against closed forms and torch's own classes."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ttlaunch.recipe import TrainingFile
from ttlaunch.train import build_model, build_optimizer, global_norm, learning_rate


def schedule(**keys):
    return TrainingFile.model_validate({"scheduler_config": keys, "training_config": {"learning_rate": 2.0}})


def test_warm_up_rises_to_the_peak():
    cfg = schedule(type="cosine", warmup_steps=4)
    assert [0.5, 1.0, 1.5, 2.0] == [learning_rate(cfg, step, total_steps=10) for step in (1, 2, 3, 4)]


@pytest.mark.parametrize(
    ("shape", "middle", "last"), [("constant", 2.0, 2.0), ("linear", 1.1, 0.2), ("cosine", 1.1, 0.2)]
)
def test_the_schedule_ends_at_its_closed_form(shape, middle, last):
    """D24."""
    cfg = schedule(type=shape)
    assert middle == pytest.approx(learning_rate(cfg, 5, total_steps=10))
    assert last == pytest.approx(learning_rate(cfg, 10, total_steps=10))


SHAPES = {
    "constant": lambda _: 1.0,
    "linear": lambda done: 1 - done,
    "cosine": lambda done: 0.5 * (1 + math.cos(math.pi * done)),
}


@pytest.mark.parametrize("shape", SHAPES)
@given(st.integers(0, 30), st.integers(0, 30), st.integers(1, 60), st.floats(0, 1), st.data())
def test_every_step_has_the_rate_of_the_closed_form(shape, warm_up, hold, total, lowest, data):
    """D24: warm-up, hold, fall; also where training ends before the fall begins."""
    cfg = schedule(type=shape, warmup_steps=warm_up, hold_steps=hold, min_learning_rate_ratio=lowest)
    step = data.draw(st.integers(1, total))
    if step <= warm_up:
        expected = 2.0 * step / warm_up
    elif step <= warm_up + hold or shape == "constant":
        expected = 2.0
    else:
        expected = 2.0 * (lowest + (1 - lowest) * SHAPES[shape]((step - warm_up - hold) / (total - warm_up - hold)))
    assert expected == pytest.approx(learning_rate(cfg, step, total_steps=total))


def test_a_hold_stays_at_the_peak():
    cfg = schedule(type="linear", warmup_steps=2, hold_steps=3, min_learning_rate_ratio=0)
    assert [1.0, 2.0, 2.0, 2.0, 2.0, 1.6] == [learning_rate(cfg, step, total_steps=10) for step in range(1, 7)]
    assert 0.0 == learning_rate(cfg, 10, total_steps=10)


@given(st.lists(st.floats(0, 1e6), max_size=60))
def test_the_global_norm_is_euclidean(squares):
    assert math.isclose(math.sqrt(math.fsum(squares)), global_norm(squares), rel_tol=1e-12)


def step_once(cfg, ctx, gradient):
    model = build_model(cfg, ctx)
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    optimizer = build_optimizer(cfg, model, total_steps=1)
    for parameter in model.parameters():
        parameter.grad.fill_(gradient)
    norm = global_norm(optimizer.squared_norms())
    optimizer.step(1, norm=norm)
    return model, before, norm


def test_clipping_comes_before_the_update(make_cfg, make_context):
    """A13, D24; bugs 10 and 11 of the originals: clipping after the step, or only in the log."""
    cfg = make_cfg(training={"optimizer": "sgd", "learning_rate": 1.0, "weight_decay": 0.0})
    model, before, norm = step_once(cfg, make_context(cfg), gradient=3.0)
    count = sum(parameter.numel() for parameter in model.parameters())
    assert norm == pytest.approx(3.0 * math.sqrt(count))
    moved = torch.cat([(before[name] - parameter).flatten() for name, parameter in model.named_parameters()])
    assert torch.linalg.vector_norm(moved.double()).item() == pytest.approx(1.0, rel=1e-4)


@pytest.mark.parametrize("rule", ["adamw", "sgd"])
def test_only_matrices_decay(make_cfg, make_context, rule):
    """A8."""
    cfg = make_cfg(training={"optimizer": rule, "learning_rate": 0.5, "weight_decay": 0.5})
    model, before, _ = step_once(cfg, make_context(cfg), gradient=0.0)
    for name, parameter in model.named_parameters():
        factor = 0.75 if parameter.dim() == 2 else 1.0
        torch.testing.assert_close(before[name] * factor, parameter.detach())


@pytest.mark.parametrize("rule", ["adamw", "sgd"])
def test_updates_equal_those_of_torch(make_cfg, make_context, rule):
    """A8: ten steps against torch.optim."""
    rate = 0.01
    cfg = make_cfg(
        training={"optimizer": rule, "learning_rate": rate, "weight_decay": 0.0, "use_clip_grad_norm": False}
    )
    ctx = make_context(cfg)
    ours, theirs = build_model(cfg, ctx), build_model(cfg, ctx)
    optimizer = build_optimizer(cfg, ours, total_steps=10)
    reference = (
        torch.optim.AdamW(theirs.parameters(), lr=rate, betas=(0.9, 0.95), weight_decay=0.0)
        if rule == "adamw"
        else torch.optim.SGD(theirs.parameters(), lr=rate, momentum=0.9)
    )
    generator = torch.Generator().manual_seed(0)
    for step in range(1, 11):
        gradient_N = torch.randn(len(ours.grads_N), generator=generator)
        ours.grads_N.copy_(gradient_N)
        theirs.grads_N.copy_(gradient_N)
        optimizer.step(step, norm=0.0)
        reference.step()
    torch.testing.assert_close(list(theirs.parameters()), list(ours.parameters()))


@pytest.mark.parametrize("rule", ["adamw", "sgd"])
def test_two_updates_equal_the_formulas_of_the_papers(make_cfg, make_context, rule):
    """A8: decoupled weight decay beside momentum, written out in float64."""
    keys = {"learning_rate": 0.1, "weight_decay": 0.3, "beta1": 0.8, "beta2": 0.9, "epsilon": 1e-3}
    cfg = make_cfg(training={"optimizer": rule, "use_clip_grad_norm": False} | keys)
    model = build_model(cfg, make_context(cfg))
    optimizer = build_optimizer(cfg, model, total_steps=2)
    weights = {name: parameter.detach().double() for name, parameter in model.named_parameters()}
    means = {name: torch.zeros_like(weight) for name, weight in weights.items()}
    squares = {name: torch.zeros_like(weight) for name, weight in weights.items()}
    for step, gradient in ((1, 0.5), (2, -0.25)):
        for name, weight in weights.items():
            decayed = weight * (1 - 0.1 * 0.3) if weight.dim() == 2 else weight
            if rule == "sgd":
                means[name] = 0.8 * means[name] + gradient
                weights[name] = decayed - 0.1 * means[name]
            else:
                means[name] = 0.8 * means[name] + 0.2 * gradient
                squares[name] = 0.9 * squares[name] + 0.1 * gradient**2
                mean, square = means[name] / (1 - 0.8**step), squares[name] / (1 - 0.9**step)
                weights[name] = decayed - 0.1 * mean / (square.sqrt() + 1e-3)
        for parameter in model.parameters():
            parameter.grad.fill_(gradient)
        assert 0.1 == optimizer.step(step, norm=0.0)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(weights[name].float(), parameter.detach())


def test_without_momentum_an_update_is_the_gradient_times_the_rate(make_cfg, make_context):
    training = {"optimizer": "sgd", "beta1": 0.0, "weight_decay": 0.0, "use_clip_grad_norm": False}
    cfg = make_cfg(training=training | {"learning_rate": 0.25})
    model, before, _ = step_once(cfg, make_context(cfg), gradient=1.0)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(before[name] - 0.25, parameter.detach())
