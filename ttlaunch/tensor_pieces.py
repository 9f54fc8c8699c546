"""How a checkpoint names rows of a tensor whose other rows another rank has: `head.output.weight[64:128/256]`.

The numbers are the first row, the one after the last, and how many rows the whole tensor has. Ranks write such names and
find their rows among them; the launcher joins the pieces again.
"""

from __future__ import annotations

import re
from typing import NamedTuple

_PIECE = re.compile(r"(?P<name>.+)\[(?P<start>[0-9]+):(?P<stop>[0-9]+)/(?P<total>[0-9]+)\]\Z")


class Rows(NamedTuple):
    """Rows `start` to `stop - 1` of the `total` that a tensor has along its first dimension."""

    start: int
    stop: int
    total: int


def piece_name(name: str, rows: Rows) -> str:
    """What these rows of a tensor are called in a file.

    >>> piece_name("head.norm.weight", Rows(0, 8, 16))
    'head.norm.weight[0:8/16]'
    """
    return f"{name}[{rows.start}:{rows.stop}/{rows.total}]"


def parse_piece(key: str) -> tuple[str, Rows | None]:
    """The tensor that a name in a file is about, and which rows of it; None: all.

    >>> parse_piece("head.norm.weight[0:8/16]")
    ('head.norm.weight', Rows(start=0, stop=8, total=16))
    >>> parse_piece("head.norm.weight")
    ('head.norm.weight', None)
    """
    match = _PIECE.match(key)
    if match is None:
        return key, None
    return match["name"], Rows(int(match["start"]), int(match["stop"]), int(match["total"]))
