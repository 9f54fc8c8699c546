"""The loop of every recipe whose members keep one another's optimizer state; what differs is who owns and who evaluates what."""

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from functools import partial

from torch import Tensor

from ttlaunch.runtime.checkpoint.checkpoints import HasState, held_tensors
from ttlaunch.runtime.context import RankContext
from ttlaunch.runtime.model.model import Model
from ttlaunch.runtime.parallel.shadowed.update import ShadowedUpdate
from ttlaunch.runtime.training.loop import TrainingLoop
from ttlaunch.runtime.training.optimizers import Optimizer
from ttlaunch.runtime.training.passes import differentiated
from ttlaunch.runtime.training.validation import report_layer_norms
from ttlaunch.spec.recipe.sections import TrainingFile


def train_with_shadows(
    cfg: TrainingFile,
    ctx: RankContext,
    update: ShadowedUpdate,
    *,
    model: Model,
    optimizer: Optimizer,
    state: HasState,
    validate: Callable[[int], object],
    around: Callable[[], AbstractContextManager[object]] = nullcontext,
) -> None:
    """Make all steps of an elastic run as one of its members, whatever its place is; all end with the parameters of one process.

    Args:
        cfg: The configuration.
        ctx: This member; its weights and state are those of the run's first step.
        update: Makes each step with the others.
        model: The whole model.
        optimizer: Its optimizer, for the norms that this member reports.
        state: What checkpoints take beside the weights.
        validate: Evaluates the weights after a step.
        around: Returns the context in which a row of micro-batches is differentiated.

    Cost: for each step that of `ShadowedUpdate.step`, and what `validate` sends.
    Order: that of `ShadowedUpdate`: the bits of one process.
    """
    ctx.save_if_abandoned(model, state, has_all=update.has_state)
    held = partial(_held, ctx, update, model=model, state=state)
    loop = TrainingLoop(cfg, ctx, validate=validate, held=held)
    for step in loop.steps():

        def enter(indices: Iterable[int], step: int = step) -> None:
            with around():
                # In the last backward pass gradients leave as they get ready.
                passes = differentiated(cfg, ctx, step, model, indices=indices, expect=update.expect)
                for index, loss, tokens in passes:
                    update.accumulate(index, tokens=tokens, loss=loss)

        made = update.step(step, enter)
        loop.end_step(step, **made.known)
        if made.known and ctx.rank == 0:
            report_layer_norms(cfg, ctx, optimizer, step)
        if update.is_keeper:
            ctx.checkpoint(step, model, state, owners=ctx.ranks("member")[:1])
    ctx.report_parameters(model.named_parameters())


def _held(ctx: RankContext, update: ShadowedUpdate, *, model: Model, state: HasState) -> Iterable[tuple[str, Tensor]]:
    """Return what is compared: the weights of all members, and the optimizer's state of both that keep it."""
    return held_tensors(model, state) if update.has_state(ctx.step) else model.named_parameters()
