"""Measures the memory that a rank keeps between steps, from its tensors and not from a formula.

A view counts as all of the memory that it keeps alive, and memory that several tensors share counts once. So a shard
that is a view of the whole vector counts as the whole one.
"""

import math
from collections.abc import Iterable

from torch import Tensor

from ttlaunch.runtime.context import RankContext
from ttlaunch.runtime.model.model import Model
from ttlaunch.runtime.model.tied import HEAD
from ttlaunch.runtime.parallel.zero.owned import OwnedParameters
from ttlaunch.runtime.training.optimizers import Optimizer


def storage_bytes(tensors: Iterable[Tensor]) -> int:
    """Return the size of all memory that the tensors keep alive."""
    storages = [tensor.untyped_storage() for tensor in tensors]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def report_memory(  # noqa: PLR0917  users' trainers call it so
    ctx: RankContext, model: Model, owned: OwnedParameters, optimizer: Optimizer, *, buffer_bytes: int
) -> None:
    """Report for the summary how many bytes per parameter this rank keeps between steps, and how large its buffers are.

    Args:
        ctx: The context of this rank.
        model: The model; its parameters count except at stage 3, where they only use the layers' buffers.
        owned: Parameters and gradients that the rank owns.
        optimizer: The optimizer of the owned parameters.
        buffer_bytes: The size of the buffers that layers use alternately.
    """
    count = sum(math.prod(shape) for name, shape in owned.layout.shapes.items() if name != HEAD or not model.is_tied)
    kept = [owned.weights_N, owned.grads_N, *(tensor for _, tensor in optimizer.named_state())]
    kept += [] if owned.shares_parameters else list(model.parameters())
    ctx.result(f"bytes a parameter, rank {ctx.rank}", round(storage_bytes(kept) / count, 4))
    ctx.result(f"buffers, rank {ctx.rank}", f"{buffer_bytes / 1e6:.2f} MB")
