"""The cases of a fuzzer: samples of what is written today, and ways to change them; see `fuzz.py`."""

import copy
import json
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Sample:
    """Input as it is written today, and what reads it.

    Attributes:
        content: As bytes.
        read: Reads any bytes; returns whatever it likes, and raises only what `Target.refusals` names.
    """

    content: bytes
    read: Callable[[bytes], object]


@dataclass(frozen=True)
class Target:
    """One kind of input.

    Attributes:
        samples: Cases begin with one of them.
        refusals: Exceptions that are an answer: they become diagnostics.
        make: Makes a case from a sample; None: by `mutated`.
        close: Called at the end.
        longer_s: Further seconds that a case may take: those of a child that is limited by processor time, on a busy machine.
    """

    samples: Sequence[Sample]
    refusals: tuple[type[Exception], ...] = ()
    make: Callable[[random.Random, Sequence[Sample]], Sample] | None = None
    close: Callable[[], object] = lambda: None
    longer_s: float = 0.0


SCRAPS = [*'[]{}:,"\\-.0\n\0 ', "[[", "]]", '{"":', "null", "true", "NaN", "Infinity", "-Infinity", "1e400", "-1", "0.5",
          "9" * 30, "9" * 400, "-" + "9" * 4000, "9" * 5000, '"y"', '""', "\\ud800", "\\u0000", "\x1b[2J", "\u009b",
          "\u202e", "\u2028", "é", "\U0001f600", "../", "/etc/shadow", "/dev/zero", "\xff", "kind", "time", "rank"]  # fmt: skip
NASTY = (None, True, -1, 0, 2**31, 2**41, 2**43, 2**53, 2**53 + 1, 2**63, 2**64, 10**400, 1e308, float("nan"), float("inf"),
         "nan", "y", "", "\ud800", "\0", "\x1b[2J", "\u202e", "x" * 5000, "9" * 4000, "/etc/shadow", [], {}, [[]], [None] * 50,
         {"": None})  # fmt: skip


def mutated(dice: random.Random, samples: Sequence[Sample]) -> Sample:
    """Change a sample: values of its JSON, or any bytes."""
    sample = dice.choice(samples)
    if dice.random() < 0.6 and (changed := other_values(dice, sample.content)) is not None:
        return Sample(changed, sample.read)
    return Sample(other_bytes(dice, sample.content, [one.content for one in samples]), sample.read)


def other_values(dice: random.Random, content: bytes) -> bytes | None:
    """Put something nasty in place of a few values; None if the content is no JSON."""
    try:
        value = json.loads(content)
    except ValueError:
        return None
    for _ in range(dice.randint(1, 3)):
        places = list(_places(value))
        if not places:
            break
        parent, key = dice.choice(places)
        if dice.random() < 0.2:
            del parent[key]
        else:
            parent[key] = copy.deepcopy(dice.choice(NASTY))
    return json.dumps(value).encode()


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    inner = (
        list(value.items()) if isinstance(value, dict) else list(enumerate(value)) if isinstance(value, list) else []
    )
    for key, one in inner:
        yield value, key
        yield from _places(one)


def other_bytes(dice: random.Random, content: bytes, others: Sequence[bytes]) -> bytes:
    """Delete, double, exchange or replace a few stretches."""
    changed = bytearray(content)
    for _ in range(dice.randint(0, 6)):
        first = dice.randint(0, len(changed))
        last = min(len(changed), first + dice.choice((0, 0, 1, 2, 8, 40)))
        other = dice.choice(others)
        begin = dice.randint(0, len(other))
        scrap = dice.choice(SCRAPS).encode("utf-8", "surrogatepass")
        pieces = (
            b"",
            bytes(changed[first:last]) * dice.choice((2, 50)),
            other[begin : begin + 40],
            scrap,
            dice.randbytes(4),
        )
        changed[first:last] = dice.choice(pieces)
    return bytes(changed)


def bomb(dice: random.Random, content: bytes) -> bytes:
    """Something large: nested without end, a list of millions of values, a number or a text of megabytes."""
    unit = dice.choice(
        ["[", '{"a":', "[],", "{},", "0,", '"",', '{"":0},', "9", '"', "\\ud800", "\U0001f600", "\n", "a\n", " "]
    )
    flood = unit.encode() * (dice.choice((2_000, 200_000, 20_000_000)) // len(unit.encode()))
    place = content.find(b":") + 1 if dice.random() < 0.7 else dice.randint(0, len(content))
    closed = b"[" + flood + b"0]" if unit.endswith(",") else flood
    return content[:place] + closed + content[place:]
