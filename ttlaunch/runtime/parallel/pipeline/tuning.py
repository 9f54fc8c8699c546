"""`schedule: auto`: each possible schedule runs a few steps at the start, and the quickest one runs the others.

These steps are ordinary training steps: the parameters do not depend on the order of the passes, so nothing is lost but
    the
time by which a step of another schedule is slower.
"""

import statistics
import time
from collections import defaultdict

import torch

from ttlaunch.runtime.comm.collectives import all_reduce, chain_all_gather
from ttlaunch.runtime.context import RankContext
from ttlaunch.runtime.parallel.pipeline.grid import PipelineGrid
from ttlaunch.runtime.parallel.pipeline.move import move_blocks
from ttlaunch.runtime.parallel.pipeline.part import PipelinePart, num_chunks
from ttlaunch.runtime.parallel.pipeline.schedules import ScheduleName
from ttlaunch.spec.recipe.sections import TrainingFile

UNTIMED_STEPS = 1
"""Of each schedule, before its timed ones: memory is allocated and caches are filled."""

TIMED_STEPS = 3
"""Of each schedule; the median counts."""


class ScheduleChoice:
    """Which schedule runs each step.

    Attributes:
        now: The one of the next step.
    """

    def __init__(self, cfg: TrainingFile, ctx: RankContext, grid: PipelineGrid) -> None:
        """Begin with the schedule that is configured, or with the first one to be measured."""
        self._cfg, self._ctx, self._grid = cfg, ctx, grid
        pipeline = cfg.multihost_config.pipeline_parallel_config
        assert pipeline is not None  # noqa: S101 - the recipe's checks have passed
        self._candidates = possible_schedules(cfg)
        self._is_open = pipeline.schedule == "auto"
        self._steps_s: dict[ScheduleName, list[float]] = defaultdict(list)
        self._began = 0.0
        self.now = self._candidates[0]
        steps = ctx.data(cfg).total_steps - ctx.steps_done
        if self._is_open and self._is_telling and steps > 0:
            ctx.result("schedule", self._undecided(steps))

    def begin_step(self, part: PipelinePart) -> PipelinePart:
        """Give the part of the model that the step's schedule needs: this one, or one to which the blocks have moved.

        Every rank of the role must call before each step.

        Cost: where the number of chunks changes, `move_blocks`; else no message.
        Order: as `move_blocks`; nothing is added up.
        """
        if num_chunks(self._cfg, self.now) != len(part.chunks):
            moved = PipelinePart(self._cfg, self._ctx, self._grid, schedule=self.now)
            move_blocks(self._cfg, self._ctx, old=part, new=moved)
            part = moved
        part.schedule = self.now
        self._began = time.perf_counter()
        return part

    def end_step(self) -> None:
        """Go on to the next schedule if this one has been measured, or to the quickest one after the last.

        Every rank of the role must call after each step.

        Cost: after the last measured step a `chain_all_gather` of a number for each schedule, and among replicas and
            among ranks that split a stage an `all_reduce`; else no message.
        Order: of the measured times that of the stages, then the tree of `all_reduce`: all ranks see the same sums, so
            all choose alike.
        """
        if not self._is_open:
            return
        self._steps_s[self.now].append(time.perf_counter() - self._began)
        if len(self._steps_s[self.now]) < UNTIMED_STEPS + TIMED_STEPS:
            return
        at = self._candidates.index(self.now) + 1
        if at < len(self._candidates):
            self.now = self._candidates[at]
            return
        self._is_open = False
        self._choose()

    @property
    def _is_telling(self) -> bool:
        return self._grid.is_reporting

    def _undecided(self, steps: int) -> str:
        """What to say of a run that ends before the last measured step; a choice takes its place."""
        each = UNTIMED_STEPS + TIMED_STEPS
        needed = len(self._candidates) * each
        if steps >= needed:
            return f"none was chosen: training ended within the {needed} steps that measuring takes"
        count = f"{steps} step is" if steps == 1 else f"{steps} steps are"
        used = ", then ".join(self._candidates[: -(-steps // each)])
        return f"none was chosen: {count} fewer than the {needed} that measuring takes; {used} ran"

    def _choose(self) -> None:
        """Add up what all ranks have measured: the same numbers everywhere, hence the same choice."""
        mine = [statistics.median(self._steps_s[name][UNTIMED_STEPS:]) for name in self._candidates]
        count, stages = len(mine), self._grid.stages
        found = chain_all_gather(self._ctx, mine, among=stages)
        total = torch.tensor(found, dtype=torch.float64).view(-1, count).sum(0)
        summed = len(stages)
        for others in (self._grid.replicas, self._grid.shares):
            summed *= len(others)
            if len(others) > 1:
                all_reduce(self._ctx, total, among=others)
        times_s = (total / summed).tolist()
        self.now = self._candidates[times_s.index(min(times_s))]
        if self._is_telling:
            measured = ", ".join(
                f"{name} {time_s * 1e3:.1f} ms" for name, time_s in zip(self._candidates, times_s, strict=True)
            )
            self._ctx.note(f"schedule {self.now} is the quickest: {measured} a step")
            self._ctx.result("schedule", self.now)
            for name, time_s in zip(self._candidates, times_s, strict=True):
                self._ctx.result(f"{name}_s", time_s)


def possible_schedules(cfg: TrainingFile) -> list[ScheduleName]:
    """The schedule that a configuration asks for; for `auto`, all that its number of chunks allows."""
    pipeline = cfg.multihost_config.pipeline_parallel_config
    assert pipeline is not None  # noqa: S101 - the recipe's checks have passed
    if pipeline.schedule != "auto":
        return [pipeline.schedule]
    return ["gpipe", "1f1b", "interleaved"] if pipeline.chunks_per_rank > 1 else ["gpipe", "1f1b"]
