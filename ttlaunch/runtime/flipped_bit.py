"""A rank in which `ttlaunch chaos` has a bit of a parameter flipped, as failing memory flips one; no other run imports this.

Only the rank itself knows where its parameters are, so it flips the bit: after it has reported a step, and before the digests of this step.
"""

import random
from typing import Any

import torch

from ttlaunch.runtime.checkpoint.checkpoints import HasParameters, HasState
from ttlaunch.runtime.context import RankContext

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
        place, bit = draw.randrange(parameter.numel()), draw.randrange(_LOWEST, _HIGHEST + 1)
        words_N = parameter.detach().view(-1).view(torch.int32)
        words_N[place] ^= 1 << bit
        self.note(f"chaos flipped bit {bit} of value {place} of {name} after step {self._flip_after}")


def _can_flip(tensor: torch.Tensor) -> bool:
    return (
        tensor.element_size() * 8 == _WORD
        and tensor.is_floating_point()
        and tensor.is_contiguous()
        and tensor.numel() > 0
    )
