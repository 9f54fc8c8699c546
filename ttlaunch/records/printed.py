"""Find the numbers that a script prints about its training, such as `step=100 loss=0.53 lr=1e-4`.

Two spellings count: `name=number`, with at most one space on each side of the sign, and `'name': number` with the name in
quotes, as Python prints a dict and JSON has it; there the number may stand in quotes too. The name is a word of at most 64
letters, digits and `_ . / - @`, begins with a letter or `_`, and nothing of this kind, no sign and no `=`, `:`, `?` or `&` stands
before it: `--lr=0.1` and `http://host/?page=2` have no numbers in this sense. The number is decimal, or `nan`, `inf` or `-inf`, and behind it
is a space, a closing bracket, a comma, `;`, `|`, a quote or the end: `time=12ms`, `n=1,000` and `12:30` have none. A number whose
name says that it is a secret, such as `password=1234` or `api_key=1`, is none either: metrics are copied to more places than the log.

Of a line, the first 4,096 bytes and the first 32 numbers count. Python 3.9 and the standard library only.
"""

from __future__ import annotations

import math
import re

from ttlaunch.records.parser import LARGEST_COUNT

TYPE_CHECKING = False  # what typing.TYPE_CHECKING is, without the time to import it
if TYPE_CHECKING:
    from typing import Union

    Number = Union[int, float]  # noqa: UP007 - Python 3.9

LONGEST_LINE, MOST_PAIRS = 4096, 32
"""How many bytes and numbers of a line count."""
_STEP = "step"
_NAME = rb"[A-Za-z_][\w.@/-]{0,63}"
# The characters of a name may not stand before it either, so a long word is tried once and not from each of its letters.
_PAIR = re.compile(
    rb"(?<![\w.@/=:?&+*$%~^<>!#\\\x80-\xff-])(?:(" + _NAME + rb") ?= ?|(['\"])(" + _NAME + rb")\2: ?['\"]?)"
    rb"([+-]?(?:[0-9]{1,20}(?:\.[0-9]{0,20})?|\.[0-9]{1,20})(?:[eE][+-]?[0-9]{1,3})?|nan|-?inf)"
    rb"(?=$|[\s;|)\]}'\"]|,(?![0-9]))"
)
# One of the words anywhere in a name, or one that metrics have too (`token_accuracy`, `loss_per_token`) as what the name is about.
_SECRET = re.compile(
    r"(?<![a-z])(?:pass(?:word|wd|phrase|code)|pwd|pw|secret|credential|otp|apikey|jwt|bearer|authorization|cookie)s?(?![a-z])"
    r"|(?<![a-z])(?<!per[_./@-])(?:token|key|auth|pin)$"
)
_WORD_IN_CAPITALS = re.compile(r"(?<=[a-z0-9])(?=[A-Z])")
_COLOUR = re.compile(rb"\x1b\[[0-9;:]*m")


def read_printed(line: bytes) -> tuple[int | None, dict[str, Number]]:
    """Return the step that a line names, if it does, and its other numbers by name; of several with one name, the last.

    >>> read_printed(b"epoch 2: step=100, loss=0.53 (best=0.5) lr = 1e-4")
    (100, {'loss': 0.53, 'best': 0.5, 'lr': 0.0001})
    """
    values: dict[str, Number] = {}
    step = None
    if len(line) > LONGEST_LINE:  # a number at the cut could lack its end
        line = line[:LONGEST_LINE].rpartition(b" ")[0]
    if b"=" not in line and b":" not in line:
        return None, values
    if b"\x1b" in line:
        line = _COLOUR.sub(b"", line)
    for count, found in enumerate(_PAIR.finditer(line), 1):
        name, value = (found[1] or found[3]).decode("ascii"), _number(found[4])
        if name == _STEP:
            step = value if isinstance(value, int) and 0 <= value <= LARGEST_COUNT else step
        elif value is not None and not _is_secret(name):
            values[name] = value
        if count == MOST_PAIRS:
            break
    return step, values


def _is_secret(name: str) -> bool:
    return _SECRET.search(_WORD_IN_CAPITALS.sub("_", name).lower()) is not None


def _number(text: bytes) -> Number | None:
    """Return a number, whole where it was printed so; None for one that is larger than a float can be."""
    if text.lstrip(b"+-").isdigit() and abs(int(text)) <= LARGEST_COUNT:
        return int(text)
    value = float(text)
    return value if math.isfinite(value) or text[-1:] in b"nf" else None
