"""Linear layers of which a rank has a part: some of the outputs, or some of the inputs.

    x (all) --enter--> column-parallel: outputs of this rank --> ... --> row-parallel: a part of the sum --leave--> y (all)

Between the two layers, an activation function or whole attention heads need no message.

Source: the paper that `share.py` cites.
"""

from collections.abc import Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional

from ttlaunch.runtime.model.split import Split, split_evenly


class Share(Protocol):
    """Which of the equal parts of every matrix a rank has, and the sums over the ranks that have the others."""

    @property
    def place(self) -> int: ...

    @property
    def count(self) -> int: ...

    def enter(self, x: Tensor) -> Tensor:
        """Return activations unchanged; in the backward pass, add up the gradients."""

    def leave(self, x: Tensor) -> Tensor:
        """Add up activations; in the backward pass, return gradients unchanged."""


class ColumnParallelLinear(nn.Module):
    """Some outputs of a linear layer, with their biases; every rank gives it the same inputs.

    Attributes:
        splits: The values of each parameter that the rank has, by parameter name.
    """

    def __init__(self, inputs: int, outputs: Sequence[int], share: Share, *, bias: bool = True) -> None:
        """Create the layer; in the outputs, matrices are stacked, such as query, key and value, and each is split."""
        super().__init__()
        place, count, rows = share.place, share.count, sum(outputs)
        weight = split_evenly((rows, inputs), dim=0, place=place, count=count, matrices=outputs)
        self.splits: Mapping[str, Split] = {"weight": weight}
        self.weight = nn.Parameter(torch.empty(weight.local_shape))
        self.bias: nn.Parameter | None = None
        if bias:
            self.splits = {"weight": weight, "bias": Split((rows,), 0, weight.ranges)}
            self.bias = nn.Parameter(torch.empty(weight.local_shape[0]))
        self._share = share

    def forward(self, x: Tensor) -> Tensor:
        return functional.linear(self._share.enter(x), self.weight, self.bias)


class RowParallelLinear(nn.Module):
    """The part of a linear layer for some inputs; outputs are added up over the ranks, and each rank has the whole bias.

    Attributes:
        splits: The values of each parameter that the rank has, by parameter name.
    """

    def __init__(self, inputs: int, outputs: int, share: Share, *, bias: bool = True) -> None:
        super().__init__()
        weight = split_evenly((outputs, inputs), dim=1, place=share.place, count=share.count)
        self.splits: Mapping[str, Split] = {"weight": weight}
        self.weight = nn.Parameter(torch.empty(weight.local_shape))
        self.bias = nn.Parameter(torch.empty(outputs)) if bias else None
        self._share = share

    def forward(self, x: Tensor) -> Tensor:
        y = self._share.leave(functional.linear(x, self.weight))
        return y if self.bias is None else y + self.bias


class ColumnParallelConvolution(nn.Module):
    """Some output channels of a convolution over 3 × 3 pixels, with their biases; every rank gives it the same inputs.

    Attributes:
        splits: The values of each parameter that the rank has, by parameter name.
    """

    def __init__(self, inputs: int, outputs: int, share: Share) -> None:
        super().__init__()
        weight = split_evenly((outputs, inputs, 3, 3), dim=0, place=share.place, count=share.count)
        bias = Split((outputs,), 0, weight.ranges)
        self.splits: Mapping[str, Split] = {"weight": weight, "bias": bias}
        self.weight = nn.Parameter(torch.empty(weight.local_shape))
        self.bias = nn.Parameter(torch.empty(bias.local_shape))
        self._share = share

    def forward(self, x: Tensor) -> Tensor:
        return functional.conv2d(self._share.enter(x), self.weight, self.bias, padding=1)
