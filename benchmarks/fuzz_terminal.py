"""The cases of terminal text: whatever a rank prints or a host names, only text and colours reach the terminal; see `fuzz.py`."""

import random
import re
import unicodedata
from collections.abc import Sequence

from fuzz_cases import Sample, Target

from ttlaunch.diagnostics.terminal_text import clean, clean_output

_PARTS = [b"\x1b", b"[", b"]", b"0;title", b"8;;http://x", b"31", b";1", b"m", b"2J", b"H", b"\x07", b"\x1b\\", b"P", b"?25l",
          b"\r", b"\n", b"\t", b"\x00", b"\x7f", b"\x9b", b"\xff", b"a", b"0", *(one.encode("utf-8", "surrogatepass") for one in
          "\x9b\x9d\x9c\u202e\u2066\u2028\u200b\u00a0\ud800\U000e0041é日")]  # fmt: skip
_LONGEST = 1 << 20  # readers of logs cut lines, too
_COLOURS = re.compile(r"\x1b\[[0-9;:]*m")
_STEERING = {"Cc", "Cs", "Zl", "Zp"}
_REORDERING = {"LRE", "RLE", "PDF", "LRO", "RLO", "LRI", "RLI", "FSI", "PDI"}


def terminal_text() -> Target:
    """Return the target: sequences that terminals obey, in pieces and put together again."""
    return Target((Sample(b"loss \x1b[1;31m2.5\x1b[0m", _shown),), (), _made)


def _made(dice: random.Random, samples: Sequence[Sample]) -> Sample:
    parts = dice.choices(_PARTS, k=dice.randint(0, 40))
    return Sample(b"".join(parts) * dice.choice((1, 1, 1, 50)), samples[0].read)


def _shown(data: bytes) -> None:
    """Fail if something passes that steers a terminal, or if cleaning again would change what was cleaned."""
    data = data[:_LONGEST]
    for colour in (False, True):
        found = clean_output(data, colour=colour).decode()
        left = _COLOURS.sub("", found) if colour else found
        assert not _steering(left) - {"\t"}, (data, found)
        assert found.endswith("\x1b[0m") or "\x1b" not in found, (data, found)
        assert clean_output(found.encode(), colour=False).decode() == left, (data, found)
    line = clean(data.decode("utf-8", "surrogateescape"))
    assert not _steering(line), (data, line)
    assert clean(line) == line, (data, line)


def _steering(text: str) -> set[str]:
    return {
        one for one in text if unicodedata.category(one) in _STEERING or unicodedata.bidirectional(one) in _REORDERING
    }
