"""FSDP2 around the runtime's model: each block is a unit, embedding and head are one; torch's own fused AdamW and clipping.

Model, weights, data and micro-batches are those of `zero`. Gradients are reduced in the backward pass of the last
micro-batch only.
"""

from contextlib import AbstractContextManager, nullcontext

import torch
from torch.distributed.fsdp import fully_shard

from ttlaunch.recipe import TrainingFile
from ttlaunch.train import (
    Model,
    RankContext,
    count_tokens,
    learning_rate,
    micro_batches,
    process_group,
    summed_loss,
)


class _PlainModel(Model):
    def _computing(self) -> AbstractContextManager[object]:
        return nullcontext()


def worker(cfg: TrainingFile, ctx: RankContext) -> None:
    """Train; every worker has its rows of all parameters."""
    workers, training, total_steps = ctx.ranks("worker"), cfg.training_config, ctx.data(cfg).total_steps
    blocks = range(cfg.transformer_config.num_blocks)
    model = _PlainModel(cfg, vocabulary=ctx.data(cfg).vocabulary, blocks=blocks, has_embedding=True, has_head=True)
    with process_group(ctx, among=workers, device=ctx.device):
        for block in model.blocks.values():
            fully_shard(block)
        fully_shard(model)
        betas = training.beta1, training.beta2
        optimizer = torch.optim.AdamW(
            model.parameters(), betas=betas, eps=training.epsilon, weight_decay=training.weight_decay, fused=True
        )
        for step in ctx.steps(cfg):
            batches = list(micro_batches(cfg, ctx, step, among=workers))
            tokens = sum(count_tokens(y_BT) for _, _, y_BT in batches)
            losses = 0.0
            for at, (index, x_BT, y_BT) in enumerate(batches):
                model.set_requires_gradient_sync(at == len(batches) - 1)  # type: ignore[operator]  # fully_shard adds it
                loss = summed_loss(model(x_BT, model.masks(step, index)), y_BT) / tokens
                loss.backward()
                losses += loss.item()
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), training.clip_grad_norm_max_norm)
            for group in optimizer.param_groups:
                group["lr"] = learning_rate(cfg, step, total_steps=total_steps)
            optimizer.step()
            optimizer.zero_grad()
            ctx.report(step, loss=losses, tokens=tokens, grad_norm=float(norm.full_tensor()))
