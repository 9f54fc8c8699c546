"""Audit a step whose ranks differentiate a layer at a time for all of their micro-batches, and keep sums of gradients only."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

from ttlaunch.runtime.audit.auditor import LAYER, Audit, BlockDigest
from ttlaunch.runtime.context import RankContext
from ttlaunch.runtime.data.batches import micro_batches
from ttlaunch.runtime.model.model import Model
from ttlaunch.runtime.parallel.zero.gradients import ScatteredGradients
from ttlaunch.runtime.parallel.zero.passes import LayerPasses
from ttlaunch.runtime.parallel.zero.weights import GatheredWeights
from ttlaunch.spec.recipe.sections import TrainingFile


@contextmanager
def audited(
    cfg: TrainingFile,
    ctx: RankContext,
    step: int,
    *,
    model: Model,
    weights: GatheredWeights,
    gradients: ScatteredGradients,
) -> Iterator[None]:
    """Audit a step, if that is due, around the block that computes its mean gradient.

    Args:
        cfg: Sizes.
        ctx: The rank.
        step: The step, whose pass over `weights` has begun.
        model: The model, whole on every rank: `zero_config.stage` is at most 2.
        weights: Its weights.
        gradients: What adds up this rank's gradients; the digests are those of the sums that it sends.

    Raises:
        AuditError: Two ranks computed different gradients of the same micro-batches.

    Cost: before the block, the passes of another rank's micro-batches; after it, the messages of `Audit.settle`.
    Order: all ranks call it in the same step; the block's own order is unchanged.
    """
    audit = ctx.auditor.begin(cfg, step)
    if audit is None:
        yield
        return
    compute = partial(_compute, cfg, ctx, audit, model=model, weights=weights, gradients=gradients)
    audit.found = compute(audit.block)
    with gradients.shown_to(audit.own.add):
        yield
    audit.settle(compute, unit=LAYER)  # the owners have the mean, and no weight has changed yet


def _compute(  # noqa: PLR0917  the block comes last, from `settle`
    cfg: TrainingFile,
    ctx: RankContext,
    audit: Audit,
    block: range,
    *,
    model: Model,
    weights: GatheredWeights,
    gradients: ScatteredGradients,
) -> BlockDigest:
    """Differentiate a block of micro-batches a layer at a time, and return the digest of the sums that its rank would send."""
    passes = LayerPasses(model, list(micro_batches(cfg, ctx, audit.step, indices=block)), step=audit.step)
    found = audit.digest()
    with audit.computing(model), gradients.rehearsing(block):
        for layer in weights.layers[:-1]:
            weights.fetch(layer.index, then=None)
            passes.forward(layer.index)
        for layer in reversed(weights.layers):
            weights.fetch(layer.index, then=None)
            for at, index in enumerate(block):
                with gradients.of(layer, index):
                    passes.backward(layer.index, at)
            found.add(gradients.sums)
            gradients.drop_sums()
    return found
