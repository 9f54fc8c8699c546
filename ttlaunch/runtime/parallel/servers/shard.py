"""The parameters that one of several servers has: some layers of the model, a contiguous part of its flat vector.

Shapes: N = values of the whole model's flat vector, S = values of a shard.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import accumulate

import torch
from torch import Tensor, nn

from ttlaunch.runtime.comm.collectives import chain_all_gather
from ttlaunch.runtime.context import RankContext
from ttlaunch.runtime.model.flat import FlatParameters
from ttlaunch.runtime.model.loss_scaling import LossScaler
from ttlaunch.runtime.model.model import Model, place_of_second_use
from ttlaunch.runtime.model.split import Split
from ttlaunch.runtime.model.tied import EMBEDDING
from ttlaunch.runtime.telemetry.traffic_counter import operation
from ttlaunch.runtime.training.optimizers import Optimizer, global_norm, layer_of
from ttlaunch.runtime.training.rank_model import build_model
from ttlaunch.runtime.world import Rank
from ttlaunch.spec.recipe.sections import TrainingFile


class ParameterShard:
    """Some of a model's parameters, under the same names, with everything that an optimizer and a checkpoint need.

    If embedding and head share a matrix, the shard that has the embedding owns the matrix and receives the gradients of
    both uses.

    Attributes:
        weights_N: A copy of its part of the model's flat vector; here N = values of the shard, not of the model.
        grads_N: The gradients, in the same layout. If the shard owns a shared matrix, the gradient of its second use
            follows them.
        traffic: The traffic counter of the rank that has the shard.
        loss_scaler: The model's loss scaler.
        copies: Always empty, because no other rank has these parameters.
        splits: Always empty, because a shard has whole parameters.
    """

    copies: frozenset[str] = frozenset()

    def __init__(self, model: Model, places: range) -> None:
        """Copy some of a model's parameters; the model itself is not kept.

        Args:
            model: The model that has the parameters.
            places: Their indices in `model.named_parameters()`.

        Raises:
            ValueError: The range of places is empty.
        """
        named = list(model.named_parameters())[places.start : places.stop]
        self._named = {name: nn.Parameter(parameter.detach().clone()) for name, parameter in named}
        second = None if places.start else place_of_second_use(model)
        self._second_use = [] if second is None else [nn.Parameter(second.detach().clone())]
        flat = FlatParameters([*self._named.values(), *self._second_use])
        self.weights_N, self.grads_N = flat.weights_N[: flat.starts[len(named)]], flat.grads_N
        self.traffic = model.traffic
        self.loss_scaler: LossScaler = model.loss_scaler
        self.splits: Mapping[str, Split] = {}
        self._names_of_whole = model.names_of_whole()

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """The shard's parameters, in the model's order."""
        return iter(self._named.items())

    def names_of_whole(self) -> Collection[str]:
        """The names of the whole model's parameters."""
        return self._names_of_whole

    def take_gradients(self) -> Tensor:
        """Return all gradients, `grads_N`."""
        return self.grads_N

    @torch.no_grad()
    def add_head_gradient(self) -> None:
        """Add the gradient of a shared matrix's second use to that of the first, if this shard owns the matrix."""
        for second in self._second_use:
            first = self._named[EMBEDDING]
            if first.grad is not None and second.grad is not None:
                first.grad.add_(second.grad)
                second.grad.zero_()


def build_shard(cfg: TrainingFile, ctx: RankContext, *, among: Sequence[Rank]) -> "Model | ParameterShard":
    """Build this server's part of the model; a sole server has the whole model.

    The size of the part is noted in the rank's traffic counter, because the formulas of traffic need it.

    Args:
        cfg: Sizes, model type and seed.
        ctx: The context of this server.
        among: All servers, in the order of their shards.
    """
    model = build_model(cfg, ctx)
    whole = len(among) == 1
    shard = model if whole else ParameterShard(model, cut_layers(model, parts=len(among))[among.index(ctx.rank)])
    ctx.traffic.note(shard_values=shard.weights_N.numel(), shard_tensors=len(list(shard.named_parameters())))
    return shard


def shared_norm(ctx: RankContext, optimizer: Optimizer, *, among: Sequence[Rank]) -> float:
    """Return the norm of the whole gradient, from the squared norms of every server's parameters, in the model's order.

    Args:
        ctx: Every rank of `among` must call, once a step, when the gradients of its own parameters are complete.
        optimizer: The optimizer of this server's shard.
        among: All servers, in the order of their shards.

    Cost: a `chain_all_gather` of a float64 for each parameter; none for one server.
    Order: that of the model's parameters: the same bits on every server, and for any number of servers.
    """
    with operation(ctx, "squared_norms"):
        return global_norm(chain_all_gather(ctx, optimizer.squared_norms(), among=among))


def cut_layers(model: Model, *, parts: int) -> list[range]:
    """Cut a model's parameters between layers, into contiguous parts whose sizes differ as little as possible.

    Returns:
        The places in `named_parameters()` of each part.

    Raises:
        ValueError: There are fewer layers than parts.
    """
    named = list(model.named_parameters())
    layers = [layer_of(name) for name, _ in named]
    starts = [index for index, layer in enumerate(layers) if not index or layer != layers[index - 1]]
    if parts > len(starts):
        raise ValueError(f"{len(starts)} layers cannot be cut into {parts} parts")
    before = [0, *accumulate(parameter.numel() for _, parameter in named)]
    borders = [0]
    for part in range(1, parts):
        index = starts.index(borders[-1])
        left = starts[index + 1 : len(starts) - (parts - part) + 1]  # each of the remaining parts needs a layer
        borders.append(min(left, key=lambda start: abs(before[start] - before[-1] * part / parts)))
    return [range(*pair) for pair in zip(borders, [*borders[1:], len(named)], strict=True)]


def cut_values(model: Model, *, parts: int) -> list[range]:
    """Find the values of each part of `cut_layers` in the model's flat vectors.

    Together the parts cover the whole vector, except the place of a shared matrix's second use.
    """
    if parts == 1:
        return [range(model.weights_N.numel())]
    parameters = [parameter for _, parameter in model.named_parameters()]
    starts = [parameters[part.start].storage_offset() for part in cut_layers(model, parts=parts)]
    ends = [*starts[1:], second_use_values(model).start]
    return [range(*pair) for pair in zip(starts, ends, strict=True)]


def second_use_values(model: Model) -> range:
    """Find the gradient of a shared matrix's second use in a whole model's flat gradient; empty if no matrix is shared."""
    second, size = place_of_second_use(model), model.weights_N.numel()
    return range(size if second is None else int(second.storage_offset()), size)


def own_values(weights_N: Tensor, part: range) -> Tensor:
    """Return a part of a flat vector as a view."""
    return weights_N[part.start : part.stop]


def own_gradients(gradient_N: Tensor, parts: Sequence[range]) -> Tensor:
    """Join the parts of a flat gradient that one server gets; the result is a view if there is only one part."""
    values = [own_values(gradient_N, part) for part in parts if part]
    return values[0] if len(values) == 1 else torch.cat(values)
