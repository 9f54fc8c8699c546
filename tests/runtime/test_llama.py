"""A llama of ours has the logits and gradients of transformers' with the same weights, and the same bits in every layout (E20)."""

import pytest
import torch
from torch.nn import functional

from ttlaunch.runtime.model.model import Model

from .layouts import train, train_recipe
from .llamas import SCALED, VOCABULARY, ours_with_weights_of, random_llama, theirs_of

CLOSE = 1e-5


@pytest.mark.parametrize(
    "changes",
    [{}, {"num_key_value_heads": 6}, {"rope_parameters": SCALED}, {"tie_word_embeddings": True}],
    ids=["grouped", "one head each", "stretched", "tied"],
)
def test_logits_and_gradients_are_those_of_transformers(changes):
    """The independent answer: positions, norms, gates, shared keys and values, one matrix or two."""
    llama = random_llama(**changes)
    _, model = ours_with_weights_of(llama)
    tokens_BT = torch.randint(VOCABULARY, (3, 64), generator=torch.Generator().manual_seed(1))
    logits, expected = model(tokens_BT), llama(tokens_BT).logits
    assert expected.std() > 0.1
    assert (logits - expected).abs().max() <= CLOSE
    for one in (logits, expected):
        functional.cross_entropy(one[:, :-1].flatten(0, 1), tokens_BT[:, 1:].flatten()).backward()
    model.add_head_gradient()
    for name, parameter in model.named_parameters():
        gradient = theirs_of(llama, name, lambda one: one.grad)
        assert gradient.abs().max() > 0
        assert (parameter.grad - gradient).abs().max() <= CLOSE, name


@pytest.mark.parametrize(("kv_heads", "mlp_dim"), [(1, 40), (4, None)])
def test_a_llama_has_as_many_parameters_as_the_formula_says(make_cfg, kv_heads, mlp_dim):
    sizes = {"num_heads": 4, "num_kv_heads": kv_heads, "mlp_dim": mlp_dim}
    cfg = make_cfg(training={"model_type": "llama"}, transformer=sizes)
    model = Model(cfg, vocabulary=50, blocks=range(2), has_embedding=True, has_head=True)
    inside = mlp_dim or 4 * 16
    block = 16 * (16 + 2 * kv_heads * 4) + 16 * 16 + 3 * 16 * inside + 2 * 16
    assert 2 * 50 * 16 + 2 * block + 16 == sum(parameter.numel() for parameter in model.parameters())


def small(**training):
    steps = {"steps": 3, "batch_size": 6, "micro_batch_size": 1, "validation_interval": 2, "validation_sequences": 5}
    sizes = {
        "num_blocks": 2,
        "num_heads": 4,
        "num_kv_heads": 2,
        "mlp_dim": 24,
        "embedding_dim": 16,
        "dropout_prob": 0.1,
    }
    return {
        "training_config": {"model_type": "llama", "learning_rate": 5e-3} | steps | training,
        "transformer_config": sizes
        | {"max_sequence_length": 16, "tie_embeddings": True, "rope_scaling": {"original_length": 16}},
    }


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """One process, by precision; trained once."""
    found = {}

    def run(precision):
        if precision not in found:
            folder = tmp_path_factory.mktemp("alone") / "run"
            found[precision] = train("single", folder, small(precision=precision), data=None)
        return found[precision]

    return run


@pytest.mark.parametrize(
    ("recipe", "roles", "own"),
    [
        ("local_sgd", ["worker"] * 3, {"local_sgd_config": {"every": 1}}),
        ("diloco", ["worker"] * 2, {"diloco_config": {"every": 1, "outer_learning_rate": 1.0, "outer_momentum": 0.0}}),
        ("classic_dp", ["worker"] * 2, {"classic_dp_config": {"staleness_bound": 0}}),
    ],
    ids=["local_sgd", "diloco", "classic_dp"],
)
def test_a_llama_has_the_bits_of_one_process_where_a_recipe_of_other_promises_reduces_to_it(
    tmp_path, recipe, roles, own
):
    """Averages after each step of SGD, and no staleness."""
    sections = small(optimizer="sgd", learning_rate=0.05)
    expected = train("single", tmp_path / "alone", sections, data=None)
    assert expected.sha256 == train_recipe(recipe, roles, tmp_path / "run", sections | own, data=None).sha256


@pytest.mark.parametrize("layout", ["two tiers", "pipeline", "two servers", "zero"])
@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_a_llama_has_the_same_bits_in_every_layout(alone, tmp_path, layout, precision):
    """Four layouts here, in bf16 in `test_precision.py`; `python benchmarks/bits.py --model llama` has all of them."""
    if layout == "zero":
        sections = small(precision=precision) | {"zero_config": {"stage": 3}}
        found = train_recipe("zero", ["worker"] * 3, tmp_path / "run", sections, data=None)
    else:
        found = train(layout, tmp_path / "run", small(precision=precision), data=None)
    assert alone(precision).sha256 == found.sha256
    assert alone(precision).by_step("step", "loss") == found.by_step("step", "loss")
