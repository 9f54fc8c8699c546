"""A pipeline: each rank has some of the model's blocks, and several micro-batches are under way at once.

    tokens --> stage 0 -- activations --> stage 1 -- activations --> ... --> stage p-1 <-- targets
               stage 0 <-- gradients ---- stage 1 <-- gradients ---- ... <-- stage p-1

A rank needs room for its own blocks only. The price: (p - 1) of (m + p - 1) slots of a step are idle, for m
micro-batches. Stage 0 reads tokens and the last stage reads targets: data is a function of the step, so neither is
sent. All receives are posted before a step begins and no send is waited for before it ends, hence no order of passes
can deadlock. Gradients, clipping norm and update are those of one process, bit for bit.

    ttlaunch run pipeline_parallel
    ttlaunch run pipeline_parallel --on 2loudboxes -c train.yaml

Shapes: B = sequences in a micro-batch, T = tokens in a sequence, D = width of the residual stream.
Source: D. Narayanan et al., "PipeDream", SOSP 2019, with the flush of their ICML 2021 paper (1F1B).
"""

import torch
from torch import Tensor

from ttlaunch.runtime import (
    GradientTree,
    Model,
    RankContext,
    build_model,
    build_optimizer,
    chain_all_gather,
    count_tokens,
    global_norm,
    micro_batches,
    one_f_one_b,
    summed_loss,
    train_in_one_process,
    validation_is_due,
    validation_micro_batches,
)

from .recipe import Config

ACTIVATIONS, GRADIENTS = 0, 1  # tags: the two directions of a link


def trainer(cfg: Config, ctx: RankContext) -> None:
    """One process has all blocks: the reference that the pipeline equals, bit for bit."""
    train_in_one_process(cfg, ctx)


def stage(cfg: Config, ctx: RankContext) -> None:
    """Train this rank's blocks; every stage updates its own, with one clipping norm for all."""
    blocks = cfg.multihost_config.pipeline_parallel_config.blocks
    model = build_model(cfg, ctx, stage=ctx.position("stage"), blocks_per_stage=blocks)
    optimizer = build_optimizer(cfg, model, total_steps=ctx.data(cfg).total_steps)
    ctx.restore(model, optimizer)
    sums = ctx.gradient_tree(model.weights_N)
    _validate(cfg, ctx, model, ctx.steps_done)
    for step in ctx.steps(cfg):
        _run_1f1b(cfg, ctx, model, sums, step)
        mean_loss, seen = sums.mean(model.grads_N, micro_batches=cfg.training_config.micro_batches)
        norm = global_norm(chain_all_gather(ctx, optimizer.squared_norms(), role="stage"))
        rate = optimizer.step(step, norm=norm)
        if ctx.next("stage") is None:  # only the last stage has seen the loss
            ctx.report(step, loss=mean_loss, tokens=seen, grad_norm=norm, learning_rate=rate)
        else:
            ctx.report(step)
        ctx.checkpoint(step, model, optimizer)
        if validation_is_due(cfg, ctx, step):
            _validate(cfg, ctx, model, step)
    ctx.report_parameters(model.named_parameters())


def _run_1f1b(cfg: Config, ctx: RankContext, model: Model, sums: GradientTree, step: int) -> None:
    """Run the forward and backward passes of one step; `sums` then holds the gradients of all micro-batches."""
    previous, following = ctx.previous("stage"), ctx.next("stage")
    batches = list(micro_batches(cfg, ctx, step))
    inputs = [x_BT if previous is None else _boundary(cfg, x_BT).requires_grad_() for _, x_BT, _ in batches]
    output_grads = [_boundary(cfg, x_BT) for _, x_BT, _ in batches]
    arriving_inputs, arriving_grads, sends = [], [], []
    if previous is not None:
        arriving_inputs = [ctx.irecv(x_BTD, source=previous, tag=ACTIVATIONS) for x_BTD in inputs]
    if following is not None:
        arriving_grads = [ctx.irecv(grad_BTD, source=following, tag=GRADIENTS) for grad_BTD in output_grads]
    outputs: dict[int, Tensor] = {}
    actions = one_f_one_b(ctx.position("stage"), num_stages=len(ctx.ranks("stage")), num_micro_batches=len(batches))
    for action in actions:
        index, _, y_BT = batches[action.micro_batch]
        if action.kind == "F":
            if previous is not None:
                arriving_inputs[index].wait()
            out = model(inputs[index], model.masks(step, index))
            outputs[index] = summed_loss(out, y_BT) if following is None else out
            if following is not None:
                sends.append(ctx.isend(out, dest=following, tag=ACTIVATIONS))
        else:
            out = outputs.pop(index)
            if following is not None:
                arriving_grads[index].wait()
            out.backward(None if following is None else output_grads[index])
            if previous is not None:
                sends.append(ctx.isend(inputs[index].grad, dest=previous, tag=GRADIENTS))
            loss = out.item() if following is None else 0.0  # only the last stage knows it
            sums.add(index, model.take_gradients(), tokens=count_tokens(y_BT), loss=loss)
            model.zero_grad()
    for send in sends:
        send.wait()


@torch.no_grad()
def _validate(cfg: Config, ctx: RankContext, model: Model, step: int) -> None:
    previous, following = ctx.previous("stage"), ctx.next("stage")
    losses = []
    for _, x_BT, y_BT in validation_micro_batches(cfg, ctx):
        x = x_BT if previous is None else _boundary(cfg, x_BT)
        if previous is not None:
            ctx.recv(x, source=previous, tag=ACTIVATIONS)
        out = model(x)
        if following is not None:
            ctx.send(out, dest=following, tag=ACTIVATIONS)
        else:
            losses.append(summed_loss(out, y_BT).item())
    if following is None:
        ctx.report_validation(step, losses, tokens=ctx.data(cfg).validation_tokens)


def _boundary(cfg: Config, x_BT: Tensor) -> Tensor:
    """Room for what crosses between two stages for these tokens, shape (B, T, D)."""
    return torch.empty(*x_BT.shape, cfg.transformer_config.embedding_dim, device=x_BT.device)
