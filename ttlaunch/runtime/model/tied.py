"""Tied embeddings: head and token embedding share a matrix, and the bits do not depend on which ranks have the two layers.

The two uses of the matrix each have a gradient of their own, summed over micro-batches along the tree like any other;
once in a step, after the division by the tokens, the two means are added. That is the definition in every layout. So a
pipeline, whose first and last stage each hold the matrix, exchanges them once in a step and not for each micro-batch,
and both ends add the same two numbers. (Autograd with one leaf would add both uses in each micro-batch, in another
order, and so round differently.)

Where one rank has both uses, `head.output.weight` is only the place where the gradient of the second use is gathered:
its values are zero and unused, and `named_parameters` leaves it out. It costs a gradient of V * D values in
memory and in what is reduced, and as many unused values among the weights. Where embedding and head are on different
ranks, or come and go one after the other, `head.output.weight` is a copy, under the name of the embedding.

Shapes: V = vocabulary, D = embedding_dim.
Source: O. Press, L. Wolf, "Using the Output Embedding to Improve Language Models", EACL 2017, for the idea.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

EMBEDDING = "embedding.token.weight"
"""The matrix."""

HEAD = "head.output.weight"
"""Its second use."""


def second_use(matrix_VD: Tensor, gradient_of_VD: Tensor) -> Tensor:
    """The values of one parameter, whose gradient goes to another of the same shape."""
    apply: Callable[[Tensor, Tensor], Tensor] = _SecondUse.apply
    return apply(matrix_VD, gradient_of_VD)


class _SecondUse(torch.autograd.Function):
    @staticmethod
    def forward(_ctx: Any, matrix_VD: Tensor, _gradient_of_VD: Tensor) -> Tensor:
        return matrix_VD.view_as(matrix_VD)

    @staticmethod
    def backward(_ctx: Any, *gradients: Tensor) -> tuple[None, Tensor]:
        return None, gradients[0]
