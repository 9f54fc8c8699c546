"""The tokenizers of our own models as `tokenizer.json`, which Hugging Face's `tokenizers` reads.

Bytes and characters become byte-pair encodings without merges, so each byte or character stays a token. Ids without a
text become words: their numbers, separated by spaces.
"""

from collections.abc import Sequence
from typing import Any

_PRINTABLE = (range(ord("!"), ord("~") + 1), range(ord("¡"), ord("¬") + 1), range(ord("®"), ord("ÿ") + 1))
"""Bytes that GPT-2's alphabet of bytes writes as the character of the same number."""


def tokenizer_json(kind: str, *, vocabulary: int, alphabet: Sequence[int] = ()) -> dict[str, Any]:
    """Return the content of `tokenizer.json`.

    Args:
        kind: `training_config.tokenizer_type`: `byte`, `char` or `ids`.
        vocabulary: Rows of the model's embedding.
        alphabet: For `char`, the code points that are tokens, ascending.

    Raises:
        ValueError: The model has another number of tokens than its tokenizer.
    """
    if kind == "byte":
        level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
        content = _content(_pairs(byte_characters()), splits=level, joins=level)
        tokens = len(byte_characters())
    elif kind == "char":
        content = _content(_pairs([chr(point) for point in alphabet]), splits=None, joins={"type": "Fuse"})
        tokens = len(alphabet)
    else:
        words = {"type": "WordLevel", "vocab": {str(token): token for token in range(vocabulary)}, "unk_token": "<unk>"}
        content, tokens = _content(words, splits={"type": "WhitespaceSplit"}, joins=None), vocabulary
    if tokens != vocabulary:
        raise ValueError(f"the model has {vocabulary} tokens, its tokenizer {tokens}")
    return content


def byte_characters() -> list[str]:
    """Return for each byte the character that stands for it in a byte-level vocabulary, as GPT-2 defined it.

    >>> byte_characters()[65], byte_characters()[32]
    ('A', 'Ġ')
    """
    shown = {byte for span in _PRINTABLE for byte in span}
    hidden = [byte for byte in range(256) if byte not in shown]
    return [chr(byte) if byte in shown else chr(256 + hidden.index(byte)) for byte in range(256)]


def _pairs(characters: Sequence[str]) -> dict[str, Any]:
    """Return a byte-pair encoding whose tokens are single characters, numbered in their order."""
    return {
        "type": "BPE",
        "dropout": None,
        "unk_token": None,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": False,
        "byte_fallback": False,
        "ignore_merges": False,
        "vocab": {character: token for token, character in enumerate(characters)},
        "merges": [],
    }


def _content(model: dict[str, Any], *, splits: dict[str, Any] | None, joins: dict[str, Any] | None) -> dict[str, Any]:
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [],
        "normalizer": None,
        "pre_tokenizer": splits,
        "post_processor": None,
        "decoder": joins,
        "model": model,
    }
