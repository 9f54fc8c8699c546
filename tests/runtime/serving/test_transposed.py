"""Products of few rows with transposed matrices have the bits of products of many, or are not used."""

import pytest
import torch
from torch.nn import functional

from ttlaunch.runtime.serving import transposed
from ttlaunch.runtime.serving.products import Products
from ttlaunch.spec.recipe.serving import MOST_TRANSPOSED_BYTES

from .served_models import configuration, needs_avx512, random_model


def layer(inputs, outputs=80, *, seed=1):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(outputs, inputs, generator=generator), torch.randn(outputs, generator=generator)


@pytest.mark.parametrize("has_bias", [True, False])
@pytest.mark.parametrize("inputs", [16, 64, 256, 384, 512, 576, 640, 1024, 1100, 1536, 2048])
def test_whatever_is_transposed_has_the_bits_of_many_rows(inputs, has_bias):
    weight, bias = layer(inputs)
    bias = bias if has_bias else None
    x = torch.randn(96, inputs, generator=torch.Generator().manual_seed(7)) * 3  # other rows than those that were tried
    expected = functional.linear(x, weight, bias)
    for rows, product in transposed.products_of_few_rows(weight, bias).items():
        for start in range(0, 97 - rows, rows):
            assert torch.equal(product(x[start : start + rows]), expected[start : start + rows])


@needs_avx512
@pytest.mark.parametrize("inputs", [256, 512, 768, 1024])
def test_matrices_of_usual_sizes_have_products_of_every_number_of_rows(inputs):
    assert set(range(2, 16)) == transposed.products_of_few_rows(*layer(inputs, 256)).keys()


@needs_avx512
def test_plain_products_of_so_few_rows_have_other_bits():
    weight, bias = layer(1024)
    x = torch.randn(96, 1024, generator=torch.Generator().manual_seed(7))
    assert not torch.equal(functional.linear(x[:4], weight, bias), functional.linear(x, weight, bias)[:4])


@pytest.mark.parametrize("rows", [1, 4, 7, 8, 9, 16, 33])
def test_a_layer_without_products_of_few_rows_is_padded_alone(rows):
    products = Products(cfg := configuration(), random_model(cfg))
    name = "blocks.0.feed_forward_in"
    if products._of_few_rows:
        products._of_few_rows[name] = {}
    x = torch.randn(64, cfg.transformer_config.embedding_dim, generator=torch.Generator().manual_seed(3))
    expected = products.own(name, x)
    padded = torch.arange(products.product_rows(rows)).clamp_(max=rows - 1)
    found = products.own(name, x[padded])
    assert len(padded) == len(found)
    assert torch.equal(found[:rows], expected[:rows])


def test_a_model_that_would_take_too_much_memory_is_not_transposed():
    large = torch.empty(MOST_TRANSPOSED_BYTES // 4 // 1024, 1024)
    here = transposed.can_transpose([large], least_rows=16)
    assert not transposed.can_transpose([large, torch.empty(1)], least_rows=16)
    assert here is (torch.get_num_threads() == 1)
    assert not transposed.can_transpose([torch.empty(4, 4, dtype=torch.bfloat16)], least_rows=16)
    assert not transposed.can_transpose([torch.empty(4, 4)], least_rows=4)


@needs_avx512
@pytest.mark.parametrize("inputs", [1024, 512])
def test_the_way_that_was_not_tried_changes_bits(monkeypatch, inputs):
    """1024 inputs are summed in blocks and 512 are not; whoever takes one way for granted has other bits."""
    weight, bias = layer(inputs, 256)
    x = torch.randn(64, inputs, generator=torch.Generator().manual_seed(7))
    expected = functional.linear(x, weight, bias)[:4]
    whole = torch.addmm(bias, x[:4], weight.T.contiguous())
    monkeypatch.setattr(transposed, "_whole", lambda weight_KN, bias_N: lambda x_RK: torch.full((len(x_RK), 256), 0.0))
    assert torch.equal(expected, whole) is (inputs == 512)
    assert not any(rows == 4 for rows in transposed.products_of_few_rows(weight, bias))  # a wrong way is not taken


@needs_avx512
@pytest.mark.parametrize("rows", [1, 2])
def test_a_layer_without_a_product_of_two_rows_takes_that_of_four(rows):
    """Not one of 16 rows, which takes three times as long."""
    products = Products(cfg := configuration(), random_model(cfg))
    name = "blocks.0.feed_forward_in"
    x = torch.randn(64, cfg.transformer_config.embedding_dim, generator=torch.Generator().manual_seed(3))
    expected = products.own(name, x)
    taken = []
    four = products._of_few_rows[name][4]
    products._of_few_rows[name] = {4: lambda rows_RK: taken.append(len(rows_RK)) or four(rows_RK)}
    padded = torch.arange(products.product_rows(rows)).clamp_(max=rows - 1)
    assert torch.equal(products.own(name, x[padded])[:rows], expected[:rows])
    assert [4] == taken


@needs_avx512
def test_a_step_has_as_many_rows_as_texts_and_two_of_a_single_one():
    products = Products(cfg := configuration(), random_model(cfg))
    assert [2, 2, 3, 8, 15, 16, 17] == [products.product_rows(rows) for rows in (1, 2, 3, 8, 15, 16, 17)]
