"""Name what was probably meant: the closest of the known words, and lists of them that stay readable."""

from collections.abc import Iterable

from ttlaunch.diagnostics.terminal_text import clean

_LIKELY = 0.6
_LONGEST_WORD = 100
_MOST_LISTED = 8


def closest(word: str, known: Iterable[str]) -> str | None:
    """Return the known word most like `word` in any letter case, or None if none is likely to have been meant."""
    if len(word) > _LONGEST_WORD:
        return None
    from difflib import SequenceMatcher  # noqa: PLC0415 - only a mistake needs it

    best, least = None, _LIKELY
    for other in known:
        matcher = SequenceMatcher(None, word.lower(), other.lower())
        # These two are cheap upper bounds of `ratio()`: a file may have thousands of unknown words.
        if matcher.real_quick_ratio() >= least and matcher.quick_ratio() >= least:
            ratio = matcher.ratio()
            # Of names that differ only in letter case, the one with more letters as they were typed.
            if ratio > least or (ratio == least and (best is None or _exact(word, other) > _exact(word, best))):
                best, least = other, ratio
    return best


def _exact(word: str, other: str) -> float:
    from difflib import SequenceMatcher  # noqa: PLC0415 - only a mistake needs it

    return SequenceMatcher(None, word, other).ratio()


def did_you_mean(word: str, known: Iterable[str]) -> tuple[str, ...]:
    """Return the hint for a misspelled word, or no hint."""
    best = closest(word, known)
    return (f"did you mean `{best}`?",) if best else ()


def listed(words: Iterable[object], *, last: str = "or", quote: str = "`") -> str:
    """Write words as an English list: `` `a`, `b` or `c` ``; a long list is cut and ends with the total number."""
    quoted = [f"{quote}{word}{quote}" for word in words]
    if len(quoted) > _MOST_LISTED:
        return ", ".join(quoted[:_MOST_LISTED]) + f", … ({len(quoted)} in all)"
    if len(quoted) <= 1:
        return "".join(quoted)
    return ", ".join(quoted[:-1]) + f" {last} {quoted[-1]}"


def shown(value: object, *, longest: int = 60) -> str:
    """Return a value as a message may contain it: one printable line of bounded length."""
    text = clean(str(value)[: longest + 1])
    return text if len(text) <= longest else text[: longest - 1] + "…"
