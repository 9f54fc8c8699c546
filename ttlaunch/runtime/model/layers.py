"""Where a block takes its linear layers and convolutions from, so that a caller can pass parts of layers.

The models of this folder run on one device. A technique that splits matrices passes its own `Layers`; the blocks stay
as they are, and so does the order in which they create parameters.
"""

from collections.abc import Mapping, Sequence
from typing import Protocol, runtime_checkable

from torch import nn

from ttlaunch.runtime.model.split import Split


class Layers(Protocol):
    """Makes the layers of blocks, in pairs: the output of an `_in` layer is the input of a `linear_out` layer."""

    @property
    def has_common_part(self) -> bool:
        """Whether this rank writes to checkpoints the parameters that are not split, such as norms."""

    def linear_in(self, inputs: int, outputs: Sequence[int], *, bias: bool = True) -> nn.Module:
        """The first linear layer of a pair; in its outputs stand matrices one behind the other, such as query, key, value."""

    def convolution_in(self, inputs: int, outputs: int) -> nn.Module:
        """A convolution over 3 × 3 pixels, as the first layer of a pair."""

    def linear_out(self, inputs: int, outputs: int, *, bias: bool = True) -> nn.Module:
        """The second layer of a pair."""


class WholeLayers:
    """Layers that have all of their parameters."""

    has_common_part = True

    def linear_in(self, inputs: int, outputs: Sequence[int], *, bias: bool = True) -> nn.Module:
        return nn.Linear(inputs, sum(outputs), bias=bias)  # only a layer that is split needs to know where each begins

    def convolution_in(self, inputs: int, outputs: int) -> nn.Module:
        return nn.Conv2d(inputs, outputs, 3, padding=1)

    def linear_out(self, inputs: int, outputs: int, *, bias: bool = True) -> nn.Module:
        return nn.Linear(inputs, outputs, bias=bias)


WHOLE = WholeLayers()
"""The layers of a model whose matrices are not split among ranks."""


@runtime_checkable
class SplitLayer(Protocol):
    """A layer that has some values of its parameters.

    Attributes:
        splits: Which values these are, by the parameters' names.
    """

    splits: Mapping[str, Split]


def splits_of(model: nn.Module) -> dict[str, Split]:
    """Which values a model has of each parameter that is split, by the parameter's name in the model."""
    return {
        f"{name}.{parameter}": split
        for name, layer in model.named_modules()
        if layer is not model and isinstance(layer, SplitLayer)
        for parameter, split in layer.splits.items()
    }
