"""The average of the weights over the training, kept beside the weights: it has less noise than the last weights.

Source: B. T. Polyak, A. B. Juditsky, "Acceleration of Stochastic Approximation by Averaging", SIAM J. Control Optim.
    30(4), 1992, for the mean of all; with a decay it is the exponential average that is common in deep learning.

Shapes: N = values of the flat vector.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor

from ttlaunch.runtime.checkpoint.checkpoints import HasParameters
from ttlaunch.runtime.context import RankContext
from ttlaunch.runtime.telemetry.memory import BUFFERS
from ttlaunch.runtime.telemetry.traffic_counter import register_owner
from ttlaunch.runtime.training.optimizers import Optimizer


class HasWeights(Protocol):
    """A model, or the part of it that a server has."""

    @property
    def weights_N(self) -> Tensor: ...

    def named_parameters(self) -> Iterable[tuple[str, Tensor]]: ...


class PolyakAverage:
    """The average of the weights after every `interval` steps.

    Of the weights w_1, ..., w_k it is the mean or, with decay b, b^(k-1) w_1 + (1 - b) (b^(k-2) w_2 + ... + w_k). The
    factor of the newest weights follows from the step, so a resumed run needs only the average itself. Each value is
    averaged on its own, so shards of the average have the same bits as the whole.

    Attributes:
        average_N: The average of the weights, float32; before the first update, the initial weights.
    """

    def __init__(self, model: HasWeights, *, interval: int, decay: float | None) -> None:
        """Begin with the weights as they are.

        Args:
            model: The model whose weights are averaged.
            interval: The weights after every `interval`-th step are averaged.
            decay: The factor of the old average when new weights are added; None: all weights count alike.
        """
        self._weights_N = model.weights_N
        self.average_N = model.weights_N.clone()
        self._places = {
            name: (parameter.storage_offset(), parameter.shape) for name, parameter in model.named_parameters()
        }
        self._interval = interval
        self._decay = decay
        register_owner(model, self, PolyakAverage.held_tensors)

    def held_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the tensor of the average for the report of memory; see `telemetry/memory.py`."""
        yield BUFFERS, self.average_N

    @torch.no_grad()
    def update(self, step: int) -> None:
        """Add the weights after a step to the average, if the step is a multiple of `interval`."""
        if step % self._interval:
            return
        count = step // self._interval
        newest = 1 / count if self._decay is None or count == 1 else 1 - self._decay
        self.average_N.lerp_(self._weights_N, newest)

    def begin(self) -> None:
        """Use the current weights as the average until the first update."""
        self.average_N.copy_(self._weights_N)

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Put the average in place of the weights for a block, to evaluate it."""
        weights_N = self._weights_N.clone()
        self._weights_N.copy_(self.average_N)
        yield
        self._weights_N.copy_(weights_N)

    def named_average(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the average of each parameter, as a view that `update` changes."""
        for name, (start, shape) in self._places.items():
            yield name, self.average_N[start : start + shape.numel()].view(shape)


class AveragedState:
    """An optimizer's state and the average, for checkpoints: `polyak.NAME` beside `mean.NAME`."""

    def __init__(self, optimizer: Optimizer, average: PolyakAverage | None) -> None:
        self._optimizer = optimizer
        self._average = average

    def named_state(self) -> Iterator[tuple[str, Tensor]]:
        yield from self._optimizer.named_state()
        if self._average is not None:
            yield from ((f"polyak.{name}", tensor) for name, tensor in self._average.named_average())

    def wait_before_update(self, ready: Callable[[], object]) -> None:
        """Pass `ready` to the optimizer: the average changes only after its update, so no further wait is needed."""
        self._optimizer.wait_before_update(ready)

    def scaler_state(self) -> Mapping[str, Any] | None:
        return self._optimizer.scaler_state()

    def restore_scaler(self, state: Mapping[str, Any] | None) -> None:
        self._optimizer.restore_scaler(state)


def restore_averaged(  # noqa: PLR0917  users' trainers call it so
    ctx: RankContext, model: HasParameters, optimizer: Optimizer, average: PolyakAverage | None
) -> AveragedState:
    """Restore a run as `ctx.restore` does, with the average too; return the state to give to `ctx.checkpoint`."""
    state = AveragedState(optimizer, average)
    ctx.restore(model, state)
    if average is not None and not ctx.steps_done:
        average.begin()
    return state
