"""`ttlaunch weights import` and `hf:` of a Llama: what its folder becomes, and every way in which one is refused (E21)."""

import json
import shutil

import pytest

torch = pytest.importorskip("torch")

from tests.cli.test_import import imported, plan  # noqa: E402 - needs torch
from tests.runtime.llamas import SCALED, random_llama, theirs_of  # noqa: E402 - needs torch

pytestmark = pytest.mark.slow

TINY = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 256,
}


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("llama")
    random_llama(**TINY).save_pretrained(folder)
    return folder


@pytest.fixture
def changed(saved, here):
    """`changed(config keys, tensors)`: the folder `m` with another configuration or other tensors."""
    from safetensors.torch import load_file, save_file  # noqa: PLC0415 - needs torch

    def change(config=None, *, without=(), more=None):
        shutil.copytree(saved, here / "m")
        path = here / "m" / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | (config or {})))
        tensors = load_file(here / "m" / "model.safetensors")
        kept = {name: one for name, one in tensors.items() if name not in without}
        save_file(kept | (more or {}), here / "m" / "model.safetensors")

    return change


@pytest.mark.parametrize(
    "changes", [{}, {"rope_parameters": SCALED, "tie_word_embeddings": True}], ids=["plain", "scaled"]
)
def test_every_tensor_gets_our_name_and_its_place_in_ours(ttlaunch, here, changes):
    llama = random_llama(**TINY, **changes)
    llama.save_pretrained(here / "shards", max_shard_size="9KB")
    llama.save_pretrained(here / "one")
    llama.model.save_pretrained(here / "base")
    names = ("shards", "one", "base") if changes else ("shards", "one")  # a base model has no head of its own
    for name in names:
        answer = ttlaunch(f"weights import {name} {name}.w --format json")
        assert 0 == answer.status, answer.stderr
    assert (here / "shards" / "model.safetensors.index.json").is_file()
    assert 1 == len({(here / f"{name}.w").read_bytes() for name in names})
    weights = imported(here / "one.w")
    assert (8 * 2 + 3 - 2 * 2 - bool(changes)) == len(weights)
    for name, values in weights.items():
        assert torch.equal(values, theirs_of(llama, name, lambda one: one)), name
    sizes = json.loads(answer.stdout)["set"]
    assert ("llama", 2, 24) == tuple(
        sizes[key]
        for key in ("training_config.model_type", "transformer_config.num_kv_heads", "transformer_config.mlp_dim")
    )
    scaling = sizes["transformer_config.rope_scaling"]
    assert scaling == (
        {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_length": 32} if changes else None
    )


def test_old_words_for_positions_mean_the_same(ttlaunch, changed):
    scaling = {key: value for key, value in SCALED.items() if key != "rope_theta"}
    changed({"rope_parameters": None, "rope_theta": 5e5, "rope_scaling": scaling})
    sizes = json.loads(ttlaunch("weights import m w --format json").stdout)["set"]
    assert 5e5 == sizes["transformer_config.rope_theta"]
    assert 8.0 == sizes["transformer_config.rope_scaling"]["factor"]


def test_the_options_that_are_printed_make_a_plan(ttlaunch, changed):
    """Numbers with exponents, nothing at all, and a section in one option."""
    changed({"rope_parameters": SCALED})
    printed = ttlaunch("weights import m w").stdout
    sets = " ".join(line for line in printed.splitlines() if line.startswith("--set"))
    answer = ttlaunch(f"plan data_parallel {sets} --set checkpoint_config.initial_weights=w --format json")
    assert 0 == answer.status, answer.stderr
    sizes = json.loads(answer.stdout)["config"]["transformer_config"]
    assert (1e-6, 10000.0, 32) == (sizes["norm_epsilon"], sizes["rope_theta"], sizes["rope_scaling"]["original_length"])


@pytest.mark.parametrize(
    ("config", "said"),
    [
        (
            {"model_type": "qwen2"},
            "`model_type` is 'qwen2', and only `gpt2` and `llama` are imported; its queries, keys and values have biases",
        ),
        ({"model_type": "mixtral"}, "a mixture of experts"),
        ({"sliding_window": 32}, "`sliding_window` is 32"),
        ({"num_local_experts": 8}, "`num_local_experts` is 8"),
        ({"attention_bias": True}, "`attention_bias` is true"),
        ({"mlp_bias": True}, "`mlp_bias` is true"),
        ({"hidden_act": "gelu"}, "`hidden_act` is 'gelu'"),
        ({"head_dim": 8}, "`head_dim` is 8"),
        ({"num_attention_heads": 0}, "`num_attention_heads` is 0"),
        ({"num_key_value_heads": 3}, "`num_key_value_heads` is 3, which does not divide"),
        ({"num_key_value_heads": 0}, "`num_key_value_heads` is 0"),
        ({"num_hidden_layers": 2**50}, "and the files have 2 blocks"),
        ({"rms_norm_eps": 0}, "`rms_norm_eps` is 0"),
        ({"rope_interleaved": True}, "`rope_interleaved` is true"),
        (
            {"rope_parameters": {"rope_type": "yarn", "factor": 2}},
            "of type 'yarn', and ours has only `default` and `llama3`",
        ),
        ({"rope_parameters": {**SCALED, "low_freq_factor": 4}}, "expected the first to be smaller"),
        ({"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}}, "`partial_rotary_factor` is 0.5"),
        ({"rope_parameters": 3}, "`rope_parameters`: it is 3"),
        ({"rope_parameters": {"rope_theta": 1e300}}, "`rope_theta` is 1e+300"),
        ({"intermediate_size": 2**50}, "and the configuration says"),
        ({"vocab_size": 300}, "tensor `lm_head.weight` has the shape [256, 16]"),
    ],
    ids=lambda one: next(iter(one)) if isinstance(one, dict) else "",
)
def test_a_llama_that_ours_cannot_be_is_refused(ttlaunch, here, changed, config, said):
    changed(config)
    answer = ttlaunch("weights import m w")
    assert (2, True, False) == (answer.status, said in answer.stderr, (here / "w").exists()), answer.stderr


def test_every_wrong_tensor_is_named_at_once(ttlaunch, changed):
    query, key = (f"model.layers.0.self_attn.{name}_proj.weight" for name in "qk")
    more = {"model.layers.0.self_attn.q_proj.bias": torch.zeros(16), key: torch.zeros(8, 16, dtype=torch.float16)}
    changed(without=["model.norm.weight"], more=more | {"model.layers.1.mlp.up_proj.weight": torch.zeros(3, 16)})
    answer = ttlaunch("weights import m w")
    for said in (
        "tensor `model.norm.weight` is missing",
        "tensor `model.layers.0.self_attn.q_proj.bias` is unknown",
        "tensor `model.layers.1.mlp.up_proj.weight` has the shape [3, 16], and the configuration says [24, 16]",
        f"tensors `{query}`, `{key}`, `model.layers.0.self_attn.v_proj.weight` are one matrix with us",
    ):
        assert said in answer.stderr
    assert (2, 4) == (answer.status, answer.stderr.count("error"))


def test_a_training_takes_type_and_sizes_of_the_folder_and_its_own_length(ttlaunch, changed):
    """Shorter texts need no other weights; longer ones than the model was made for are refused."""
    changed({"max_position_embeddings": 40})
    taken = ttlaunch("plan data_parallel --set checkpoint_config.initial_weights=hf:m --format json")
    assert 0 == taken.status, taken.stderr
    config = json.loads(taken.stdout)["config"]
    assert ("llama", 40, 2) == (
        config["training_config"]["model_type"],
        config["transformer_config"]["max_sequence_length"],
        config["transformer_config"]["num_kv_heads"],
    )
    assert 0 == plan(ttlaunch, "transformer_config.max_sequence_length=24").status
    longer = plan(ttlaunch, "transformer_config.max_sequence_length=41")
    assert (3, True) == (longer.status, "was made for texts of up to 40 tokens" in longer.stderr)
    other = plan(ttlaunch, "training_config.model_type=gpt", "transformer_config.mlp_dim=32")
    assert 3 == other.status
    assert "`model_type` is `gpt`, and the model in " in other.stderr
    assert "`mlp_dim` is 32, and the model in " in other.stderr
