"""A recipe whose workers print, and time their steps and writes: `benchmarks/sink_blocks.py` puts this in the place of its trainer.

Each worker prints some lines after every step. Into `times-RANK.jsonl` beside this file go, for each step: when it began and ended,
the processor time of the process, for how long its main thread waited for a core, how many writes there were, and how long they and
the longest of them took: lines to the shim's pipe, and records to the run's folder.
"""

import json
import os
import time
from collections.abc import Iterator
from pathlib import Path

from ttlaunch.train import RankContext

from . import undisturbed
from .recipe import Config

HERE = Path(__file__).parent
LINES = int((HERE / "lines.txt").read_text(encoding="utf-8"))


def trainer(cfg: Config, ctx: RankContext) -> None:
    """One process is left alone."""
    undisturbed.trainer(cfg, ctx)


def worker(cfg: Config, ctx: RankContext) -> None:
    """The recipe's own worker, whose steps and writes are timed."""
    steps, writes = ctx.steps, _Writes()
    file = (HERE / f"times-{ctx.rank}.jsonl").open("w", buffering=1 << 16, encoding="utf-8")

    def timed(cfg: Config) -> Iterator[int]:
        for step in steps(cfg):
            begin, spent_s, waited_s = time.time(), time.process_time(), _waited_s()
            yield step
            for line in range(LINES):
                writes.print(f"12:00:00 | worker | INFO | rank {ctx.rank}, step {step}, line {line}: all is well")
            values = [begin, time.time(), time.process_time() - spent_s, _waited_s() - waited_s, *writes.take()]
            file.write(json.dumps([step, *values]) + "\n")

    ctx.steps = timed  # type: ignore[method-assign]  this instance's alone
    with file:
        undisturbed.worker(cfg, ctx)


def _waited_s() -> float:
    """For how long the main thread could have gone on and had no core."""
    return int(Path("/proc/self/schedstat").read_text(encoding="ascii").split()[1]) / 1e9


class _Writes:
    """How long the writes of this process take."""

    def __init__(self) -> None:
        self._times: list[float] = []
        self._write = os.write
        os.write = self._timed  # type: ignore[assignment]  the writer of records looks it up at each call

    def _timed(self, descriptor: int, data: bytes) -> int:
        began = time.perf_counter()
        try:
            return self._write(descriptor, data)
        finally:
            self._times.append(time.perf_counter() - began)

    def print(self, line: str) -> None:
        began = time.perf_counter()
        print(line, flush=True)
        self._times.append(time.perf_counter() - began)

    def take(self) -> tuple[int, float, float]:
        """Return how many writes there were since the last call, how long they took together, and the longest."""
        times, self._times = self._times, []
        return len(times), sum(times), max(times, default=0.0)
