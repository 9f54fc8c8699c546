"""Cached logits have the bits of the training's forward pass, however rows are batched; without its rules they have not."""

import re

import pytest
import torch

from ttlaunch.runtime.serving import rules
from ttlaunch.runtime.serving.probe import probe
from ttlaunch.runtime.serving.products import Products

from .served_models import (
    SharesInTurns,
    Stages,
    cached_logits,
    configuration,
    differing,
    random_model,
    random_texts,
    training_logits,
    whole_part,
)

LLAMA = {"model_type": "llama", "heads": 6, "num_kv_heads": 2, "width": 96, "mlp_dim": 100}


def count_differing(cfg, *, part=None, **batching):
    """Positions, of three texts, whose cached logits differ from those of training."""
    model, texts = random_model(cfg), random_texts(cfg)
    found = cached_logits(part or whole_part(cfg, model), texts, **batching)
    return differing(found, training_logits(model, texts))


@pytest.mark.parametrize("kind", [{}, LLAMA], ids=["gpt", "llama"])
@pytest.mark.parametrize("length", [64, 128, 160])
@pytest.mark.parametrize("chunks", [(1,), (1, 2, 3, 4, 7), (13, 32)])
def test_cached_rows_have_the_bits_of_training(length, chunks, kind):
    """S2: alone, beside others, in chunks of any size."""
    assert 0 == count_differing(configuration(length=length, **kind), chunks=chunks)


@pytest.mark.parametrize("kind", [{}, LLAMA], ids=["gpt", "llama"])
def test_keys_beyond_one_page_keep_the_bits(kind):
    cfg = configuration(length=576, blocks=1, **kind)
    assert 0 == count_differing(cfg, chunks=(1, 40, 64), starts=(98, 450, 510))


@pytest.mark.parametrize(
    "kind",
    [
        {"precision": "bf16"},
        {"tied": True},
        {"activation": "gelu_new"},
        {"model_type": "mlp"},
        {"model_type": "mlp", "precision": "bf16"},
        LLAMA,
        LLAMA | {"precision": "bf16"},
        LLAMA | {"tied": True, "rope_scaling": {"original_length": 16}},
    ],
    ids=str,
)
def test_every_kind_of_language_model_keeps_its_bits(kind):
    assert 0 == count_differing(configuration(length=64, **kind), chunks=(1, 3, 13))


@pytest.mark.parametrize("kind", [{}, LLAMA | {"tied": True}], ids=["gpt", "llama"])
def test_stages_of_a_model_have_the_bits_of_the_whole(kind):
    cfg = configuration(length=64, blocks=3, **kind)
    cuts = [(range(1), True, False), (range(1, 2), False, False), (range(2, 3), False, True)]
    parts = [
        whole_part(cfg, random_model(cfg, blocks=blocks, has_embedding=first, has_head=last))
        for blocks, first, last in cuts
    ]
    assert 0 == count_differing(cfg, part=Stages(parts), chunks=(1, 13))


@pytest.mark.parametrize("count", [2, 3, 4])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("kind", [{}, LLAMA], ids=["gpt", "llama"])
def test_shares_of_columns_have_the_bits_of_the_whole(count, precision, kind):
    """Columns need not follow the heads of a llama: 4 ranks share 2 heads of keys and values."""
    cfg = configuration(length=64, precision=precision, **kind)
    part = whole_part(cfg, random_model(cfg), products=SharesInTurns(cfg, random_model(cfg), count=count))
    assert 0 == count_differing(cfg, part=part, chunks=(1, 13))


@pytest.mark.parametrize("kind", [{}, LLAMA], ids=["gpt", "llama"])
def test_a_first_stage_that_also_scores_has_the_bits_of_the_whole(kind):
    """A tied matrix is there once, for both of its uses; the last stage sends rows."""
    cfg = configuration(length=64, blocks=3, tied=True, **kind)
    first = random_model(cfg, blocks=range(1))
    last = random_model(cfg, blocks=range(1, 3), has_embedding=False, has_head=False)
    part = Stages([whole_part(cfg, first, scores_later=True), whole_part(cfg, last)])
    assert 0 == count_differing(cfg, part=part, chunks=(1, 13))


def test_a_smaller_context_than_that_of_training_changes_no_bit():
    cfg = configuration(length=160)
    model, texts = random_model(cfg), random_texts(cfg)
    found = cached_logits(whole_part(cfg, model, context=100), [text[:100] for text in texts], chunks=(1, 13))
    assert 0 == differing(found, training_logits(model, texts)[:, :100])


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_two_threads_keep_the_bits(precision):
    torch.set_num_threads(2)
    try:
        cfg = configuration(length=64, precision=precision)
        assert 0 == count_differing(cfg, chunks=(1, 2, 3, 5), starts=(5, 7, 6))
        model = random_model(cfg)
        assert [] == probe(cfg, model, Products(cfg, model))
    finally:
        torch.set_num_threads(1)


def test_a_batch_of_training_has_the_bits_of_each_sequence_alone():
    model, texts = random_model(cfg := configuration()), random_texts(cfg)
    alone = torch.cat([training_logits(model, [text]) for text in texts])
    assert 0 == differing(training_logits(model, texts), alone)


@pytest.mark.parametrize(("heads", "rule"), [(4, "0 columns of blocks.0.attention_in"), (8, "5 ranks cannot share 64")])
def test_more_shares_than_columns_for_them_are_refused(heads, rule):
    cfg = configuration(length=64, heads=heads)
    with pytest.raises(ValueError, match=f"{rule}.*at least 16"):
        Products(cfg, random_model(cfg), place=0, count=5, gather=lambda own, _widths: own)


@pytest.mark.parametrize(
    ("kind", "context", "rule"),
    [
        ({"model_type": "conv"}, 64, "images"),
        ({"precision": "fp16"}, 64, "fp16"),
        ({}, 65, "context of 65 tokens.* 64"),
    ],
)
def test_what_cannot_be_served_is_refused_by_name(kind, context, rule):
    cfg = configuration(length=64, **kind)
    with pytest.raises(ValueError, match=rule):
        whole_part(cfg, random_model(cfg), context=context)


@pytest.mark.parametrize("kind", [{}, {"precision": "bf16"}, {"model_type": "mlp"}, LLAMA, {"length": 640}], ids=str)
@pytest.mark.parametrize("count", [1, 2])
def test_the_probe_finds_nothing_where_the_rules_hold(kind, count):
    cfg = configuration(**kind)
    model = random_model(cfg)
    for place in range(count):
        products = Products(cfg, model, place=place, count=count, gather=lambda own, _widths: own)
        assert [] == probe(cfg, model, products)


@pytest.mark.parametrize(
    ("length", "name", "value", "finding"),
    [
        (513, "KEYS", 512, "ends with a block of 1 rows"),
        (513, "KEYS", 512, "attention of 1 rows from position 512"),
        (160, "ROWS", 1, "products of .*1, 2, 3"),
        (512, "KEYS", 32, "attention of"),
    ],
)
def test_the_probe_names_the_rule_that_does_not_hold(monkeypatch, length, name, value, finding):
    monkeypatch.setattr(rules, name, value)
    cfg = configuration(length=length)
    model = random_model(cfg)
    assert re.search(finding, "\n".join(probe(cfg, model, Products(cfg, model))))


def mutant_without_padded_rows(monkeypatch):
    monkeypatch.setattr(rules, "ROWS", 1)
    return {"chunks": (1,)}


def mutant_with_at_least_four_query_rows(monkeypatch):
    monkeypatch.setattr(rules, "padded_count", lambda rows: max(rows, 4))
    return {"chunks": (34, 13), "starts": (98, 33, 66)}


def mutant_with_keys_rounded_to_32(monkeypatch):
    monkeypatch.setattr(rules, "KEYS", 32)
    return {"length": 512, "chunks": (1, 13)}  # shorter texts keep their bits with AVX-512


def mutant_with_repeated_rows_of_stride_0(monkeypatch):
    def repeated(rows, index):
        is_one_row = index.dim() == 2 and index.shape[0] == 1 and len(index.unique()) == 1
        return rows[index[:, :1]].expand(-1, index.shape[1], *rows.shape[1:]) if is_one_row else rows[index]

    monkeypatch.setattr(rules, "padded_rows", repeated)
    return {"chunks": (1,)}


def mutant_with_query_rows_as_they_are(monkeypatch):
    monkeypatch.setattr(rules, "padded_count", lambda rows: rows)
    return {"chunks": (1, 2, 3)}


@pytest.mark.parametrize(
    "mutant",
    [
        mutant_without_padded_rows,
        mutant_with_at_least_four_query_rows,
        mutant_with_keys_rounded_to_32,
        mutant_with_repeated_rows_of_stride_0,
        mutant_with_query_rows_as_they_are,
    ],
    ids=lambda mutant: mutant.__name__,
)
def test_without_one_of_the_rules_bits_differ(monkeypatch, mutant):
    """Each rule is needed: the very comparison of the tests above finds a forward pass that lacks it."""
    settings = mutant(monkeypatch)
    cfg = configuration(length=settings.pop("length", 160), width=128)
    assert 0 < count_differing(cfg, **settings)


def test_shares_of_fewer_than_16_columns_change_bits(monkeypatch):
    monkeypatch.setattr(rules, "LEAST_SHARE", 1)
    cfg = configuration(
        length=64, width=256, heads=32, blocks=1
    )  # with AVX-512, products of few inputs keep their bits
    part = whole_part(cfg, random_model(cfg), products=SharesInTurns(cfg, random_model(cfg), count=32))
    assert 0 < count_differing(cfg, part=part, chunks=(1, 13))
