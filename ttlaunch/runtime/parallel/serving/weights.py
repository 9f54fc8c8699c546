"""The part of a trained model that a rank of a serving run has: built, and filled from a checkpoint of any layout."""

from collections.abc import Iterable

from ttlaunch.runtime.context import RankContext
from ttlaunch.runtime.model.layers import WHOLE, Layers
from ttlaunch.runtime.model.model import Model
from ttlaunch.spec.recipe.sections import TrainingFile


def build_served_model(
    cfg: TrainingFile,
    ctx: RankContext,
    *,
    vocabulary: int,
    blocks: Iterable[int] | None = None,
    has_embedding: bool = True,
    has_head: bool = True,
    layers: Layers = WHOLE,
) -> Model:
    """Build a part of a model and read its weights from the checkpoint that the run was given; it cannot be trained.

    Args:
        cfg: Sizes, model type and precision of the training.
        ctx: This rank.
        vocabulary: Number of different tokens.
        blocks: The blocks of the part; None: all.
        has_embedding: Whether the part begins with the embedding.
        has_head: Whether the part ends with the head.
        layers: This rank's share of the matrices of its blocks.

    Raises:
        CheckpointReadError: The files are not what the launching machine found, or lack a tensor of this part.
    """
    model = Model(
        cfg,
        vocabulary=vocabulary,
        blocks=range(cfg.transformer_config.num_blocks) if blocks is None else blocks,
        has_embedding=has_embedding,
        has_head=has_head,
        layers=layers,
    )
    model.flatten(ctx.device)
    ctx.watch(model, values=model.weights_N.numel())
    model.release_flat_vectors(weights=False)
    model.requires_grad_(requires_grad=False)
    ctx.restore_weights(model)
    return model
