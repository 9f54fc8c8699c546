"""The tokenizers of this project's own models, for text that is served: bytes, characters, and ids without a text."""

import hashlib
from collections.abc import Sequence
from typing import Protocol

from ttlaunch.runtime.serving.ask import Tokenizer

BYTES = 256


class NamedTokenizer(Tokenizer, Protocol):
    """A tokenizer that says by a hash which one it is."""

    @property
    def sha256(self) -> str:
        """The hash of all that decides which tokens a text has."""


class _ByteTokenizer:
    """Each byte of UTF-8 is a token."""

    vocabulary = BYTES
    ends: frozenset[int] = frozenset()
    sha256 = hashlib.sha256(b"byte").hexdigest()

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def piece(self, token: int) -> bytes:
        return bytes([token])


class _CharacterTokenizer:
    """Each character of the training text is a token, numbered in the order of code points."""

    ends: frozenset[int] = frozenset()

    def __init__(self, alphabet: Sequence[int]) -> None:
        self.vocabulary = len(alphabet)
        self.sha256 = hashlib.sha256(f"char {list(alphabet)}".encode()).hexdigest()
        self._characters = [chr(point) for point in alphabet]
        self._tokens = {character: token for token, character in enumerate(self._characters)}

    def encode(self, text: str) -> list[int]:
        unknown = next((character for character in text if character not in self._tokens), None)
        if unknown is not None:
            raise ValueError(f"{unknown!r} does not occur in the text on which the model was trained")
        return [self._tokens[character] for character in text]

    def piece(self, token: int) -> bytes:
        return self._characters[token].encode()


class _IdTokenizer:
    """Tokens without a text of their own: their numbers, separated by spaces, stand for them."""

    ends: frozenset[int] = frozenset()

    def __init__(self, vocabulary: int) -> None:
        self.vocabulary = vocabulary
        self.sha256 = hashlib.sha256(f"ids {vocabulary}".encode()).hexdigest()

    def encode(self, text: str) -> list[int]:
        words = text.split()
        wrong = next((word for word in words if not self._is_token(word)), None)
        if wrong is not None:
            raise ValueError(f"{wrong[:40]!r} is no token: numbers from 0 to {self.vocabulary - 1} are")
        return [int(word) for word in words]

    def piece(self, token: int) -> bytes:
        return f"{token} ".encode()

    def _is_token(self, word: str) -> bool:
        return word.isascii() and word.isdigit() and len(word) < 10 and int(word) < self.vocabulary  # noqa: PLR2004 - 2^31 has ten digits


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
        _ByteTokenizer()
        if kind == "byte"
        else _CharacterTokenizer(alphabet)
        if kind == "char"
        else _IdTokenizer(vocabulary)
    )
    if made.vocabulary != vocabulary:
        raise ValueError(f"the model has {vocabulary} tokens, its tokenizer {made.vocabulary}")
    return made
