"""Pieces with scores, SentencePiece's byte-pair encoding, become a tokenizer that joins them as SentencePiece does (E22)."""

import json
import random
from array import array

import pytest

pytest.importorskip("tokenizers")
from ttlaunch.untrusted.child import UntrustedError
from ttlaunch.untrusted.gguf_header import Header
from ttlaunch.untrusted.gguf_tokenizer import tokenizer_of
from ttlaunch.untrusted.tokenizer import load

BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
FIRST = ["<unk>", "<s>", "</s>", *BYTES]


def header(pieces, **more):
    """Pieces that are the less likely the later they come, behind special tokens and bytes."""
    values = {
        "model": "llama",
        "tokens": [*FIRST, *pieces],
        "scores": array("f", [0.0] * len(FIRST) + [-float(number) for number in range(len(pieces))]),
        "token_type": array("i", [2, 3, 3] + [6] * 256 + [1] * len(pieces)),
        "unknown_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    return Header(values={f"tokenizer.ggml.{name}": value for name, value in (values | more).items()})


def drawn_pieces(draw):
    pieces = list("abc▁")
    while len(pieces) < 40:
        piece = draw.choice(pieces) + draw.choice(pieces)
        if piece not in pieces and len(piece) < 9:
            pieces.append(piece)
    return pieces


def joined_one_by_one(text, pieces):
    """The definition: of all neighbours that make a piece, those with the highest score are joined, the leftmost first."""
    parts = list("▁" + text.replace(" ", "▁"))
    while True:
        places = [place for place in range(len(parts) - 1) if parts[place] + parts[place + 1] in pieces]
        if not places:
            break
        best = min(places, key=lambda place: pieces.index(parts[place] + parts[place + 1]))
        parts[best : best + 2] = [parts[best] + parts[best + 1]]
    names = [name for part in parts for name in ([part] if part in pieces else [BYTES[byte] for byte in part.encode()])]
    return [[*FIRST, *pieces].index(name) for name in names]


@pytest.mark.parametrize("seed", range(20))
def test_pieces_are_joined_as_by_definition_and_every_text_comes_back(seed):
    draw = random.Random(seed)  # noqa: S311 - no secret
    pieces = drawn_pieces(draw)
    made = load(json.dumps(tokenizer_of(header(pieces))).encode())
    for _ in range(10):
        text = "".join(draw.choice("abc é\n") for _ in range(60))
        ids = made.encode(text, add_special_tokens=False).ids
        assert joined_one_by_one(text, pieces) == ids
        assert text == made.decode(ids)
        assert [1, *ids] == made.encode(text).ids


def test_a_file_may_say_that_texts_begin_without_a_space_and_without_a_token():
    made = load(json.dumps(tokenizer_of(header(["a", "▁"], add_space_prefix=False, add_bos_token=False))).encode())
    assert [len(FIRST)] == made.encode("a").ids


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"scores": None}, "`tokenizer.ggml.scores` or `tokenizer.ggml.token_type` is missing"),
        ({"scores": array("f", [0.0])}, "have 260, 1 and 260 values"),
        ({"tokens": [*FIRST, "<s>"]}, "has 1 tokens twice"),
        ({"tokens": [*FIRST, "a" * 129]}, "a piece of 129 characters, more than 128"),
        ({"bos_token_id": 999}, "is 999, and there are 260 tokens"),
        ({"model": "t5"}, "its tokenizer is `t5`, and only `gpt2`"),
    ],
)
def test_lists_that_do_not_fit_together_are_refused(change, said):
    with pytest.raises(UntrustedError) as caught:
        tokenizer_of(header(["a"], **change))
    assert said in str(caught.value)
