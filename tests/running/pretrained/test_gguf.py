"""What a GGUF becomes: names, turned matrices, values, configuration, tokenizer; `gguf` and transformers are the judges."""

import numpy as np
import pytest

from ttlaunch.running.checkpoints.tensor_file import pieces_of
from ttlaunch.running.pretrained.gguf import read_gguf, read_gguf_tokenizer, shortest
from ttlaunch.running.pretrained.read_folder import PretrainedError
from ttlaunch.untrusted.child import UntrustedError

gguf = pytest.importorskip("gguf")
from tests.untrusted.gguf_files import BLOCKS, LENGTH, TOKENS, WIDTH, write_gguf  # noqa: E402 - needs gguf

MIXED = {"attn_qkv": "Q4_0", "ffn_up": "Q4_1", "token_embd": "Q8_0", "ffn_down": "F16", "attn_output": "BF16"}
MIXED |= {"attn_q": "Q4_0", "attn_k": "Q8_0", "attn_v": "F16", "ffn_gate": "Q4_1"}


def values(tensor):
    data = b"".join(pieces_of(tensor))
    assert len(data) == tensor.size
    if tensor.dtype == "BF16":
        return (np.frombuffer(data, "<u2").astype("<u4") << 16).view("<f4").reshape(tensor.shape)
    return np.frombuffer(data, {"F32": "<f4", "F16": "<f2"}[tensor.dtype]).astype("<f4").reshape(tensor.shape)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_every_value_is_the_one_that_transformers_reads(tmp_path, kind):
    import transformers  # noqa: PLC0415 - it takes seconds to import

    write_gguf(tmp_path / "m.gguf", kind=kind, types=MIXED)
    model = read_gguf(tmp_path / "m.gguf")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="m.gguf")
    weights = {
        name: one for name, one in theirs.state_dict().items() if not name.endswith((".attn.bias", "masked_bias"))
    }
    if model.config["tie_word_embeddings"]:
        del weights["lm_head.weight"]
    assert weights.keys() == model.tensors.keys()
    with model.reader:
        for name, tensor in model.tensors.items():
            assert np.array_equal(values(tensor), weights[name].float().numpy()), name
    config = theirs.config.to_dict()
    rope = config.get("rope_parameters") or {}
    own = {"architectures", "tie_word_embeddings", "rope_scaling", "pad_token_id", "head_dim", "n_positions"}
    for key, value in model.config.items():
        said = rope.get(key, config.get(key))
        assert key in own or value == (pytest.approx(said) if isinstance(value, float) else said), key


def test_quantised_values_are_those_of_the_gguf_package(tmp_path):
    arrays = write_gguf(tmp_path / "m.gguf", types=MIXED)
    model = read_gguf(tmp_path / "m.gguf")
    assert {"Q4_0": BLOCKS, "Q4_1": BLOCKS, "Q8_0": 1} == model.quantised
    raw = gguf.quants.quantize(arrays["blk.1.ffn_up.weight"], gguf.GGMLQuantizationType.Q4_1)
    expected = gguf.quants.dequantize(raw, gguf.GGMLQuantizationType.Q4_1)
    assert np.array_equal(expected.T, values(model.tensors["transformer.h.1.mlp.c_fc.weight"]))


def test_the_configuration_says_what_the_file_says(tmp_path):
    write_gguf(tmp_path / "m.gguf")
    config = read_gguf(tmp_path / "m.gguf").config
    said = (config["n_embd"], config["n_layer"], config["n_positions"], config["vocab_size"], config["n_inner"])
    assert (WIDTH, BLOCKS, LENGTH, TOKENS, None) == said
    assert (1e-5, True, "gelu_new", TOKENS - 1) == (
        config["layer_norm_epsilon"],
        config["tie_word_embeddings"],
        config["activation_function"],
        config["eos_token_id"],
    )


def test_a_float32_is_written_with_the_fewest_digits():
    for value in (1e-5, 1e-6, 0.1, 10000.0, 500000.0, 1 / 3):
        stored = float(np.float32(value))
        assert np.float32(shortest(stored)) == np.float32(value)
        assert value == pytest.approx(shortest(stored), rel=1e-7)
    assert "1e-05" == repr(shortest(float(np.float32(1e-5))))


@pytest.mark.parametrize("cut", ["gpt-2", "smollm", "llama-bpe", "qwen2"])
def test_the_tokenizer_takes_every_text_apart_and_together_again(tmp_path, cut):
    tokenizers = pytest.importorskip("tokenizers")
    write_gguf(tmp_path / "m.gguf", tokenizer={"cut": cut})
    special, content = read_gguf_tokenizer(tmp_path / "m.gguf")
    assert {"bos_token": "<|begin|>", "eos_token": "<|end|>"} == special
    made = tokenizers.Tokenizer.from_str(content.decode())
    assert made.get_vocab_size() == TOKENS
    text = "<|begin|>hello world 12 naïve\n\n  🙂<|end|>"
    tokens = made.encode(text)
    assert ("<|begin|>", "hello", "Ġwo") == tuple(tokens.tokens[:3])
    assert ("12" in tokens.tokens) == (cut not in {"smollm", "qwen2"})
    assert text == made.decode(tokens.ids, skip_special_tokens=False)


@pytest.mark.parametrize(
    ("tokenizer", "said"),
    [
        ({"model": "t5"}, "its tokenizer is `t5`, and only `gpt2`"),
        ({"model": "llama"}, "`tokenizer.ggml.scores` or `tokenizer.ggml.token_type` is missing"),
        ({"cut": None}, "its tokenizer cuts texts as `None` does"),
        ({"cut": "deepseek-llm"}, "its tokenizer cuts texts as `deepseek-llm` does"),
    ],
)
def test_a_tokenizer_of_another_kind_is_refused_by_name(tmp_path, tokenizer, said):
    write_gguf(tmp_path / "m.gguf", tokenizer=tokenizer)
    with pytest.raises(UntrustedError, match=said.replace("`", ".")):
        read_gguf_tokenizer(tmp_path / "m.gguf")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"types": {"ffn_up": "Q5_0"}}, "tensors of other types than .*: 2 of type Q5_0"),
        ({"kind": "llama", "change": lambda w: w.add_expert_count(8)}, "mixtures of experts are not read"),
        ({"kind": "llama", "extra": {"rope_freqs.weight": np.ones(8, np.float32)}}, "scales positions as Llama 3.1"),
        (
            {"kind": "llama", "change": lambda w: w.add_rope_scaling_type(gguf.RopeScalingType.YARN)},
            "scaled positions are not read",
        ),
        ({"change": lambda w: w.add_string("general.architecture", "gtp2")}, "did you mean `gpt2`"),
        ({"change": lambda w: w.add_string("general.architecture", "mamba")}, "only .gpt2. or .llama. are read"),
        ({"change": lambda w: w.add_array("gpt2.attention.head_count", [4, 4])}, "is a list, and one number"),
        ({"change": lambda w: w.add_string("gpt2.block_count", "two")}, "`gpt2.block_count` is 'two'"),
        ({"kind": "llama", "change": lambda w: w.add_uint32("llama.attention.head_count", 0)}, "head_count` is 0"),
        (
            {"kind": "llama", "change": lambda w: w.add_uint32("llama.attention.head_count_kv", 7)},
            "no 7 heads of pairs",
        ),
    ],
)
def test_a_model_that_is_not_read_is_refused_by_name(tmp_path, options, said, recwarn):
    """`gguf` warns of keys that are written twice, which is how a value is changed here."""
    write_gguf(tmp_path / "m.gguf", **options)
    with pytest.raises(PretrainedError, match=said):
        read_gguf(tmp_path / "m.gguf")
