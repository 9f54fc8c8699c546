"""`schedule: auto`: each possible schedule runs a few steps at the start, and the fastest one runs all further steps.

These steps are ordinary training steps: the parameters do not depend on the order of the passes. The only
cost is the additional time of the slower schedules. If the next schedule cuts the model differently, blocks and their optimizer state
first move to other ranks.
"""

import re
import statistics
import time
from collections import defaultdict
from collections.abc import Iterator

import torch
from torch import Tensor

from ttlaunch.runtime.comm.collectives import all_reduce, chain_all_gather
from ttlaunch.runtime.comm.protocol import Communicator
from ttlaunch.runtime.context import RankContext
from ttlaunch.runtime.model.parts import cut_into_parts
from ttlaunch.runtime.parallel.pipeline.grid import PipelineGrid
from ttlaunch.runtime.parallel.pipeline.part import PipelinePart, num_chunks
from ttlaunch.runtime.parallel.pipeline.schedules import ScheduleName
from ttlaunch.runtime.world import Rank
from ttlaunch.spec.recipe.sections import TrainingFile

UNTIMED_STEPS = 1
"""Steps of each schedule before its timed ones, in which memory is allocated and caches are filled."""

TIMED_STEPS = 3
"""Timed steps of each schedule; the median counts."""


class ScheduleChoice:
    """Decides which schedule runs each step.

    Attributes:
        now: The schedule of the next step.
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
        if self._is_open and self._is_reporting and steps > 0:
            ctx.result("schedule", self._undecided(steps))

    def begin_step(self, part: PipelinePart) -> PipelinePart:
        """Return the part of the model that the step's schedule needs: `part`, or a new one to which blocks have moved.

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
        """Continue with the next schedule if this one has been measured; after the last one, with the fastest.

        Every rank of the role must call after each step.

        Cost: after the last measured step a `chain_all_gather` of a number for each schedule, and among replicas and
            among ranks that split a stage an `all_reduce`; else no message.
        Order: measured times are added in the order of the stages, then along the tree of `all_reduce`. All ranks get
            the same sums, so all choose the same schedule.
        """
        if not self._is_open:
            return
        self._steps_s[self.now].append(time.perf_counter() - self._began)
        if len(self._steps_s[self.now]) < UNTIMED_STEPS + TIMED_STEPS:
            return
        index = self._candidates.index(self.now) + 1
        if index < len(self._candidates):
            self.now = self._candidates[index]
            return
        self._is_open = False
        self._choose()

    @property
    def _is_reporting(self) -> bool:
        return self._grid.is_reporting

    def _undecided(self, steps: int) -> str:
        """Return the result of a run that ends before the measurements do; a choice replaces it."""
        each = UNTIMED_STEPS + TIMED_STEPS
        needed = len(self._candidates) * each
        if steps >= needed:
            return f"none was chosen: training ended within the {needed} steps that measuring takes"
        count = f"{steps} step is" if steps == 1 else f"{steps} steps are"
        used = ", then ".join(self._candidates[: -(-steps // each)])
        return f"none was chosen: {count} fewer than the {needed} that measuring takes; {used} ran"

    def _choose(self) -> None:
        """Add up the measurements of all ranks, so that every rank has the same numbers and makes the same choice."""
        mine = [statistics.median(self._steps_s[name][UNTIMED_STEPS:]) for name in self._candidates]
        count, stages = len(mine), self._grid.stages
        found = chain_all_gather(self._ctx, mine, among=stages)
        total = torch.tensor(found, dtype=torch.float64).view(-1, count).sum(0)
        summed = len(stages)
        for others in (self._grid.replicas, self._grid.shares):
            summed *= len(others)
            if len(others) > 1:
                all_reduce(self._ctx, total, among=others)
        # Equal sums on all ranks: ranks that chose by their own times might run different schedules, and hang.
        times_s = (total / summed).tolist()
        self.now = self._candidates[times_s.index(min(times_s))]
        if self._is_reporting:
            measured = ", ".join(
                f"{name} {time_s * 1e3:.1f} ms" for name, time_s in zip(self._candidates, times_s, strict=True)
            )
            self._ctx.note(f"schedule {self.now} is the quickest: {measured} a step")
            self._ctx.result("schedule", self.now)
            for name, time_s in zip(self._candidates, times_s, strict=True):
                self._ctx.result(f"{name}_s", time_s)


def possible_schedules(cfg: TrainingFile) -> list[ScheduleName]:
    """Return the schedule that a configuration asks for; for `auto`, all that its number of chunks allows."""
    pipeline = cfg.multihost_config.pipeline_parallel_config
    assert pipeline is not None  # noqa: S101 - the recipe's checks have passed
    if pipeline.schedule != "auto":
        return [pipeline.schedule]
    return ["gpipe", "1f1b", "interleaved"] if pipeline.chunks_per_rank > 1 else ["gpipe", "1f1b"]


_MOVE = 30_006
_BLOCK = re.compile(r"(?:^|\.)blocks\.(\d+)\.")


@torch.no_grad()
def move_blocks(cfg: TrainingFile, ctx: Communicator, *, old: PipelinePart, new: PipelinePart) -> None:
    """Fill the weights and the optimizer state of `new` from the `old` parts of all ranks of the replica.

    Only blocks change ranks: embedding and head are on the first and the last stage under every schedule.

    Args:
        cfg: The training configuration, with the blocks of each stage.
        ctx: Every rank of the replica must call, between two steps.
        old: The part that this rank has; only read.
        new: The part that this rank will have; built for another number of chunks.

    Cost: one message (float32) for each tensor of a block that changes ranks: for each weight, and for each tensor of
        the optimizer's state, such as AdamW's two moments.
    Order: block by block, then by name, on both ends; nothing is added up, so no bit changes.
    """
    new.model.loss_scaler.take(old.model.loss_scaler.values())
    was, becomes = _ranks_by_block(cfg, old), _ranks_by_block(cfg, new)
    found, wanted = dict(_tensors(old)), dict(_tensors(new))
    for name in found.keys() & wanted.keys():
        wanted[name].copy_(found[name])
    arriving = [
        ctx.irecv(tensor, source=was[_block(name)], tag=_MOVE) for name, tensor in wanted.items() if name not in found
    ]
    sends = [
        ctx.isend(tensor, dest=becomes[_block(name)], tag=_MOVE) for name, tensor in found.items() if name not in wanted
    ]
    # Everything is under way before the first wait, so ranks that swap blocks cannot wait for each other.
    for message in [*arriving, *sends]:
        message.wait()


def _tensors(part: PipelinePart) -> Iterator[tuple[str, Tensor]]:
    """Yield weights and state, block by block, so that two ranks exchange their tensors in the same order."""
    everything = [*part.model.named_parameters(), *part.optimizer.named_state()]
    named = [(name, tensor.detach()) for name, tensor in everything]
    yield from sorted(named, key=lambda pair: (_block(pair[0]), pair[0]))


def _block(name: str) -> int:
    """Return the block that a tensor belongs to; -1 for embedding and head."""
    found = _BLOCK.search(name)
    return int(found[1]) if found else -1


def _ranks_by_block(cfg: TrainingFile, part: PipelinePart) -> dict[int, Rank]:
    pipeline, stages = cfg.multihost_config.pipeline_parallel_config, part.grid.stages
    assert pipeline is not None  # noqa: S101 - there is a part of it
    parts = cut_into_parts(pipeline.blocks, num_chunks=len(part.chunks))
    return {block: stages[index % len(stages)] for index, blocks in enumerate(parts) for block in blocks}
