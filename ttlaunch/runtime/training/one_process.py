"""Training in one process: the reference that every synchronous recipe equals, bit for bit.

Not a shortcut beside the recipes: the same micro-batches, the same tree of sums, one division, the same clipping norm and
the same update, with nobody to talk to.
"""

from ttlaunch.runtime.context import RankContext
from ttlaunch.runtime.data.batches import micro_batches
from ttlaunch.runtime.training.optimizers import build_optimizer, global_norm
from ttlaunch.runtime.training.passes import differentiate
from ttlaunch.runtime.training.rank_model import build_model
from ttlaunch.runtime.training.validation import report_layer_norms, validation_is_due, validation_losses
from ttlaunch.spec.recipe.sections import TrainingFile


def train_in_one_process(cfg: TrainingFile, ctx: RankContext) -> None:
    """Train the whole model on this rank, and report as the reporting rank of a larger layout does."""
    model, data = build_model(cfg, ctx), ctx.data(cfg)
    optimizer = build_optimizer(cfg, model, total_steps=data.total_steps)
    ctx.restore(model, optimizer)
    sums = ctx.gradient_tree(model.weights_N)
    ctx.report_validation(ctx.steps_done, validation_losses(cfg, ctx, model).tolist(), tokens=data.validation_tokens)
    for step in ctx.steps(cfg):
        for index, x_BT, y_BT in micro_batches(cfg, ctx, step):
            loss, tokens = differentiate(model, x_BT, y_BT, masks=model.masks(step, index))
            sums.add(index, model.take_gradients(), tokens=tokens, loss=loss)
            model.zero_grad()
        mean_loss, tokens = sums.mean(model.grads_N, micro_batches=cfg.training_config.micro_batches)
        norm = global_norm(optimizer.squared_norms())
        rate = optimizer.step(step, norm=norm)
        ctx.report(step, loss=mean_loss, tokens=tokens, grad_norm=norm, learning_rate=rate)
        if validation_is_due(cfg, ctx, step):
            ctx.report_validation(step, validation_losses(cfg, ctx, model).tolist(), tokens=data.validation_tokens)
        report_layer_norms(cfg, ctx, optimizer, step)
        ctx.checkpoint(step, model, optimizer)
    ctx.report_parameters(model.named_parameters())
