"""Texts to tokens and back: the tokenizers of training, and pieces of text that can be passed on. No torch.

Tokens may hold parts of characters, and a stop text may spread over tokens. Both are held back until they are decided.
"""

import codecs
from collections.abc import Sequence


class ByteTokenizer:
    """The bytes of UTF-8, as `tokenizer_type: byte` trains."""

    vocabulary = 256
    ends: frozenset[int] = frozenset()

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

    def encode(self, text: str) -> list[int]:
        """Read the ids.

        Raises:
            ValueError: A word is no id of the vocabulary.
        """
        words = text.split()
        for word in words:
            if not (word.isascii() and word.isdigit() and len(word) < 10 and int(word) < self.vocabulary):  # noqa: PLR2004
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
