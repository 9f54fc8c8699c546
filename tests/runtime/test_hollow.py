"""Tensors without values: what is allocated is what the same code allocates with values (E9)."""

from functools import partial

import psutil
import pytest
import torch
from torch import nn

from ttlaunch.runtime.hollow import Hollow
from ttlaunch.runtime.telemetry.memory import StepMemory, TensorOwners, tensors_of_model


class Transformer(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(64, 32)
        self.layers = nn.TransformerEncoderLayer(32, 4, dim_feedforward=64, dropout=0.1, batch_first=True)
        self.head = nn.Linear(32, 64)

    def forward(self, tokens):
        return self.head(self.layers(self.embedding(tokens)))


class Images(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Conv2d(1, 4, 3), nn.GELU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(36, 64))

    def forward(self, tokens):
        return self.layers(tokens.view(-1, 1, 8, 8).float())


def trained(model_class, *, optimizer, precision):
    """The most of each kind in the second step of a model, by plain torch."""
    torch.manual_seed(0)
    model, owners = model_class(), TensorOwners()
    owners.add(model, tensors_of_model)
    optimizer = optimizer(model.parameters())
    for _ in range(2):
        with StepMemory(owners) as memory:
            tokens = torch.arange(256).view(2, 128) % 64
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=precision == "bf16"):
                logits = model(tokens)
            loss = nn.functional.cross_entropy(
                logits.flatten(0, -2).float(), tokens.flatten()[: logits[..., 0].numel()]
            )
            loss.backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)
            del logits, loss
    return memory.peaks


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("optimizer", [torch.optim.SGD, partial(torch.optim.AdamW, fused=True)], ids=["sgd", "adamw"])
@pytest.mark.parametrize("model_class", [Transformer, Images])
def test_a_step_without_values_allocates_what_one_with_values_does(model_class, optimizer, precision):
    expected = trained(model_class, optimizer=optimizer, precision=precision)
    with Hollow():
        actual = trained(model_class, optimizer=optimizer, precision=precision)

    assert expected == actual
    assert expected["peak"] > expected["parameters"] > 0


def test_memory_without_values_takes_no_pages():
    before = psutil.Process().memory_info().rss
    with Hollow():
        weights = torch.randn(8192, 8192)  # 256 MiB
        product = (weights @ weights).add_(1).relu()

    assert 8192 * 8192 * 4 == product.untyped_storage().nbytes()
    assert psutil.Process().memory_info().rss - before < 16 * 1024 * 1024


def test_whole_and_64_bit_numbers_are_computed_and_a_loss_is_0():
    with Hollow():
        counts = torch.arange(4) + torch.tensor([1, 2, 3, 4])
        sums = torch.tensor([1.5, 2.5], dtype=torch.float64).sum()
        loss = torch.randn(16, 16).square().sum()

        assert ([1, 3, 5, 7], 4.0, 0.0) == (counts.tolist(), sums.item(), loss.item())


def test_an_operation_in_place_returns_its_argument_and_a_view_shares_it():
    with Hollow():
        weights = torch.ones(4, 4)
        assert weights.add_(1) is weights
        assert weights.view(16).untyped_storage().data_ptr() == weights.untyped_storage().data_ptr()


def test_a_size_that_depends_on_values_is_refused():
    with Hollow(), pytest.raises(Exception, match="nonzero"):
        torch.ones(4).nonzero()


def test_what_is_known_of_a_draw_does_not_depend_on_who_draws():
    """Every rank of every simulated plan makes its own generator, and finds the shapes only once."""
    known = {}
    sizes = []
    for seed in range(3):
        with Hollow(known=known):
            torch.empty(5).normal_(generator=torch.Generator().manual_seed(seed))
        sizes.append(len(known))
    assert sizes[0] > 0
    assert {sizes[0]} == set(sizes)
