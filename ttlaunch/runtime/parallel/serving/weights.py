"""The part of a trained model that a rank of a serving run has: built, and filled from a checkpoint of any layout.

Only this part is ever in memory: of a matrix that ranks share by columns, files are read column by column.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from ttlaunch.runtime.context import RankContext
from ttlaunch.runtime.model.model import Model
from ttlaunch.runtime.serving.shares import Shares
from ttlaunch.spec.recipe.sections import TrainingFile


def build_served_model(
    cfg: TrainingFile,
    ctx: RankContext,
    *,
    vocabulary: int,
    blocks: Iterable[int] | None = None,
    has_embedding: bool = True,
    has_head: bool = True,
    place: int = 0,
    count: int = 1,
) -> Model:
    """Build a part of a model and read its weights from the checkpoint that the run was given; it cannot be trained.

    Args:
        cfg: Sizes, model type and precision of the training.
        ctx: This rank.
        vocabulary: Number of different tokens.
        blocks: The blocks of the part; None: all.
        has_embedding: Whether the part begins with the embedding.
        has_head: Whether the part ends with the head.
        place: This rank's position among those that share the matrices by columns.
        count: The number of ranks that share them.

    Cost: memory for the part, and while it is read for one tensor of it more.

    Raises:
        CheckpointReadError: The files are not what the launching machine found, or lack a tensor of this part.
        ValueError: The matrices are too narrow for so many ranks.
    """
    with torch.device("meta"), _NothingDrawn():  # shapes without memory
        model = Model(
            cfg,
            vocabulary=vocabulary,
            blocks=range(cfg.transformer_config.num_blocks) if blocks is None else blocks,
            has_embedding=has_embedding,
            has_head=has_head,
        )
    model.splits = dict(Shares(cfg, count).splits(model, place))
    _give_memory(model, ctx.device)
    ctx.watch(model, values=sum(parameter.numel() for parameter in model.parameters()))
    ctx.restore_weights(model)
    return model


class _NothingDrawn(TorchFunctionMode):
    """Leaves out the drawing of first values: for tensors without memory, torch would import its compiler for it, in seconds."""

    def __torch_function__(  # noqa: PLR0917  signature of TorchFunctionMode
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        del types
        kwargs = kwargs or {}
        return kwargs.get("tensor", *args[:1]) if func.__name__ == "normal_" else func(*args, **kwargs)


def _give_memory(model: Model, device: torch.device) -> None:
    """Replace the parameters of a model by empty ones of this rank's size, which no backward pass changes."""
    named = {name for name, _ in model.named_parameters()}
    for module_name, module in model.named_modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            whole_name = f"{module_name}.{name}"
            split = model.splits.get(whole_name)
            shape = parameter.shape if split is None else split.local_shape
            if model.is_tied and whole_name == "head.output.weight" and model.embedding is not None:
                shape = torch.Size([0])  # the head computes with the embedding's matrix
            setattr(module, name, nn.Parameter(torch.empty(shape, device=device), requires_grad=False))
    assert named == {name for name, _ in model.named_parameters()}  # noqa: S101 - as many under the same names
