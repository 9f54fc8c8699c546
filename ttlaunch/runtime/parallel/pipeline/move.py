"""Blocks change ranks, with all that the optimizer knows of them, when a schedule needs them elsewhere.

Embedding and head are on the first and the last stage under every schedule, so only blocks move.
"""

import re
from collections.abc import Iterator

import torch
from torch import Tensor

from ttlaunch.runtime.comm.protocol import Communicator
from ttlaunch.runtime.model.parts import cut_into_parts
from ttlaunch.runtime.parallel.pipeline.part import PipelinePart
from ttlaunch.runtime.world import Rank
from ttlaunch.spec.recipe.sections import TrainingFile

_MOVE = 30_006
_BLOCK = re.compile(r"(?:^|\.)blocks\.(\d+)\.")


@torch.no_grad()
def move_blocks(cfg: TrainingFile, ctx: Communicator, *, old: PipelinePart, new: PipelinePart) -> None:
    """Fill the weights and the optimizer state of `new` with those that some rank's `old` has.

    Args:
        cfg: Blocks of each stage.
        ctx: Every rank of the replica must call, between two steps.
        old: What this rank has; only read.
        new: What it is to have; built for another number of chunks.

    Cost: one message of its bytes (float32) for each tensor of a block that changes ranks: weights, and two such of
        AdamW's state.
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
    for message in [*arriving, *sends]:
        message.wait()


def _tensors(part: PipelinePart) -> Iterator[tuple[str, Tensor]]:
    """Weights and state, block by block, so that two ranks name what they exchange in the same order."""
    everything = [*part.model.named_parameters(), *part.optimizer.named_state()]
    named = [(name, tensor.detach()) for name, tensor in everything]
    yield from sorted(named, key=lambda pair: (_block(pair[0]), pair[0]))


def _block(name: str) -> int:
    """The block that a tensor belongs to; -1 for embedding and head."""
    found = _BLOCK.search(name)
    return int(found[1]) if found else -1


def _ranks_by_block(cfg: TrainingFile, part: PipelinePart) -> dict[int, Rank]:
    pipeline, stages = cfg.multihost_config.pipeline_parallel_config, part.grid.stages
    assert pipeline is not None  # noqa: S101 - there is a part of it
    parts = cut_into_parts(pipeline.blocks, num_chunks=len(part.chunks))
    return {block: stages[at % len(stages)] for at, blocks in enumerate(parts) for block in blocks}
