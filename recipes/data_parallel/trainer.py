"""Data parallelism: every worker has the whole model and a part of each step's micro-batches.

    worker 0 <-- shard 0 of every gradient --> worker 1 <-- ... --> worker W-1      each worker adds up one shard
    worker 0 <-- finished shards ------------> worker 1 <-- ... --> worker W-1      and gets the other shards

An all-reduce moves 2(W - 1)/W of the weights' size S in and out of every worker, whatever W is, so no worker is a bottleneck.
The price is memory: every worker has weights, gradients and optimizer state, 16 bytes a parameter with AdamW.

With `reduction: canonical` workers add gradients along one tree over the micro-batches, an order of our own, so any number of them
trains to the bits of one process. A worker with several nodes of the tree sends its shards once for each. With `reduction: fast`
torch's DistributedDataParallel adds gradients while the backward pass still runs, in an order that depends on W.

    ttlaunch run data_parallel
    ttlaunch run data_parallel --on 5loudboxes -c train.yaml

Shapes: N = values of all parameters in one flat vector, B = sequences in a micro-batch, T = tokens in a sequence.
Source: S. Li et al., "PyTorch Distributed: Experiences on Accelerating Data Parallel Training", VLDB 2020, for `fast`.
"""

from collections.abc import Callable, Iterable
from contextlib import nullcontext
from functools import partial

import torch
from torch.nn.parallel import DistributedDataParallel

from ttlaunch.train import (
    CompressedExchange,
    ElasticExchange,
    GradientExchange,
    MicroBatch,
    Model,
    RankContext,
    TrainingLoop,
    all_reduce,
    build_model,
    build_optimizer,
    contiguous_blocks,
    differentiate,
    differentiated,
    global_norm,
    mean_per_token,
    micro_batches,
    process_group,
    replicate,
    train_in_one_process,
    validate_together,
)

from .recipe import Config

Exchange = GradientExchange | ElasticExchange | CompressedExchange


def trainer(cfg: Config, ctx: RankContext) -> None:
    """One process has all micro-batches: the reference that the workers equal, bit for bit."""
    train_in_one_process(cfg, ctx)


def worker(cfg: Config, ctx: RankContext) -> None:
    """Differentiate a contiguous block of each step's micro-batches, agree on the mean, update."""
    workers, is_first = ctx.ranks("worker"), ctx.position("worker") == 0  # in an elastic run the loop knows who reports
    model = build_model(cfg, ctx)  # drawn from the seed: equal everywhere, so nothing is sent
    optimizer = build_optimizer(cfg, model, total_steps=ctx.data(cfg).total_steps)
    exchange = _exchange(cfg, ctx, model)
    is_fast = cfg.data_parallel_config.reduction == "fast"
    ctx.restore(model, exchange.saved_with(optimizer) if isinstance(exchange, CompressedExchange) else optimizer)
    loop = TrainingLoop(
        cfg,
        ctx,
        validate=partial(validate_together, cfg, ctx, model=model),
        reports=is_first,
        norms=optimizer if is_first else None,
        saved=None if isinstance(exchange, CompressedExchange) else (model, optimizer),
        owners=workers[:1],  # all workers hold the same
    )
    with process_group(ctx, among=workers, device=ctx.device) if is_fast else nullcontext():
        replica = replicate(ctx, model, among=workers) if is_fast else None
        for step in loop.steps():
            if replica is None:
                loss, tokens = _mean_gradient(cfg, ctx, step, model=model, exchange=exchange)
            else:
                loss, tokens = _fast_mean_gradient(cfg, ctx, step, model=model, replica=replica)
            norm = global_norm(optimizer.squared_norms())  # of the mean, so the same on every worker
            rate = optimizer.step(step, norm=norm)
            loop.end_step(step, loss=loss, tokens=tokens, grad_norm=norm, learning_rate=rate)
            if isinstance(exchange, CompressedExchange):
                exchange.checkpoint(step)  # the weights once, and what each worker still owes
    ctx.report_parameters(model.named_parameters())


def _exchange(cfg: Config, ctx: RankContext, model: Model) -> Exchange:
    """All make the mean of the workers' sums: along the tree, also while workers come and go, or of what codecs leave of the sums."""
    workers, count = ctx.ranks("worker"), cfg.training_config.micro_batches
    if cfg.compression_config.kind != "none":
        return CompressedExchange(model, cfg=cfg.compression_config, ctx=ctx, among=workers, micro_batches=count)
    exchange = GradientExchange if ctx.elastic is None else ElasticExchange
    megabytes = cfg.multihost_config.bucket_megabytes
    return exchange(model.parameters(), ctx=ctx, among=workers, micro_batches=count, bucket_megabytes=megabytes)


def _mean_gradient(cfg: Config, ctx: RankContext, step: int, *, model: Model, exchange: Exchange) -> tuple[float, int]:
    """Leave the gradient of the mean loss in `grads_N`; buckets travel while the last micro-batch is differentiated."""

    def compute(batch: MicroBatch, before: Callable[..., None] | None) -> tuple[float, int]:
        index, x_BT, y_BT = batch
        return differentiate(model, x_BT, y_BT, masks=model.masks(step, index), before_backward=before)

    def enter(indices: Iterable[int]) -> None:
        passes = differentiated(cfg, ctx, step, model, compute, indices=indices, expect=exchange.expect)
        for index, loss, tokens in passes:
            exchange.accumulate(index, tokens=tokens, loss=loss)

    return exchange.mean(step, enter)


def _fast_mean_gradient(
    cfg: Config, ctx: RankContext, step: int, *, model: Model, replica: DistributedDataParallel
) -> tuple[float, int]:
    """The same up to rounding; the replica adds up with its buckets, only while the last micro-batch is differentiated."""
    workers = ctx.ranks("worker")
    last = contiguous_blocks(cfg.training_config.micro_batches, len(workers))[ctx.position("worker")][-1]
    seen = torch.zeros(2, dtype=torch.float64)  # summed loss, tokens
    for index, x_BT, y_BT in micro_batches(cfg, ctx, step, among=workers):
        with nullcontext() if index == last else replica.no_sync():
            seen += torch.tensor(differentiate(replica, x_BT, y_BT, masks=model.masks(step, index)), dtype=seen.dtype)
    all_reduce(ctx, seen, among=workers)
    loss, tokens = seen.tolist()
    model.take_gradients().mul_(len(workers) / max(1.0, tokens))  # the replica divides by the number of workers
    return mean_per_token(loss, int(tokens)), int(tokens)
