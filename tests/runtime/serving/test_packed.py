"""Packed products of few rows have the bits of products of many, or are not used."""

import pytest
import torch
from torch.nn import functional

from ttlaunch.runtime.serving import packed, rules
from ttlaunch.runtime.serving.products import Products
from ttlaunch.spec.recipe.serving import MOST_PACKED_BYTES, PACKED_ROWS

from .served_models import configuration, random_model

needs_avx512 = pytest.mark.skipif(
    rules.ROWS <= max(PACKED_ROWS),
    reason="this CPU has the bits of many rows in plain products of 4, so nothing is packed",
)


def layer(inputs, outputs=80, *, seed=1):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(outputs, inputs, generator=generator), torch.randn(outputs, generator=generator)


@pytest.mark.parametrize("has_bias", [True, False])
@pytest.mark.parametrize("inputs", [16, 64, 256, 384, 576, 1024, 1536, 2048])
def test_whatever_is_packed_has_the_bits_of_many_rows(inputs, has_bias):
    weight, bias = layer(inputs)
    bias = bias if has_bias else None
    x = torch.randn(96, inputs, generator=torch.Generator().manual_seed(7)) * 3  # other rows than those that were tried
    expected = functional.linear(x, weight, bias)
    for rows, product in packed.pack(weight, bias).items():
        for start in range(0, 96, rows):
            assert torch.equal(product(x[start : start + rows]), expected[start : start + rows])


@needs_avx512
@pytest.mark.parametrize("inputs", [256, 1024])
def test_matrices_of_usual_sizes_are_packed(inputs):
    assert set(PACKED_ROWS) == packed.pack(*layer(inputs, 256)).keys()


@needs_avx512
def test_plain_products_of_so_few_rows_have_other_bits():
    weight, bias = layer(1024)
    x = torch.randn(96, 1024, generator=torch.Generator().manual_seed(7))
    assert not torch.equal(functional.linear(x[:4], weight, bias), functional.linear(x, weight, bias)[:4])


@pytest.mark.parametrize("rows", [1, 4, 7, 8, 9, 16, 33])
def test_a_layer_without_packed_products_of_its_own_is_padded_alone(rows):
    products = Products(cfg := configuration(), random_model(cfg))
    name = "blocks.0.feed_forward_in"
    if products._packed:
        products._packed[name] = {}
    x = torch.randn(64, cfg.transformer_config.embedding_dim, generator=torch.Generator().manual_seed(3))
    expected = products.own(name, x)
    padded = torch.arange(products.product_rows(rows)).clamp_(max=rows - 1)
    found = products.own(name, x[padded])
    assert len(padded) == len(found)
    assert torch.equal(found[:rows], expected[:rows])


def test_a_model_that_would_take_too_much_memory_is_not_packed():
    large = torch.empty(MOST_PACKED_BYTES // 4 // len(PACKED_ROWS) // 1024, 1024)
    here = packed.can_pack([large], least_rows=16)
    assert not packed.can_pack([large, torch.empty(1)], least_rows=16)
    assert here is (torch.backends.mkl.is_available() and torch.get_num_threads() == 1)
    assert not packed.can_pack([torch.empty(4, 4, dtype=torch.bfloat16)], least_rows=16)
    assert not packed.can_pack([torch.empty(4, 4)], least_rows=4)


@needs_avx512
@pytest.mark.parametrize("rows", [1, 2])
def test_a_layer_without_a_product_of_two_rows_takes_that_of_four(rows):
    """Not one of 16 rows, which takes three times as long."""
    products = Products(cfg := configuration(), random_model(cfg))
    name = "blocks.0.feed_forward_in"
    x = torch.randn(64, cfg.transformer_config.embedding_dim, generator=torch.Generator().manual_seed(3))
    expected = products.own(name, x)
    taken = []
    four = products._packed[name][4]
    products._packed[name] = {4: lambda padded: taken.append(len(padded)) or four(padded)}
    padded = torch.arange(products.product_rows(rows)).clamp_(max=rows - 1)
    assert torch.equal(products.own(name, x[padded])[:rows], expected[:rows])
    assert [4] == taken


@needs_avx512
def test_one_text_is_computed_in_two_rows():
    products = Products(cfg := configuration(), random_model(cfg))
    assert [2, 2, 4, 4, 8, 8, 16] == [products.product_rows(rows) for rows in (1, 2, 3, 4, 5, 8, 9)]
