"""How few keys attention needs for exact bits is found by trying; a number that was not tried changes bits."""

import pytest
import torch

from ttlaunch.runtime.serving import forward, rules
from ttlaunch.runtime.serving.keys import fewest_keys, right_key_counts

from .served_models import (
    cached_logits,
    configuration,
    differing,
    needs_avx512,
    random_model,
    random_texts,
    training_logits,
    whole_part,
)

LLAMA = {"model_type": "llama", "heads": 4, "num_kv_heads": 2, "mlp_dim": 96}


def attention(length, *, width=16, seed=9):
    """A causal attention, and the function that attends for some rows with so many keys; other values than those that were tried."""
    q, k, v = torch.randn(3, 1, 2, length, width, generator=torch.Generator().manual_seed(seed)) * 2
    whole = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)

    def attended(position, keys):
        rows = torch.full((rules.QUERY_ROWS,), position)
        bias = rules.causal_bias(rows[None], keys=keys, dtype=q.dtype)
        return rules.attend(q[:, :, rows], k[:, :, :keys], v[:, :, :keys], bias_B1nT=bias)[:, :, 0]

    return whole, attended


@pytest.mark.parametrize("length", [64, 160, 256, 512, 640])
def test_every_row_has_its_bits_with_as_few_keys_as_were_found(length):
    right = right_key_counts(length, width=16, dtype=torch.float32)
    whole, attended = attention(length)
    for position in range(length):
        keys = fewest_keys(position + 1, right, otherwise=rules.key_count(position + 1, length))
        assert torch.equal(whole[:, :, position], attended(position, keys))


@needs_avx512
def test_a_short_text_is_not_attended_to_with_the_keys_of_the_longest():
    """Where no sum is divided, the rows of a text with 20 tokens are handed 32 keys."""
    assert [32, 64, 96, 128] == right_key_counts(160, width=16, dtype=torch.float32)
    cfg = configuration(length=160)
    part = whole_part(cfg, random_model(cfg))
    assert (4, 32) == forward._shape_of(forward.Span(0, 19, 1, 1), part.cache, rules.EXACT)
    assert (8, 160) == forward._shape_of(forward.Span(0, 10, 5, 1), part.cache, rules.EXACT)  # only 4 rows were tried


@needs_avx512
def test_numbers_of_keys_that_change_bits_are_not_taken():
    """At 512 tokens and heads 64 wide, attention over the first 288 keys adds up in other parts than over all 512."""
    assert 288 not in right_key_counts(512, width=64, dtype=torch.float32)
    whole, attended = attention(512, width=64)
    assert not torch.equal(whole[:, :, 280], attended(280, 288))


@pytest.mark.parametrize("kind", [{}, LLAMA, {"precision": "bf16"}], ids=["gpt", "llama", "bf16"])
@pytest.mark.parametrize("length", [160, 512])
def test_cached_rows_with_few_keys_have_the_bits_of_training(length, kind):
    cfg = configuration(length=length, blocks=1, **kind)
    model, texts = random_model(cfg), random_texts(cfg, count=2)
    found = cached_logits(whole_part(cfg, model), texts, chunks=(1, 2, 4, 30), starts=(1, length - 60))
    assert 0 == differing(found, training_logits(model, texts))


@needs_avx512
def test_keys_that_were_not_tried_change_bits(monkeypatch):
    """The comparison above finds a cache that takes every multiple of 32 for granted."""
    monkeypatch.setattr(forward, "right_key_counts", lambda length, **_: list(range(32, length, 32)))
    cfg = configuration(length=512, blocks=1, width=128)
    model, texts = random_model(cfg), random_texts(cfg, count=1)
    found = cached_logits(whole_part(cfg, model), texts, chunks=(1, 4), starts=(270,))
    assert 0 < differing(found, training_logits(model, texts))


def test_attention_of_very_long_sequences_is_not_tried():
    assert [] == right_key_counts(5000, width=16, dtype=torch.float32)
