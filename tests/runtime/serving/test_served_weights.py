"""A rank that serves part of a model has only this part in memory, at any time, and it has the bits of the whole (W7)."""

import hashlib
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import save_file

from ttlaunch.app.served_memory import transposed_bytes, weight_bytes
from ttlaunch.runtime.checkpoint.checkpoints import held_tensors
from ttlaunch.runtime.checkpoint.reader import read_tensors
from ttlaunch.runtime.parallel.serving.weights import build_served_model
from ttlaunch.runtime.serving.probe import probe
from ttlaunch.runtime.serving.products import Products, linear_layers
from ttlaunch.runtime.serving.rules import EXACT, FAST
from ttlaunch.runtime.telemetry.memory import StepMemory, TensorOwners

from .served_models import VOCABULARY, configuration, differing, random_model, random_texts, training_logits, whole_part
from .served_models import cached_logits as cached

SIZES = {"length": 64, "width": 128, "blocks": 3, "heads": 4}
KINDS = [{}, {"tied": True}, {"model_type": "mlp"}, {"model_type": "llama"}, {"precision": "bf16"}]


@pytest.fixture
def saved(tmp_path):
    """`saved(cfg)`: a rank of a run that was given the weights of the random model in a file."""

    def rank(cfg):
        path = tmp_path / "weights.safetensors"
        save_file({name: value.detach().clone() for name, value in random_model(cfg).named_parameters()}, path)
        files = [{"path": str(path), "sha256": hashlib.sha256(path.read_bytes()).hexdigest()}]
        return SimpleNamespace(
            device=torch.device("cpu"),
            report_not_finite=lambda *_, **__: None,
            watch=lambda *_, **__: None,
            restore_weights=lambda model: read_tensors(files, into=dict(held_tensors(model))),
        )

    return rank


def build(cfg, rank, **part):
    return build_served_model(cfg, rank, vocabulary=VOCABULARY, **part)


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_a_share_that_was_read_alone_is_that_of_the_whole_model(saved, kind):
    cfg = configuration(**{**SIZES, **kind})
    rank, whole = saved(cfg), random_model(cfg)
    for padding in (EXACT, FAST):
        for place in range(3):
            how = {"place": place, "count": 3, "gather": lambda own, _: own, "padding": padding}
            cut, expected = (Products(cfg, model, **how) for model in (build(cfg, rank, place=place, count=3), whole))
            for name, (weight_NK, _) in expected._layers.items():
                assert torch.equal(weight_NK, cut._layers[name][0])
                assert expected.columns(name) == cut.columns(name)


@pytest.mark.parametrize("kind", KINDS[:-1], ids=str)
def test_the_probe_of_a_share_that_was_read_alone_finds_nothing(saved, kind):
    cfg = configuration(**{**SIZES, **kind})
    model = build(cfg, saved(cfg), place=1, count=2)
    assert [] == probe(cfg, model, Products(cfg, model, place=1, count=2, gather=lambda own, _: own))


@pytest.mark.parametrize("kind", KINDS[:-1], ids=str)
def test_a_whole_model_and_a_stage_that_were_read_have_the_bits_of_training(saved, kind):
    cfg = configuration(**{**SIZES, **kind})
    model, texts = build(cfg, saved(cfg)), random_texts(cfg)
    assert 0 == differing(cached(whole_part(cfg, model), texts), training_logits(random_model(cfg), texts))
    stage = build(cfg, saved(cfg), blocks=[1], has_embedding=False, has_head=False)
    expected = dict(random_model(cfg).named_parameters())
    assert all(torch.equal(value, expected[name]) for name, value in stage.named_parameters())


@pytest.mark.parametrize("kind", [{}, {"model_type": "llama"}], ids=str)
@pytest.mark.parametrize(
    "part", [{"place": 1, "count": 4}, {"blocks": [1], "has_embedding": False, "has_head": False}], ids=str
)
def test_what_is_allocated_at_any_time_is_the_part_and_one_tensor_of_the_model(saved, kind, part):
    cfg = configuration(**{**SIZES, **kind})
    rank = saved(cfg)
    with StepMemory(TensorOwners()) as memory:
        model = build(cfg, rank, **part)
        if "count" in part:
            Products(cfg, model, **part, gather=lambda own, _: own)
    own = sum(parameter.nbytes for parameter in model.parameters())
    whole = [parameter.nbytes for parameter in random_model(cfg).parameters()]
    assert own <= memory.peaks["peak"] <= own + max(whole)
    assert own + max(whole) < 0.6 * sum(whole)


@pytest.mark.parametrize("kind", KINDS[:-1], ids=str)
@pytest.mark.parametrize("is_shared", [True, False])
def test_the_bytes_of_all_ranks_are_predicted(saved, kind, is_shared):
    cfg = configuration(**{**SIZES, **kind})
    is_tied, rank, ranks = cfg.transformer_config.tie_embeddings, saved(cfg), 3
    if is_shared:
        parts = [{"place": place, "count": ranks} for place in range(ranks)]
    else:
        head = 0 if is_tied else ranks - 1
        parts = [{"blocks": [at], "has_embedding": at == 0, "has_head": at == head} for at in range(ranks)]
    have = sum(value.nbytes for part in parts for value in build(cfg, rank, **part).parameters())
    # of a tied matrix, a share's products copy their columns of the embedding
    have += VOCABULARY * SIZES["width"] * 4 if is_tied and is_shared else 0
    sizes = {name: value.nbytes for name, value in random_model(cfg).named_parameters()}
    assert have == weight_bytes(sizes, ranks=ranks, is_shared=is_shared, is_tied=is_tied)


@pytest.mark.parametrize("kind", KINDS[:-1], ids=str)
def test_the_bytes_of_transposed_copies_are_predicted(kind):
    """Each of a rank's linear layers, once."""
    cfg = configuration(**{**SIZES, **kind})
    head = 0 if cfg.transformer_config.tie_embeddings else 2
    whole = random_model(cfg)
    sizes = {name: value.nbytes for name, value in whole.named_parameters()}
    stages = [random_model(cfg, blocks=[at], has_embedding=at == 0, has_head=at == head) for at in range(3)]
    for models in ([whole], stages):
        have = [sum(matrix.nbytes for matrix, _ in linear_layers(model).values()) for model in models]
        assert have == list(transposed_bytes(cfg, sizes, stages=len(models)))


def test_a_rank_that_copies_nothing_is_predicted_to_copy_nothing():
    sizes = {name: value.nbytes for name, value in random_model(configuration(**SIZES)).named_parameters()}
    large = {name: size * 64 for name, size in sizes.items()}
    assert [0] == list(transposed_bytes(configuration(**{**SIZES, "width": 128 * 64}), large, stages=1))
    assert [] == list(transposed_bytes(configuration(**SIZES, precision="bf16"), sizes, stages=1))
