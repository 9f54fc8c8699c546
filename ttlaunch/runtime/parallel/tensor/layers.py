"""Linear layers of which a rank has a part: some of the outputs, or some of the inputs.

    x (all) --enter--> column-parallel: outputs of this rank --> ... --> row-parallel: a part of the sum --leave--> y (all)

What lies between, an activation function or whole attention heads, needs no message.

Source: as `share.py`.
"""

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.nn import functional

from ttlaunch.runtime.model.split import Split, split_evenly
from ttlaunch.runtime.parallel.tensor.share import ModelShare


class ColumnParallelLinear(nn.Module):
    """Some outputs of a linear layer, with their biases; every rank gives it the same inputs.

    Attributes:
        splits: Which values of its parameters the rank has, by their names.
    """

    def __init__(self, inputs: int, outputs: int, share: ModelShare, *, matrices: int = 1) -> None:
        """`matrices`: That stand one behind the other in the outputs, such as query, key and value; each is split."""
        super().__init__()
        place, count = share.place, share.count
        weight = split_evenly((outputs, inputs), dim=0, place=place, count=count, matrices=matrices)
        bias = Split((outputs,), 0, weight.ranges)
        self.splits: Mapping[str, Split] = {"weight": weight, "bias": bias}
        self.weight = nn.Parameter(torch.empty(weight.local_shape))
        self.bias = nn.Parameter(torch.empty(bias.local_shape))
        self._share = share

    def forward(self, x: Tensor) -> Tensor:
        return functional.linear(self._share.enter(x), self.weight, self.bias)


class RowParallelLinear(nn.Module):
    """A linear layer of some inputs, whose outputs are added up over the ranks; each rank has the whole bias.

    Attributes:
        splits: Which values of its parameters the rank has, by their names.
    """

    def __init__(self, inputs: int, outputs: int, share: ModelShare) -> None:
        super().__init__()
        weight = split_evenly((outputs, inputs), dim=1, place=share.place, count=share.count)
        self.splits: Mapping[str, Split] = {"weight": weight}
        self.weight = nn.Parameter(torch.empty(weight.local_shape))
        self.bias = nn.Parameter(torch.empty(outputs))
        self._share = share

    def forward(self, x: Tensor) -> Tensor:
        return self._share.leave(functional.linear(x, self.weight)) + self.bias


class ColumnParallelConvolution(nn.Module):
    """Some output channels of a convolution over 3 × 3 pixels, with their biases; every rank gives it the same inputs.

    Attributes:
        splits: Which values of its parameters the rank has, by their names.
    """

    def __init__(self, inputs: int, outputs: int, share: ModelShare) -> None:
        super().__init__()
        weight = split_evenly((outputs, inputs, 3, 3), dim=0, place=share.place, count=share.count)
        bias = Split((outputs,), 0, weight.ranges)
        self.splits: Mapping[str, Split] = {"weight": weight, "bias": bias}
        self.weight = nn.Parameter(torch.empty(weight.local_shape))
        self.bias = nn.Parameter(torch.empty(bias.local_shape))
        self._share = share

    def forward(self, x: Tensor) -> Tensor:
        return functional.conv2d(self._share.enter(x), self.weight, self.bias, padding=1)


def convolution_in(inputs: int, outputs: int, share: ModelShare | None) -> nn.Module:
    """A convolution over 3 × 3 pixels, to be followed by `linear_out`: all of it, or the outputs of this rank's share."""
    if share is None:
        return nn.Conv2d(inputs, outputs, 3, padding=1)
    return ColumnParallelConvolution(inputs, outputs, share)


def linear_in(inputs: int, outputs: int, share: ModelShare | None, *, matrices: int = 1) -> nn.Module:
    """The first layer of a pair: all of it, or the outputs of this rank's share."""
    if share is None:
        return nn.Linear(inputs, outputs)
    return ColumnParallelLinear(inputs, outputs, share, matrices=matrices)


def linear_out(inputs: int, outputs: int, share: ModelShare | None) -> nn.Module:
    """The second layer of a pair: all of it, or the inputs that this rank's share of the first one makes."""
    return nn.Linear(inputs, outputs) if share is None else RowParallelLinear(inputs, outputs, share)


def splits_of(model: nn.Module) -> dict[str, Split]:
    """Which values a rank has of each parameter that is split, by the parameter's name in the model."""
    return {
        f"{name}.{parameter}": split
        for name, module in model.named_modules()
        if isinstance(module, ColumnParallelLinear | ColumnParallelConvolution | RowParallelLinear)
        for parameter, split in module.splits.items()
    }
