"""Inform the user if ranks of a script train each by itself, although there are several: none has joined a group of torch.

A rank reports its first backward pass if its process is in no group by then, and again if it joins one later
(`torch_hooks/alone.py`). Programs that exchange gradients by MPI, and runs with `--independent`, are left alone.
"""

import time
from collections.abc import Callable, Sequence

from ttlaunch.planning.launch_plan import CommandProgram, LaunchPlan
from ttlaunch.running.failures.causes import Cause
from ttlaunch.running.failures.failure import Failure, name_ranks
from ttlaunch.running.logs.output import View
from ttlaunch.running.runs.run_folder import RunFolder, append_event
from ttlaunch.running.watch import RankState

PATIENCE_S = 60.0
"""How long a rank may train before it joins the others; some scripts warm up first."""

_WHY = (
    "the script calls no `init_process_group()`, or its framework chose a single process, as Accelerate does on CPUs without "
    "`ACCELERATE_USE_CPU=true`"
)
_NEXT_STEP = "join the ranks; or add `--independent` if each rank is to train a model of its own"


class SingleTrainingWatch:
    """Warns once of ranks that train alone for a minute."""

    def __init__(
        self, plan: LaunchPlan, folder: RunFolder, view: View, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._is_watched = _is_watched(plan)
        self._folder, self._view, self._clock = folder, view, clock
        self._since: dict[int, float] = {}

    def notice(self, ranks: Sequence[RankState]) -> None:
        """Report what is new; call it a few times a second."""
        if not self._is_watched:
            return
        now = self._clock()
        # Counted on this machine's clock: a host's may be set meanwhile.
        self._since = {rank: self._since.get(rank, now) for rank in _alone(ranks) if ranks[rank].exit is None}
        long = [rank for rank, since in self._since.items() if now - since >= PATIENCE_S]
        if long:
            self._is_watched = False
            append_event(self._folder, "single_trainings", ranks=long)
            text = f"warning[R074]: {_describe(long, len(ranks))}: {_WHY}; {_NEXT_STEP}"
            self._view.output("stderr", text.encode())


def single_trainings(plan: LaunchPlan, ranks: Sequence[RankState]) -> Failure | None:
    """Return the failure of a run that has ended well, but in which ranks trained alone; None for any other run."""
    alone = _alone(ranks) if _is_watched(plan) else []
    if not alone:
        return None
    return Failure(
        code="R074",
        kind=Cause.TRAINED_ALONE,
        cause=_describe(alone, len(ranks)),
        time=max((state.exit.time for state in ranks if state.exit), default=None),
        evidence=(_WHY,),
        next_step=_NEXT_STEP,
        comes_again=True,
    )


def _is_watched(plan: LaunchPlan) -> bool:
    program = plan.program
    if not isinstance(program, CommandProgram) or plan.world_size == 1:
        return False
    return program.is_python and not program.uses_mpi and not program.is_independent


def _alone(ranks: Sequence[RankState]) -> list[int]:
    return [state.row.rank for state in ranks if state.trains_alone]


def _describe(alone: Sequence[int], world_size: int) -> str:
    trained = "trained a model by itself" if len(alone) == 1 else "trained a model each"
    joined = "this rank has" if len(alone) == 1 else "these ranks have"
    return f"{name_ranks(alone)} of {world_size} {trained}: {joined} run a backward pass and joined no group of torch.distributed"
