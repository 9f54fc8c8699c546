"""What a rank owns of a model: the parameters that it updates, their gradients, and their names in checkpoints.

It stands in for the model where an optimizer is built and where checkpoints are written and read. `zero_stage` determines
what a rank has for its shard only: from 1 on the optimizer state, from 2 on also the gradients, from 3 on also the parameters.

Shapes: N = values of the flat vector of the whole model, n = values of this rank's shards of all layers.
"""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn

from ttlaunch.runtime.model.model import Model
from ttlaunch.runtime.model.split import Split
from ttlaunch.runtime.parallel.zero.layout import Fragment, Layer, ShardLayout
from ttlaunch.runtime.training.norms import Node, Part, SquaredNorms


class OwnedParameters:
    """The part of the model that this rank updates.

    Attributes:
        layout: Who owns what.
        shares_state, shares_gradients, shares_parameters: Whether each rank has only its shard of the optimizer's state,
            the gradients, the parameters: from stage 1, 2 and 3 on.
        place: This rank's position among those that share the model.
        splits: The rows that this rank has of each parameter that it does not have whole, by name.
        weights_N, grads_N: The flat vectors that this rank has: of the whole model, or its shards of all layers one after
            the other. Only `grads_N` has values for a matrix's second use. Up to stage 2 the model's parameters are views
            of `weights_N`; at stage 3 `GatheredWeights` gives them memory.
        copies: Names of state that another rank saves: the optimizer's step of each parameter whose first row is there.
    """

    def __init__(
        self, model: Model, layout: ShardLayout, *, place: int, zero_stage: int, is_filled_later: bool = False
    ) -> None:
        """Keep the part of a flat model that this rank owns at this stage, and free the rest.

        Args:
            model: The model.
            layout: Who owns what.
            place: This rank's position among those that share the model.
            zero_stage: See the module.
            is_filled_later: Whether the model has no weights to keep, or not these: at stage 3 those of this rank are zeros then.
        """
        self.layout, self.place = layout, place
        self.shares_state, self.shares_gradients, self.shares_parameters = (zero_stage >= least for least in (1, 2, 3))
        self.loss_scaler, self.traffic = model.loss_scaler, model.traffic
        self._model = model
        self._starts = _starts([layer.shards[place] for layer in layout.layers])
        self.weights_N, self.grads_N = model.weights_N, model.grads_N
        if self.shares_parameters and is_filled_later:
            self.weights_N = model.weights_N.new_zeros(sum(len(layout.kept(layer, place)) for layer in layout.layers))
        elif self.shares_parameters:
            self.weights_N = torch.cat([self.weights_N[_slice(layout.kept(layer, place))] for layer in layout.layers])
        if self.shares_gradients:
            self.grads_N = self.weights_N.new_zeros(self._starts[-1])
            model.release_flat_vectors(weights=self.shares_parameters)
        owned = [layer.values if not self.shares_state else layer.shards[place] for layer in layout.layers]
        self._parameters = [
            (fragment, self._parameter(layer, fragment))
            for layer, values in zip(layout.layers, owned, strict=True)
            for fragment in _updated(layout, values)
        ]
        cut = [fragment for fragment, _ in self._parameters if not fragment.is_whole]
        self.splits = {one.name: Split(tuple(one.shape), 0, (one.rows,)) for one in cut}
        self.copies = frozenset(f"step.{one.name}" for one in cut if one.rows.start > 0)

    def weights(self, layer: Layer) -> Tensor:
        """Return this rank's shard of a layer's parameters."""
        return self._of(self.weights_N, layer, self.layout.kept(layer, self.place), is_whole=not self.shares_parameters)

    def weights_again(self, layer: Layer) -> Tensor:
        """Return this rank's rows of the matrix that a layer uses a second time; empty for all layers but the head."""
        _, matrix = self.layout.use_again(layer, layer.shards[self.place])
        return self._of(self.weights_N, self.layout.layers[0], matrix, is_whole=not self.shares_parameters)

    def gradients(self, layer: Layer) -> Tensor:
        """Return this rank's shard of the gradients of a layer, with those of a second use."""
        return self._of(self.grads_N, layer, layer.shards[self.place], is_whole=not self.shares_gradients)

    def count(self, layers: Sequence[Layer]) -> int:
        """Count the values of this rank's shards of some layers, with those of a second use."""
        return sum(len(layer.shards[self.place]) for layer in layers)

    def count_again(self) -> int:
        """Count the values of this rank's shards that belong to a second use."""
        again, _ = self.layout.use_again(self.layout.layers[-1], self.layout.layers[-1].shards[self.place])
        return len(again)

    def shares(self) -> dict[str, list[int]]:
        """Count the values of each rank's shards, with those of a second use, for the formula of the traffic; and those that it updates.

        Cost: about 10 µs for each rank and layer.
        """
        layers, places = self.layout.layers, range(len(self.layout.layers[0].shards))
        updated = [self._count_updated(place) for place in places]
        return {
            "owned_values": [sum(len(one.shards[place]) for one in layers) for place in places],
            "values_of_backward": [sum(len(one.shards[place]) for one in layers[:-2]) for place in places],
            "values_of_second_use": [
                len(self.layout.use_again(layers[-1], layers[-1].shards[place])[0]) for place in places
            ],
            "updated_in_matrices": [in_matrices for in_matrices, _ in updated],
            "updated_elsewhere": [elsewhere for _, elsewhere in updated],
        }

    def _count_updated(self, place: int) -> tuple[int, int]:
        """Count the values that a rank updates, as its optimizer divides them: those of matrices, and all others."""
        found = [0, 0]
        for layer in self.layout.layers:
            for fragment in _updated(self.layout, layer.shards[place] if self.shares_state else layer.values):
                found[len(fragment.shape) == 1] += len(fragment.part.values)
        return found[0], found[1]

    def squared_norms(self) -> "list[SquaredNorms]":
        """Return, for each layer, the sums of squares over this rank's shard; at stage 0 over the whole layer."""
        whole = not self.shares_gradients
        found = []
        for layer in self.layout.layers:
            values = layer.values if not self.shares_state else layer.shards[self.place]
            shift = 0 if whole else self._shift(layer)
            found.append(SquaredNorms(_parts(self.layout, values, shift=shift)))
        return found

    def nodes_of(self, place: int) -> list[Node]:
        """Return the tree nodes whose squared norms another rank computes, from stage 1 on."""
        norms = [SquaredNorms(_parts(self.layout, layer.shards[place], shift=0)) for layer in self.layout.layers]
        return [node for one in norms for node in one.nodes]

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield the parameters, or rows of them, that this rank updates, with their gradients."""
        yield from ((fragment.name, parameter) for fragment, parameter in self._parameters)

    def fragments(self) -> Sequence[tuple[Fragment, nn.Parameter]]:
        """Return the rows of parameters that this rank updates, with these parameters."""
        return self._parameters

    def names_of_whole(self) -> frozenset[str]:
        """Return the names of the whole model's parameters."""
        return self._model.names_of_whole()

    def take_gradients(self) -> Tensor:
        """Return all gradients that this rank keeps."""
        return self.grads_N

    @torch.no_grad()
    def add_head_gradient(self) -> None:
        """Add the gradient of a shared matrix's second use to that of the first, for the rows that this rank owns."""
        first, last = self.layout.layers[0], self.layout.layers[-1]
        values = last.shards[self.place] if self.shares_state else last.values
        again, matrix = self.layout.use_again(last, values)
        second = self._of(self.grads_N, last, again, is_whole=not self.shares_gradients)
        self._of(self.grads_N, first, matrix, is_whole=not self.shares_gradients).add_(second)
        second.zero_()

    def _parameter(self, layer: Layer, fragment: Fragment) -> nn.Parameter:
        shape = (len(fragment.rows), *fragment.shape[1:])
        values = fragment.part.values
        weights_at = values.start + (self._shift(layer) if self.shares_parameters else 0)
        grads_at = values.start + (self._shift(layer) if self.shares_gradients else 0)
        parameter = nn.Parameter(self.weights_N[weights_at : weights_at + len(values)].view(shape), requires_grad=False)
        parameter.grad = self.grads_N[grads_at : grads_at + len(values)].view(shape)
        return parameter

    def _of(self, vector_N: Tensor, layer: Layer, values: range, *, is_whole: bool) -> Tensor:
        """Return the part of a vector that holds this rank's values of a layer."""
        shift = 0 if is_whole else self._shift(layer)
        return vector_N[values.start + shift : values.stop + shift]

    def _shift(self, layer: Layer) -> int:
        """Return what to add to a place in the model's flat vector to get the place in this rank's own vector."""
        return self._starts[layer.index] - layer.shards[self.place].start


def _starts(shards: Sequence[range]) -> list[int]:
    starts = [0]
    for shard in shards:
        starts.append(starts[-1] + len(shard))
    return starts


def _slice(values: range) -> slice:
    return slice(values.start, values.stop)


def _updated(layout: ShardLayout, values: range) -> list[Fragment]:
    """Return the parameters, or rows of them, in a range of values; leave out the place of a second use, which has no update."""
    return [fragment for fragment in layout.fragments(values) if fragment.part.values.start not in layout.second_use]


def _parts(layout: ShardLayout, values: range, *, shift: int) -> list[Part]:
    parts = [fragment.part for fragment in _updated(layout, values)]
    return [Part(one.parameter, one.first, range(one.values.start + shift, one.values.stop + shift)) for one in parts]
