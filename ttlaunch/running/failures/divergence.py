"""Find out whether training has diverged: whether the last losses are NaN or infinite, and since which step."""

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import takewhile
from typing import Any, NamedTuple

from ttlaunch.running.failures.causes import Cause
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
        what = (
            f"validation loss of {self.loss} after step {self.step}"
            if self.is_validation
            else f"training loss of {self.loss}"
        )
        return f"reported a {what}: training has diverged"


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
    step = None if first.is_validation else first.step  # whose passes made it
    return rank_failure(
        row, code="R011", kind=Cause.DIVERGED, cause=first.cause, step=step, time=time.time(), comes_again=True
    )


def with_first_micro_batch(failure: Failure | None, ranks: Sequence[RankState], *, run_id: str) -> Failure | None:
    """Name the micro-batch in which a training has diverged, and its rank, as far as ranks have reported it.

    A rank knows the loss of each of its micro-batches. The rank that stops the training is any of those that know the norm of the
    whole gradient.

    Args:
        failure: The failure of a run; only a divergence is changed.
        ranks: All ranks.
        run_id: The run that `ttlaunch replay` is given; empty for one that it cannot repeat.
    """
    step = None if failure is None else failure.step
    if failure is None or failure.kind is not Cause.DIVERGED or step is None:
        return failure
    followers = tuple(one for one in failure.followers if one.kind is not Cause.DIVERGED)
    again = f"`ttlaunch replay {run_id} --step {step}` names the layer and shows the texts" if run_id else None
    failure = replace(failure, followers=followers, last_lines=(), next_step=again)
    reported = [(one.micro_batch, state, one) for state in ranks if (one := state.not_finite.get(step))]
    if not reported:
        return failure
    _, state, found = min(reported, key=lambda one: one[0])
    row = state.row
    return replace(
        failure,
        rank=row.rank,
        role=row.role,
        host=row.host,
        cause=f"had a loss of {found.loss} in micro-batch {found.micro_batch}: training has diverged",
        evidence=(f"rank {failure.rank} {failure.cause.partition(':')[0]}", *failure.evidence),
        followers=tuple(one for one in followers if one.rank != row.rank),
    )


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
    training = (config or {}).get("training_config") or {}
    return training.get("precision") == "fp16" or training.get("on_not_finite") == "skip"


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
