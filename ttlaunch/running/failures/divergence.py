"""Find out whether training has diverged: whether the last losses are NaN or infinite, and since which step."""

import math
import time
from collections.abc import Mapping, Sequence
from itertools import takewhile
from typing import Any, NamedTuple

from ttlaunch.running.failures.failure import Failure, rank_failure
from ttlaunch.running.watch import RankState


class _Bad(NamedTuple):
    """A loss that is NaN or infinite; these objects sort by time."""

    step: int
    is_validation: bool  # a validation happens after the training of its step
    rank: int
    loss: float

    @property
    def cause(self) -> str:
        what = f"a validation loss of {self.loss} after" if self.is_validation else f"a training loss of {self.loss} in"
        return f"reported {what} step {self.step}: training has diverged"


def divergence(ranks: Sequence[RankState], config: Mapping[str, Any] | None) -> Failure | None:
    """Return the failure of the rank that first reported a NaN or infinite loss, if all losses after it were so; else None.

    The weights of such a run are useless, even if every rank ended with status 0.

    Args:
        ranks: All ranks of a run that has ended.
        config: The run's resolved configuration; None for a program that is no recipe.
    """
    found = [bad for state in ranks for bad in (_in_validation(state), _in_training(state)) if bad is not None]
    if not found or (_skips_overflows(config) and _weights_are_numbers(ranks, found)):
        return None
    first = min(found)
    row = next(state.row for state in ranks if state.row.rank == first.rank)
    return rank_failure(row, code="R011", cause=first.cause, time=time.time(), comes_again=True)


def _in_validation(state: RankState) -> _Bad | None:
    """Return the first validation after which a rank had only bad ones; None if its last validation was good or it had none."""
    bad = list(takewhile(lambda record: not math.isfinite(record.loss), reversed(state.validations)))
    if not bad:
        return None
    return _Bad(bad[-1].step, is_validation=True, rank=state.row.rank, loss=float(bad[-1].loss))


def _in_training(state: RankState) -> _Bad | None:
    """Return the first step from which on a rank had only bad ones; None if its last step was good or it had none."""
    if state.diverged is None:
        return None
    step, loss = state.diverged
    return _Bad(step, is_validation=False, rank=state.row.rank, loss=loss)


def _skips_overflows(config: Mapping[str, Any] | None) -> bool:
    """Whether ranks skip the update of a step whose loss is NaN or infinite, so that the weights stay finite."""
    return ((config or {}).get("training_config") or {}).get("precision") == "fp16"


def _weights_are_numbers(ranks: Sequence[RankState], found: Sequence[_Bad]) -> bool:
    """Whether the weights are finite although the last steps were bad, in a run whose ranks skip the updates of bad steps.

    They are if a finite validation followed the last step, or if only the last step was bad: its update was skipped, and
    the loss of the step before was finite.
    """
    if any(bad.is_validation for bad in found):
        return False
    last = max(state.step for state in ranks)
    validated = max((record.step for state in ranks for record in state.validations), default=-1)
    return validated >= last or all(bad.step == last for bad in found)
