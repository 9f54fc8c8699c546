"""The models: size by formula, parameters that do not depend on the stage, and that they learn."""

import hashlib

import pytest
import torch
from torch.nn import functional

from ttlaunch.runtime.model.dropout import Dropout, Masks
from ttlaunch.runtime.model.flat import digests
from ttlaunch.runtime.model.mlp import CONTEXT_TOKENS
from ttlaunch.runtime.model.model import Model
from ttlaunch.runtime.parallel.tensor.share import ModelShare
from ttlaunch.stored_parts import parse_part
from ttlaunch.train import build_model, build_optimizer, global_norm, summed_loss


@pytest.mark.parametrize(("blocks", "width", "length"), [(1, 8, 4), (3, 16, 32)])
def test_the_transformer_has_as_many_parameters_as_the_formula_says(make_cfg, make_context, blocks, width, length):
    """E5."""
    cfg = make_cfg(transformer={"num_blocks": blocks, "embedding_dim": width, "max_sequence_length": length})
    block = 12 * width**2 + 13 * width
    expected = 256 * width + length * width + blocks * block + 2 * width + 256 * width
    assert expected == sum(parameter.numel() for parameter in build_model(cfg, make_context(cfg)).parameters())


def test_the_feed_forward_model_has_as_many_parameters_as_the_formula_says(make_cfg, make_context):
    cfg = make_cfg(training={"model_type": "mlp"})
    block = 8 * 16**2 + 7 * 16
    expected = 256 * 16 + CONTEXT_TOKENS * 16**2 + 16 + 2 * block + 2 * 16 + 256 * 16
    assert expected == sum(parameter.numel() for parameter in build_model(cfg, make_context(cfg)).parameters())


def test_the_classifier_of_images_has_as_many_parameters_as_the_formula_says(make_cfg):
    """The number of values of a network for 5 classes, counted layer by layer: convolutions, blocks, last norm and scores."""
    cfg = make_cfg(training={"model_type": "conv"})
    embedding, block, head = 9 * 16 + 16, 2 * 16 + (9 * 16**2 + 16) + (16**2 + 16), 2 * 4 * 16 + 4 * 16 * 5
    model = Model(cfg, vocabulary=5, blocks=range(2), has_embedding=True, has_head=True)
    assert embedding + 2 * block + head == sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize("kind", ["gpt", "llama", "mlp"])
def test_stages_begin_with_the_parameters_of_the_whole_model(make_cfg, make_context, kind):
    """B10."""
    cfg = make_cfg(training={"model_type": kind}, transformer={"num_blocks": 4})
    ctx = make_context(cfg)
    whole = digests(build_model(cfg, ctx).named_parameters())
    stages = [build_model(cfg, ctx, stage=stage, blocks_per_stage=[1, 2, 1]) for stage in range(3)]
    parts = [digests(stage.named_parameters()) for stage in stages]
    assert sum(map(len, parts)) == len(whole)
    assert list(whole.items()) == [entry for part in parts for entry in part.items()]


def deviation(name, parameter, *, blocks):
    """The standard deviation that the docstring of `initialise` promises."""
    fixed = {"embedding.token.weight": 1.0, "embedding.position.weight": 0.1, "head.output.weight": 0.02}
    if name in fixed:
        return fixed[name]
    inputs = parameter[0].numel()
    return inputs**-0.5 * ((2 * blocks) ** -0.5 if name.endswith("_out.weight") else 1)


@pytest.mark.parametrize("kind", ["gpt", "llama", "mlp"])
def test_every_matrix_begins_with_draws_of_its_own_as_wide_as_promised(make_cfg, make_context, kind):
    made = {}
    for seed in (0, 1):
        cfg = make_cfg(training={"model_type": kind, "seed": seed}, transformer={"embedding_dim": 32, "num_blocks": 3})
        model = build_model(cfg, make_context(cfg))
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                assert not parameter.any()
            elif "norm" in name:
                assert (parameter == 1).all()
            else:
                expected = deviation(name, parameter, blocks=3)
                assert abs(parameter.std().item() / expected - 1) < 0.15, name
                made[seed, name] = tuple((parameter.flatten()[:4] / expected).tolist())
    assert len(made) >= 18
    assert len(made) == len({tuple(round(value, 3) for value in first) for first in made.values()})


def test_a_matrix_is_drawn_from_the_hash_of_the_word_parameter_the_seed_and_its_name(make_cfg, make_context):
    """Its numbers are those of an earlier version, and not those of a dropout mask, which is drawn from another word."""
    cfg = make_cfg(training={"seed": 7})
    matrices = {
        name: value for name, value in build_model(cfg, make_context(cfg)).named_parameters() if value.dim() > 1
    }
    assert len(matrices) == 3 + 4 * 2
    for name, parameter in matrices.items():
        digest = hashlib.sha256(f"parameter\x007\x00{name}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:7], "big"))
        expected = torch.empty(parameter.shape).normal_(generator=generator) * deviation(name, parameter, blocks=2)
        torch.testing.assert_close(expected, parameter.detach())


@pytest.mark.parametrize("has_embedding", [False, True])
@pytest.mark.parametrize("ties", [False, True])
def test_named_parameters_takes_the_arguments_of_a_torch_module(make_cfg, ties, has_embedding):
    """A shared matrix has the embedding's name once, behind a prefix, too, and also on a stage that has only the head."""
    cfg = make_cfg(transformer={"tie_embeddings": ties})
    model = Model(cfg, vocabulary=16, blocks=range(2), has_embedding=has_embedding, has_head=True)
    names = [name for name, _ in model.named_parameters()]
    assert ("head.output.weight" in names) is not ties
    assert ("embedding.token.weight" in names) is (ties or has_embedding)
    assert [] == list(model.named_parameters(recurse=False))
    assert names == [name for name, _ in model.named_parameters(remove_duplicate=False)]
    assert [f"outer.{name}" for name in names] == [name for name, _ in model.named_parameters("outer")]


@pytest.mark.parametrize("kind", ["gpt", "llama", "mlp", "conv"])
def test_the_named_parts_of_ranks_that_split_matrices_are_the_whole_model(make_cfg, kind):
    """Each part has the whole model's values at the places that its name shows, and no value is missing."""
    cfg = make_cfg(training={"model_type": kind})
    has_all = {"vocabulary": 16, "blocks": range(2), "has_embedding": True, "has_head": True}
    whole = {name: value.detach() for name, value in Model(cfg, **has_all).named_parameters()}
    joined = {name: torch.full_like(value, float("nan")) for name, value in whole.items()}
    split = set()
    for place in range(2):
        for stored, values in Model(cfg, **has_all, layers=ModelShare(place, 2)).named_parts():
            part = parse_part(stored)
            if part is None:
                joined[stored].copy_(values.detach())
            else:
                split.add(part.name)
                joined[part.name][tuple(slice(places.start, places.stop) for places in part.places)] = values
    assert all(torch.equal(value, joined[name]) for name, value in whole.items())
    assert len(split) >= 2 * 3


@pytest.mark.parametrize("kind", ["gpt", "llama", "mlp"])
def test_a_model_run_in_two_chunks_of_its_blocks_has_the_logits_of_one_pass(make_cfg, make_context, kind):
    cfg = make_cfg(training={"model_type": kind}, transformer={"num_blocks": 3})
    ctx = make_context(cfg)
    model = build_model(cfg, ctx)
    _, x_BT, _ = ctx.data(cfg).training_batch(1, 0)
    half_BTD = model(x_BT, blocks=range(1))
    assert half_BTD.shape == (*x_BT.shape, cfg.transformer_config.embedding_dim)
    assert torch.equal(model(x_BT), model(half_BTD, blocks=range(1, 3)))


@pytest.mark.parametrize("kind", ["gpt", "llama", "mlp"])
def test_a_model_never_sees_the_token_it_predicts(make_cfg, make_context, kind):
    cfg = make_cfg(training={"model_type": kind})
    model = build_model(cfg, make_context(cfg))
    x_BT = torch.arange(16).repeat(2, 1)
    changed_BT = x_BT.clone()
    changed_BT[:, 9] = 200
    before, after = model(x_BT), model(changed_BT)
    assert torch.equal(before[:, :9], after[:, :9])
    assert not torch.equal(before[:, 9], after[:, 9])


@pytest.mark.parametrize("kind", ["gpt", "llama", "mlp"])
@pytest.mark.parametrize("rule", ["adamw", "sgd"])
def test_it_overfits_one_batch(make_cfg, make_context, kind, rule):
    """E5, A8."""
    training = {"model_type": kind, "optimizer": rule, "learning_rate": 0.02 if rule == "adamw" else 0.3}
    cfg = make_cfg(training=training)
    ctx = make_context(cfg)
    model = build_model(cfg, ctx)
    optimizer = build_optimizer(cfg, model, total_steps=100)
    _, x_BT, y_BT = ctx.data(cfg).training_batch(1, 0)
    for step in range(1, 101):
        loss = summed_loss(model(x_BT), y_BT) / y_BT.numel()
        loss.backward()
        optimizer.step(step, norm=global_norm(optimizer.squared_norms()))
    assert loss.item() < 0.1


def test_dropout_depends_on_seed_step_micro_batch_and_layer_only(make_cfg, make_context):
    cfg = make_cfg(transformer={"dropout_prob": 0.5})
    ctx = make_context(cfg)
    model, twin = build_model(cfg, ctx), build_model(cfg, ctx)
    _, x_BT, _ = ctx.data(cfg).training_batch(1, 0)
    torch.manual_seed(1)
    once = model(x_BT, model.masks(3, 1))
    torch.manual_seed(2)
    assert torch.equal(once, twin(x_BT, twin.masks(3, 1)))
    assert not torch.equal(once, model(x_BT, model.masks(3, 2)))
    assert not torch.equal(once, model(x_BT, model.masks(4, 1)))
    assert torch.equal(model(x_BT), twin(x_BT))


@pytest.mark.parametrize("probability", [0.25, 0.6])
def test_dropout_keeps_the_mean_of_what_it_drops(probability):
    """What is kept is divided by the chance of being kept; the share of zeros is within five standard deviations."""
    x = torch.linspace(1, 2, 20_000)
    dropped = Dropout("blocks.0.attention", probability=probability)(x, Masks(1, 2, 3))
    is_kept = dropped != 0
    torch.testing.assert_close(x[is_kept] / (1 - probability), dropped[is_kept])
    deviation = (probability * (1 - probability) / len(x)) ** 0.5
    assert abs(is_kept.double().mean().item() - (1 - probability)) < 5 * deviation
    assert torch.equal(x, Dropout("blocks.0.attention", probability=probability)(x, None))


def transformer(parameters, tokens_BT, *, heads, drop=lambda layer, x: x):
    """GPT-2's forward pass from its paper, from named parameters."""

    def normed(x, name):
        weight, bias = parameters[f"{name}.weight"], parameters[f"{name}.bias"]
        variance = x.var(-1, unbiased=False, keepdim=True)
        return (x - x.mean(-1, keepdim=True)) / (variance + 1e-5).sqrt() * weight + bias

    def linear(x, name):
        return x @ parameters[f"{name}.weight"].T + parameters[f"{name}.bias"]

    length = tokens_BT.shape[1]
    x = parameters["embedding.token.weight"][tokens_BT] + parameters["embedding.position.weight"][:length]
    x = drop("embedding", x)
    for block in range(sum(name.endswith("attention_in.weight") for name in parameters)):
        name = f"blocks.{block}"
        queries, keys, values = linear(normed(x, f"{name}.attention_norm"), f"{name}.attention_in").chunk(3, -1)
        mixed = []
        for query, key, value in zip(
            queries.chunk(heads, -1), keys.chunk(heads, -1), values.chunk(heads, -1), strict=True
        ):
            scores = query @ key.transpose(1, 2) / query.shape[-1] ** 0.5
            later = torch.ones(length, length, dtype=torch.bool).triu(1)
            mixed.append(scores.masked_fill(later, float("-inf")).softmax(-1) @ value)
        x = x + drop(f"{name}.attention", linear(torch.cat(mixed, -1), f"{name}.attention_out"))
        hidden = functional.gelu(linear(normed(x, f"{name}.feed_forward_norm"), f"{name}.feed_forward_in"))
        x = x + drop(f"{name}.feed_forward", linear(hidden, f"{name}.feed_forward_out"))
    return normed(x, "head.norm") @ parameters["head.output.weight"].T


@pytest.mark.parametrize("probability", [0.0, 0.5])
def test_the_transformer_is_that_of_its_paper(make_cfg, make_context, probability):
    """E5: also with dropout, whose masks are read off ones."""
    cfg = make_cfg(transformer={"dropout_prob": probability})
    ctx = make_context(cfg)
    model = build_model(cfg, ctx)
    generator = torch.Generator().manual_seed(0)
    parameters = {}
    for name, parameter in model.named_parameters():
        parameter.data += 0.1 * torch.randn(parameter.shape, generator=generator)  # biases and norms count, too
        parameters[name] = parameter.detach()
    masks = model.masks(3, 1) if probability else None

    def drop(layer, x):
        return x * Dropout(layer, probability=probability)(torch.ones_like(x), masks)

    _, x_BT, _ = ctx.data(cfg).training_batch(1, 0)
    torch.testing.assert_close(
        transformer(parameters, x_BT, heads=2, drop=drop), model(x_BT, masks).detach(), rtol=1e-4, atol=1e-4
    )


DROPS = {
    "gpt": ("attention", "feed_forward"),
    "llama": ("attention", "feed_forward"),
    "mlp": ("feed_forward",),
    "conv": ("convolution",),
}


@pytest.mark.parametrize("kind", DROPS)
def test_every_layer_drops_activations_under_a_name_of_its_own(make_cfg, kind):
    cfg = make_cfg(training={"model_type": kind}, transformer={"dropout_prob": 0.5})
    has_all = {"vocabulary": 16, "blocks": range(2), "has_embedding": True, "has_head": True}
    model = Model(cfg, **has_all)
    model.flatten(torch.device("cpu"))
    layers = [layer for layer in model.modules() if isinstance(layer, Dropout)]
    names = ["embedding", *(f"blocks.{block}.{part}" for block in range(2) for part in DROPS[kind])]
    assert sorted(names) == sorted(layer._layer for layer in layers)
    x_BT = torch.arange(32).reshape(2, 16) % 16
    for alone in layers:
        for layer in layers:
            layer._probability = 0.5 if layer is alone else 0.0
        assert not torch.equal(model(x_BT), model(x_BT, model.masks(1, 0))), alone._layer
