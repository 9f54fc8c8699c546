"""The last steps of a run as a timeline: when each rank's step began and ended, and which parts it had."""

from itertools import pairwise
from pathlib import Path
from typing import Any, Final

from ttlaunch import contract
from ttlaunch.records.parser import BadRecord
from ttlaunch.records.ranks import StepDone, read_progress
from ttlaunch.records.regular_files import read_tail
from ttlaunch.records.telemetry import read_stretch
from ttlaunch.running.metrics.telemetry import OUTSIDE_STEPS, last_step_of
from ttlaunch.running.runs.facts import read_facts
from ttlaunch.running.runs.files import read_object_if_any
from ttlaunch.running.runs.run_folder import clock_in, read_events

MOST_STEPS: Final = 60
_TAIL = 256 << 10
_MOST_RANKS = 64


def steps_as_json(path: Path, *, most: int) -> dict[str, Any]:
    """Return the last steps of each rank, from the ends of its files.

    A step ends when the rank reports it, and begins where the one before ends or as long ago as it took, whichever is later.
    Phases are in the order of a step; how much of it the rank could only wait is in `waits`.

    Raises:
        OSError, ValueError: The run's plan cannot be read.
    """
    facts = read_facts(path)
    config = read_object_if_any(path / contract.PLAN_FILE).get("config")
    size = len(facts.ranks)
    last_step = last_step_of(config, world_size=size)
    offsets = dict(filter(None, map(clock_in, read_events(path))))
    rows = []
    for row in facts.ranks[:_MOST_RANKS]:
        ends = _ends(path, row.rank, most=min(most, MOST_STEPS) + 1)
        parts = _parts(path, row.rank, world_size=size, last_step=last_step)
        offset = offsets.get(row.host, 0.0)
        steps = []
        for (before, began), (step, ended) in pairwise(ends):
            phases, waits = parts.get(step, ({}, {}))
            steps.append(
                {
                    "step": step,
                    "begin": (began if before == step - 1 else ended) - offset,
                    "end": ended - offset,
                    "phases": {name: us / 1e6 for name, us in phases.items() if name != "step"},
                    "step_s": phases["step"] / 1e6 if "step" in phases else None,
                    "waits": {name: us / 1e6 for name, us in waits.items()},
                }
            )
        rows.append({"rank": row.rank, "role": row.role, "host": row.host, "steps": steps})
    return {"ranks": rows}


def _ends(path: Path, rank: int, *, most: int) -> list[tuple[int, float]]:
    """Return the last steps that a rank has reported, each with its time by the clock of its host."""
    found: dict[int, float] = {}
    for line in _lines(path / contract.progress_file(rank)):
        record = read_progress(line)
        if not isinstance(record, BadRecord) and isinstance(record, StepDone):
            found[record.step] = record.time
    return sorted(found.items())[-most:]


def _parts(
    path: Path, rank: int, *, world_size: int, last_step: int
) -> dict[int, tuple[dict[str, int], dict[str, int]]]:
    """Return by step the microseconds of its phases and of its waits, as far as the end of the rank's telemetry has them."""
    found: dict[int, tuple[dict[str, int], dict[str, int]]] = {}
    for line in _lines(path / contract.traffic_file(rank)):
        stretch = read_stretch(line, world_size=world_size, last_step=last_step)
        if isinstance(stretch, BadRecord):
            continue
        for phase, times in stretch.spent:
            if phase not in OUTSIDE_STEPS:
                for step, microseconds in times.items():
                    found.setdefault(step, ({}, {}))[0][phase] = microseconds
        for name, phase, times in stretch.waited:
            if phase not in OUTSIDE_STEPS:
                for step, microseconds in times.items():
                    waits = found.setdefault(step, ({}, {}))[1]
                    waits[name] = waits.get(name, 0) + microseconds
    return found


def _lines(path: Path) -> list[bytes]:
    try:
        return read_tail(path, most=_TAIL).split(b"\n")[:-1]
    except OSError:
        return []
