"""The tokenizer of a model of others, for its head: a `tokenizer.json` that was checked before the run started. No torch.

`ttlaunch/untrusted/tokenizer.py` has checked in a limited child that it has only parts whose time and memory are in proportion to
a text, and its SHA-256 says that it is still the same file.
"""

import hashlib
import json
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from ttlaunch.records.regular_files import open_regular
from ttlaunch.serving.byte_level import byte_characters

_BYTE = re.compile(r"<0x([0-9A-F]{2})>")


class FolderTokenizer:
    """A tokenizer of the library `tokenizers`."""

    def __init__(self, made: Any, *, sha256: str, vocabulary: int, ends: Iterable[int]) -> None:
        """Take over a tokenizer of the library.

        Args:
            made: The tokenizer.
            sha256: The hash of its file.
            vocabulary: The rows of the model's embedding, which may be more than the tokenizer's tokens.
            ends: Tokens that end a text.
        """
        self._made = made
        self.sha256, self.vocabulary, self.ends = sha256, vocabulary, frozenset(ends)
        content = json.loads(made.to_str())
        added = {one["id"]: bool(one.get("special")) for one in content.get("added_tokens") or ()}
        as_bytes = _piece_writer(content)
        self._pieces = {
            number: as_bytes(token) if number not in added else b"" if added[number] else token.encode()
            for token, number in made.get_vocab(with_added_tokens=True).items()
        }

    def encode(self, text: str) -> list[int]:
        """Return the tokens of a text. Special tokens in it count as such; none is added.

        Raises:
            ValueError: The tokenizer has no tokens for the text, or the model has no such tokens.
        """
        try:
            text.encode()
            ids: list[int] = self._made.encode(text, add_special_tokens=False).ids
        except UnicodeEncodeError as error:
            raise ValueError(f"{text[error.start]!r} at character {error.start} is half of a surrogate pair") from None
        except Exception as error:  # the library raises nothing narrower
            raise ValueError(f"the tokenizer has no tokens for the text: {str(error)[:200]}") from error
        if ids and max(ids) >= self.vocabulary:
            raise ValueError(f"the text has token {max(ids)}, and the model has {self.vocabulary} tokens")
        return ids

    def piece(self, token: int) -> bytes:
        """Return the bytes of a token; a special one, and one that only the model has, is no text."""
        return self._pieces.get(token, b"")


def read_tokenizer(file: str, *, sha256: str, vocabulary: int, ends: Iterable[int]) -> FolderTokenizer:
    """Read the tokenizer of a model of others.

    Args:
        file: A `tokenizer.json` that was checked before the run started.
        sha256: The hash that it had then.
        vocabulary: The rows of the model's embedding.
        ends: Tokens that end a text.

    Raises:
        OSError: The file cannot be read.
        ValueError: It is not the file that was checked.
    """
    from tokenizers import Tokenizer  # noqa: PLC0415 - an extra

    with open_regular(file, follow=True) as opened:
        data = opened.read()
    if hashlib.sha256(data).hexdigest() != sha256:
        raise ValueError(f"{file} has changed since it was checked")
    made = Tokenizer.from_buffer(data)
    made.no_truncation()
    made.no_padding()
    return FolderTokenizer(made, sha256=sha256, vocabulary=vocabulary, ends=ends)


def _piece_writer(content: Mapping[str, Any]) -> Callable[[str], bytes]:
    """Return what makes bytes of a token's name, by the decoder of a tokenizer."""
    decoder = content.get("decoder") or {}
    kinds = {one.get("type") for one in (decoder, *decoder.get("decoders", ()))} - {None}
    if "ByteLevel" in kinds:
        numbers = {character: byte for byte, character in enumerate(byte_characters())}
        return lambda token: bytes(map(numbers.__getitem__, token)) if numbers.keys() >= set(token) else token.encode()
    if not kinds and content["model"].get("type") == "WordLevel":
        return lambda token: f"{token} ".encode()  # without a decoder, words are joined by spaces
    return _spaced_piece if kinds & {"Metaspace", "ByteFallback", "Replace"} else str.encode


def _spaced_piece(token: str) -> bytes:
    """Return the bytes of a token in which a lower block stands for a space, or which is a byte in hexadecimal."""
    match = _BYTE.fullmatch(token)
    return bytes.fromhex(match[1]) if match else token.replace("▁", " ").encode()
