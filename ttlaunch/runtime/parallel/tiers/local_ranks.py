"""The ranks of one worker, one for each of its devices: what they share, and which of them sends to the aggregator.

With `device_config.enable_ddp`, `enable_tp` or both a worker has as many ranks as `mesh_shape` has devices, else one.
The picture shows the ranks of a worker as a grid of rows:

    enable_tp, [1, 2]:  0 1      enable_ddp, [1, 2]:  0      both, [2, 2]:  0 1
                                                      1                     2 3

Rows split the worker's micro-batches; the ranks of a row split the model, and compute each of the row's micro-batches
together. Rows have consecutive blocks of micro-batches. The first row adds the sums of the other rows to its own along the
tree, so the bits are those of the same number of workers with one row each.

Shapes: V = micro-batches of a validation.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ttlaunch.runtime.comm.agreement import agree
from ttlaunch.runtime.comm.reduction import contiguous_blocks
from ttlaunch.runtime.context import RankContext
from ttlaunch.runtime.model.model import Model
from ttlaunch.runtime.parallel.tensor.share import ModelShare, share_of
from ttlaunch.runtime.parallel.tiers.gradient_aggregator import GradientAggregator
from ttlaunch.runtime.parallel.tiers.split_gradient_aggregator import SplitGradientAggregator
from ttlaunch.runtime.telemetry.traffic_counter import operation
from ttlaunch.runtime.training.validation import validation_losses
from ttlaunch.runtime.world import Rank
from ttlaunch.spec.recipe.sections import TrainingFile


@dataclass(frozen=True)
class WorkerGroup:
    """One worker.

    Attributes:
        rows: Its ranks; the ranks of a row split a model.
        blocks: The micro-batches of a step that each row computes.
    """

    rows: Sequence[Sequence[Rank]]
    blocks: Sequence[range]

    @property
    def first(self) -> Rank:
        """The rank that sends losses to the aggregator."""
        return self.rows[0][0]

    @property
    def block(self) -> range:
        """The micro-batches of all rows of the worker."""
        return range(self.blocks[0].start, self.blocks[-1].stop)

    def block_of(self, rank: Rank) -> range:
        """Return the micro-batches of a rank's row."""
        return next(block for row, block in zip(self.rows, self.blocks, strict=True) if rank in row)

    def row_of(self, rank: Rank) -> Sequence[Rank]:
        """Return the ranks that split a model with this rank, itself included."""
        return next(row for row in self.rows if rank in row)

    def server_of(self, rank: Rank, *, aggregator: Rank) -> Rank:
        """Return the rank to which a rank sends its sums: for the first row the aggregator, for other rows the rank of the first row in its column."""
        return aggregator if rank in self.rows[0] else self.rows[0][self.row_of(rank).index(rank)]

    def members_of(self, rank: Rank) -> dict[Rank, range]:
        """Return the ranks whose sums a rank adds to its own, with their blocks: its column below, if it is in the first row."""
        if rank not in self.rows[0]:
            return {}
        column = self.rows[0].index(rank)
        return {row[column]: block for row, block in zip(self.rows[1:], self.blocks[1:], strict=True)}

    def share_of(self, ctx: RankContext) -> ModelShare | None:
        """Return this rank's share of the model; None if it has the whole model."""
        return share_of(ctx, self.row_of(ctx.rank))


def worker_groups(cfg: TrainingFile, ctx: RankContext) -> list[WorkerGroup]:
    """Return all workers, in the order of their ranks."""
    workers, device = ctx.ranks("worker"), cfg.device_config
    rows = [workers[start : start + device.split_ranks] for start in range(0, len(workers), device.split_ranks)]
    blocks = contiguous_blocks(cfg.training_config.micro_batches, len(rows))
    height = device.local_ranks // device.split_ranks
    starts = range(0, len(rows), height)
    return [WorkerGroup(rows[start : start + height], blocks[start : start + height]) for start in starts]


def own_group(cfg: TrainingFile, ctx: RankContext) -> WorkerGroup:
    """Return the worker that this rank belongs to."""
    return next(group for group in worker_groups(cfg, ctx) for row in group.rows if ctx.rank in row)


def ranks_of_share(cfg: TrainingFile, ctx: RankContext) -> tuple[Rank, ...]:
    """Return the worker ranks that have this rank's share of the model; together they compute each micro-batch once."""
    workers, width = ctx.ranks("worker"), cfg.device_config.split_ranks
    return workers[workers.index(ctx.rank) % width :: width]


def build_aggregator(cfg: TrainingFile, ctx: RankContext, model: Model) -> GradientAggregator | SplitGradientAggregator:
    """Build the aggregator of the workers' gradients, of the whole model or, where ranks split it, of its shares."""
    groups, width = worker_groups(cfg, ctx), cfg.device_config.split_ranks
    followers, size = ctx.ranks("optimizer"), cfg.multihost_config.bucket_megabytes
    if width > 1:
        blocks = [{group.rows[0][place]: group.block for group in groups} for place in range(width)]
        return SplitGradientAggregator(cfg, model, ctx=ctx, workers=blocks, followers=followers)
    return GradientAggregator(
        model.parameters(),
        ctx=ctx,
        workers={group.first: group.block for group in groups},
        bucket_megabytes=size,
        followers=followers,
        shared=model.loss_scaler,
    )


def send_validation(cfg: TrainingFile, ctx: RankContext, model: Model, *, dest: Rank) -> None:
    """Evaluate this rank's share of a validation, send its losses and its members' to `dest`, and wait for the decision.

    All ranks of a row know its losses, and the first of them sends them.

    Args:
        cfg: The training configuration.
        ctx: Every worker rank must call, after the same step.
        model: The whole model, or the rank's share.
        dest: The rank that takes this rank's sums.

    Cost: from the first rank of each row one message of 8 bytes (float64) for each micro-batch of its share and its
        members'; an `agree` back.
    Order: the losses are sent one by one, in the order of the micro-batches, and added up only where they are reported.
    """
    sharers, group = ranks_of_share(cfg, ctx), own_group(cfg, ctx)
    count, row, members = ctx.data(cfg).validation_micro_batches, group.row_of(ctx.rank), group.members_of(ctx.rank)
    shares = dict(zip(sharers, contiguous_blocks(count, len(sharers)), strict=True))
    parts = [validation_losses(cfg, ctx, model, among=sharers)]
    if ctx.rank != row[0]:
        agree(ctx, ctx.early_stop, source=row[0])
        return
    with operation(ctx, "validation"):
        for member in members:
            parts.append(torch.empty(len(shares[member]), dtype=torch.float64))
            ctx.recv(parts[-1], source=member)
        ctx.send(torch.cat(parts), dest=dest)
    agree(ctx, ctx.early_stop, source=dest, dests=[*members, *row[1:]])


def receive_validation(cfg: TrainingFile, ctx: RankContext, step: int) -> None:
    """Report the mean of the losses that workers send after `step`, and send them the decision whether training continues.

    Args:
        cfg: The training configuration.
        ctx: Only the rank that aggregates calls it.
        step: The step just done.

    Cost: from each worker one message of 8 bytes (float64) for each micro-batch of its share; an `agree` to workers and
        optimizer.
    Order: losses are added in the order of the micro-batches: the same bits for any number of workers.
    """
    data, groups = ctx.data(cfg), worker_groups(cfg, ctx)
    losses_V = torch.empty(data.validation_micro_batches, dtype=torch.float64)
    shares = iter(contiguous_blocks(len(losses_V), sum(len(group.rows) for group in groups)))
    with operation(ctx, "validation"):
        for group in groups:
            first, *_, last = [share for _ in group.rows for share in [next(shares)] * 2]
            ctx.recv(losses_V[first.start : last.stop], source=group.first)
    ctx.report_validation(step, losses_V.tolist(), tokens=data.validation_tokens)
    agree(ctx, ctx.early_stop, dests=(*(group.first for group in groups), *ctx.ranks("optimizer")))
