"""Texts to tokens and back: the tokenizers of training, and pieces of text that can be passed on. No torch.

Tokens may hold parts of characters, and a stop text may spread over tokens. Both are held back until they are decided.
"""

import codecs
import hashlib
from collections.abc import Sequence
from typing import Protocol

from ttlaunch.runtime.serving.ask import Tokenizer


class NamedTokenizer(Tokenizer, Protocol):
    """A tokenizer that says by a hash which one it is."""

    @property
    def sha256(self) -> str:
        """The hash of all that decides which tokens a text has."""


def make_tokenizer(kind: str, *, vocabulary: int, alphabet: Sequence[int] = ()) -> NamedTokenizer:
    """Make the tokenizer of a model.

    Args:
        kind: `training_config.tokenizer_type`; `ids` also for a model of generated sequences.
        vocabulary: The rows of the model's embedding.
        alphabet: For `char`, the code points that are tokens, ascending.

    Raises:
        ValueError: It has another number of tokens than the model.
    """
    made: NamedTokenizer = (
        ByteTokenizer()
        if kind == "byte"
        else CharTokenizer("".join(map(chr, alphabet)))
        if kind == "char"
        else IdsTokenizer(vocabulary)
    )
    if made.vocabulary != vocabulary:
        raise ValueError(f"the model has {vocabulary} tokens, its tokenizer {made.vocabulary}")
    return made


class ByteTokenizer:
    """The bytes of UTF-8, as `tokenizer_type: byte` trains."""

    vocabulary = 256
    ends: frozenset[int] = frozenset()
    sha256 = hashlib.sha256(b"byte").hexdigest()

    def encode(self, text: str) -> list[int]:
        """Return the bytes of a text.

        Raises:
            ValueError: The text has half of a surrogate pair, which UTF-8 has no bytes for.
        """
        try:
            return list(text.encode())
        except UnicodeEncodeError as error:
            raise ValueError(f"{text[error.start]!r} at character {error.start} is half of a surrogate pair") from None

    def piece(self, token: int) -> bytes:
        return bytes([token])


class CharTokenizer:
    """The characters of the training text in the order of their code points, as `tokenizer_type: char` trains."""

    ends: frozenset[int] = frozenset()

    def __init__(self, characters: str) -> None:
        """Number the characters that a text has; repeated ones count once."""
        self._characters = sorted(set(characters))
        self._tokens = {character: token for token, character in enumerate(self._characters)}
        self.vocabulary = len(self._characters)
        self.sha256 = hashlib.sha256(f"char {[ord(one) for one in self._characters]}".encode()).hexdigest()

    def encode(self, text: str) -> list[int]:
        """Return the numbers of a text's characters.

        Raises:
            ValueError: The training text did not have one of them.
        """
        for place, character in enumerate(text):
            if character not in self._tokens:
                raise ValueError(f"{character!r} at character {place} does not occur in the text of the training")
        return [self._tokens[character] for character in text]

    def piece(self, token: int) -> bytes:
        return self._characters[token].encode()


class IdsTokenizer:
    """Numbers separated by spaces, for a model that was trained on token ids without their text."""

    ends: frozenset[int] = frozenset()

    def __init__(self, vocabulary: int) -> None:
        self.vocabulary = vocabulary
        self.sha256 = hashlib.sha256(f"ids {vocabulary}".encode()).hexdigest()

    def encode(self, text: str) -> list[int]:
        """Read the ids.

        Raises:
            ValueError: A word is no id of the vocabulary.
        """
        words = text.split()
        for word in words:
            if not (word.isascii() and word.isdigit() and len(word) < 10 and int(word) < self.vocabulary):  # noqa: PLR2004 - 2^31 has ten digits
                raise ValueError(f"{word[:40]!r} is no token id from 0 to {self.vocabulary - 1}")
        return [int(word) for word in words]

    def piece(self, token: int) -> bytes:
        return f"{token} ".encode()


class TextPieces:
    """The text of one stream as it grows.

    Attributes:
        is_stopped: Whether a stop text has come; nothing more is passed on.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._stops = [stop for stop in stops if stop]
        self._held = ""
        self.is_stopped = False

    def add(self, piece: bytes) -> str:
        """Add the bytes of a token, and return what can be passed on: whole characters, and no beginning of a stop text."""
        return self._passed_on(self._decoder.decode(piece))

    def finish(self) -> str:
        """Return what was held back, when the text ends without a stop text; part of a character becomes U+FFFD."""
        text = self._passed_on(self._decoder.decode(b"", final=True)) + self._held
        self._held = ""
        return text

    def _passed_on(self, text: str) -> str:
        if self.is_stopped:
            return ""
        text = self._held + text
        found = [place for stop in self._stops if (place := text.find(stop)) >= 0]
        if found:
            self.is_stopped, self._held = True, ""
            return text[: min(found)]
        start = len(text) - max((_overlap(text, stop) for stop in self._stops), default=0)
        self._held = text[start:]
        return text[:start]


def _overlap(text: str, stop: str) -> int:
    """The length of the longest end of the text that is a beginning of the stop text."""
    return next((length for length in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:length])), 0)
