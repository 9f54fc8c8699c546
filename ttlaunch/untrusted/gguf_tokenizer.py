"""Make a `tokenizer.json` of the lists that the header of a GGUF has: of pairs of bytes, or of pieces with scores.

Standard library only. Where a text is cut before pairs of bytes are joined is not in the file, only its name; names that are not
known here are refused, because another cut would give other tokens without a word. Pieces with scores, as SentencePiece has them,
become pairs in the order of the scores; they are joined in a text that is not cut.

Source: llama.cpp, `src/llama-vocab.cpp` (`tokenizer.ggml.pre`), and the `tokenizer.json` of the models that it names; for pieces,
transformers, `convert_slow_tokenizer.py`.
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Iterator
from typing import Any, BinaryIO

from ttlaunch.untrusted.child import UntrustedError
from ttlaunch.untrusted.gguf_header import Header, read_header

_KEY = "tokenizer.ggml."
_NORMAL, _CONTROL, _USER_DEFINED = 1, 3, 4
_SPACE = "▁"
_LONGEST_PIECE = 128
_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_REST = r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
SPLITS = {"llama-bpe": _CONTRACTIONS + _REST % "{1,3}", "qwen2": _CONTRACTIONS + _REST % ""}
"""By name of the cut an expression; the others cut as GPT-2 does."""
_ALIASES = {"gpt-2": "gpt-2", "gpt2": "gpt-2", "phi-2": "gpt-2", "smollm": "smollm", "llama3": "llama-bpe"}
_ALIASES |= {"llama-v3": "llama-bpe", "llama-bpe": "llama-bpe", "qwen2": "qwen2"}


def answers(requests: Iterator[dict[str, object]], file: BinaryIO) -> Iterator[bytes]:
    """Answer with special tokens and chat template as a line of JSON, and the content of `tokenizer.json`."""
    next(requests, None)
    header = read_header(file)
    special, tokenizer = special_tokens(header), tokenizer_of(header)
    yield json.dumps(special).encode() + b"\n"
    yield json.dumps(tokenizer, ensure_ascii=False).encode()


def special_tokens(header: Header) -> dict[str, str]:
    """Return the special tokens of a model by their names in `tokenizer_config.json`."""
    tokens, found = _list(header, "tokens", str), {}
    names = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
    for name, key in names.items():
        number = header.values.get(f"{_KEY}{key}_token_id")
        if type(number) is int:
            if not 0 <= number < len(tokens):
                raise UntrustedError(f"`{_KEY}{key}_token_id` is {number}, and there are {len(tokens)} tokens")
            found[name] = tokens[number]
    return found


def tokenizer_of(header: Header) -> dict[str, Any]:
    """Return the content of `tokenizer.json`.

    Raises:
        UntrustedError: The tokenizer is of another kind, or its lists do not fit together.
    """
    model, cut = header.values.get(f"{_KEY}model"), header.values.get(f"{_KEY}pre")
    if model == "llama":
        return _of_pieces(header)
    if model != "gpt2":
        raise UntrustedError(
            f"its tokenizer is `{str(model)[:40]}`, and only `gpt2`, pairs of bytes, and `llama`, pieces with scores, are converted"
        )
    if not isinstance(cut, str) or cut not in _ALIASES:
        known = ", ".join(_ALIASES)
        raise UntrustedError(f"its tokenizer cuts texts as `{str(cut)[:40]}` does, and only {known} are known")
    vocabulary, pairs = _pairs(_list(header, "tokens", str), _list(header, "merges", str))
    begins = header.values.get(f"{_KEY}add_bos_token") is True
    steps = {
        "normalizer": {"type": "NFC"} if _ALIASES[cut] == "qwen2" else None,
        "pre_tokenizer": _cut(_ALIASES[cut]),
        "post_processor": _beginning(special_tokens(header), vocabulary) if begins else None,
        "decoder": _bytes(use_regex=True),
    }
    model = {"ignore_merges": _ALIASES[cut] == "llama-bpe", "vocab": vocabulary, "merges": pairs}
    return _content(header, vocabulary, steps=steps, model=model)


def _content(
    header: Header, vocabulary: dict[str, int], *, steps: dict[str, Any], model: dict[str, Any]
) -> dict[str, Any]:
    marks = {"continuing_subword_prefix": None, "end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": list(_added(header, list(vocabulary))),
        **steps,
        "model": {"type": "BPE", "dropout": None, "unk_token": None, **marks, **model},
    }


def _of_pieces(header: Header) -> dict[str, Any]:
    """Return the content of `tokenizer.json` for pieces with scores, which are joined from the highest score on."""
    tokens, special = _list(header, "tokens", str), special_tokens(header)
    scores, kinds = header.values.get(f"{_KEY}scores"), header.values.get(f"{_KEY}token_type")
    if not isinstance(scores, list | array) or not isinstance(kinds, list | array):
        raise UntrustedError(f"`{_KEY}scores` or `{_KEY}token_type` is missing, or is no list")
    if not len(tokens) == len(scores) == len(kinds):
        raise UntrustedError(
            f"`{_KEY}tokens`, `scores` and `token_type` have {len(tokens)}, {len(scores)} and {len(kinds)} values"
        )
    vocabulary = {token: number for number, token in enumerate(tokens)}
    if len(vocabulary) != len(tokens):
        raise UntrustedError(f"`{_KEY}tokens` has {len(tokens) - len(vocabulary)} tokens twice")
    begins = header.values.get(f"{_KEY}add_bos_token", "bos_token" in special) is True
    is_spaced = header.values.get(f"{_KEY}add_space_prefix") is not False
    replaced = [{"type": "Replace", "pattern": {"String": " "}, "content": _SPACE}]
    joined = [
        {"type": "Replace", "pattern": {"String": _SPACE}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
        *([{"type": "Strip", "content": " ", "start": 1, "stop": 0}] if is_spaced else []),
    ]
    spaced = [{"type": "Prepend", "prepend": _SPACE}] if is_spaced else []
    steps = {
        "normalizer": {"type": "Sequence", "normalizers": [*spaced, *replaced]},
        "pre_tokenizer": None,
        "post_processor": _beginning(special, vocabulary) if begins else None,
        "decoder": {"type": "Sequence", "decoders": joined},
    }
    merges = _merges({token: scores[number] for number, token in enumerate(tokens) if kinds[number] == _NORMAL})
    model = {"unk_token": special.get("unk_token"), "fuse_unk": True, "byte_fallback": True, "ignore_merges": False}
    return _content(header, vocabulary, steps=steps, model={**model, "vocab": vocabulary, "merges": merges})


def _merges(scores: dict[str, float]) -> list[list[str]]:
    """Return the pairs of pieces that make a piece, those with the highest scores first."""
    found: list[tuple[float, list[str]]] = []
    for piece, score in scores.items():
        if len(piece) > _LONGEST_PIECE:
            raise UntrustedError(f"`{_KEY}tokens` has a piece of {len(piece)} characters, more than {_LONGEST_PIECE}")
        pairs = ([piece[:place], piece[place:]] for place in range(1, len(piece)))
        found += ((score, pair) for pair in pairs if pair[0] in scores and pair[1] in scores)
    return [pair for _, pair in sorted(found, key=lambda one: -one[0])]


def _pairs(tokens: list[str], merges: list[str]) -> tuple[dict[str, int], list[list[str]]]:
    """Return the tokens with their numbers, and the pairs that are joined; both parts and the whole must be tokens."""
    vocabulary = {token: number for number, token in enumerate(tokens)}
    if len(vocabulary) != len(tokens):
        raise UntrustedError(f"`{_KEY}tokens` has {len(tokens) - len(vocabulary)} tokens twice")
    pairs = [pair.split(" ", 1) for pair in merges]
    lost = next((pair for pair in pairs if len(pair) != 2 or not _known(pair, vocabulary)), None)  # noqa: PLR2004 - a pair
    if lost is not None:
        raise UntrustedError(f"`{_KEY}merges` joins {lost!r:.80}, which are no tokens that make a token")
    return vocabulary, pairs


def _known(pair: list[str], vocabulary: dict[str, int]) -> bool:
    return all(part in vocabulary for part in pair) and "".join(pair) in vocabulary


def _added(header: Header, tokens: list[str]) -> Iterator[dict[str, Any]]:
    """Yield the tokens that are found in a text before it is cut."""
    kinds = header.values.get(f"{_KEY}token_type", [])
    if len(kinds) not in {0, len(tokens)}:
        raise UntrustedError(f"`{_KEY}token_type` has {len(kinds)} numbers, and there are {len(tokens)} tokens")
    for number, kind in enumerate(kinds):
        if kind in {_CONTROL, _USER_DEFINED}:
            marks = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
            yield {"id": number, "content": tokens[number], **marks, "special": kind == _CONTROL}


def _cut(name: str) -> dict[str, Any]:
    if name in SPLITS:
        split = {"type": "Split", "pattern": {"Regex": SPLITS[name]}, "behavior": "Isolated", "invert": False}
        return {"type": "Sequence", "pretokenizers": [split, _bytes(use_regex=False)]}
    if name == "smollm":
        digits = {"type": "Digits", "individual_digits": True}
        return {"type": "Sequence", "pretokenizers": [digits, _bytes(use_regex=True)]}
    return _bytes(use_regex=True)


def _bytes(*, use_regex: bool) -> dict[str, Any]:
    return {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": use_regex}


def _beginning(special: dict[str, str], vocabulary: dict[str, int]) -> dict[str, Any]:
    """Return what puts the token of a beginning before a text."""
    token = special.get("bos_token")
    if token is None:
        raise UntrustedError(f"`{_KEY}add_bos_token` is true, and there is no `{_KEY}bos_token_id`")
    begin: dict[str, Any] = {"SpecialToken": {"id": token, "type_id": 0}}
    texts = [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}]
    known = {token: {"id": token, "ids": [vocabulary[token]], "tokens": [token]}}
    second: dict[str, Any] = {"SpecialToken": {"id": token, "type_id": 1}}
    pair = [begin, texts[0], second, texts[1]]
    return {"type": "TemplateProcessing", "single": [begin, texts[0]], "pair": pair, "special_tokens": known}


def _list(header: Header, name: str, kind: type) -> list[Any]:
    values = header.values.get(_KEY + name)
    if not isinstance(values, list) or isinstance(values, array) or (values and type(values[0]) is not kind):
        raise UntrustedError(f"`{_KEY}{name}` is missing, or is no list of texts")
    return values
