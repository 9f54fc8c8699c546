"""Check a `tokenizer.json`, and encode texts with it.

The library takes any expression to cut texts by, and any number of replacements that make a text longer, so a file could make
it compute for ever on an ordinary text. Only parts that are known to take time and memory in proportion to the text are
taken; then a process that is not limited may use the file, too.

Source: the library `tokenizers`, `tokenizers/src/{models,normalizers,pre_tokenizers,processors,decoders}`.
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Iterator, Mapping
from typing import Any, BinaryIO

import tokenizers

from ttlaunch.untrusted.child import UntrustedError
from ttlaunch.untrusted.gguf_tokenizer import SPLITS

LARGEST = 64 * 2**20
"""The most bytes of a file."""
_GPT2 = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_GPT2_LONG = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_EXPRESSIONS = frozenset({_GPT2, _GPT2_LONG, *SPLITS.values()})
PARTS = {
    "model": {"BPE", "WordLevel"},
    "normalizer": {"NFC", "NFD", "NFKC", "NFKD", "Lowercase", "StripAccents", "Strip", "Prepend", "Replace"},
    "pre_tokenizer": {"ByteLevel", "Whitespace", "WhitespaceSplit", "Digits", "Metaspace", "Split", "Punctuation"},
    "post_processor": {"ByteLevel", "TemplateProcessing"},
    "decoder": {"ByteLevel", "ByteFallback", "Fuse", "Strip", "Replace", "Metaspace"},
}
"""By place the kinds of parts that are taken, besides sequences of them."""
_LISTS = ("normalizers", "pretokenizers", "processors", "decoders")
_MOST_PARTS = 8
_LONGEST_PIECE = 16
_LONGEST_TOKEN = 1024
_MOST_PIECES = 16


def answers(requests: Iterator[dict[str, Any]], file: BinaryIO) -> Iterator[bytes]:
    """Answer about a file, then encode texts.

    The first request, `{"tokens": [text, …]}`, is answered by a line of JSON: the number of tokens, and the number of each
    of those. Each further one, `{"text": text}`, is answered by the ids of its tokens: how many there are, in 4 bytes, and
    each in 4 bytes.
    """
    file.seek(0)
    data = file.read(LARGEST + 1)
    if len(data) > LARGEST:
        raise UntrustedError(f"it has more than {LARGEST >> 20} MiB")
    made = load(data)
    first = next(requests)
    facts = {
        "vocabulary": made.get_vocab_size(with_added_tokens=True),
        "largest": max(made.get_vocab().values(), default=-1),
    }
    yield json.dumps(facts | {"numbers": [made.token_to_id(token) for token in first["tokens"]]}).encode() + b"\n"
    for request in requests:
        ids = array("I", _encode(made, request["text"]))
        yield len(ids).to_bytes(4, "little") + ids.tobytes()


def _encode(made: Any, text: str) -> list[int]:
    try:
        ids: list[int] = made.encode(text, add_special_tokens=False).ids
    except Exception as error:  # the library raises nothing narrower
        raise UntrustedError(f"it has no tokens for a text: {str(error)[:300]}") from error
    return ids


def load(data: bytes) -> Any:
    """Make the library's tokenizer of a file's content, without truncation and padding.

    Raises:
        UntrustedError: It is no tokenizer, or one with parts that are not taken.
    """
    try:
        content = json.loads(data)
    except ValueError as error:
        raise UntrustedError(f"it is no JSON: {error}") from error
    check(content)
    try:
        made = tokenizers.Tokenizer.from_buffer(data)
    except MemoryError:
        raise
    except BaseException as error:  # a panic of the library is no Exception
        raise UntrustedError(f"it is no tokenizer: {str(error)[:300]}") from error
    made.no_truncation()
    made.no_padding()
    return made


def check(content: Any) -> None:
    """Check that a tokenizer has only known parts.

    Raises:
        UntrustedError: It has others; the first one.
    """
    if not isinstance(content, dict) or not isinstance(content.get("model"), dict):
        raise UntrustedError("it is no tokenizer: it has no `model`")
    for place in PARTS:
        left = _MOST_PARTS
        for part in _parts(content.get(place), place, depth=0):
            left -= 1
            if left < 0:
                raise UntrustedError(f"`{place}` has more than {_MOST_PARTS} parts")
            _check_part(part, place)
    if content["model"].get("dropout") not in (None, 0, 0.0):
        raise UntrustedError("`model.dropout` draws tokens at random")
    added = content.get("added_tokens") or []
    if not isinstance(added, list) or not all(isinstance(one, dict) for one in added):
        raise UntrustedError("`added_tokens` is no list of tokens")
    for one in added:
        token = one.get("content")
        if not isinstance(token, str) or not 0 < len(token) <= _LONGEST_TOKEN:
            raise UntrustedError(
                f"`added_tokens` has {str(token)[:60]!r}, and tokens have 1 to {_LONGEST_TOKEN} characters"
            )


def _parts(part: Any, place: str, *, depth: int) -> Iterator[Mapping[str, Any]]:
    """Yield the parts at a place; those of a sequence one after the other."""
    if part is None:
        return
    if not isinstance(part, dict):
        raise UntrustedError(f"`{place}` is no part of a tokenizer")
    if part.get("type") != "Sequence":
        yield part
        return
    if depth:
        raise UntrustedError(f"`{place}` has a sequence in a sequence")
    for name in _LISTS:
        listed = part.get(name) or []
        if not isinstance(listed, list):
            raise UntrustedError(f"`{place}.{name}` is no list")
        for one in listed:
            yield from _parts(one, place, depth=depth + 1)


def _check_part(part: Mapping[str, Any], place: str) -> None:
    kind = part.get("type", "BPE" if place == "model" else None)  # older files do not name their model
    if kind not in PARTS[place]:
        raise UntrustedError(
            f"`{place}` has the part {str(kind)[:40]!r}, and only {', '.join(sorted(PARTS[place]))} are taken"
        )
    pattern = part.get("pattern")
    if pattern is not None and not _is_known(pattern):
        raise UntrustedError(f"`{place}` cuts by the expression {str(pattern)[:80]!r}, which is not known to end")
    for name in ("content", "prepend", "replacement"):
        if len(str(part.get(name) or "")) > _LONGEST_PIECE:
            raise UntrustedError(f"`{place}.{name}` has more than {_LONGEST_PIECE} characters")
    if kind == "Replace" and not (isinstance(pattern, dict) and pattern.get("String")):
        raise UntrustedError(f"`{place}` replaces no text of its own")
    if any(len(part.get(name) or ()) > _MOST_PIECES for name in ("single", "pair")):
        raise UntrustedError(f"`{place}` adds more than {_MOST_PIECES} tokens")


def _is_known(pattern: Any) -> bool:
    if not isinstance(pattern, dict):
        return False
    text = pattern.get("String")
    return pattern.get("Regex") in _EXPRESSIONS or (isinstance(text, str) and len(text) <= _LONGEST_PIECE)
