"""Data parallelism: every worker has the whole model and a part of each step's micro-batches.

    worker 0 <-- shard 0 of every gradient --> worker 1 <-- ... --> worker W-1      everybody adds up one shard
    worker 0 <-- finished shards ------------> worker 1 <-- ... --> worker W-1      and gets the others' back

An all-reduce moves 2(W - 1)/W of the weights' size S in and out of every worker, whatever W is: no worker is a bottleneck,
as the aggregator of `hierarchical_parallel` is. The price is memory: each worker keeps weights, gradients and optimizer
state, 16 bytes a parameter with AdamW, and all of them make the same update.

With `reduction: canonical` gradients are added along one tree over the micro-batches, so any number of workers trains to
the bits of one process. Where W does not divide their number into powers of two, a worker has several nodes of the
tree and sends its shards once for each. With `reduction: fast`, torch's DistributedDataParallel adds them, in an order
that depends on W, while the backward pass of the last micro-batch still runs.

    ttlaunch run data_parallel
    ttlaunch run data_parallel --on 5loudboxes -c train.yaml

Shapes: N = values of all parameters in one flat vector, B = sequences in a micro-batch, T = tokens in a sequence,
V = micro-batches of a validation.
Source: S. Li et al., "PyTorch Distributed: Experiences on Accelerating Data Parallel Training", VLDB 2020, for the idea
and for `fast`; the order of sums in `canonical` is our own.
"""

from contextlib import ExitStack, nullcontext
from functools import partial

import torch
from torch.nn.parallel import DistributedDataParallel

from ttlaunch.train import (
    CompressedExchange,
    GradientExchange,
    Model,
    RankContext,
    all_gather,
    all_reduce,
    build_model,
    build_optimizer,
    contiguous_blocks,
    differentiate,
    global_norm,
    mean_per_token,
    micro_batches,
    process_group,
    replicate,
    report_layer_norms,
    train_in_one_process,
    validation_is_due,
    validation_losses,
)

from .recipe import Config


def trainer(cfg: Config, ctx: RankContext) -> None:
    """One process has all micro-batches: the reference that the workers equal, bit for bit."""
    train_in_one_process(cfg, ctx)


def worker(cfg: Config, ctx: RankContext) -> None:
    """Differentiate a contiguous block of each step's micro-batches, agree on the mean, update."""
    workers = ctx.ranks("worker")
    model = build_model(cfg, ctx)  # drawn from the seed: equal everywhere, so nothing is sent
    optimizer = build_optimizer(cfg, model, total_steps=ctx.data(cfg).total_steps)
    exchange = _exchange(cfg, ctx, model)
    ctx.restore(model, exchange.saved_with(optimizer) if isinstance(exchange, CompressedExchange) else optimizer)
    is_first = ctx.position("worker") == 0
    _validate(cfg, ctx, model, ctx.steps_done)
    with ExitStack() as stack:
        replica = None
        if cfg.data_parallel_config.reduction == "fast":
            stack.enter_context(process_group(ctx, among=workers, device=ctx.device))
            replica = replicate(ctx, model, among=workers)
        for step in ctx.steps(cfg):
            if replica is None:
                loss, tokens = _mean_gradient(cfg, ctx, model, exchange, step)
            else:
                loss, tokens = _fast_mean_gradient(cfg, ctx, model, replica, step)
            norm = global_norm(optimizer.squared_norms())  # of the mean, so the same on every worker
            rate = optimizer.step(step, norm=norm)
            if is_first:
                ctx.report(step, loss=loss, tokens=tokens, grad_norm=norm, learning_rate=rate)
            else:
                ctx.report(step)
            if validation_is_due(cfg, ctx, step):
                _validate(cfg, ctx, model, step)
            if is_first:
                report_layer_norms(cfg, ctx, optimizer, step)
            if isinstance(exchange, CompressedExchange):
                exchange.checkpoint(step)  # the weights once, and what each worker still owes
            elif is_first:
                ctx.checkpoint(step, model, optimizer, owners=workers[:1])  # all workers hold the same
    ctx.report_parameters(model.named_parameters())


def _exchange(cfg: Config, ctx: RankContext, model: Model) -> GradientExchange | CompressedExchange:
    """Either makes the mean of the workers' sums: along the tree, or of what each worker's codec leaves of its sum."""
    workers = ctx.ranks("worker")
    if cfg.compression_config.kind != "none":
        return CompressedExchange(model, cfg=cfg.compression_config, ctx=ctx, among=workers)
    return GradientExchange(
        model.parameters(),
        ctx=ctx,
        among=workers,
        micro_batches=cfg.training_config.micro_batches,
        bucket_megabytes=cfg.multihost_config.bucket_megabytes,
    )


def _mean_gradient(
    cfg: Config, ctx: RankContext, model: Model, exchange: GradientExchange | CompressedExchange, step: int
) -> tuple[float, int]:
    """Leave the gradient of the mean loss in `grads_N`; buckets travel while the last micro-batch is differentiated."""
    for index, x_BT, y_BT in micro_batches(cfg, ctx, step, among=ctx.ranks("worker")):
        expect = partial(exchange.expect, index)
        loss, tokens = differentiate(model, x_BT, y_BT, masks=model.masks(step, index), before_backward=expect)
        exchange.accumulate(index, tokens=tokens, loss=loss)
    return exchange.finish()


def _fast_mean_gradient(
    cfg: Config, ctx: RankContext, model: Model, replica: DistributedDataParallel, step: int
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


def _validate(cfg: Config, ctx: RankContext, model: Model, step: int) -> None:
    """Every worker evaluates its share; the first one reports the mean of all."""
    workers, data = ctx.ranks("worker"), ctx.data(cfg)
    losses_V = torch.zeros(data.validation_micro_batches, dtype=torch.float64)
    share = contiguous_blocks(len(losses_V), len(workers))[ctx.position("worker")]
    losses_V[share.start : share.stop] = validation_losses(cfg, ctx, model, among=workers)
    all_gather(ctx, losses_V, among=workers)
    ctx.report_validation(step, losses_V.tolist(), tokens=data.validation_tokens, reporter=workers[0])
