"""A folder of transformers becomes the specification of a serving run, or is refused before anything starts (E21)."""

import json
from pathlib import Path

import pytest

from ttlaunch.app.serve import ServeOptions, check_prompt, find_served, most_context, section_of, weights_of
from ttlaunch.app.served_memory import predict_memory
from ttlaunch.diagnostics import LaunchError
from ttlaunch.running.pretrained.tokenizer_json import tokenizer_json

torch = pytest.importorskip("torch")

from tests.runtime.llamas import random_llama  # noqa: E402 - needs torch

CHAT = "{{ messages[0].content }}"


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("saved")
    random_llama(vocab_size=256, tie_word_embeddings=True).save_pretrained(folder / "llama")
    random_llama(max_position_embeddings=100_000).save_pretrained(folder / "long")
    return folder


@pytest.fixture
def llama(saved, tmp_path):
    """A copy of the saved Llama that a test may change."""
    folder = tmp_path / "llama"
    folder.mkdir()
    for path in (saved / "llama").iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    return folder


def served(where, **options):
    return find_served(str(where), ServeOptions(**options), runs_dir=Path("runs"), working_folder=where.parent)[0]


def refusal(where, **options):
    with pytest.raises(LaunchError) as caught:
        served(where, **options)
    [found] = caught.value.diagnostics
    return " ".join((found.message, *found.hints))


def test_the_folder_says_the_sizes_and_how_long_a_text_may_be(saved):
    spec = served(saved / "llama", max_context=40)
    training, sizes = section_of(spec, "training_config"), section_of(spec, "transformer_config")
    assert ("llama", "ids") == (training["model_type"], training["tokenizer_type"])
    assert (2, 6, 48, True) == tuple(
        sizes[key] for key in ("num_kv_heads", "num_heads", "embedding_dim", "tie_embeddings")
    )
    assert (40, 64, None) == (sizes["max_sequence_length"], most_context(spec), spec.resume)
    assert 64 == section_of(served(saved / "llama"), "transformer_config")["max_sequence_length"]


def test_a_text_has_4096_tokens_unless_more_are_asked_for(saved):
    lengths = [
        section_of(served(saved / "long", **asked), "transformer_config") for asked in ({}, {"max_context": 9999})
    ]
    assert [4096, 9999] == [one["max_sequence_length"] for one in lengths]


def test_the_weights_are_named_by_one_hash_whatever_their_shards(saved, tmp_path):
    random_llama(vocab_size=256, tie_word_embeddings=True).save_pretrained(tmp_path / "shards", max_shard_size="60KB")
    hashes = [
        section_of(served(where), "serve_config")["weights_sha256"] for where in (saved / "llama", tmp_path / "shards")
    ]
    assert 1 == len(set(hashes))
    assert hashes[0] != section_of(served(saved / "long"), "serve_config")["weights_sha256"]


def test_halves_take_four_bytes_a_value_in_memory(saved, tmp_path):
    random_llama(vocab_size=256, tie_word_embeddings=True).to(torch.bfloat16).save_pretrained(tmp_path / "halves")
    sizes = [predict_memory(served(where)).weights for where in (saved / "llama", tmp_path / "halves")]
    assert sizes[0] == sizes[1]
    assert sum(tensor.size for tensor in weights_of(served(tmp_path / "halves")).values()) == sizes[0] // 2


def test_a_longer_context_than_the_model_was_made_for_is_refused(saved):
    found = refusal(saved / "llama", max_context=65)
    assert "`--max-context 65` exceeds the 64 tokens for which the model in" in found
    assert "`--max-context 64` is the most" in found


@pytest.mark.parametrize("command", ["serve", "generate"])
def test_both_commands_take_a_context(ttlaunch, saved, command):
    """A text that is longer than those of a fine-tuning needs it for `generate`, too."""
    answer = ttlaunch([command, str(saved / "llama"), *(["x"] if command == "generate" else []), "--max-context", "65"])
    assert (2, True) == (answer.status, "`--max-context 64` is the most" in answer.stderr), answer.stderr


def test_more_ranks_than_blocks_are_refused(saved):
    assert "3 ranks cannot share 2 blocks as stages" in refusal(saved / "llama", ranks=3, split="stages")
    assert "over 9 ranks are less than 16 each" in refusal(saved / "llama", ranks=9, split="columns")


def test_a_folder_of_pickles_is_refused_by_name(llama):
    (llama / "model.safetensors").rename(llama / "pytorch_model.bin")
    assert "pytorch_model.bin is a pickle" in refusal(llama)


def test_a_tokenizer_that_is_not_taken_or_too_large_is_refused(llama):
    (llama / "tokenizer.json").write_text("{}")
    assert "has a tokenizer that is not taken: tokenizer.json: it is no tokenizer" in refusal(llama)
    words = {"type": "WordLevel", "vocab": {str(number): number for number in range(257)}, "unk_token": "0"}
    (llama / "tokenizer.json").write_text(json.dumps({"version": "1.0", "model": words, "added_tokens": []}))
    assert "the tokenizer has 257 tokens, and the model 256" in refusal(llama)


def test_the_tokenizer_and_its_chat_template_are_served_with_the_model(llama):
    words = {"type": "WordLevel", "vocab": {str(number): number for number in range(256)}, "unk_token": "0"}
    (llama / "tokenizer.json").write_text(json.dumps({"version": "1.0", "model": words, "added_tokens": []}))
    (llama / "chat_template.jinja").write_text(CHAT)
    (llama / "tokenizer_config.json").write_text(json.dumps({"eos_token": "7"}))
    found = section_of(served(llama), "serve_config")
    assert (str(llama / "tokenizer.json"), [7], CHAT, {"eos_token": "7"}) == tuple(
        found[key] for key in ("tokenizer_file", "ends", "chat_template", "special_tokens")
    )


@pytest.mark.parametrize(
    ("template", "reason"),
    [(b"{% for", "chat_template.jinja: line 1: "), (b"\xff", "chat_template.jinja: it is not UTF-8")],
)
def test_a_chat_template_that_is_none_is_refused_before_anything_starts(llama, template, reason):
    byte = tokenizer_json("byte", vocabulary=256)
    (llama / "tokenizer.json").write_text(json.dumps(byte))
    (llama / "chat_template.jinja").write_bytes(template)
    assert f"has a chat template that is not taken: {reason}" in refusal(llama)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "TEXT is empty"),
        (" \n", "TEXT is empty"),
        ("5 x", "`x` is no token id from 0 to 255, and the model has no tokenizer"),
        ("5 256", "`256` is no token id from 0 to 255"),
        ("9" * 50, "` is no token id from 0 to 255"),
        ("٣", "is no token id from 0 to 255"),
    ],
)
def test_a_text_that_the_model_cannot_continue_is_refused_before_anything_starts(saved, text, reason):
    spec = served(saved / "llama")
    check_prompt(spec, "5 17 255")
    with pytest.raises(LaunchError) as refused:
        check_prompt(spec, text)
    [found] = refused.value.diagnostics
    assert (reason in found.message, 1) == (True, len(found.hints))


def test_a_gguf_file_is_refused_with_the_command_that_makes_a_folder_of_it(tmp_path):
    pytest.importorskip("gguf")
    from tests.untrusted.gguf_files import write_gguf  # noqa: PLC0415 - needs gguf

    write_gguf(tmp_path / "m.gguf")
    assert "m.gguf DIR --as hf` makes a folder of it" in refusal(tmp_path / "m.gguf")


def test_a_run_that_nobody_trains_cannot_be_followed(ttlaunch, saved):
    answer = ttlaunch(f"serve {saved}/llama --follow")
    assert 2 == answer.status
    assert "is a folder that nobody trains" in answer.stderr
