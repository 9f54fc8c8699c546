"""One slot of a model's state in an elastic run: a shard of each layer's parameters, with its optimizer state and its gradients.

Shapes: K = values of some pieces of the slot; P = kinds of values that an update keeps of each: the parameter itself, and what the
update rule keeps of it, such as two moments.
"""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from ttlaunch.runtime.parallel.zero.owned import OwnedParameters
from ttlaunch.runtime.training.optimizers import Optimizer

_KINDS = ("mean", "square")


class SlotState:
    """The parameters, moments and gradients of one slot.

    Attributes:
        owned: Parameters and gradients.
        optimizer: The optimizer of these.
    """

    def __init__(self, owned: OwnedParameters, optimizer: Optimizer) -> None:
        """Take them; nothing is copied."""
        self.owned, self.optimizer = owned, optimizer
        state = dict(optimizer.named_state())
        self._steps = [tensor for name, tensor in state.items() if name.startswith("step.")]
        self._rows: list[tuple[range, list[Tensor]]] = []
        for fragment, parameter in owned.fragments():
            kept = [state[f"{kind}.{fragment.name}"] for kind in _KINDS if f"{kind}.{fragment.name}" in state]
            self._rows.append((fragment.part.values, [one.detach().view(-1) for one in (parameter, *kept)]))

    @property
    def kinds(self) -> int:
        """P."""
        return len(self._rows[0][1]) if self._rows else 0

    @property
    def bytes(self) -> int:
        """The bytes that it keeps, with its gradients."""
        gradients = self.owned.grads_N.nbytes if self.owned.shares_gradients else 0
        return sum(tensor.nbytes for _, tensors in self._rows for tensor in tensors) + gradients

    def pack(self, values: Sequence[range]) -> Tensor:
        """Copy values and what is kept of them into one vector of P K values, float32, on the CPU."""
        parts = [tensor[inside] for one in values for tensor, inside in self._overlaps(one)]
        return torch.cat([part.cpu() for part in parts]) if parts else torch.empty(0)

    @torch.no_grad()
    def fill(self, values: Sequence[range], content: Tensor) -> None:
        """Overwrite values with those that another slot has packed for the same ranges."""
        begun = 0
        for tensor, inside in (pair for one in values for pair in self._overlaps(one)):
            count = inside.stop - inside.start
            tensor[inside] = content[begun : begun + count].to(tensor.device)
            begun += count

    def count_packed(self, values: Sequence[range]) -> int:
        """Return P K: how long the vector is that another slot packs."""
        return sum(inside.stop - inside.start for one in values for _, inside in self._overlaps(one))

    @torch.no_grad()
    def set_updates(self, count: int) -> None:
        """Note how many updates the state has seen."""
        for tensor in self._steps:
            tensor.fill_(count)

    def updates(self) -> int:
        """Return how many updates the state has seen; 0 if the update rule does not count them, or the slot is empty."""
        return int(self._steps[0].item()) if self._steps else 0

    def _overlaps(self, values: range) -> Iterator[tuple[Tensor, slice]]:
        """Yield each tensor that has some of the values, with the place of these in it."""
        for held, tensors in self._rows:
            first, stop = max(held.start, values.start), min(held.stop, values.stop)
            if first < stop:
                yield from ((tensor, slice(first - held.start, stop - held.start)) for tensor in tensors)
