"""Training in one process: the reference that every synchronous recipe equals, bit for bit.

It uses the same code as the recipes: the same micro-batches, tree of sums, single division, clipping norm and update, only without
messages.
"""

from ttlaunch.runtime.context import RankContext
from ttlaunch.runtime.training.loop import TrainingLoop
from ttlaunch.runtime.training.optimizers import build_optimizer, global_norm
from ttlaunch.runtime.training.passes import mean_gradient
from ttlaunch.runtime.training.rank_model import build_model
from ttlaunch.runtime.training.validation import validation_losses
from ttlaunch.spec.recipe.sections import TrainingFile


def train_in_one_process(cfg: TrainingFile, ctx: RankContext) -> None:
    """Train the whole model on this rank, and report as the reporting rank of a larger layout does."""
    model, data = build_model(cfg, ctx), ctx.data(cfg)
    optimizer = build_optimizer(cfg, model, total_steps=data.total_steps)
    ctx.restore(model, optimizer)
    sums = ctx.gradient_tree(model.weights_N)

    def validate(step: int) -> None:
        ctx.report_validation(step, validation_losses(cfg, ctx, model).tolist(), tokens=data.validation_tokens)

    loop = TrainingLoop(cfg, ctx, validate=validate, norms=optimizer, saved=(model, optimizer))
    for step in loop.steps():
        loss, tokens = mean_gradient(cfg, ctx, step, model=model, sums=sums)
        norm = global_norm(optimizer.squared_norms())
        rate = optimizer.step(step, norm=norm)
        loop.end_step(step, loss=loss, tokens=tokens, grad_norm=norm, learning_rate=rate)
    ctx.report_parameters(model.named_parameters())
