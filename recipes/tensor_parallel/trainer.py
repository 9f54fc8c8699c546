"""Tensor parallelism: the ranks of a model have parts of its matrices, and all of them compute every micro-batch.

    x --+--> heads of rank 0 --> part of a sum --+          x --+--> a half inside, rank 0 --> part of a sum --+
        |                                      (+)--> y         |                                            (+)--> y
        +--> heads of rank 1 --> part of a sum --+              +--> a half inside, rank 1 --> part of a sum --+
             attention                                               feed-forward layer

The first matrix of each pair is split by its outputs, the second by its inputs. So between the two no message is needed: each
attention head is whole on one rank, and so is each value that the activation function reads. A block needs two sums of activations
in the forward pass and two in the backward pass, of 4BTD bytes each. This saves memory: each of n ranks has 1/n of the weights, gradients and
optimizer state, and of the activations inside blocks. Every rank has the whole embedding, head and norms, and the biases that are
added after a sum; all ranks compute the same with these, to the bit. (With a vocabulary of bytes the embedding is small, so
splitting it would save little memory and cost messages.)

With `replicas` there are several such models, each with a block of a step's micro-batches. Ranks that have the same parts average
their gradients along one tree. So for a given number of ranks that split a model, any number of replicas gives the same bits. One
process gives other bits: there a value is one sum over all columns of a matrix, here it is a sum of n sums.

    ttlaunch run tensor_parallel
    ttlaunch run tensor_parallel --set tensor_parallel_config.replicas=2

Shapes: B = sequences in a micro-batch, T = tokens in a sequence, D = width of the residual stream, V = micro-batches of a
validation.
Source: M. Shoeybi et al., "Megatron-LM: Training Multi-Billion Parameter Language Models Using Model Parallelism",
arXiv:1909.08053, 2019; the layers are in `ttlaunch.runtime.parallel.tensor.layers`, the sums in `ttlaunch.runtime.parallel.tensor.share`.
"""

from functools import partial

from ttlaunch.train import (
    GradientExchange,
    RankContext,
    TrainingLoop,
    build_model,
    build_optimizer,
    differentiate,
    global_norm,
    micro_batches,
    place_in_grid,
    share_of,
    share_validation,
    squared_norms,
    train_in_one_process,
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
    replicas, is_first = grid.along("dp"), ctx.position("worker") == 0
    evaluate = partial(validation_losses, cfg, ctx, model, among=replicas)
    loop = TrainingLoop(
        cfg,
        ctx,
        validate=partial(share_validation, cfg, ctx, among=replicas, evaluate=evaluate, reporter=grid.ranks[0]),
        reports=is_first,
        norms=optimizer if is_first else None,
        saved=(model, optimizer),
        owners=grid.ranks[: RANKS(cfg)],  # of the first model; all models hold the same
    )
    for step in loop.steps():
        for index, x_BT, y_BT in micro_batches(cfg, ctx, step, among=replicas):  # the same for all ranks of a model
            expect = partial(exchange.expect, index)
            loss, tokens = differentiate(model, x_BT, y_BT, masks=model.masks(step, index), before_backward=expect)
            exchange.accumulate(index, tokens=tokens, loss=loss)
        loss, tokens = exchange.finish()
        norm = global_norm(squared_norms(optimizer, model, share))  # of whole matrices, so the same on every rank
        rate = optimizer.step(step, norm=norm)
        loop.end_step(step, loss=loss, tokens=tokens, grad_norm=norm, learning_rate=rate)
    ctx.report_parameters(model.named_parts())
