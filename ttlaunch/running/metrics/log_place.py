"""Where a reader of a run's events stands: it can be kept in a file, and another reader can go on from there."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import fields
from itertools import islice
from pathlib import Path
from typing import Any, Final

from ttlaunch import contract
from ttlaunch.planning.launch_plan import RankRow
from ttlaunch.quick_dataclass import dataclass
from ttlaunch.records.parser import BadRecord
from ttlaunch.records.ranks import read_progress
from ttlaunch.records.regular_files import read_regular, read_tail
from ttlaunch.running.runs.files import size_of
from ttlaunch.running.watch import Phase, RankState, fold

_HEAD_BYTES, _TAIL_BYTES, _TELEMETRY_BYTES = 4096, 256 << 10, 64 << 10
_OF_STATE: Final = (
    *("phase", "place", "stage", "ready_time", "step", "total_steps", "loss", "grad_norm", "counts", "counted"),
    *("first_step", "first_step_counted", "first_step_time", "last_step_time", "stops_after", "printed_step"),
)
"""What is kept of a rank's state: what its next records do not tell again."""


@dataclass(frozen=True)
class LogPlace:
    """Where a reader stands, by rank as text, as JSON has it.

    Attributes:
        progress, telemetry: The bytes of the rank's files where the next lines begin.
        states: What was known of the rank there.
        step_times: The last step that the rank reported, and when.
        first_times: When the rank first reported something.
        reported: The last steps whose telemetry has not come yet, with the times when they were reported.
        exited: The ranks whose end was read.
    """

    progress: Mapping[str, int]
    telemetry: Mapping[str, int]
    states: Mapping[str, Mapping[str, Any]]
    step_times: Mapping[str, Sequence[float]]
    first_times: Mapping[str, float]
    reported: Mapping[str, Sequence[Sequence[float]]]
    exited: Sequence[int]

    def as_json(self) -> dict[str, Any]:
        """Return the place as a JSON object."""
        return {one.name: getattr(self, one.name) for one in fields(self)}


def parse_log_place(record: Mapping[str, Any]) -> LogPlace:
    """Read what `as_json` returned.

    Raises:
        TypeError: Another version has written it.
    """
    return LogPlace(**record)


def state_as_json(state: RankState) -> dict[str, Any]:
    """Return what is kept of a rank's state."""
    return {name: getattr(state, name) for name in _OF_STATE} | {"phase": str(state.phase)}


def restore_state(state: RankState, kept: Mapping[str, Any]) -> None:
    """Give a state what was kept of it."""
    for name in _OF_STATE:
        if name in kept:
            setattr(state, name, Phase(kept[name]) if name == "phase" else kept[name])


def place_near_end(folder: Path, rows: Sequence[RankRow], *, most: int) -> LogPlace:
    """Return a place before the last records of each rank, found without reading the rest.

    The sums over all steps, and so the ranks' speeds, are not known there.

    Args:
        folder: The run's folder.
        rows: Its ranks.
        most: How many of a rank's records come after the place at most.
    """
    progress, telemetry, states = {}, {}, {}
    for row in rows:
        path = folder / contract.progress_file(row.rank)
        progress[str(row.rank)] = _begin_of_last(path, lines=most, most=_TAIL_BYTES)
        telemetry[str(row.rank)] = _begin_of_last(
            folder / contract.traffic_file(row.rank), lines=most, most=_TELEMETRY_BYTES
        )
        state = RankState(row, Phase.ABSENT if row.later else Phase.WAITING)
        for line in _first_lines(path)[:-1] if progress[str(row.rank)] else ():
            record = read_progress(line)
            if not isinstance(record, BadRecord):
                fold(state, record)
        state.first_step_time = state.last_step_time = None  # no speed is better than a wrong one
        states[str(row.rank)] = state_as_json(state)
    return LogPlace(progress, telemetry, states, {}, {}, {}, ())


def _begin_of_last(path: Path, *, lines: int, most: int) -> int:
    """Return where the last lines of a file begin, among its last bytes; its size if no line begins there."""
    size = size_of(path)
    try:
        data = read_tail(path, most=most)
    except OSError:
        return 0
    begin = size - len(data)
    ends = [found.start() for found in re.finditer(b"\n", data)]
    starts = [*([] if begin else [-1]), *ends[:-1]] or [len(data) - 1]
    return max(0, begin + next(islice(reversed(starts), lines - 1, None), starts[0]) + 1)


def _first_lines(path: Path) -> list[bytes]:
    try:
        return read_regular(path, most=_HEAD_BYTES).split(b"\n")
    except OSError:
        return []
