"""Find the ranks of an active run that wait for each other, as a report of a hang would tell it, from the ranks' flight recorders.

Recorders of ranks on this machine are read in shared memory, so what they say is of this moment. Those of other hosts are copies in the
run's folder, a few seconds old. Nothing is asked of the run.
"""

import contextlib
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ttlaunch import contract
from ttlaunch.agent.run_processes import belongs_to, is_stopped, variable_of_run
from ttlaunch.diagnostics.terminal_text import clean
from ttlaunch.flight_recorder import Recording
from ttlaunch.quick_dataclass import dataclass
from ttlaunch.running.flight_recorders import read_recorders, short_place
from ttlaunch.running.hang.verdict import describe_wait
from ttlaunch.running.hang.waits import Seen, peers_of
from ttlaunch.running.watch import Phase, RankState

COPIED_EVERY_S = 5.0
"""How often a host sends a recorder that has changed, so that an older copy is still true."""
_LATE_S = 1.0
_MOST_RANKS = 256


@dataclass(frozen=True)
class Wait:
    """What a rank waits for.

    Attributes:
        state: In words, such as `waits for rank 2`, `waits for none` or `is done`.
        waits_for: The ranks, as far as they are known.
        operation: In which operation; empty if in none.
        place: The line of the recipe, `file:line`; None if it is not known.
        for_s: For how many seconds; None if the rank waits for none.
        seen_s: How many seconds ago this was so; 0 for a rank on this machine.
    """

    rank: int
    role: str
    host: str
    state: str
    waits_for: tuple[int, ...]
    operation: str
    place: str | None
    for_s: float | None
    seen_s: float

    def as_json(self) -> dict[str, Any]:
        return {**vars(self), "waits_for": list(self.waits_for)}


def waits_now(path: Path, ranks: Sequence[RankState], *, is_recipe: bool) -> list[Wait]:
    """Return what each rank of an active run waits for; nothing if no flight recorder can be read, or with more ranks than a table can show.

    Args:
        path: The run's folder.
        ranks: The states of its ranks.
        is_recipe: Whether they run a recipe.
    """
    present = [state for state in ranks if state.phase is not Phase.ABSENT]
    if len(present) > _MOST_RANKS:
        return []
    size = 1 + max((state.row.rank for state in present), default=-1)
    copied = read_recorders(path, ranks=range(size))
    scratch = variable_of_run(path.name, contract.ENV_SCRATCH)
    here = read_recorders(Path(scratch), ranks=range(size)) if scratch.startswith("/") else {}
    if not (copied or here):
        return []
    now = time.time()
    ages = {rank: _age_of_copy(path, rank, now=now) for rank in copied.keys() - here.keys()}
    known = {**copied, **here}
    stopped = {state.row.rank for state in present if state.row.rank in here and _is_stopped(state, path.name)}
    seen = [
        _seen(state, known.get(state.row.rank), is_recipe=is_recipe, is_stopped=state.row.rank in stopped)
        for state in present
    ]
    offsets = {state.row.rank: state.clock_offset_s for state in present}
    return [_wait(one, seen, moment=now + offsets[one.rank], age_s=ages.get(one.rank, 0.0)) for one in seen]


def _age_of_copy(path: Path, rank: int, *, now: float) -> float:
    """Return how old a copy is; 0 if a newer one would have come if the rank had moved."""
    with contextlib.suppress(OSError):
        age = max(0.0, now - (path / contract.recorder_file(rank)).stat().st_mtime)
        return age if age < COPIED_EVERY_S + _LATE_S else 0.0
    return 0.0


def _is_stopped(state: RankState, run_id: str) -> bool:
    """Whether a signal has stopped a rank's process on this machine."""
    pid = state.started.pid if state.started and state.exit is None else None
    return pid is not None and belongs_to(pid, run_id) and is_stopped(pid)


def _seen(state: RankState, recording: Recording | None, *, is_recipe: bool, is_stopped: bool) -> Seen:
    return Seen(
        rank=state.row.rank,
        role=clean(state.row.role),
        host=clean(state.row.host),
        recording=recording,
        is_stopped=is_stopped,
        is_starting=is_recipe and state.phase is Phase.STARTING,
        has_left=state.exit is not None,
    )


def _wait(one: Seen, ranks: Sequence[Seen], *, moment: float, age_s: float) -> Wait:
    state, operation = describe_wait(one, ranks)
    wait = one.waiting
    known: Mapping[str, Any] = {"rank": one.rank, "role": one.role, "host": one.host, "seen_s": round(age_s, 1)}
    if wait is None or one.recording is None or one.is_stopped:
        return Wait(state=state, waits_for=(), operation="", place=None, for_s=None, **known)
    return Wait(
        state=state,
        waits_for=tuple(peers_of(one, ranks)),
        operation=clean(operation),
        place=clean(short_place(wait.place)) if wait.place else None,
        for_s=round(max(0.0, moment - age_s - one.recording.seconds(wait.begun)), 1),
        **known,
    )
