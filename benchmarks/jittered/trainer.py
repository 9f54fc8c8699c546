"""A recipe whose steps take now longer and now shorter: `benchmarks/staleness.py` puts this in the place of its trainer.

Every worker sleeps before it computes a step, for so many seconds times a factor between 1 and 3 that depends on seed, worker
and step alone. So all bounds are measured with the same delays, and a sleep is no waiting in the telemetry.
"""

import json
import random
import time
from collections.abc import Iterator
from pathlib import Path

from ttlaunch.train import RankContext

from . import undisturbed
from .recipe import Config

JITTER = json.loads((Path(__file__).parent / "jitter.json").read_text(encoding="utf-8"))


def trainer(cfg: Config, ctx: RankContext) -> None:
    """One process is left alone."""
    undisturbed.trainer(cfg, ctx)


def worker(cfg: Config, ctx: RankContext) -> None:
    """The recipe's own worker, which is given its steps late."""
    steps = ctx.steps

    def late(cfg: Config) -> Iterator[int]:
        for step in steps(cfg):
            factor = random.Random(f"{JITTER['seed']} {ctx.rank} {step}").uniform(1, 3)  # noqa: S311  not for secrets
            time.sleep(JITTER["seconds"] * factor)
            yield step

    ctx.steps = late  # type: ignore[method-assign]  this instance's alone
    undisturbed.worker(cfg, ctx)
