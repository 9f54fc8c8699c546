"""The clipping norm where ranks split matrices: the squared norm of a matrix is the sum of its parts' squared norms."""

import torch

from ttlaunch.runtime.model.model import Model
from ttlaunch.runtime.parallel.tensor.share import ModelShare
from ttlaunch.runtime.training.optimizers import Optimizer


def squared_norms(optimizer: Optimizer, model: Model, share: ModelShare | None) -> list[float]:
    """Return the squared norm of each whole parameter's gradient, in the model's order, on all ranks that have shares.

    Every rank that has a share must call, once a step, when its gradients are complete.

    Args:
        optimizer: The optimizer of this rank's share; afterwards its layer norms are those of whole layers, too.
        model: The part of the model that this rank has.
        share: Which share that is; None: the rank has whole matrices, and nothing is sent.

    Cost: an `all_reduce` of a float64 for each parameter.
    Order: the tree over the shares: the same bits on every rank and every run.
    """
    found = optimizer.squared_norms()
    if share is None or not found:
        return found
    names = [name for name, _ in model.named_parameters()]
    is_counted = [
        name in model.splits or share.place == 0 for name in names
    ]  # parameters that all ranks have whole count once
    own = [square if counts else 0.0 for square, counts in zip(found, is_counted, strict=True)]
    total = share.add_up(torch.tensor(own, dtype=torch.float64), name="squared_norms", dtype=torch.float64)
    squares: list[float] = total.tolist()
    optimizer.squares.update(zip(names, squares, strict=True))
    return squares
