"""A pipeline in its plainest form: all forward passes of a step, then all backward passes (the schedule of GPipe).

    tokens --> stage 0 -- activations --> stage 1 -- activations --> ... --> stage p-1 <-- targets
               stage 0 <-- gradients ---- stage 1 <-- gradients ---- ... <-- stage p-1

Every stage keeps the activations of all micro-batches until their backward passes. `schedule` and `chunks_per_rank` change nothing
here; no schedule changes the parameters. They have the bits of `trainer.py`.

    ttlaunch run pipeline_parallel --naive

Shapes: B = sequences of a micro-batch, T = tokens of a sequence, D = width of the residual stream.
Source: Y. Huang et al., "GPipe: Efficient Training of Giant Neural Networks using Pipeline Parallelism", NeurIPS 2019.
"""

import torch

from ttlaunch.train import (
    RankContext,
    build_model,
    build_optimizer,
    chain_all_gather,
    count_tokens,
    global_norm,
    micro_batches,
    summed_loss,
)

from .recipe import Config


def stage(cfg: Config, ctx: RankContext) -> None:
    """Compute and update this rank's blocks; send activations to the next stage and gradients to the previous one."""
    previous, following = ctx.previous("stage"), ctx.next("stage")
    pipeline, width = cfg.multihost_config.pipeline_parallel_config, cfg.transformer_config.embedding_dim
    model = build_model(cfg, ctx, stage=ctx.position("stage"), blocks_per_stage=pipeline.blocks if pipeline else ())
    optimizer = build_optimizer(cfg, model, total_steps=ctx.data(cfg).total_steps)
    sums = ctx.gradient_tree(model.weights_N)
    for step in ctx.steps(cfg):
        passes = []
        for index, x_BT, y_BT in micro_batches(cfg, ctx, step):
            x = x_BT
            if previous is not None:
                x = torch.empty(*x_BT.shape, width, device=ctx.device)
                ctx.recv(x, source=previous)
                x.requires_grad_()
            out = model(x, model.masks(step, index))
            if following is not None:
                ctx.send(out.detach(), dest=following)
            passes.append((index, x, out if following is not None else summed_loss(out, y_BT), count_tokens(y_BT)))
        for index, x, out, tokens in passes:
            gradient = torch.ones_like(out)  # of the summed loss on the last stage, where out is that loss
            if following is not None:
                ctx.recv(gradient, source=following)
            out.backward(gradient)
            if previous is not None and x.grad is not None:
                ctx.send(x.grad, dest=previous)
            loss = out.item() if following is None else 0.0
            sums.add(index, model.take_gradients(), tokens=tokens, loss=loss)
            model.zero_grad()
        loss, tokens = sums.mean(model.grads_N, micro_batches=cfg.training_config.micro_batches)
        norm = global_norm(chain_all_gather(ctx, optimizer.squared_norms(), among=ctx.ranks("stage")))
        rate = optimizer.step(step, norm=norm)
        known = {"loss": loss, "tokens": tokens} if following is None else {}  # earlier stages have not seen the loss
        ctx.report(step, grad_norm=norm, learning_rate=rate, **known)
    ctx.report_parameters(model.named_parameters())
