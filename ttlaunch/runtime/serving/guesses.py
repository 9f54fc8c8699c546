"""Guesses of a stream's next tokens: what followed the same tokens the last time. No torch.

Source: for the idea, A. Saxena, "Prompt Lookup Decoding", 2023.
"""

from collections.abc import Iterable

_LENGTHS = (3, 2)
"""How many tokens have to be the same; the longer match is preferred."""


class Guesser:
    """Looks up in a stream's own tokens what may follow. Memory: two entries a token."""

    def __init__(self, tokens: Iterable[int] = ()) -> None:
        self._tokens: list[int] = []
        self._after: dict[tuple[int, ...], int] = {}
        for token in tokens:
            self.add(token)

    def add(self, token: int) -> None:
        """Take the stream's next token."""
        for length in _LENGTHS:
            if len(self._tokens) >= length:
                self._after[tuple(self._tokens[-length:])] = len(self._tokens)
        self._tokens.append(token)

    def guess(self, count: int) -> list[int]:
        """Return at most so many tokens that may follow; none if the last tokens are new."""
        for length in _LENGTHS:
            start = self._after.get(tuple(self._tokens[-length:]))
            if start is not None and len(self._tokens) >= length:
                return self._tokens[start : start + count]
        return []
