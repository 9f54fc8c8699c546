"""The rows of every parameter that a rank has under torch's FSDP2, which it updates, and saves to and loads from checkpoints.

Shapes: N = values of all rows that a rank has.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ttlaunch.runtime.comm.collectives import all_reduce
from ttlaunch.runtime.comm.protocol import Communicator
from ttlaunch.runtime.model.model import Model
from ttlaunch.runtime.model.split import Split
from ttlaunch.runtime.parallel.zero.memory import storage_bytes
from ttlaunch.runtime.telemetry.traffic_counter import operation
from ttlaunch.runtime.training.optimizers import Optimizer, norms_of_layers
from ttlaunch.runtime.world import Rank


class Shards:
    """This rank's rows of a model; optimizers and checkpoints use them in place of the model.

    Attributes:
        peers: The ranks that together have all rows, in their order.
        splits: The rows of each parameter that this rank has.
        copies: Names of state that another rank saves: the optimizer's step of each parameter, on all peers but the first.
        grads_N: The gradients of the rows in one flat vector.
        traffic: The traffic counter of the rank.
        loss_scaler: The model's loss scaler.
    """

    def __init__(self, model: Model, *, peers: Sequence[Rank], place: int) -> None:
        """Take a model whose parameters FSDP has divided among `peers`; this rank is `peers[place]`."""
        self.peers = peers
        self.traffic = model.traffic
        self.loss_scaler = model.loss_scaler
        self._model = model
        self._squares: dict[str, float] = {}
        self._dealt: dict[str, Any] = dict(model.named_parameters())  # torch's DTensors
        self._own = {name: nn.Parameter(one.detach().to_local()) for name, one in self._dealt.items()}
        self.splits = {
            name: _split(self._dealt[name].shape, own.shape[0], parts=len(peers), place=place)
            for name, own in self._own.items()
        }
        self.copies = frozenset() if place == 0 else frozenset(f"step.{name}" for name in self._own)
        sizes = [own.numel() for own in self._own.values()]
        self.grads_N = torch.zeros(sum(sizes), device=next(iter(self._own.values())).device)
        for own, gradient in zip(self._own.values(), self.grads_N.split(sizes), strict=True):
            own.grad = gradient.view(own.shape)

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield this rank's rows of each parameter, under the parameter's name in the whole model."""
        yield from self._own.items()

    def names_of_whole(self) -> frozenset[str]:
        return self._model.names_of_whole()

    def add_head_gradient(self) -> None:
        """Do nothing: `take_gradients` has added both uses of a shared matrix."""

    @torch.no_grad()
    def take_gradients(self) -> Tensor:
        """Move the gradients of a synchronised backward pass, summed over all ranks, to `grads_N`, and free FSDP's own."""
        self._model.add_head_gradient()
        self.grads_N.zero_()
        for name, own in self._own.items():
            gradient = self._dealt[name].grad
            if own.grad is not None and gradient is not None:
                own.grad.copy_(gradient.to_local())
        for parameter in self._model.parameters():
            parameter.grad = None
        return self.grads_N

    def squared_norms(self, ctx: Communicator) -> list[float]:
        """Return the squared norm of each parameter's gradient over the rows of all peers, the loss scale divided out.

        All peers must call, once in a step. All get the same numbers, which differ from a whole gradient's by rounding.

        Cost: an `all_reduce` of 8 bytes (float64) for each parameter.
        Order: the tree over the peers: the same bits on every run with as many ranks.
        """
        norms = [torch.linalg.vector_norm(own.grad, dtype=torch.float64) for own in self._own.values()]
        squares = torch.stack(norms).cpu().div_(self.loss_scaler.scale).square_()
        with operation(ctx, "squared_norms"):
            all_reduce(ctx, squares, among=self.peers)
        self._squares = dict(zip(self._own, squares.tolist(), strict=True))
        return list(self._squares.values())

    def layer_norms(self) -> dict[str, float]:
        """Return the norm of each layer's gradient, from the `squared_norms` of the step."""
        return norms_of_layers(self._squares)

    def whole_parameters(self) -> Iterator[tuple[str, Tensor]]:
        """Yield each whole parameter, one after the other; all peers must iterate over all of them.

        Cost: torch gathers the rows of each parameter; the traffic counter does not count this.
        """
        for name, dealt in self._dealt.items():
            yield name, dealt.detach().full_tensor()

    def persistent_bytes(self, optimizer: Optimizer) -> int:
        """Return the bytes that this rank keeps from step to step: rows, their gradients and the optimizer's state."""
        dealt: list[Any] = list(self._model.parameters())  # also where the gradient of a second use is gathered
        rows = [one.detach().to_local() for one in dealt]
        return storage_bytes([*rows, self.grads_N, *(tensor for _, tensor in optimizer.named_state())])

    @property
    def values_of_whole(self) -> int:
        """The number of values of all parameters."""
        return sum(dealt.numel() for dealt in self._dealt.values())


def _split(shape: Sequence[int], own: int, *, parts: int, place: int) -> Split:
    """Return the rows that `torch.chunk` gives a part: all parts have as many as the first, except the last ones.

    >>> [_split((10, 2), own, parts=4, place=place).ranges for place, own in enumerate([3, 3, 3, 1])]
    [(range(0, 3),), (range(3, 6),), (range(6, 9),), (range(9, 10),)]
    """
    start = place * -(-shape[0] // parts)
    return Split(tuple(shape), 0, (range(start, start + own),) if own else ())


def padded_values(parameters: Iterable[Tensor], *, parts: int) -> int:
    """Count the values in a collective over some parameters, which pads each part to the rows of the first part."""
    return sum(-(-one.shape[0] // parts) * parts * one[0].numel() for one in parameters)
