"""Find where the time from Enter to the first step of a run went.

The launcher notes when each part of its preparation began (`contract.EVENT_PREPARED`); ranks report the stages of their start. The
parts follow each other without gaps, so their times add up to the whole. Work that runs in the background counts where somebody waits for it.
"""

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from ttlaunch import contract
from ttlaunch.quick_dataclass import dataclass
from ttlaunch.records.endings import read_output_note
from ttlaunch.records.parser import BadRecord, checked
from ttlaunch.records.ranks import moved_back
from ttlaunch.running.metrics.telemetry import TelemetryReader
from ttlaunch.running.runs.files import Tail
from ttlaunch.running.runs.run_folder import read_events
from ttlaunch.running.watch import RankState

PARTS = {
    "command": "start of the command",
    "checks": "checks and plan",
    "supervisor": "start of the supervisor, and its plan",
    "slurm": "hosts from Slurm",
    "connections": "connections to the hosts",
    "hosts": "checks of the hosts",
    "sync": "code and data to the hosts",
    "folder": "run folder and guard",
    "agents": "agents on the hosts",
    "engine": "start of the ranks by the engine",
    "python": "start of Python, and its first imports",
    "program": "the program, until its first line",
    "joining": "joining the other ranks",
    "data": "reading the data",
    "torch": "import of torch",
    "connecting": "connecting the ranks",
    "setup": "set-up, such as model and data",
    "first_step": "the first step",
}
"""What each part of a start is called for people."""
OF_RANKS = frozenset(list(PARTS)[list(PARTS).index("python") :])
_JOINING, _READING, _IMPORTING, _CONNECTING = contract.START_STAGES
_STAGES = {
    _JOINING: "joining",
    _READING: "data",
    _IMPORTING: "torch",
    _CONNECTING: "connecting",
    contract.STAGE_SETTING_UP: "setup",
    contract.STAGE_FIRST_PASS: "first_step",
}

FIRST_STEPS = {
    "step": "the end of the first reported step",
    "pass": "the beginning of the first backward pass",
    "output": "the first line of output",
}
"""What counts as the first step: the first of these that any rank has."""
_FIRST_NOTE_BYTES = 256


@dataclass(frozen=True)
class StartTimes:
    """The time from Enter to the first step of the rank whose first step came last.

    Attributes:
        first_step: What counts as the first step, a key of `FIRST_STEPS`.
        parts: The parts in the order in which they began, keys of `PARTS`, with their milliseconds.
        is_warm: Whether the rank was forked, so that the start of the ranks includes the import of torch.
    """

    rank: int
    host: str
    first_step: str
    parts: Mapping[str, int]
    is_warm: bool = False

    @property
    def total_ms(self) -> int:
        return sum(self.parts.values())

    def as_json(self) -> dict[str, Any]:
        parts = [
            {"part": part, "rank": self.rank if part in OF_RANKS else None, "seconds": ms / 1000}
            for part, ms in self.parts.items()
        ]
        known = {"rank": self.rank, "host": self.host, "first_step": self.first_step, "is_warm": self.is_warm}
        return {"seconds": self.total_ms / 1000, **known, "parts": parts}


def read_start_times(path: Path, ranks: Sequence[RankState], plan: Mapping[str, Any]) -> StartTimes | None:
    """Read where the time of a start went from a run's folder.

    Args:
        path: The folder of the run.
        ranks: The states of its ranks, with all records read.
        plan: The content of its `plan.json`.

    Returns:
        None if no rank has come to its first step, or an older version made the run.
    """
    marks: dict[str, float] = next(filter(None, map(marks_in, read_events(path))), {})
    is_recipe = plan.get("recipe") is not None
    printed = {} if is_recipe else dict(_first_outputs(path, ranks))
    lasted = dict(_first_durations(path, ranks)) if is_recipe else {}
    return find_start_times(marks, ranks, printed=printed, lasted=lasted, is_warm=plan.get("warm") is True)


def marks_in(event: Mapping[str, Any]) -> dict[str, float]:
    """Return when each part of a run's preparation began; empty for an event of another kind or with other content."""
    if event.get("event") != contract.EVENT_PREPARED:
        return {}
    try:
        found: dict[str, float] = checked("dict[str, Time]", event.get("marks"))
    except ValueError:
        return {}
    return {name: time for name, time in found.items() if name in PARTS and name not in OF_RANKS}


def find_start_times(
    marks: Mapping[str, float],
    ranks: Sequence[RankState],
    *,
    printed: Mapping[int, float],
    lasted: Mapping[int, float],
    is_warm: bool = False,
) -> StartTimes | None:
    """Divide the time until the last rank's first step into its parts.

    Args:
        marks: When each part of the preparation began, seconds since the epoch; empty if nobody measured it.
        ranks: The states of all ranks; those that were added to the run later do not count.
        printed: When each rank printed its first line, in the time of this machine; without the ranks of recipes.
        lasted: The seconds of each rank's first step itself, as far as they are known.
        is_warm: Whether ranks were to be forked; one that started by itself has imported torch itself.
    """
    ranks = [state for state in ranks if not state.row.later]
    first = _first_steps(ranks, printed)
    if not marks or first is None:
        return None
    kind, times = first
    state = max((state for state in ranks if state.row.rank in times), key=lambda state: times[state.row.rank])
    rank = state.row.rank
    end = times[rank]
    # A rank that prints a line and then imports torch had its first step before the import: later stages do not count.
    of_rank = [(part, time) for part, time in _of_rank(state, kind) if time < end]
    if rank in lasted:
        of_rank.append(("first_step", end - lasted[rank]))
    began = [*sorted(marks.items(), key=lambda mark: mark[1]), *of_rank]
    # Clocks of two hosts agree only to some milliseconds, so no part begins before the one in front of it.
    latest, bounds = 0, list[tuple[str, int]]()
    for part, time in [*began, ("", end)]:
        latest = max(latest, round(time * 1000))
        bounds.append((part, latest))
    parts: dict[str, int] = {}
    for (part, begin), (_, until) in pairwise(bounds):
        parts[part] = parts.get(part, 0) + until - begin
    return StartTimes(rank, state.row.host, kind, parts, is_warm and "torch" not in parts)


def _first_steps(ranks: Sequence[RankState], printed: Mapping[int, float]) -> tuple[str, dict[int, float]] | None:
    """Return what counts as the first step of these ranks, and when each rank that has one came to it."""
    steps = {state.row.rank: state.first_step_time for state in ranks if state.first_step_time is not None}
    passes = {
        state.row.rank: time for state in ranks for stage, time in state.stages if stage == contract.STAGE_FIRST_PASS
    }
    found = {"step": steps, "pass": passes, "output": dict(printed)}
    return next(((kind, times) for kind, times in found.items() if times), None)


def _of_rank(state: RankState, kind: str) -> Iterator[tuple[str, float]]:
    """Yield the parts of a rank's start, with the times when they began."""
    if state.started is not None:
        yield "program" if kind == "output" and not state.stages else "python", state.started.time
    for stage, time in state.stages:
        if stage in _STAGES:
            yield _STAGES[stage], time
    if state.ready_time is not None:
        yield "setup", state.ready_time


def _first_outputs(path: Path, ranks: Sequence[RankState]) -> Iterator[tuple[int, float]]:
    for state in ranks:
        lines = Tail(path / contract.times_file(state.row.rank)).read(most=_FIRST_NOTE_BYTES)
        note = next(map(read_output_note, lines), None)
        if note is not None and not isinstance(note, BadRecord) and not note.is_over:
            yield state.row.rank, moved_back(note, state.clock_offset_s).time


def _first_durations(path: Path, ranks: Sequence[RankState]) -> Iterator[tuple[int, float]]:
    """Yield how long the first step of each rank took, without what the rank had set up before."""
    is_elastic = any(state.row.later for state in ranks)
    for state in ranks:
        steps = TelemetryReader(path, state.row.rank, world_size=len(ranks), is_elastic=is_elastic).steps()
        first = next((one for one in steps if one.step >= max(1, state.first_step)), None)
        if first is not None and first.step == state.first_step and "step_s" in first.times:
            yield state.row.rank, first.times["step_s"]
