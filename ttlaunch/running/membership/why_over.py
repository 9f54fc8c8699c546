"""Why an elastic run cannot go on: what to name when too few workers are left, or none that has the weights."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from ttlaunch.contract import worker_name
from ttlaunch.diagnostics.count import counted
from ttlaunch.membership.coordinator_state import Coordinator, Phase
from ttlaunch.running.failures.causes import Cause
from ttlaunch.running.failures.failure import Failure


@dataclass(frozen=True, kw_only=True)
class Ended:
    """The workers of an elastic run that have ended, by number.

    Attributes:
        why: How each ended, as a clause.
        lost: Those that were lost and without which nobody has gone on, in the order in which the launcher noticed it, each with
            whether it had the weights, or its part of them.
        hung: Of those that the launcher has killed because they made no progress, the failure if that ended the run. Its cause is a
            clause such as "made no progress for 5 s".
    """

    why: Mapping[int, str]
    lost: Mapping[int, bool]
    hung: Mapping[int, Failure]

    def first_hung(self, *, lost_weights: bool) -> Failure | None:
        """Return the failure of the worker whose hang ended the run; None if none did, or if another worker was lost before it.

        When the launcher gave a worker up decides, and not the record of its end: one that the launcher kills has a record soon after,
        before the others have said that they cannot go on, or later.

        Args:
            lost_weights: Whether the run ended because the weights are gone: then who had none did not end it.
        """
        for number, had_weights in self.lost.items():
            hung = self.hung.get(number)
            if hung is None or had_weights or not lost_weights:
                return hung
        return None


def why_nobody_goes_on(
    state: Coordinator, ended: Ended, *, is_of_a_worker: bool, needed: int, at: float, next_step: str
) -> Failure | None:
    """Return the failure of a run whose workers are too few; None if one of them has a failure of its own to name.

    Args:
        state: What the coordinator knows.
        ended: The workers that are gone.
        is_of_a_worker: Whether a worker that the others did not outlive has failed, or was lost. One that the launcher has killed
            because it made no progress is none of these.
        needed: How many workers a step needs.
        at: When the run could not go on, in seconds since the epoch.
        next_step: How to go on from what was saved.
    """
    why = tuple(f"{worker_name(number)} {reason}" for number, reason in sorted(ended.why.items()))
    if state.lacks_slots:
        cause = "a part of the state is gone: the worker that owned it and its shadow ended together"
        return Failure(code="R075", cause=cause, time=at, evidence=why, next_step=next_step)
    lost_weights, count = state.phase is Phase.STRANDED, len(state.workers)
    cause = f"{counted(count, 'worker')} {'is' if count == 1 else 'are'} left, and a step needs {needed}"
    if lost_weights and count:
        who = "the worker that is left" if count == 1 else f"the {count} workers that are left"
        cause = f"{who} cannot go on: the weights are gone with those that ended"
    hung = ended.first_hung(lost_weights=lost_weights)
    if hung is not None:
        is_alone = lost_weights and [hung.rank] == [number for number, had_weights in ended.lost.items() if had_weights]
        text = "took the weights with it: it was killed because it" if is_alone else "was killed because it"
        return replace(hung, cause=f"{text} {hung.cause}", evidence=(cause, *why), next_step=next_step)
    if is_of_a_worker:
        return None
    if lost_weights and count:
        return Failure(code="R075", cause=cause, time=at, evidence=why, next_step=next_step)
    return Failure(code="R075", kind=Cause.OTHER, cause=cause, time=at, evidence=why)
