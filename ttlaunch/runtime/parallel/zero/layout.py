"""Who owns which values of the model: every layer is cut into one shard for each rank.

A shard begins and ends between rows of a parameter, so that checkpoints can store it as rows. It also begins
and ends between nodes of the tree along which squared norms are added, and at an aligned address. A parameter can therefore
be cut after every lcm(columns, 16) values. If the shards of a layer differ in size, those of the next layer balance
this: over the whole model, shares differ by less than one such piece.

Where embedding and head share a matrix, the head has a place for the gradient of the second use, as in `model/tied.py`.
This place is cut at the same rows as the matrix, so the owner of a row of the matrix gets both of its gradients. The
rest of the head then belongs to the first rank.

Shapes: N = values of the flat vector of the whole model.
"""

import itertools
import math
from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor, nn

from ttlaunch.membership.slots import Piece
from ttlaunch.runtime.model.tied import EMBEDDING, HEAD
from ttlaunch.runtime.training.norms import LEAF_VALUES, Part


@dataclass(frozen=True)
class Layer:
    """A part of the model that is gathered, computed and freed as one: embedding, a block, or the head.

    Attributes:
        index: The layer's index in a forward pass.
        parameters: The places of its parameters among the model's.
        values: The range of these parameters in the flat vector.
        shards: The part of these values that each rank owns, in order; it may be empty. In the place of a matrix's second
            use, a rank owns only gradients.
    """

    index: int
    parameters: range
    values: range
    shards: tuple[range, ...]

    def within(self, values: range) -> slice:
        """Return where a range of the model's values is in a vector of this layer alone."""
        return slice(values.start - self.values.start, values.stop - self.values.start)


@dataclass(frozen=True)
class Fragment:
    """Rows of a parameter.

    Attributes:
        name: The parameter's name.
        rows: The rows, along the parameter's first dimension.
        shape: The shape of the whole parameter.
        part: The values of the rows in the flat vector.
    """

    name: str
    rows: range
    shape: tuple[int, ...]
    part: Part

    @property
    def is_whole(self) -> bool:
        return len(self.rows) == self.shape[0]


class ShardLayout:
    """Layers, shards and fragments of a model for a number of ranks; equal on all of them.

    Attributes:
        layers: The layers in the order of a forward pass.
        shapes: The shape of each parameter by name, in the model's order.
        starts: Where each parameter begins in the flat vector.
        second_use: The values, at the end of the vector, that stand for the second use of the embedding's matrix; empty
            if embedding and head share no matrix.
    """

    def __init__(self, parameters: Mapping[str, Tensor], *, ranks: int, second_use: Tensor | None = None) -> None:
        """Assign every value to a rank.

        Args:
            parameters: The parameters of the whole model by name, in its order, as views of its flat vector.
            ranks: The number of ranks that share them.
            second_use: The place after all parameters for the gradient of a shared matrix's second use; None if no matrix
                is shared.
        """
        if second_use is not None:
            parameters = {**parameters, HEAD: second_use}
        self.shapes = {name: tuple(parameter.shape) for name, parameter in parameters.items()}
        self.starts = [int(parameter.storage_offset()) for parameter in parameters.values()]
        self._names = list(parameters)
        end = self._end(len(self._names) - 1)
        self.second_use = range(end if second_use is None else self.starts[-1], end)
        self.layers: list[Layer] = []
        owned, total = [0] * ranks, 0
        for index, places in enumerate(_layers(self._names)):
            values = range(self.starts[places.start], self._end(places.stop - 1))
            if self.second_use and places.stop == len(self._names):
                self.layers.append(Layer(index, places, values, self._shards_of_second_use(values)))
                break
            total += len(values)
            borders = self._borders(places, values)
            ends = [values.start]
            for rank, before in enumerate(itertools.accumulate(owned[:-1])):
                target = values.start + (rank + 1) * total // ranks - before
                ends.append(max(ends[-1], _nearest(borders, target)))
            ends.append(values.stop)
            shards = tuple(range(start, stop) for start, stop in itertools.pairwise(ends))
            owned = [before + len(shard) for before, shard in zip(owned, shards, strict=True)]
            self.layers.append(Layer(index, places, values, shards))

    def fragments(self, values: range) -> list[Fragment]:
        """Return the parameters, or rows of them, that lie in a range of values."""
        found = []
        # The last parameter that begins at the first value or before it, and those up to the end: with thousands of ranks, all ask for all.
        for place in range(max(0, bisect_right(self.starts, values.start) - 1), bisect_left(self.starts, values.stop)):
            name = self._names[place]
            start, shape = self.starts[place], self.shapes[name]
            part = range(max(start, values.start), min(start + math.prod(shape), values.stop))
            if part:
                columns = math.prod(shape[1:])
                rows = range((part.start - start) // columns, (part.stop - start) // columns)
                found.append(Fragment(name, rows, shape, Part(place, part.start - start, part)))
        return found

    def parameters_of(self, layer: Layer, model: nn.Module) -> list[tuple[str, nn.Parameter]]:
        """Return a layer's parameters, with their names."""
        named = list(model.named_parameters())
        return named[layer.parameters.start : layer.parameters.stop]

    def kept(self, layer: Layer, rank: int) -> range:
        """Return the values of a layer's parameters that a rank owns: its shard without the place of a second use."""
        shard = layer.shards[rank]
        return range(shard.start, max(shard.start, min(shard.stop, self.second_use.start)))

    def use_again(self, layer: Layer, values: range) -> tuple[range, range]:
        """Return the values of a layer that stand for a matrix's second use, and the values of the matrix itself."""
        start = max(values.start, self.second_use.start)
        again = range(start, max(start, values.stop)) if layer is self.layers[-1] else range(0)
        shift = self.starts[0] - self.second_use.start
        return again, range(again.start + shift, again.stop + shift)

    def name(self, parameter: int) -> str:
        """Return the name of the parameter at this place."""
        return self._names[parameter]

    def _end(self, place: int) -> int:
        count = math.prod(self.shapes[self._names[place]])
        return self.starts[place] + -(-count // LEAF_VALUES) * LEAF_VALUES

    def _shards_of_second_use(self, values: range) -> tuple[range, ...]:
        """Divide the last layer: its values before the second use go to the first rank, each row of that to the matrix row's owner."""
        matrix = range(self.starts[0], self.starts[0] + math.prod(self.shapes[EMBEDDING]))
        stops = [shard.stop for shard in self.layers[0].shards[:-1]]
        ends = [len(self.second_use) if stop >= matrix.stop else stop - matrix.start for stop in stops]
        borders = [values.start, *(self.second_use.start + end for end in ends), values.stop]
        return tuple(range(start, stop) for start, stop in itertools.pairwise(borders))

    def _borders(self, places: range, values: range) -> list[int]:
        """Return the places where shards may begin and end, ascending."""
        found: list[int] = []
        for place in places:
            shape = self.shapes[self._names[place]]
            piece = math.lcm(math.prod(shape[1:]), LEAF_VALUES)
            found += range(self.starts[place], self.starts[place] + math.prod(shape), piece)
        return [*found, values.stop]


def pieces_between(before: ShardLayout, after: ShardLayout) -> list[Piece]:
    """Return all values of the parameters, each exactly once, cut at the borders of both cuts, in ascending order: see `plan_transfers`.

    Args:
        before, after: Two cuts of the same model.
    """
    found = []
    for layer, other in zip(before.layers, after.layers, strict=True):
        for slot in range(len(layer.shards)):
            kept = before.kept(layer, slot)
            for new in range(len(other.shards)):
                wanted = after.kept(other, new)
                values = range(max(kept.start, wanted.start), min(kept.stop, wanted.stop))
                if values:
                    found.append(Piece(slot, new, values))
    return found


def _nearest(borders: Sequence[int], target: int) -> int:
    after = min(bisect_left(borders, target), len(borders) - 1)
    before = max(0, after - 1)
    return min(borders[before], borders[after], key=lambda border: abs(border - target))


def _layers(names: Sequence[str]) -> list[range]:
    """Return the places of each layer's parameters; a layer's names begin with the same words."""
    found: list[range] = []
    before = None
    for place, name in enumerate(names):
        kind, rest = name.split(".", 1)
        layer = f"{kind}.{rest.split('.', 1)[0]}" if kind == "blocks" else kind
        if layer == before:
            found[-1] = range(found[-1].start, place + 1)
        else:
            found.append(range(place, place + 1))
        before = layer
    return found
