"""Check a `tokenizer.json`, and encode texts with it.

The library takes any expression to cut texts by, and any number of replacements that make a text longer, so a file could make
it compute for ever on an ordinary text. Only parts that are known to take time and memory in proportion to the text are
taken; then a process that is not limited may use the file, too.

Source: the library `tokenizers`, `tokenizers/src/{models,normalizers,pre_tokenizers,processors,decoders}`.
"""

from __future__ import annotations

import json
import math
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
    "model": {"BPE", "Unigram", "WordLevel"},
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
_LONGEST_UNIGRAM = 128
"""Characters of a piece that a Unigram weighs at each place of a text."""


def answers(requests: Iterator[dict[str, Any]], file: BinaryIO) -> Iterator[bytes]:
    """Answer about a file, then encode texts.

    The first request, `{"tokens": [text, …], "takes_any": flag}`, is answered by a line of JSON: the number of tokens, the number of
    each of those, and whether all parts are known; `takes_any` is for a file that no other process will use.

    Each further one, `{"text": text, "skip": number, "ends": which}`, is answered by the ids of its tokens: how many there are, in
    4 bytes, and each in 4 bytes. Those that begin in so many of its first characters are left out, and so are tokens that the file
    puts at ends of a text, but for those at the `begin`, at the `end`, or at `both`.
    """
    file.seek(0)
    data = file.read(LARGEST + 1)
    if len(data) > LARGEST:
        raise UntrustedError(f"it has more than {LARGEST >> 20} MiB")
    first = next(requests)
    made, is_known = _load_any(data) if first.get("takes_any") else (load(data), True)
    facts = {
        "vocabulary": made.get_vocab_size(with_added_tokens=True),
        "largest": max(made.get_vocab().values(), default=-1),
        "numbers": [made.token_to_id(token) for token in first["tokens"]],
        "is_known": is_known,
    }
    yield json.dumps(facts).encode() + b"\n"
    for request in requests:
        ids = array("I", _encode(made, request["text"], skip=request.get("skip", 0), ends=request.get("ends", "")))
        yield len(ids).to_bytes(4, "little") + ids.tobytes()


def _load_any(data: bytes) -> tuple[Any, bool]:
    """Make the library's tokenizer of a file's content, whatever its parts, and return with it whether they are known."""
    try:
        return load(data), True
    except UntrustedError:
        return _made(data), False


def _encode(made: Any, text: str, *, skip: int, ends: str) -> list[int]:
    try:
        found = made.encode(text, add_special_tokens=bool(ends))
    except Exception as error:  # the library raises nothing narrower
        raise UntrustedError(f"it has no tokens for a text: {str(error)[:300]}") from error
    ids: list[int] = found.ids
    added: list[int] = found.special_tokens_mask if ends else [0] * len(ids)
    begin = added.index(0) if 0 in added else len(added)
    kept = [
        begins >= skip if not is_added else ends in {"both", "begin" if place < begin else "end"}
        for place, ((begins, _), is_added) in enumerate(zip(found.offsets, added, strict=True))
    ]
    return [token for token, is_kept in zip(ids, kept, strict=True) if is_kept]


def load(data: bytes) -> Any:
    """Make the library's tokenizer of a file's content, without truncation and padding.

    Raises:
        UntrustedError: It is no tokenizer, or one with parts that are not taken.
    """
    try:
        content = json.loads(str(data, "utf-8"))  # of bytes, the encoding would be guessed, and its codec imported
    except ValueError as error:
        raise UntrustedError(f"it is no JSON: {error}") from error
    except RecursionError as error:
        raise UntrustedError("it is nested too deep") from error
    check(content)
    return _made(data)


def _made(data: bytes) -> Any:
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
    if content["model"].get("type") == "Unigram":
        _check_unigram(content["model"].get("vocab"))
    added = content.get("added_tokens") or []
    if not isinstance(added, list) or not all(isinstance(one, dict) for one in added):
        raise UntrustedError("`added_tokens` is no list of tokens")
    for one in added:
        token = one.get("content")
        if not isinstance(token, str) or not 0 < len(token) <= _LONGEST_TOKEN:
            raise UntrustedError(
                f"`added_tokens` has {str(token)[:60]!r}, and tokens have 1 to {_LONGEST_TOKEN} characters"
            )


def _check_unigram(vocabulary: Any) -> None:
    if not isinstance(vocabulary, list) or not all(isinstance(one, list) and len(one) == 2 for one in vocabulary):  # noqa: PLR2004 - a pair
        raise UntrustedError("`model.vocab` is no list of pieces with their scores")
    for piece, score in vocabulary:
        if not isinstance(piece, str) or len(piece) > _LONGEST_UNIGRAM:
            raise UntrustedError(
                f"`model.vocab` has {str(piece)[:60]!r}, and pieces have up to {_LONGEST_UNIGRAM} characters"
            )
        if not isinstance(score, int | float) or not math.isfinite(score):
            raise UntrustedError(f"`model.vocab` scores {piece[:60]!r} with {str(score)[:40]!r}, which is no number")


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
