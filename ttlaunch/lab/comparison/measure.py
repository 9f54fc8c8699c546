"""Measure a completed run, from its folder alone, in numbers that can be compared between recipes.

Speed is counted in tokens or images, because steps are not the same thing everywhere: where a server updates after every worker's
gradient, a worker's step is a part of what others call one. `steps_per_s` are steps of the workload's global batch.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path
from statistics import fmean
from typing import Any

from ttlaunch import contract
from ttlaunch.records.ranks import StepDone
from ttlaunch.running.bad_records import progress_of
from ttlaunch.running.metrics.telemetry import RankTelemetry
from ttlaunch.running.readers.recorded import Recorded, bytes_per_step, read_run
from ttlaunch.running.runs.files import read_object
from ttlaunch.running.watch import start_up_end

_WARM_UP_DIVISOR = 4
"""The first quarter of the steps is not timed: recipes try out sizes of messages and schedules in it."""

_FORWARD = "forward"
_MOST_POINTS = 100


@dataclass(frozen=True)
class Measured:
    """The numbers of one run.

    Attributes:
        ranks: The number of ranks of each role.
        steps_per_s: Global batches per second, after the warm-up.
        tokens_per_s: Tokens per second, after the warm-up; None for images.
        samples_per_s: Images per second, after the warm-up; None for texts.
        first_loss, loss: The losses of the validations before the first step and after the last.
        samples: The number of sequences that were trained on.
        bytes_per_step: The bytes that all ranks together send in a step.
        is_counted: Whether all of these bytes were counted; otherwise those that another library sends are from the
            recipe's formula.
        peak_memory_bytes: The most memory that the process of each rank held.
        idle_share: The share of the steps' time in which ranks that compute gradients could only wait; None if another
            library waits for them.
        sha256: The hash of all parameters.
        curve: The training loss during the run: the number of global batches, the mean loss since the entry before, the seconds
            since the start-up, and the bytes sent by all ranks if these are known. Bytes are spread evenly over the run.
    """

    run_id: str
    ranks: Mapping[str, int]
    steps_per_s: float | None
    tokens_per_s: float | None
    samples_per_s: float | None
    first_loss: float | None
    loss: float | None
    samples: float
    bytes_per_step: float | None
    is_counted: bool
    peak_memory_bytes: tuple[int, ...]
    idle_share: float | None
    sha256: str | None
    curve: tuple[tuple[float, float, float, float | None], ...] = ()


def measure_run(path: Path) -> Measured:
    """Read the numbers of a completed run.

    Raises:
        OSError: The run's folder cannot be read.
        ValueError, KeyError: The run is not of a recipe that trains, or has no report.
    """
    recorded = read_run(path)
    report, training = recorded.report or {}, recorded.plan["config"]["training_config"]
    length = recorded.plan["config"]["transformer_config"]["max_sequence_length"]
    counts, reports = _reports(recorded)
    per_sample = length if counts == "tokens" else 1
    per_step = training["batch_size"] * training.get("gradient_accumulation_steps", 1) * per_sample
    speed = _per_second(reports)
    size, is_counted = bytes_per_step(recorded)
    roles = [state.row.role for state in recorded.ranks]
    return Measured(
        run_id=path.name,
        ranks={role: roles.count(role) for role in dict.fromkeys(roles)},
        steps_per_s=speed / per_step if speed else None,
        tokens_per_s=speed if counts == "tokens" else None,
        samples_per_s=speed if counts == "samples" else None,
        first_loss=report.get("first_validation"),
        loss=report.get("last_validation"),
        samples=sum(number for _, _, number, _ in reports) / per_sample,
        bytes_per_step=size,
        is_counted=is_counted,
        peak_memory_bytes=tuple(row.get("peak_memory_bytes") or 0 for row in report["ranks"]),
        idle_share=_idle_share(recorded.telemetry or ()) if is_counted else None,
        sha256=report.get("parameters_sha256"),
        curve=_curve(
            reports,
            per_step=per_step,
            began=start_up_end(recorded.ranks, reports_ready=True),
            size=None if size is None else size * max(state.step for state in recorded.ranks),
        ),
    )


_Report = tuple[float, int, int, float | None]
"""Time, step, count and loss that a rank has reported."""


def _curve(
    reports: Sequence[_Report], *, per_step: float, began: float | None, size: float | None
) -> tuple[tuple[float, float, float, float | None], ...]:
    """Return the training loss over global batches, as `Measured.curve` has it.

    Args:
        reports: The reports of one role in the order of their times.
        per_step: The tokens or samples of a global batch.
        began: The end of the start-up; None if it is not known.
        size: The bytes that all ranks have sent at the end of the run; None if they are not known.
    """
    total = sum(number for _, _, number, _ in reports)
    every = max(1, math.ceil(total / per_step / _MOST_POINTS))
    done, found = 0, dict[int, tuple[list[float], float]]()
    for time, _, number, loss in reports:
        done += number
        if loss is not None and math.isfinite(loss):
            losses, _ = found.get(at := math.ceil(done / per_step / every), ([], time))
            found[at] = ([*losses, loss], time)
    since = reports[0][0] if reports and began is None else began or 0.0

    def point(at: int, losses: Sequence[float], time: float) -> tuple[float, float, float, float | None]:
        steps = min(at * every, total / per_step)
        sent = None if size is None else round(size * steps * per_step / total)
        return round(steps, 3), round(fmean(losses), 6), round(max(0.0, time - since), 3), sent

    return tuple(point(at, losses, time) for at, (losses, time) in found.items())


def _reports(recorded: Recorded) -> tuple[str, list[_Report]]:
    """Return what ranks count, and the reports of one role.

    It is the role with the highest count: other roles report the same tokens or samples.
    """
    by_role: dict[str, list[_Report]] = {}
    counts = contract.COUNTED[0]
    for state in recorded.ranks:
        for record in progress_of(recorded.path, state.row.rank):
            if isinstance(record, StepDone) and record.counted[1]:
                counts, number = record.counted
                by_role.setdefault(state.row.role, []).append(
                    (record.time - state.clock_offset_s, record.step, number, record.loss)
                )
    found = max(by_role.values(), key=lambda reports: sum(number for _, _, number, _ in reports), default=[])
    return counts, sorted(found, key=itemgetter(0, 1))


def _per_second(reports: Sequence[_Report]) -> float | None:
    last = max((step for _, step, _, _ in reports), default=0)
    warm = max(1, last // _WARM_UP_DIVISOR)
    since = min((time for time, step, _, _ in reports if step >= warm), default=0.0)
    timed = [(time, number) for time, _, number, _ in reports if time > since]
    if not timed or timed[-1][0] <= since:
        return None
    return sum(number for _, number in timed) / (timed[-1][0] - since)


def _idle_share(telemetry: Sequence[RankTelemetry]) -> float | None:
    """Return the idle share of ranks that run forward passes, without the first step, which opens connections."""
    waited = total = 0
    for entry in telemetry:
        if not entry.phases.get(_FORWARD):
            continue
        steps = sorted(entry.steps)[1:]
        total += sum(entry.steps[step] for step in steps)
        waited += sum(times.get(step, 0) for times in entry.waits.values() for step in steps)
    return waited / total if total else None


def as_json(measured: Measured) -> dict[str, Any]:
    """Return the numbers as JSON."""
    return {**vars(measured), "ranks": dict(measured.ranks), "peak_memory_bytes": list(measured.peak_memory_bytes)}


def read_code(path: Path) -> str:
    """Read the hash of the code that made a run; empty if the comparison has not recorded one."""
    try:
        return str(read_object(path / CODE_FILE)["code"])
    except (OSError, ValueError, KeyError, TypeError):
        return ""


CODE_FILE = "compared.json"
"""The file in a run's folder with the hash of the code that made the run: runs of other code are not reused."""
