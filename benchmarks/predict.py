"""How far predictions are from real runs: the time of a step, the memory of tensors and of processes, `--fits`, and the choice of a schedule.

    PYTHONPATH=. python benchmarks/predict.py [--minutes 5] [--kept FILE]     more trials, added to those that are kept
    PYTHONPATH=. python benchmarks/predict.py --only fits                     only trials of `time`, `memory`, `fits`, `large` or `schedule`
    PYTHONPATH=. python benchmarks/predict.py --minutes 0                     only the figures of those that are kept
    PYTHONPATH=. python benchmarks/predict.py --minutes 0 --plot docs/explanation/predicted.svg

A trial of time takes one of four recipes, 1 or 2 ranks, and one of ten models. A run and the calibration of its plan go on at the same time, and their
ranks compute in turns of 0.15 s (`turns.py`), so that both get the same machine; of a single rank there are three runs, because one process is up to a
tenth slower than another for as long as it lives, and their steps count together. What is measured is every second step of the run, and
the others; a trial counts if the medians of the two are within 4 % of each other: else the machine was too restless to say what was true.
Four ranks are more than the cores of the machine of the measurements: of them, only whether the step is within the predicted interval is asked.

A trial of memory takes the same models, and makes two runs of three steps: one measures its tensors, and one its processes, which torch's profiler would
make larger.

A trial of `--fits` takes a random model, and a limit within `NEAR` of what the prediction needs, and runs each rank in a control group with this limit: the
run fits if the kernel kills no rank. Half of the trials have models that are done in seconds and need 0.2 to 0.8 GB, of which the reserve of `--fits` is a large part;
the others (`--only large`) need 1 to 6 GB, and take a minute each. Where no such group can be made, the memory of ranks that is no file is sampled 50 times a second.

A trial of a schedule takes a random pipeline with two stages. All schedules are calibrated in turns, and then run in turns, each twice, because of that difference between processes. A prediction is right if the
schedule whose predicted step is the shortest is the quickest, or nearly. A trial counts as one of time does, by each of its runs.

All trials are in one file, a line each; the next call goes on where it ends.
"""

# ruff: noqa: S311 - chance here guards nothing

import argparse
import json
import math
import os
import random
import statistics
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Self

import psutil

import ttlaunch
from benchmarks.memory_groups import Groups
from benchmarks.predict_plot import Point, draw
from benchmarks.turns import Calibration, EndlessRun, pooled, take_turns
from ttlaunch.app.fits import needed_bytes, unreclaimable_bytes
from ttlaunch.app.predict import NotPredicted, peaks_of, predict
from ttlaunch.running.metrics.prediction import judge
from ttlaunch.running.metrics.telemetry import memory_of_ranks
from ttlaunch.running.readers.recorded import read_run

RECIPES = ("data_parallel", "zero", "hierarchical_parallel", "pipeline_parallel")
MODELS = (
    {"embedding_dim": 64, "max_sequence_length": 64},
    {"embedding_dim": 128, "max_sequence_length": 64},
    {"embedding_dim": 192, "max_sequence_length": 64},
    {"embedding_dim": 256, "max_sequence_length": 32},
    {"embedding_dim": 96, "max_sequence_length": 128},
    {"embedding_dim": 128, "max_sequence_length": 128},
    {"embedding_dim": 320, "max_sequence_length": 32},
    {"embedding_dim": 64, "max_sequence_length": 128, "num_heads": 8},
    {"embedding_dim": 160, "max_sequence_length": 96},
    {"embedding_dim": 256, "max_sequence_length": 64, "num_heads": 8},
)
ENDLESS, FEWEST, REHEARSED_S = 100_000, 8, 8.0
RUNS_IN_TURNS, RUNS_OF_SCHEDULE = {1: 3, 2: 1, 4: 1}, 2
CROWDED, CROWDED_MODELS = 4, 3
HALVES, COUNTED = 0.04, 0.7
INSIDE, TIME_MEAN, TIME_WORST, PEAK_MEAN, PEAK_WORST, PROCESS_WORST = 0.9, 0.05, 0.10, 0.01, 0.03, 0.05
FITS, NEAR, WRONGLY_REFUSED = 30, 0.07, 0.1
SCHEDULES = {"gpipe": 1, "1f1b": 1, "interleaved": 2}
PIPELINES, STEPS, NEARLY, RIGHT = 10, 40, 0.03, 0.9
_TICK_S = 0.02


class Size(NamedTuple):
    """How large random models are: the kind of trial, the fewest and the most 64s of their width, and of their blocks."""

    kind: str
    widths: tuple[int, int]
    blocks: tuple[int, int]


SMALL, LARGE = Size("fits", (2, 10), (2, 6)), Size("large", (12, 20), (4, 8))


def main() -> int:
    """Make trials until the time is over, then print all figures with their limits; status 1 if one is missed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument("--kept", type=Path, default=Path("predict-trials.jsonl"))
    parser.add_argument("--plot", type=Path)
    parser.add_argument("--only", choices=("time", "memory", "fits", "large", "schedule"))
    order = parser.parse_args()
    kept = read_kept(order.kept)
    until = time.monotonic() + order.minutes * 60
    for name, trial in missing(kept, only=order.only):
        if time.monotonic() >= until:
            break
        row = {"trial": name, **trial()}
        kept.append(row)
        with order.kept.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")
        print(json.dumps(row), flush=True)
    if order.plot is not None:
        order.plot.write_text(draw(points_of(kept)), encoding="utf-8")
    return judge_all(kept)


def read_kept(path: Path) -> list[dict[str, Any]]:
    """Read the trials of earlier calls."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.is_file() else []


def missing(kept: list[dict[str, Any]], *, only: str | None) -> Iterator[tuple[str, Any]]:
    """Yield the trials that are not kept, those of different kinds in turns."""
    done = {row["trial"] for row in kept}
    places = [(recipe, ranks, model) for model in range(len(MODELS)) for ranks in (1, 2) for recipe in RECIPES]
    for place, (recipe, ranks, model) in enumerate(places):
        name = f"{recipe} n={ranks} model={model}"
        if name not in done and only in {None, "time"}:
            yield name, lambda of=(recipe, ranks, model): time_trial(*of)
        if f"memory of {name}" not in done and only == "memory":
            yield f"memory of {name}", lambda of=(recipe, ranks, model): memory_trial(*of)
        if place < FITS and f"fits {place}" not in done and only in {None, "fits"}:
            yield f"fits {place}", lambda of=place: fits_trial(of, SMALL)
        if place < FITS and f"large {place}" not in done and only == "large":
            yield f"large {place}", lambda of=place: fits_trial(of, LARGE)
        if place < PIPELINES and f"schedule {place}" not in done and only in {None, "schedule"}:
            yield f"schedule {place}", lambda of=place: schedule_trial(of)
    crowded = [(recipe, CROWDED, model) for model in range(CROWDED_MODELS) for recipe in RECIPES]
    for recipe, ranks, model in crowded if only == "time" else ():
        name = f"{recipe} n={ranks} model={model}"
        if name not in done:
            yield name, lambda of=(recipe, ranks, model): time_trial(*of)


def settings(recipe: str, model: dict[str, int], *, steps: int, ranks: int = 2) -> dict[str, Any]:
    """Return the values that are set: little validation, no checkpoints while steps are timed; two stages in a pipeline, or four."""
    values = {
        "training_config.steps": steps,
        "training_config.validation_interval": 10_000,
        "training_config.validation_sequences": 2,
        "checkpoint_config.interval": 10_000,
        "scheduler_config.warmup_steps": 1,
        **{f"transformer_config.{key}": value for key, value in model.items()},
    }
    if recipe == "pipeline_parallel":
        values["multihost_config.pipeline_parallel_config.schedule"] = "1f1b"
        if ranks == CROWDED:
            values["multihost_config.pipeline_parallel_config.blocks_per_rank"] = [1] * CROWDED
    else:
        values["transformer_config.num_blocks"] = 2
    return values


def time_trial(recipe: str, ranks: int, model: int) -> dict[str, Any]:
    """Run and calibrate in turns; return what was predicted and what was measured."""
    values, count = settings(recipe, MODELS[model], steps=ENDLESS, ranks=ranks), RUNS_IN_TURNS[ranks]
    with ExitStack() as stack:
        runs = [stack.enter_context(EndlessRun(recipe, ranks=ranks, values=values)) for _ in range(count)]
        seconds = (1 + count) * REHEARSED_S
        kept = stack.enter_context(Calibration(recipe, ranks=ranks, values=values, seconds=seconds))
        take_turns(
            [*(run.command for run in runs), kept.command],
            lambda: kept.has_ended() or any(run.has_ended() for run in runs),
            step_s=lambda: max(run.step_s() for run in runs),
        )
        said = kept.found()
        found = pooled([run.measured() for run in runs])
    if isinstance(said, str) or not found:
        return {"kind": "time", "refused": said if isinstance(said, str) else "no rank has made a step"}
    slowest = max(found, key=lambda one: one.median)
    if min(map(len, slowest.steps)) < FEWEST:
        return {"kind": "time", "refused": "the run has made too few steps"}
    terms = next(one.phases for one in said.ranks if one.rank == slowest.rank)
    return {
        "kind": "time",
        "predicted_s": said.step.median,
        "interval_s": [said.step.low, said.step.high],
        "measured_s": [*map(statistics.median, slowest.steps)],
        "steps": [*map(len, slowest.steps)],
        "phases_s": {name: [one.median, slowest.phases.get(name)] for name, one in terms.items()},
        "parts_s": [[one.computing_s, one.exposed.median, one.waiting.median] for one in said.ranks],
    }


def memory_trial(recipe: str, ranks: int, model: int) -> dict[str, Any]:
    """Run a few steps twice, and return the memory of tensors and of processes that was predicted and that was measured."""
    values = settings(recipe, MODELS[model], steps=3)
    held = predict(ttlaunch.plan(recipe, ranks=ranks, set=values))
    if isinstance(held, NotPredicted):
        return {"kind": "memory", "refused": held.reason}
    with tempfile.TemporaryDirectory(prefix="ttl-bench-") as folder:
        options = {"ranks": ranks, "set": values, "runs_dir": folder}
        run = read_run(ttlaunch.run(recipe, profile_steps="1", **options).folder)
        peaks = peaks_of(read_run(ttlaunch.run(recipe, **options).folder))
    tensors = judge(None, held, memory_of_ranks(run.telemetry or ())).memory
    processes = judge(None, held, [], processes=peaks).memory
    return {
        "kind": "memory",
        "tensors": [(one.predicted, one.measured) for one in tensors],
        "processes": [(one.predicted, one.measured) for one in processes],
        "held": [(sum(one.held.values()), sum(one.formula.values())) for one in held.ranks if one.held],
    }


def fits_trial(number: int, size: Size) -> dict[str, Any]:
    """Ask whether a random model fits into a limit near what it needs, and see whether it does."""
    chance = random.Random(number)
    recipe = RECIPES[number % len(RECIPES)]
    model = {
        "embedding_dim": 64 * chance.randint(*size.widths),
        "num_blocks": 4 if recipe == "pipeline_parallel" else chance.randint(*size.blocks),
        "max_sequence_length": chance.choice((32, 64, 128)),
    }
    values = {**settings(recipe, {}, steps=3), **{f"transformer_config.{key}": one for key, one in model.items()}}
    values |= {"training_config.batch_size": 8, "training_config.micro_batch_size": chance.choice((1, 2, 4))}
    ranks = chance.choice((1, 2))
    found = predict(ttlaunch.plan(recipe, ranks=ranks, set=values))
    if isinstance(found, NotPredicted):
        return {"kind": size.kind, "refused": found.reason}
    needed = needed_bytes(found)
    limit = int(needed * chance.uniform(1 - NEAR, 1 + NEAR))
    row = {"kind": size.kind, "recipe": recipe, "needed": needed, "limit": limit, "said": needed <= limit}
    row["ranks"] = [[one.peak, one.saved, unreclaimable_bytes(found, one)] for one in found.ranks]
    start = partial(ttlaunch.run, recipe, ranks=ranks, set=values)
    with tempfile.TemporaryDirectory(prefix="ttl-bench-") as folder:
        if not Groups.can_be_made():
            with Sampled() as sampled:
                start(runs_dir=folder)
            most = max(sampled.peaks.values(), default=0)
            return {**row, "measured": most, "fits": most <= limit}
        with Groups({one.rank: limit for one in found.ranks}) as groups:
            report = start(runs_dir=folder, env=groups.environment)
    row |= {
        "model": model,
        "measured": max(groups.peaks.values()),
        "each": list(groups.peaks.values()),
        "fits": not groups.killed,
    }
    return row if groups.killed or report.status == "done" else {"kind": size.kind, "refused": report.status}


def schedule_trial(number: int) -> dict[str, Any]:
    """Predict the step of a random pipeline with each schedule, and measure it."""
    chance = random.Random(f"schedule {number}")
    micro = chance.choice((1, 2, 4))
    shared = {
        **settings("data_parallel", {}, steps=ENDLESS),
        "transformer_config.num_blocks": 4,
        "transformer_config.embedding_dim": 64 * chance.randint(1, 4),
        "transformer_config.max_sequence_length": chance.choice((32, 64, 128)),
        "training_config.micro_batch_size": micro,
        "training_config.batch_size": micro * chance.choice((2, 4, 8)),
    }
    part = "multihost_config.pipeline_parallel_config"
    values = {
        name: shared | {f"{part}.blocks_per_rank": [2, 2], f"{part}.schedule": name, f"{part}.chunks_per_rank": chunks}
        for name, chunks in SCHEDULES.items()
    }
    with ExitStack() as stack:
        kept = {
            name: stack.enter_context(
                Calibration("pipeline_parallel", ranks=2, values=one, seconds=len(values) * REHEARSED_S)
            )
            for name, one in values.items()
        }
        take_turns([one.command for one in kept.values()], lambda: all(one.has_ended() for one in kept.values()))
        said = {name: one.found() for name, one in kept.items()}
    refused = next((one for one in said.values() if isinstance(one, str)), None)
    if refused is not None:
        return {"kind": "schedule", "refused": refused}
    with ExitStack() as stack:
        runs = {
            name: [
                stack.enter_context(EndlessRun("pipeline_parallel", ranks=2, values=one))
                for _ in range(RUNS_OF_SCHEDULE)
            ]
            for name, one in values.items()
        }
        every = [run for some in runs.values() for run in some]
        take_turns(
            [one.command for one in every],
            lambda: all(is_enough(one) for one in every),
            step_s=lambda: max(one.step_s() for one in every),
        )
        measured = {name: pooled([run.measured() for run in some]) for name, some in runs.items()}
        found = {name: max(ranks, key=lambda rank: rank.median, default=None) for name, ranks in measured.items()}
    slowest = {name: one for name, one in found.items() if one is not None and min(map(len, one.steps)) >= FEWEST}
    if len(slowest) < len(values):
        return {"kind": "schedule", "refused": "a run made too few steps"}
    return {
        "kind": "schedule",
        "predicted_s": {name: one.step.median for name, one in said.items()},
        "each_s": {name: [*map(statistics.median, one.steps)] for name, one in slowest.items()},
    }


def is_enough(run: EndlessRun) -> bool:
    """Whether a run has made enough steps for its median, for as long as a rehearsal takes; or has ended."""
    return run.has_ended() or (run.steps_done() > STEPS and run.seconds() > REHEARSED_S)


class Sampled:
    """Samples the memory of all ranks that this process has started while it is entered.

    Attributes:
        peaks: By process id, the most bytes that are no pages of files.
    """

    def __init__(self) -> None:
        self.peaks: dict[int, int] = {}
        self._ends = threading.Event()
        self._thread = threading.Thread(target=self._sample)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ends.set()
        self._thread.join()

    def _sample(self) -> None:
        ranks: list[int] = []
        looked = 0.0
        while not self._ends.wait(_TICK_S):
            if time.monotonic() - looked > 0.5:  # walking the tree takes longer than a look
                ranks, looked = [*_ranks()], time.monotonic()
            for pid in ranks:
                self.peaks[pid] = max(self.peaks.get(pid, 0), _held(pid))


def _ranks() -> Iterator[int]:
    for process in psutil.Process(os.getpid()).children(recursive=True):
        try:
            if process.cmdline()[1:3] == ["-m", "ttlaunch.runtime"]:
                yield process.pid
        except (psutil.Error, OSError):  # it has ended
            continue


def _held(pid: int) -> int:
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text(encoding="ascii").splitlines()
    except OSError:
        return 0
    rows = (line.split() for line in lines)
    return sum(int(row[1]) * 1024 for row in rows if row[0] in {"Anonymous:", "Pss_Shmem:"})


def judge_all(kept: list[dict[str, Any]]) -> int:
    """Print each figure beside its limit; return 1 if one is missed."""
    both = [row for row in kept if row["kind"] == "time" and "refused" not in row]
    times, crowded = ([row for row in both if is_crowded(row) == wanted] for wanted in (False, True))
    within = [row["interval_s"][0] <= statistics.mean(row["measured_s"]) <= row["interval_s"][1] for row in crowded]
    counted = [row for row in times if apart(row) <= HALVES]
    errors = [abs(error_of(row)) for row in counted]
    tensors, processes = (
        [abs(said / real - 1) for row in kept for said, real in row.get(of, ())] for of in ("tensors", "processes")
    )
    exact = [said == real for row in kept for said, real in row.get("held", ())]
    pipelines = [row for row in kept if row["kind"] == "schedule" and "refused" not in row]
    chosen = [behind(row) for row in pipelines if all(map(is_steady, row["each_s"].values()))]
    refused = sum("refused" in row for row in kept)
    memory, fits = (sum(row["kind"] in of for row in kept) for of in ({"memory"}, {SMALL.kind, LARGE.kind}))
    print(
        f"{len(both)} trials of time, {memory} of memory, {fits} of --fits, {len(pipelines)} of a schedule; {refused} were refused"
    )
    figures = [
        ("time: trials that count", part(len(counted), len(times)), ">=", COUNTED),
        ("time: mean error of those", mean(errors), "<=", TIME_MEAN),
        ("time: largest error of those", max(errors, default=math.nan), "<=", TIME_WORST),
        ("time, ranks that share cores: within interval", part(sum(within), len(within)), ">=", INSIDE),
        ("tensors held ÷ formula is 1 (zero has more)", part(sum(exact), len(exact)), "=", None),
        ("tensors at their peak: mean error", mean(tensors), "<=", PEAK_MEAN),
        ("tensors at their peak: largest error", max(tensors, default=math.nan), "<=", PEAK_WORST),
        ("processes: largest error", max(processes, default=math.nan), "<=", PROCESS_WORST),
        *figures_of_fits(kept, SMALL, "0.2 to 0.8 GB"),
        *figures_of_fits(kept, LARGE, "1 to 6 GB"),
    ]
    figures.append(("schedule: trials that count", part(len(chosen), len(pipelines)), ">=", COUNTED))
    right = part(sum(one <= NEARLY for one in chosen), len(chosen))
    figures.append(("schedule: predicted best is best, or within 3 %", right, ">=", RIGHT))
    missed = 0
    for name, value, sign, limit in figures:
        if math.isnan(value):
            print(f"  {name:46}        –   no trial")
            continue
        is_met = limit is None or (value >= limit if sign == ">=" else value <= limit)
        missed += not is_met
        said = "no limit" if limit is None else f"{sign} {limit:g}: {'met' if is_met else 'MISSED'}"
        print(f"  {name:46} {value:8.4f}   {said}")
    return int(missed > 0)


def figures_of_fits(kept: list[dict[str, Any]], size: Size, words: str) -> Iterator[tuple[str, float, str, float]]:
    """Yield how often `--fits` was wrong on either side, for models of one size."""
    fits = [row for row in kept if row["kind"] == size.kind and "refused" not in row]
    no = [row for row in fits if not row["said"]]
    unsafe = sum(row["said"] and not row["fits"] for row in fits)
    yield f"--fits, {words}: said to fit, and does not", unsafe if fits else math.nan, "<=", 0
    yield (
        f"--fits, {words}: part of refused that fit",
        part(sum(row["fits"] for row in no), len(no)),
        "<=",
        WRONGLY_REFUSED,
    )


def is_crowded(row: dict[str, Any]) -> bool:
    """Whether a trial of time has more ranks than cores."""
    return f" n={CROWDED} " in row["trial"]


def part(count: int, of: int) -> float:
    """The part of some trials; NaN if there are none."""
    return count / of if of else math.nan


def apart(row: dict[str, Any]) -> float:
    """By how much the two halves of a measurement differ."""
    first, second = row["measured_s"]
    return abs(first - second) / statistics.mean((first, second))


def error_of(row: dict[str, Any]) -> float:
    """By how much the predicted time was wrong."""
    real = statistics.mean(row["measured_s"])
    return (row["predicted_s"] - real) / real


def is_steady(each: list[float]) -> bool:
    """Whether the two smallest of some times are near each other, so that a third one would hardly be smaller."""
    first, second = sorted(each)[:2]
    return second / first - 1 <= HALVES


def behind(row: dict[str, Any]) -> float:
    """By how much the schedule that was predicted to be the quickest is slower than the one that is."""
    times = {name: min(each) for name, each in row["each_s"].items()}
    return times[min(row["predicted_s"], key=row["predicted_s"].get)] / min(times.values()) - 1


def mean(values: list[float]) -> float:
    """The mean; NaN if there are none."""
    return statistics.mean(values) if values else math.nan


def points_of(kept: list[dict[str, Any]]) -> dict[str, list[Point]]:
    """Return for each panel of the plot what was measured, what was predicted, and whether it counts."""
    times = [row for row in kept if row["kind"] == "time" and "refused" not in row and not is_crowded(row)]
    steps = [
        (statistics.mean(row["measured_s"]) * 1e3, row["predicted_s"] * 1e3, apart(row) <= HALVES) for row in times
    ]
    tensors, processes = (
        [(real / 1e6, said / 1e6, True) for row in kept for said, real in row.get(of, ())]
        for of in ("tensors", "processes")
    )
    limited = [
        (real / 1e6, rank[-1] / 1e6, True)
        for row in kept
        if row["kind"] in {SMALL.kind, LARGE.kind} and row.get("fits") and "each" in row
        for rank, real in zip(row["ranks"], row["each"], strict=True)
    ]
    return {
        "time of a step, ms": steps,
        "tensors at their peak, MB": tensors,
        "resident memory, MB": processes,
        "memory of ranks with a limit, MB": limited,
    }


if __name__ == "__main__":
    raise SystemExit(main())
