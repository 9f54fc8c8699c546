"""The ranks of one worker, one for each of its devices: the first talks to the aggregator, the others to the first.

With `device_config.enable_ddp` a worker has as many ranks as `mesh_shape` has devices, else one. Ranks of a worker
follow each other, and so do their blocks of micro-batches: the first adds the others' sums to its own along the tree, and
the bits are those of as many workers of one rank.

Shapes: V = micro-batches of a validation.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from ttlaunch.recipe import TrainingFile
from ttlaunch.runtime.books.ledger import operation
from ttlaunch.runtime.collectives.agreement import agree
from ttlaunch.runtime.collectives.reduction import contiguous_blocks
from ttlaunch.runtime.context import RankContext
from ttlaunch.runtime.model.model import Model
from ttlaunch.runtime.tiers.gradient_hub import GradientHub
from ttlaunch.runtime.training.validation import validation_losses
from ttlaunch.runtime.world import Rank


@dataclass(frozen=True)
class WorkerGroup:
    """One worker.

    Attributes:
        blocks: Micro-batches of a step of each of its ranks, in their order.
    """

    blocks: Mapping[Rank, range]

    @property
    def first(self) -> Rank:
        """The rank that talks to the aggregator."""
        return next(iter(self.blocks))

    @property
    def block(self) -> range:
        """Micro-batches of all its ranks."""
        blocks = list(self.blocks.values())
        return range(blocks[0].start, blocks[-1].stop)

    def members_of(self, rank: Rank) -> dict[Rank, range]:
        """The ranks whose sums a rank adds to its own: all others for the first, none for them."""
        return {other: block for other, block in self.blocks.items() if rank == self.first != other}


def worker_groups(cfg: TrainingFile, ctx: RankContext) -> list[WorkerGroup]:
    """All workers, in the order of their ranks."""
    workers, size = ctx.ranks("worker"), cfg.device_config.local_ranks
    blocks = contiguous_blocks(cfg.training_config.micro_batches, len(workers))
    pairs = list(zip(workers, blocks, strict=True))
    return [WorkerGroup(dict(pairs[at : at + size])) for at in range(0, len(pairs), size)]


def build_hub(cfg: TrainingFile, ctx: RankContext, model: Model) -> GradientHub:
    """Where the first rank of each worker brings the sums of its block of micro-batches; for the rank that aggregates."""
    return GradientHub(
        model.parameters(),
        ctx=ctx,
        workers={group.first: group.block for group in worker_groups(cfg, ctx)},
        bucket_megabytes=cfg.multihost_config.bucket_megabytes,
        followers=ctx.ranks("optimizer"),
        shared=model.loss_scaler,
    )


def own_group(cfg: TrainingFile, ctx: RankContext) -> WorkerGroup:
    """The worker that this rank is of."""
    return next(group for group in worker_groups(cfg, ctx) if ctx.rank in group.blocks)


def send_validation(cfg: TrainingFile, ctx: RankContext, model: Model, *, dest: Rank) -> None:
    """Evaluate this rank's share of a validation, send the losses up with those of its members, hear if training goes on.

    Args:
        cfg: Sizes.
        ctx: Every worker rank must call, after the same step.
        model: All of it.
        dest: Of the losses: for the first rank of a worker the aggregator, for the others the first.
    """
    workers, group = ctx.ranks("worker"), own_group(cfg, ctx)
    shares = dict(zip(workers, contiguous_blocks(ctx.data(cfg).validation_micro_batches, len(workers)), strict=True))
    parts = [validation_losses(cfg, ctx, model, among=workers)]
    with operation(ctx, "validation"):
        for member in group.members_of(ctx.rank):
            parts.append(torch.empty(len(shares[member]), dtype=torch.float64))
            ctx.recv(parts[-1], source=member)
        ctx.send(torch.cat(parts), dest=dest)
    agree(ctx, ctx.early_stop, source=dest, dests=list(group.members_of(ctx.rank)))


def receive_validation(cfg: TrainingFile, ctx: RankContext, *, step: int) -> None:
    """Report the mean of what all workers send after `step`, in the order of the micro-batches; say if training goes on."""
    workers, data, groups = ctx.ranks("worker"), ctx.data(cfg), worker_groups(cfg, ctx)
    losses_V = torch.empty(data.validation_micro_batches, dtype=torch.float64)
    shares = dict(zip(workers, contiguous_blocks(len(losses_V), len(workers)), strict=True))
    with operation(ctx, "validation"):
        for group in groups:
            first, *_, last = [shares[rank] for rank in group.blocks for _ in range(2)]
            ctx.recv(losses_V[first.start : last.stop], source=group.first)
    ctx.report_validation(step, losses_V.tolist(), tokens=data.validation_tokens)
    agree(ctx, ctx.early_stop, dests=(*(group.first for group in groups), *ctx.ranks("optimizer")))
