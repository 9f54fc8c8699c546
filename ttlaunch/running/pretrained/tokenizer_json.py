"""The tokenizers of our own models as `tokenizer.json`, which Hugging Face's `tokenizers` reads.

Bytes and characters become byte-pair encodings without merges, so each byte or character stays a token. Ids without a
text become words: their numbers, separated by spaces.
"""

from collections.abc import Sequence
from typing import Any

from ttlaunch.serving.byte_level import byte_characters


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
