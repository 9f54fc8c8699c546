"""Ending training when validations no longer improve; a function of their losses, so the same in every layout.

Source: L. Prechelt, "Early Stopping - But When?", in "Neural Networks: Tricks of the Trade", 1998: the third class of
stopping criteria, which counts successive strips of training; here these are the steps between two validations.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from ttlaunch.spec.recipe.sections import ConfigFile, TrainingConfig, TrainingFile


class EarlyStop:
    """Counts validations without improvement.

    Attributes:
        name: The name of its messages, in reports.
        best: Lowest mean loss that counted as an improvement.
        misses: Validations since then.
    """

    name = "early_stop"

    def __init__(self, training: TrainingConfig | None, *, state: Mapping[str, Any] | None = None) -> None:
        """Begin, or continue from a checkpoint's `state()`; without a configuration training never ends early."""
        self._training = training
        self.best, self.misses, self._step = math.inf, 0, -1
        if state:
            best = math.inf if state["best"] is None else state["best"]
            self.take([best, state["misses"], state["step"]])

    @property
    def is_on(self) -> bool:
        return self._patience is not None

    @property
    def is_over(self) -> bool:
        """Whether there were as many validations without improvement as the configuration allows."""
        return self._patience is not None and self.misses >= self._patience

    @property
    def _patience(self) -> int | None:
        return self._training.early_stop_patience if self._training else None

    def observe(self, step: int, mean_loss: float, *, is_last: bool = False) -> None:
        """Take a validation into account.

        One that a run without interruption would not make does not count: that before the first step of a run that
        goes on from a checkpoint.
        """
        if self._training is None or step <= self._step or (step % self._training.validation_interval and not is_last):
            return
        self._step = step
        if mean_loss < self.best - self._training.early_stop_min_delta:
            self.best, self.misses = mean_loss, 0
        else:
            self.misses += 1

    def reason(self) -> str:
        """Why training is over, for the summary."""
        delta = self._training.early_stop_min_delta if self._training else 0.0
        amount = f" by {delta:g} or more" if delta else ""
        times = f"{self.misses} validation{'s' if self.misses > 1 else ''}"
        return f"after step {self._step}: the validation loss has not fallen{amount} in {times}"

    def state(self) -> dict[str, Any] | None:
        """Return the state for a checkpoint, as JSON; a `best` of None means infinity. None if training never ends early."""
        if not self.is_on:
            return None
        best = self.best if math.isfinite(self.best) else None
        return {"best": best, "misses": self.misses, "step": self._step}

    def values(self) -> list[float]:
        """Return the values that other ranks need for the same decision."""
        return [self.best, float(self.misses), float(self._step)]

    def take(self, values: Sequence[float]) -> None:
        """Take over the state of another rank, from its `values`."""
        best, misses, step = values
        self.best, self.misses, self._step = float(best), int(misses), int(step)


def make_early_stop(cfg: ConfigFile, start: Mapping[str, Any] | None) -> EarlyStop:
    """Make the early stop of a run from its configuration and the state in the checkpoint that it goes on from."""
    state = ((start or {}).get("state") or {}).get("early_stop")
    return EarlyStop(cfg.training_config if isinstance(cfg, TrainingFile) else None, state=state)
