"""How many rows of a product have the bits of training is tried, and so are the logits of a whole model, where no rule is known."""

from types import SimpleNamespace

import pytest
import torch

from ttlaunch.runtime.serving import tried_rows
from ttlaunch.runtime.serving.probe import probe_whole
from ttlaunch.runtime.serving.products import Products
from ttlaunch.runtime.serving.tried_rows import tried_counts

from .served_models import cached_logits as cached
from .served_models import configuration, differing, random_model, random_texts, training_logits, whole_part


def test_only_counts_whose_products_have_the_right_bits_are_used(monkeypatch):
    """A kernel for fewer than 100 rows that adds otherwise, as GPUs have some."""
    linear = torch.nn.functional.linear
    otherwise = SimpleNamespace(linear=lambda x, *more: linear(x, *more) + (1e-3 if len(x) < 100 else 0))
    monkeypatch.setattr(tried_rows, "functional", otherwise)
    layers = [(torch.randn(48, 32), None), (torch.randn(32, 48), torch.randn(32))]
    assert (128, 256, 512, 600) == tried_counts(layers, rows=600)
    assert (16, 32, 64) == tried_counts(layers, rows=64)  # training itself used that kernel


def test_a_product_that_is_too_large_to_try_is_refused():
    with pytest.raises(ValueError, match=r"has 2097152 × 1024 values"):
        tried_counts([(torch.zeros(1, 1).expand(1024, 1), None)], rows=2**21)


def with_counts(cfg, model, counts):
    """Products as on a GPU, whose counts were tried."""
    products = Products(cfg, model)
    products._counts, products._of_few_rows = counts, {}
    return products


@pytest.mark.parametrize("counts", [(16, 64, 256), (64,)])
def test_products_of_tried_counts_have_the_bits_of_training(counts):
    """Also where a step has more rows than a micro-batch of training had."""
    cfg = configuration(length=64)
    model, texts = random_model(cfg), random_texts(cfg)
    part = whole_part(cfg, model, products=with_counts(cfg, model, counts))
    assert 0 == differing(cached(part, texts, chunks=(1, 30), starts=(1, 60, 40)), training_logits(model, texts))


def test_logits_of_a_whole_model_are_compared_with_those_of_training():
    cfg = configuration(length=64)
    model = random_model(cfg)
    assert [] == probe_whole(cfg, model, whole_part(cfg, model), training_rows=128)
    wrong = whole_part(cfg, model)
    wrong._norms = dict.fromkeys(wrong._norms, lambda x_RD: x_RD)
    assert ["logits of 2 texts differ from those of a micro-batch in training, at 32 tokens"] == probe_whole(
        cfg, model, wrong, training_rows=128
    )
