"""A backward pass that begins with a gradient."""

import pytest
import torch

from ttlaunch.runtime.model.backward import run_backward


def gradients(run):
    torch.manual_seed(1)
    layer = torch.nn.Linear(7, 5)
    x = torch.randn(3, 7, requires_grad=True)
    run(torch.relu(layer(x)), torch.randn(3, 5))
    return [x.grad, layer.weight.grad, layer.bias.grad]


def test_the_bits_are_those_of_torch():
    ours, torchs = gradients(run_backward), gradients(lambda out, gradient: out.backward(gradient))
    assert all(map(torch.equal, ours, torchs))


def test_it_may_run_where_no_gradients_are_noted():
    x = torch.tensor([2.0], requires_grad=True)
    out = x * x
    with torch.no_grad():
        run_backward(out, torch.tensor([3.0]))
    assert x.grad == 12


def test_without_a_gradient_it_begins_with_one():
    x = torch.tensor(3.0, requires_grad=True)
    run_backward(x * x, None)
    assert x.grad == 6


def test_a_gradient_of_another_shape_is_refused():
    with pytest.raises(ValueError, match=r"shape \(2,\) for a tensor of shape \(3,\)"):
        run_backward(torch.zeros(3, requires_grad=True) * 2, torch.zeros(2))
