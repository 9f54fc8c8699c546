"""A rank in which `ttlaunch chaos` has a bit flipped, as failing memory flips one; no other run imports this.

Only the rank itself knows where its tensors are, so it flips the bit: of a parameter after it has reported a step, and before the digests of
this step; of a gradient or of an activation in the first pass of the step that follows which is not one of an audit.
"""

import random
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ttlaunch.records.audits import FLIPPED
from ttlaunch.runtime.checkpoint.checkpoints import HasParameters, HasState
from ttlaunch.runtime.context import RankContext
from ttlaunch.runtime.telemetry.traffic_counter import TrafficCounter

_WORD = 32
_LOWEST, _HIGHEST = 12, 22
"""The bits of a float32 that are drawn: those of the mantissa that change a value by more than 0.01 %, and by less than half."""


class FlippedBitContext(RankContext):
    """The context of such a rank."""

    def __init__(self, flip_after: int, **known: Any) -> None:
        """Make the context; further arguments are those of `RankContext`.

        Args:
            flip_after: The step after whose report the bit flips.
        """
        super().__init__(**known)
        self._flip_after = flip_after
        self._model: HasParameters | None = None

    def restore(self, model: HasParameters, optimizer: HasState, *, is_given: bool = True) -> None:
        self._model = model
        super().restore(model, optimizer, is_given=is_given)

    def report(self, step: int, **values: float) -> None:
        super().report(step, **values)
        if step == self._flip_after:
            self._flip()

    @torch.no_grad()
    def _flip(self) -> None:
        """Flip a bit of a value of a parameter; which one follows from the step and the rank."""
        draw = random.Random(f"flip {self._flip_after} {self.rank}")  # noqa: S311 - no secret
        named = [] if self._model is None else [one for one in self._model.named_parameters() if _can_flip(one[1])]
        if not named:
            self.note("chaos found no parameter in which a bit can flip: this rank has none in float32")
            return
        name, parameter = draw.choice(named)
        self.note(f"{_flip_a_bit(parameter, draw)} of {name} after step {self._flip_after}")


class FlippedPassContext(RankContext):
    """The context of a rank in which a bit of a gradient or of an activation flips."""

    def __init__(self, flip_after: int, *, of_gradient: bool, draw: random.Random | None = None, **known: Any) -> None:
        """Make the context; further arguments are those of `RankContext`.

        Args:
            flip_after: The step before that in which the bit flips.
            of_gradient: Whether it is a bit of a gradient, or of what a layer hands on.
            draw: Decides which bit; None: it follows from the step and the rank.
        """
        super().__init__(**known)
        self._flip_after, self._of_gradient = flip_after, of_gradient
        self._draw = draw or random.Random(f"flip {flip_after} {self.rank}")  # noqa: S311 - no secret
        self._is_done = False

    def watch(self, model: nn.Module, *, values: int) -> TrafficCounter:
        """Watch one of the model's parameters or layers, and flip a bit of its gradient or of its output when its time has come."""
        if self._of_gradient:
            name, parameter = self._draw.choice([one for one in model.named_parameters() if _can_flip(one[1])])
            parameter.register_post_accumulate_grad_hook(
                lambda one: None if one.grad is None else self._flip(one.grad, f"the gradient of {name}")
            )
        else:
            layers = [one for one in model.named_modules() if not list(one[1].children()) and list(one[1].parameters())]
            # Some only hold a tensor and are never called, such as an embedding of positions: then the bit flips in the next one that is.
            # The last layer may be such a one, so it is not drawn.
            for name, layer in layers[self._draw.randrange(max(1, len(layers) - 1)) :]:
                layer.register_forward_hook(partial(self._flip_output, name))
        return super().watch(model, values=values)

    def _flip_output(self, name: str, _layer: nn.Module, _inputs: object, output: Tensor) -> None:
        if torch.is_grad_enabled():
            self._flip(output, f"the output of {name}")

    def _flip(self, tensor: Tensor, name: str) -> None:
        if self._is_done or self.auditor.is_computing or self.step != self._flip_after + 1:
            return
        if isinstance(tensor, Tensor) and _can_flip(tensor):
            self._is_done = True
            self.note(f"{_flip_a_bit(tensor, self._draw)} of {name} in step {self.step}")


def context_that_flips(order: str) -> Callable[..., RankContext]:
    """Return what makes the context of a rank that flips a bit, by the verb of a fault and a step, such as `flip 5`."""
    verb, _, step = order.partition(" ")
    if verb == "flip":
        return partial(FlippedBitContext, int(step))
    return partial(FlippedPassContext, int(step), of_gradient=verb == "flip-gradient")


def _flip_a_bit(tensor: Tensor, draw: random.Random) -> str:
    """Flip a bit of a value of a tensor, and begin the note about it."""
    place, bit = draw.randrange(tensor.numel()), draw.randrange(_LOWEST, _HIGHEST + 1)
    words_N = tensor.data.view(-1).view(
        torch.int32
    )  # autograd hears nothing of it, as it hears nothing of failing memory
    words_N[place] ^= 1 << bit
    return f"{FLIPPED} bit {bit} of value {place}"


def _can_flip(tensor: Tensor) -> bool:
    return (
        tensor.element_size() * 8 == _WORD
        and tensor.is_floating_point()
        and tensor.is_contiguous()
        and tensor.numel() > 0
    )
