"""What `benchmarks/hangs.py` has ordered: who gets stuck, how, and when. Standard library only.

A line that is to be named ends with a comment `# stuck: NAME`, or `# stuck: NAME, beside` on the other side of the same mistake.
"""

import json
import os
import time
from pathlib import Path
from typing import NamedTuple

LONG_S = 10_000.0


class Order(NamedTuple):
    """Read from `order.json` in the working folder.

    Attributes:
        hang: Its name.
        rank: Who gets stuck.
        step: When.
        steps: How long the run is, if nobody does.
        pace: Seconds that a step takes, rank by rank; of false alarms.
    """

    hang: str
    rank: int
    step: int
    steps: int
    pace: list[float]


def read_order() -> Order:
    """Of this run."""
    return Order(**json.loads(Path("order.json").read_text()))


def note_begin() -> None:
    """Leave word that the hang begins now."""
    part = Path(f"begun-{os.getpid()}")
    part.write_text(repr(time.time()))
    part.rename("begun")
