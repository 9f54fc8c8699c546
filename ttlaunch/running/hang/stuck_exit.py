"""Find a program's rank that an exception has ended and whose process nevertheless stays, which mpirun waits for without end.

`MPI_Finalize` waits for the other ranks, and these wait for a message that the rank will never send. `python -m mpi4py` aborts
MPI after an exception, and ranks of recipes and scripts do the same; a program that calls `python` does not.
"""

import time
from collections.abc import Callable
from dataclasses import replace

from ttlaunch.diagnostics.count import render_duration
from ttlaunch.planning.launch_plan import LaunchPlan, RecipeProgram
from ttlaunch.running.failures.attribution import Witnesses, first_failure, patience_for_cause_s
from ttlaunch.running.failures.failure import Failure
from ttlaunch.running.failures.stderr_tail import stderr_tails
from ttlaunch.running.runs.run_folder import RunFolder
from ttlaunch.running.watch import RankState, Watch

PATIENCE_S = 5.0
"""How long libraries may take to end after all code of the program has run."""

_LOOK_S = 1.0
_NEXT_STEP = "with `python -m mpi4py` in place of `python`, a rank that raises ends the others at once"


class StuckExitWatch:
    """Looks for such a rank once a second; ranks of a recipe end at once and are not looked at."""

    def __init__(
        self, plan: LaunchPlan, folder: RunFolder, watch: Watch, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._is_recipe = isinstance(plan.program, RecipeProgram)
        self._folder, self._watch, self._clock = folder, watch, clock
        self._looked = clock()
        self._since: dict[int, float] = {}

    def check(self) -> Failure | None:
        """Return the failure to report if a rank has been exiting for too long; call it a few times a second."""
        now = self._clock()
        if self._is_recipe or now - self._looked < _LOOK_S:
            return None
        self._looked = now
        self._watch.read_exceptions()
        stuck = {state.row.rank for state in self._watch.ranks if _is_exiting(state)}
        # Counted on this machine's clock: a host's may be set meanwhile.
        self._since = {rank: self._since.get(rank, now) for rank in stuck}
        longest = max((now - since for since in self._since.values()), default=0.0)
        if longest < PATIENCE_S:
            return None
        seen = Witnesses(stderr_tail=stderr_tails(self._folder))
        # Ranks that have lost a connection are not the ones that hold up the end while the one that closed it is still ending too.
        if longest < patience_for_cause_s(self._watch.ranks, seen.stderr_tail):
            return None
        failure = first_failure(self._watch.ranks, lost_shims={}, stopped=False, witnesses=seen)
        if failure is None or failure.rank not in stuck:
            return failure
        note = (
            f"its process was still there {render_duration(longest)} after all code of the program had run, "
            "as in MPI_Finalize, which waits for the other ranks"
        )
        return replace(failure, evidence=(*failure.evidence, note), next_step=failure.next_step or _NEXT_STEP)


def _is_exiting(state: RankState) -> bool:
    """Whether an exception has ended a rank's program, and its process has not ended."""
    last = state.in_flight
    return state.exit is None and last is not None and last.uncaught and last.left is not None
