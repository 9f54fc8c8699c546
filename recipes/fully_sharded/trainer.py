"""Fully sharded data parallelism: each worker has a shard of weights, gradients and optimizer state, and a part of the step.

    rows of block 3 --> all workers gather block 3, compute, free it --> rows of block 4 --> ...     forward
    all workers gather block 4, differentiate, free it --> each keeps the sum of its own rows        backward

Each of n workers keeps 1/n of everything: with AdamW 16/n bytes for each parameter instead of 16. The price is traffic. Data
parallelism moves 2(n - 1)/n of the weights' size S in and out of each worker in a step. This recipe moves (n - 1)/n of S for the
gradients, and the same again each time that weights are gathered. With `shard: optimizer+gradients` that is once in a step, because
gathered weights stay until the last backward pass; with `shard: all` it is twice for each micro-batch. With `replicas`, each
replica is a group of workers that divide one model among them, and gradients are added up over the replicas.

This is torch's FSDP2 over gloo, or NCCL on CUDA devices. It adds in an order that depends on the number of workers, so the
loss is that of one process up to rounding. The optimizer, the norm, checkpoints and telemetry are ours: a checkpoint has the
rows of each worker, and any layout of any recipe can resume from it.

    ttlaunch run fully_sharded
    ttlaunch run fully_sharded --on 5loudboxes -c train.yaml

Shapes: B = sequences in a micro-batch, T = tokens in a sequence, V = micro-batches of a validation.
Source: Y. Zhao et al., "PyTorch FSDP: Experiences on Scaling Fully Sharded Data Parallel", VLDB 2023.
"""

from functools import partial

import torch
from torch import Tensor

from ttlaunch.train import (
    RankContext,
    ShardedModel,
    Shards,
    TrainingLoop,
    all_reduce,
    build_optimizer,
    contiguous_blocks,
    differentiate,
    global_norm,
    in_step,
    mean_per_token,
    micro_batches,
    process_group,
    shard_model,
    share_validation,
    train_in_one_process,
    validation_losses,
)

from .recipe import Config


def trainer(cfg: Config, ctx: RankContext) -> None:
    """One process has everything: the reference whose losses the workers' equal up to rounding."""
    train_in_one_process(cfg, ctx)


def worker(cfg: Config, ctx: RankContext) -> None:
    """Differentiate a contiguous block of each step's micro-batches, keep a part of the mean, update it."""
    workers, sharing = ctx.ranks("worker"), cfg.fully_sharded_config
    keeps_weights, is_first = sharing.shard != "all", ctx.position("worker") == 0
    with process_group(ctx, among=workers, device=ctx.device):
        model, shards = shard_model(cfg, ctx, among=workers, replicas=sharing.replicas, keeps_weights=keeps_weights)
        optimizer = build_optimizer(cfg, shards, total_steps=ctx.data(cfg).total_steps)
        ctx.restore(shards, optimizer)
        passes = len(contiguous_blocks(ctx.data(cfg).validation_micro_batches, len(workers))[0])

        def evaluate() -> Tensor:
            losses = validation_losses(cfg, ctx, model, among=workers, passes=passes)  # as many as the others make
            model.free()
            return losses

        loop = TrainingLoop(
            cfg,
            ctx,
            validate=partial(share_validation, cfg, ctx, among=workers, evaluate=evaluate),
            reports=is_first,
            norms=shards if is_first else None,
            saved=(shards, optimizer),
            owners=workers[: len(shards.peers)],  # the first replica's; all replicas hold the same
        )
        for step in loop.steps():
            loss, tokens = _mean_gradient(cfg, ctx, step, model=model, shards=shards)
            norm = global_norm(shards.squared_norms(ctx))  # the same on every worker
            rate = optimizer.step(step, norm=norm)
            loop.end_step(step, loss=loss, tokens=tokens, grad_norm=norm, learning_rate=rate)
        kept = shards.persistent_bytes(optimizer) / shards.values_of_whole
        ctx.result(f"bytes a parameter, rank {ctx.rank}", round(kept, 4))
        ctx.report_parameters(shards.whole_parameters())


def _mean_gradient(
    cfg: Config, ctx: RankContext, step: int, *, model: ShardedModel, shards: Shards
) -> tuple[float, int]:
    """Leave this worker's rows of the gradient of the mean loss in its shards; they are added once in a step."""
    workers = ctx.ranks("worker")
    passes = len(contiguous_blocks(cfg.training_config.micro_batches, len(workers))[0])
    own = micro_batches(cfg, ctx, step, among=workers)
    batches = in_step(own, passes=passes, any_batch=lambda: next(micro_batches(cfg, ctx, step)))
    seen = torch.zeros(2, dtype=torch.float64)  # summed loss, tokens
    for done, (index, x_BT, y_BT) in enumerate(batches, start=1):
        model.synchronises(is_last=done == passes)
        seen += torch.tensor(differentiate(model, x_BT, y_BT, masks=model.masks(step, index)), dtype=seen.dtype)
    all_reduce(ctx, seen, among=workers)
    loss, tokens = seen.tolist()
    shards.take_gradients().div_(max(1.0, tokens))
    return mean_per_token(loss, int(tokens)), int(tokens)
