"""`ttlaunch weights import FILE.gguf`: both layouts, what is said of quantised tensors, and what is refused (E21)."""

import json
from pathlib import Path

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
    write_gguf(here / "m.gguf", tokenizer={"model": "t5"})
    answer = ttlaunch("weights import m.gguf m --as hf --format concise")
    assert (0, True) == (
        answer.status,
        "the tokenizer is left out: its tokenizer is `t5`, and only" in answer.stderr,
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


def tokens_of(plan):
    described = json.loads(plan.stdout)["data"]
    return described["sha256"], Path(described["path"]).read_text().splitlines()


def test_the_folders_tokenizer_makes_tokens_of_the_text_of_a_training(ttlaunch, here, monkeypatch):
    tokenizers = pytest.importorskip("tokenizers")
    monkeypatch.setenv("XDG_CACHE_HOME", str(here / "cache"))
    write_gguf(here / "m.gguf")
    assert 0 == ttlaunch("weights import m.gguf m --as hf").status
    text = "hello world 12\n" * 4000
    (here / "t.txt").write_text(text)
    words = "plan data_parallel --format json --set checkpoint_config.initial_weights=hf:m --set training_config.data_path=t.txt"
    first = ttlaunch(words)
    assert 0 == first.status, first.stderr
    sha256, (head, *rows) = tokens_of(first)
    assert head.endswith(f" {TOKENS}")
    made = tokenizers.Tokenizer.from_file(str(here / "m/tokenizer.json"))
    assert made.encode(text, add_special_tokens=False).ids == [int(one) for row in rows for one in row.split()]
    assert sha256 == tokens_of(ttlaunch(words))[0]
    assert 1 == len(list((here / "cache/ttlaunch/tokens").iterdir()))
    chosen = ttlaunch(f"{words} --set training_config.tokenizer_type=byte")
    assert (3, True) == (chosen.status, f"has {TOKENS} tokens" in chosen.stdout)
    (here / "m/tokenizer.json").write_text('{"model": {"type": "Unigram"}}')
    refused = ttlaunch(words)
    assert (3, True) == (refused.status, "has a tokenizer that is not taken" in refused.stderr + refused.stdout)
