"""Tensor parallelism: the ranks of a model have parts of its matrices, and all of them compute every micro-batch.

    x --+--> heads of rank 0 --> part of a sum --+          x --+--> a half inside, rank 0 --> part of a sum --+
        |                                      (+)--> y         |                                            (+)--> y
        +--> heads of rank 1 --> part of a sum --+              +--> a half inside, rank 1 --> part of a sum --+
             attention                                               feed-forward layer

The first matrix of each pair is split by its outputs, the second by its inputs, so what lies between needs no message:
attention heads and the activation function see whole rows. A block costs two sums of activations on the way forth and two
on the way back, of 4BTD bytes each; what they save is memory, of weights, gradients, optimizer state and of what is kept
inside blocks: with n ranks each has 1/n of them. Embedding, head, norms and the biases that are added after a sum are on
every rank, which computes with them what the others do, to the bit. (A vocabulary of bytes makes a small embedding;
splitting it would trade messages for little.)

With `replicas` there are several such models, each with a block of a step's micro-batches; ranks that have the same parts
average their gradients along one tree, so for a given number of ranks that split a model any number of models gives the
same bits. One process gives others: there a value is one sum over all columns of a matrix, here a sum of n sums.

    ttlaunch run tensor_parallel
    ttlaunch run tensor_parallel --set tensor_parallel_config.replicas=2

Shapes: B = sequences in a micro-batch, T = tokens in a sequence, D = width of the residual stream, V = micro-batches of a
validation.
Source: M. Shoeybi et al., "Megatron-LM: Training Multi-Billion Parameter Language Models Using Model Parallelism",
arXiv:1909.08053, 2019; the layers are in `ttlaunch.runtime.parallel.tensor.layers`, the sums in `ttlaunch.runtime.parallel.tensor.share`.
"""

from functools import partial

import torch

from ttlaunch.train import (
    GradientExchange,
    Model,
    RankContext,
    RankGrid,
    all_gather,
    build_model,
    build_optimizer,
    contiguous_blocks,
    differentiate,
    global_norm,
    micro_batches,
    place_in_grid,
    report_layer_norms,
    share_of,
    squared_norms,
    train_in_one_process,
    validation_is_due,
    validation_losses,
)

from .recipe import RANKS, REPLICAS, Config


def trainer(cfg: Config, ctx: RankContext) -> None:
    """One process has all matrices: the reference that the split model equals up to rounding."""
    train_in_one_process(cfg, ctx)


def worker(cfg: Config, ctx: RankContext) -> None:
    """Compute this rank's part of every matrix product, agree with the same parts of other models on the mean, update."""
    grid = place_in_grid(ctx.rank, ctx.ranks("worker"), dp=REPLICAS(cfg), tp=RANKS(cfg))
    share = share_of(ctx, grid.along("tp"))
    model = build_model(cfg, ctx, share=share)  # its layers add up over the ranks of the share
    optimizer = build_optimizer(cfg, model, total_steps=ctx.data(cfg).total_steps)
    ctx.restore(model, optimizer)
    exchange = GradientExchange(
        model.parameters(),
        ctx=ctx,
        among=grid.along("dp"),
        micro_batches=cfg.training_config.micro_batches,
        bucket_megabytes=cfg.multihost_config.bucket_megabytes,
    )
    is_first = ctx.position("worker") == 0
    _validate(cfg, ctx, model, grid, ctx.steps_done)
    for step in ctx.steps(cfg):
        loss, tokens = _mean_gradient(cfg, ctx, model, exchange, grid, step)
        norm = global_norm(squared_norms(optimizer, model, share))  # of whole matrices, so the same on every rank
        rate = optimizer.step(step, norm=norm)
        if is_first:
            ctx.report(step, loss=loss, tokens=tokens, grad_norm=norm, learning_rate=rate)
        else:
            ctx.report(step)
        if validation_is_due(cfg, ctx, step):
            _validate(cfg, ctx, model, grid, step)
        if is_first:
            report_layer_norms(cfg, ctx, optimizer, step)
        if grid.place("dp") == 0:  # all models hold the same
            ctx.checkpoint(step, model, optimizer, owners=grid.along("tp"))
    ctx.report_parameters(model.named_parts())


def _mean_gradient(
    cfg: Config, ctx: RankContext, model: Model, exchange: GradientExchange, grid: RankGrid, step: int
) -> tuple[float, int]:
    """Leave the gradient of the mean loss in the parameters; the ranks of a model work on the same micro-batches."""
    for index, x_BT, y_BT in micro_batches(cfg, ctx, step, among=grid.along("dp")):
        expect = partial(exchange.expect, index)
        loss, tokens = differentiate(model, x_BT, y_BT, masks=model.masks(step, index), before_backward=expect)
        exchange.accumulate(index, tokens=tokens, loss=loss)
    return exchange.finish()


def _validate(cfg: Config, ctx: RankContext, model: Model, grid: RankGrid, step: int) -> None:
    """Every model evaluates its share; the first rank of all reports the mean."""
    replicas, data = grid.along("dp"), ctx.data(cfg)
    losses_V = torch.zeros(data.validation_micro_batches, dtype=torch.float64)
    share = contiguous_blocks(len(losses_V), len(replicas))[grid.place("dp")]
    losses_V[share.start : share.stop] = validation_losses(cfg, ctx, model, among=replicas)
    all_gather(ctx, losses_V, among=replicas)
    ctx.report_validation(step, losses_V.tolist(), tokens=data.validation_tokens, reporter=grid.ranks[0])
