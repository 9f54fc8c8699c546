"""What no tokenizer may have that a process without limits uses: parts that may take any time or memory (E22)."""

import json

import pytest

pytest.importorskip("tokenizers")
from ttlaunch.running.pretrained.tokenizer_json import tokenizer_json
from ttlaunch.untrusted.child import UntrustedError
from ttlaunch.untrusted.tokenizer import _GPT2, load

OURS = tokenizer_json("byte", vocabulary=256)


def changed(**parts):
    return json.dumps({**OURS, **parts}).encode()


def split(expression):
    return {"type": "Split", "pattern": {"Regex": expression}, "behavior": "Isolated", "invert": False}


def replace(pattern, content):
    return {"type": "Replace", "pattern": {"String": pattern}, "content": content}


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"{", "it is no JSON"),
        (b"\0\1", "it is no JSON"),
        (b"\xff\xfe[\0]\0", "it is no JSON"),
        (b"[" * 200_000, "it is nested too deep"),
        (b"[]", "it has no .model."),
        (b"{}", "it has no .model."),
        (
            changed(model={"type": "WordPiece", "vocab": {}}),
            ".model. has the part 'WordPiece', and only BPE, Unigram, WordLevel are",
        ),
        (changed(model={"type": "Unigram", "vocab": {}}), "is no list of pieces with their scores"),
        (changed(model={"type": "Unigram", "vocab": [["a" * 129, 0.0]]}), "pieces have up to 128 characters"),
        (changed(model={"type": "Unigram", "vocab": [["a", float("nan")]]}), "scores 'a' with 'nan'"),
        (changed(model={**OURS["model"], "dropout": 0.5}), "draws tokens at random"),
        (changed(model={**OURS["model"], "merges": [["x", "yy"]]}), "it is no tokenizer"),
        (changed(pre_tokenizer=split("(a+)+$")), "which is not known to end"),
        (changed(normalizer=replace("a", "a" * 17)), "has more than 16 characters"),
        (changed(normalizer={"type": "Replace", "pattern": {"Regex": ""}, "content": "a"}), "not known to end"),
        (changed(normalizer=replace("", "aa")), "replaces no text of its own"),
        (changed(normalizer={"type": "Sequence", "normalizers": [replace("a", "aa")] * 9}), "more than 8 parts"),
        (changed(normalizer={"type": "Sequence", "normalizers": [{"type": "Sequence"}]}), "a sequence in a sequence"),
        (changed(normalizer={"type": "Precompiled", "precompiled_charsmap": "AA=="}), "has the part 'Precompiled'"),
        (changed(decoder=[1]), "`decoder` is no part"),
        (changed(added_tokens=[{"content": ""}]), "tokens have 1 to 1024 characters"),
        (changed(added_tokens={"a": 1}), "is no list of tokens"),
    ],
)
def test_a_tokenizer_that_could_take_any_time_is_refused(content, said):
    with pytest.raises(UntrustedError, match=said.replace("`", ".")):
        load(content)


def test_known_parts_are_taken():
    assert 256 == load(changed()).get_vocab_size()
    assert 256 == load(changed(pre_tokenizer=split(_GPT2), normalizer={"type": "NFC"})).get_vocab_size()
    long = load(changed(truncation={"max_length": 2, "strategy": "LongestFirst", "stride": 0, "direction": "Right"}))
    assert 5 == len(long.encode("hello").ids)
