"""Loss scaling for fp16, whose gradients would vanish below 2^-24: differentiate a multiple of the loss, divide it out.

Every micro-batch's summed loss is multiplied by the scale before its backward pass. The sums of the tree are of scaled
gradients, in float32; the optimizer divides by the scale after the sum and the division by the tokens. Scales are
powers of two, so neither changes a bit of a float32 number. If the norm of the whole reduced gradient is not finite,
some gradient has overflowed: then every rank skips the update. The norm is the same on every rank that updates, so those
agree without a message; workers whose optimizer is elsewhere receive the next scale with the weights.

A skipped step counts as a step: it is reported, its samples are used up, and the learning rate continues with that of the next
step. Weights and the optimizer's state, AdamW's own count of updates included, stay as they were.

Source: P. Micikevicius et al., "Mixed Precision Training", ICLR 2018; halving and doubling as in torch.amp.GradScaler.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ttlaunch.spec.recipe.sections import TrainingFile


class LossScaler:
    """The scale: halved by an overflow, doubled after so many steps without one, within bounds; 1 except for fp16.

    Attributes:
        name: The name of its messages, in reports.
        scale: The scale of the step that is being computed, a power of two.
        skips: Whether updates are skipped whose gradient is not finite; always with fp16.
        skipped: Steps whose update was skipped.
    """

    name = "loss_scale"

    def __init__(self, cfg: TrainingFile) -> None:
        """Begin with the configured scale."""
        self._cfg = cfg.loss_scale_config
        self.is_on = cfg.training_config.precision == "fp16"
        self.skips = cfg.training_config.skips_updates
        self.scale = 2.0**self._cfg.initial_power if self.is_on else 1.0
        self.skipped = self._good_steps = 0
        self._useless = 0  # skipped in a row although the scale was the smallest
        self._result: Callable[[str, float | str], None] | None = None
        self._note: Callable[[str], None] | None = None

    def tell(self, result: Callable[[str, float | str], None], *, note: Callable[[str], None] | None = None) -> None:
        """Report from now on whenever this rank skips an update, and when even the smallest scale is too large.

        Args:
            result: Is given names and values for the summary.
            note: Is given a line for the user, once for each time that the smallest scale becomes too large.
        """
        self._result, self._note = result, note

    def seed(self, loss: Tensor) -> Tensor | None:
        """Return the gradient that the backward pass of a loss begins with: the scale; None for 1."""
        return torch.full_like(loss, self.scale) if self.is_on else None

    def update(self, *, overflowed: bool) -> None:
        """Choose the scale of the next step; every rank that updates calls it once in a step, with equal arguments."""
        if overflowed:
            self.skipped += 1
            if self._result is not None:
                self._result("skipped steps", self.skipped)
        if not self.is_on:
            return
        self._good_steps = 0 if overflowed else self._good_steps + 1
        smallest = 2.0**self._cfg.min_power
        self._count_useless(overflowed=overflowed and self.scale <= smallest)
        if overflowed:
            self.scale = max(self.scale / 2, smallest)
        elif self._good_steps == self._cfg.growth_interval:
            self._good_steps = 0
            self.scale = min(self.scale * 2, 2.0**self._cfg.max_power)

    def _count_useless(self, *, overflowed: bool) -> None:
        """Report when every update is skipped, so that the model learns nothing, and when updates succeed again."""
        before, self._useless = self._useless, self._useless + 1 if overflowed else 0
        if before == self._useless:
            return
        scale = f"2^{self._cfg.min_power}"
        if self._useless == 1 and self._note is not None:
            self._note(
                f"gradients overflow at the smallest loss scale, {scale}; nothing is learned until they fit again"
            )
        if self._result is not None:
            text = f"{scale}, the smallest; the last updates, {self._useless} in a row, were skipped all the same"
            self._result(
                "loss scale", text if overflowed else f"{scale}, the smallest, was too large {before} times in a row"
            )

    def state(self) -> dict[str, Any] | None:
        """Return the state of the scale for a checkpoint; None if losses are not scaled."""
        if not self.is_on:
            return None
        return {"scale": self.scale, "good_steps": self._good_steps, "skipped": self.skipped}

    def restore(self, state: Mapping[str, Any] | None) -> None:
        """Go on from a checkpoint's state."""
        if state is not None and self.is_on:
            self.take([state["scale"], state["good_steps"], state["skipped"]])

    def values(self) -> list[float]:
        """Return what other ranks need in order to use the same scale."""
        return [self.scale, float(self._good_steps), float(self.skipped)]

    def take(self, values: Sequence[float]) -> None:
        """Use the scale of another rank, from its `values`."""
        scale, good_steps, skipped = values
        self.scale, self._good_steps, self.skipped = float(scale), int(good_steps), int(skipped)
