"""The single-device model as a rank has it: all of it or one stage's part, on its device, with its passes counted."""

from collections.abc import Iterable
from itertools import chain

from ttlaunch.runtime.context import RankContext
from ttlaunch.runtime.model.layers import WHOLE, Layers
from ttlaunch.runtime.model.model import Model
from ttlaunch.runtime.model.parts import cut_into_parts
from ttlaunch.spec.recipe.sections import TrainingFile


def build_model(
    cfg: TrainingFile,
    ctx: RankContext,
    *,
    stage: int = 0,
    blocks_per_stage: Iterable[int] = (),
    chunks_per_stage: int = 1,
    share: Layers | None = None,
) -> Model:
    """Build the model on this rank's device, initialised and flat.

    Args:
        cfg: Sizes, model type and seed.
        ctx: This rank, for the vocabulary of the training text and the device.
        stage: The stage to build.
        blocks_per_stage: Blocks of each stage in order; empty: the whole model.
        chunks_per_stage: Equal chunks that these are cut into; see `pipeline_grid`.
        share: This rank's share of the matrices of its blocks; None: all of them.
    """
    counts = list(blocks_per_stage) or [cfg.transformer_config.num_blocks]
    parts = cut_into_parts(counts, num_chunks=chunks_per_stage)
    model = Model(
        cfg,
        vocabulary=ctx.data(cfg).vocabulary,
        blocks=chain.from_iterable(parts[stage :: len(counts)]),
        has_embedding=stage == 0,
        has_head=stage == len(counts) - 1,
        layers=WHOLE if share is None else share,
    )
    model.flatten(ctx.device)
    introduce(model, ctx, values=model.weights_N.numel())
    return model


def introduce(model: Model, ctx: RankContext, *, values: int) -> None:
    """Count a model's passes in the traffic counter, and report losses that are not finite and updates that are skipped."""
    model.report_not_finite = ctx.report_not_finite
    if model.loss_scaler.skips:
        is_reporter = ctx.position(ctx.role) == 0  # of ranks that update alike, one reports to the user
        model.loss_scaler.tell(
            ctx.result, note=(lambda text: ctx.note(f"step {ctx.step}: {text}")) if is_reporter else None
        )
    model.traffic = ctx.watch(model, values=values)
