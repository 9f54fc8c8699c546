"""`ttlaunch weights import FILE.gguf`: both layouts, what is said of quantised tensors, and what is refused."""

import json

import pytest

pytest.importorskip("gguf")
from tests.untrusted.gguf_files import BLOCKS, LENGTH, TOKENS, WIDTH, write_gguf

TYPES = {"attn_qkv": "Q4_1", "token_embd": "Q8_0", "ffn_up": "BF16"}
TEMPLATE = "{% for m in messages %}<|begin|>{{ m['content'] }}{% endfor %}"


def test_a_gguf_becomes_a_folder_with_which_a_training_begins(ttlaunch, here):
    write_gguf(here / "m.gguf", types=TYPES, tokenizer={"template": TEMPLATE})
    answer = ttlaunch("weights import m.gguf m --as hf")
    assert 0 == answer.status, answer.stderr
    for said in (
        "wrote 28 tensors to m\n",
        f"{BLOCKS} tensors of Q4_1 were dequantised to F32\n1 tensor of Q8_0 was dequantised to F32\n",
        "`--set checkpoint_config.initial_weights=hf:m` begins a training with them\n",
    ):
        assert said in answer.stdout
    assert TEMPLATE == (here / "m/chat_template.jinja").read_text()
    config = json.loads((here / "m/tokenizer_config.json").read_text())
    assert ("<|end|>", LENGTH) == (config["eos_token"], config["model_max_length"])
    assert TOKENS == len(json.loads((here / "m/tokenizer.json").read_text())["model"]["vocab"])
    assert 0 == ttlaunch("weights import m m.safetensors").status
    plain = ttlaunch("weights import m.gguf plain.safetensors --format json")
    assert 0 == plain.status, plain.stderr
    facts = json.loads(plain.stdout)
    assert {"Q4_1": BLOCKS, "Q8_0": 1} == facts["dequantised"]
    assert (WIDTH, TOKENS) == (facts["set"]["transformer_config.embedding_dim"], facts["vocabulary"])
    assert (here / "m.safetensors").read_bytes() == (here / "plain.safetensors").read_bytes()


def test_a_tokenizer_that_is_not_converted_is_left_out_with_a_warning(ttlaunch, here):
    write_gguf(here / "m.gguf", tokenizer={"model": "llama"})
    answer = ttlaunch("weights import m.gguf m --as hf --format concise")
    assert (0, True) == (
        answer.status,
        "the tokenizer is left out: its tokenizer is `llama`, SentencePiece" in answer.stderr,
    )
    assert ["config.json", "model.safetensors", "tokenizer_config.json"] == sorted(
        one.name for one in (here / "m").iterdir()
    )


def test_what_is_no_model_is_refused_and_leaves_nothing(ttlaunch, here):
    write_gguf(here / "m.gguf", types={"attn_qkv": "Q5_0"})
    whole = (here / "m.gguf").read_bytes()
    (here / "cut.gguf").write_bytes(whole[:-100])
    (here / "counts.gguf").write_bytes(whole[:8] + b"\xff" * 16 + whole[24:])
    for source, said in {
        "m.gguf": "m.gguf cannot be imported: m.gguf: it has tensors of other types than",
        "cut.gguf": "it has tensors of other types than",
        "counts.gguf": "it says that it has 18446744073709551615 tensors",
    }.items():
        for layout in ("plain", "hf"):
            answer = ttlaunch(f"weights import {source} m --as {layout}")
            assert (2, True) == (answer.status, said in answer.stderr), answer.stderr
    assert ["counts.gguf", "cut.gguf", "m.gguf"] == sorted(one.name for one in here.iterdir())


def test_a_folder_needs_no_other_layout_and_a_gguf_no_ranks(ttlaunch, here):
    write_gguf(here / "m.gguf")
    assert 0 == ttlaunch("weights import m.gguf m --as hf").status
    answer = ttlaunch("weights import m n --as hf")
    assert (2, True) == (answer.status, "m is in the layout of transformers already" in answer.stderr)
    answer = ttlaunch("plan data_parallel --set checkpoint_config.initial_weights=hf:m.gguf")
    assert (3, True) == (answer.status, "m.gguf is a GGUF file" in answer.stderr), answer.stderr
    assert "m.gguf DIR --as hf` makes one" in answer.stderr
