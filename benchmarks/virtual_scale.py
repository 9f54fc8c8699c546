"""The virtual clock with thousands of ranks: folded exactly as unfolded, 1,024 and 10,000 ranks, and where recipes stop scaling.

    python benchmarks/virtual_scale.py [--most 10000] [--no-folds] [--no-limits] [--no-curves] [--recipe NAME ...] [--write docs/explanation] [--anew]

Folded: recipes on 8, 32 and 64 workers, with and without a slow rank. The times of each step of each rank have to be the same floats as those of
ranks that all run their own code.

Size: 3 steps of 1,024 workers within 60 s and 2 GB, of 10,000 within 120 s, both in processor time; with 1,024, the bytes of each pair of
ranks have to be those of the recipe's formula. `--recipe` chooses recipes, for these too.

Curves: each worker has the same work whatever their number, 20 GFLOP a step at 50 GFLOP/s, with 10 Gbit/s and 50 µs between any two ranks. A recipe
stops scaling where less than half of the slowest rank's step is computing. `--write` writes the numbers, the picture and the page of the
documentation after each point, and does not measure again what is there (`--anew` does): so it may be interrupted.
"""

import argparse
import itertools
import json
import math
import resource
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from ttlaunch.app.dialogue import Unattended
from ttlaunch.app.run_spec import RunSpec
from ttlaunch.diagnostics import LaunchError
from ttlaunch.draw.curves import Chart, Curve, render_charts_svg
from ttlaunch.lab.simulate import plan_simulation
from ttlaunch.lab.virtual import Conditions, StepTime, VirtualRun, run_virtually

LIMITS_S = {1024: 60.0, 10_000: 120.0}
MOST_BYTES = 2e9
SIZES = (2, 8, 32, 128, 1024, 10_000)
SIZES_OF_FOLDS = (8, 32, 64)
FOLDS = ("data_parallel", "local_sgd", "diloco", "classic_dp", "tensor_parallel", "pipeline_parallel")
REPEATED = ("hierarchical_parallel", "sync_ps")
OTHERS = ("zero", *REPEATED)
COMPARED = (*FOLDS, *OTHERS)
CHECKED = ("data_parallel", "tensor_parallel", "pipeline_parallel", *OTHERS)
MODEL = (
    "transformer_config={num_blocks: 4, num_heads: 4, embedding_dim: 256, max_sequence_length: 128}",
    "checkpoint_config={interval: null}",
    "training_config.micro_batch_size=2",
    "training_config.validation_sequences=2",
    "training_config.validation_interval=1000",
)
HALF = 0.5
WHY = {
    "data_parallel": ", because each rank sends and receives twice the model, whatever their number",
    "classic_dp": ", because each rank sends and receives twice the model around a ring, one message after the other",
    "local_sgd": ", because each average moves twice the model in and out of each rank, here after every step",
    "diloco": ", because each outer step moves twice the model in and out of each rank, here after every step",
    "hierarchical_parallel": ", because every gradient passes through the one port of the aggregator",
    "sync_ps": ", because every gradient passes through the one port of the server",
    "zero": ", because layers are gathered again in each pass, with messages that become more and smaller",
    "tensor_parallel": ", because only the replicas grow in number, and these average their gradients as `data_parallel` does",
    "pipeline_parallel": ", because only the replicas grow in number, and the bubble stays what it is",
}
PAGE = """# Where recipes stop scaling

The [virtual clock](what-a-prediction-knows.md#time-on-a-virtual-clock) runs each recipe with more and more workers. Each worker has the same work whatever their number: 4 micro-batches of 2 sequences, about 20 GFLOP a
step, on 50 GFLOP/s, with 10 Gbit/s and 50 µs between any two ranks. The model has 3.3 million values, so a gradient is 13 MB. The table shows which share of its step the slowest rank of the role that computes spends computing. A recipe stops
scaling where that is less than half: from there on, more workers add less than half of their work.

{table}

{reasons}

![Shares of computing over the number of workers](scaling.svg)

## How far a curve goes

{ends}

Where one rank stands for many, or repeats the code of three, 10,000 workers take up to two minutes of processor time. The server of `sync_ps` and the aggregator of `hierarchical_parallel` serve one worker after the other, so no two workers have the same times. They
[repeat the code of three of them](what-a-prediction-knows.md#code-that-runs-once-times-of-its-own), without threads of their own. Ranks of `zero` own shards of other sizes, and each sends to each. [Those with equal shares have equal times](what-a-prediction-knows.md#shares-of-unequal-size),
and one of each such class stands for the others. `elastic_dp` is left
out: its workers share no step. `fully_sharded` needs a process for each rank.

Other machines move these points: twice the bandwidth moves them to the right, faster processors to the left. `ttlaunch simulate RECIPE --virtual --what-if` shows where yours are.

`benchmarks/virtual_scale.py --write docs/explanation` has written this page and its picture.
"""
KEYS = {
    "classic_dp": ["classic_dp_config.staleness_bound=0"],
    "local_sgd": ["local_sgd_config.every=1"],
    "diloco": ["diloco_config.every=1"],
    "tensor_parallel": ["tensor_parallel_config.ranks=2"],
    "pipeline_parallel": ["multihost_config.pipeline_parallel_config.schedule=1f1b"],
}


@dataclass(frozen=True)
class Place:
    """A point of a curve: how much of the slowest rank's step is computing, exposed communication and waiting."""

    workers: int
    ranks: int
    step_ms: float
    computing: float
    exposed: float
    waiting: float
    role: str


def main() -> int:
    """Print the tables; status 1 if a limit is missed."""
    parser = argparse.ArgumentParser(description="Measure simulations on a virtual clock.")
    parser.add_argument("--most", type=int, default=10_000, help="no more ranks than these")
    parser.add_argument("--no-folds", action="store_true")
    parser.add_argument("--no-limits", action="store_true")
    parser.add_argument("--no-curves", action="store_true")
    parser.add_argument("--recipe", action="append", help="these alone; repeatable")
    parser.add_argument("--write", type=Path, metavar="DIR", help="write scaling.json and scaling.svg there")
    parser.add_argument("--anew", action="store_true", help="also measure the points that scaling.json has")
    options = parser.parse_args()
    is_met: list[bool] = []
    names, folds = ([name for name in some if name in (options.recipe or some)] for some in (CHECKED, COMPARED))
    if not options.no_folds:
        for workers, name, is_slow in itertools.product(SIZES_OF_FOLDS, folds, (False, True)):
            if workers <= options.most:
                is_met.append(_folds(name, workers, {workers // 3: 1.5} if is_slow else {}))
    if not options.no_limits:
        is_met += [_is_in_time(name, workers) for name in names for workers in LIMITS_S if workers <= options.most]
    if not options.no_curves:
        names = options.recipe or [*FOLDS, *OTHERS]
        known = {} if options.anew or options.write is None else _read(options.write)
        for name in names:
            for curve in _curve(name, known.get(name, []), most=options.most):
                if options.write is not None:
                    _write({name: curve}, options.write)
        if options.write is not None:
            _write({}, options.write)
    print("all met" if all(is_met) else "MISSED")
    return 0 if all(is_met) else 1


def _simulate(name: str, workers: int, conditions: Conditions, *, work: int = 4) -> VirtualRun:
    """Simulate workers, each with so many micro-batches of two sequences."""
    values = [*MODEL, *KEYS.get(name, ()), f"training_config.batch_size={2 * work * workers}"]
    if name == "tensor_parallel":
        values += [f"tensor_parallel_config.replicas={workers // 2}"]
    elif name == "pipeline_parallel":
        values += [f"multihost_config.pipeline_parallel_config.replicas={workers // 2}"]
    else:
        values += [f"multihost_config.num_workers={workers}"]
    return run_virtually(plan_simulation(RunSpec(name, overrides=values), Unattended(), has_room=True), conditions)


def _times(found: VirtualRun) -> dict[int, StepTime]:
    return {rank: one for one in found.groups for rank in one.members}


def _folds(name: str, workers: int, slow: dict[int, float]) -> bool:
    folded, every = (_simulate(name, workers, Conditions(slow=slow, fold=fold), work=1) for fold in (True, False))
    one, other = _times(folded), _times(every)
    parts = ("step_ms", "computing_ms", "exposed_ms", "waiting_ms", "each_ms")
    same = all(getattr(one[rank], part) == getattr(other[rank], part) for rank in other for part in parts)
    ranks = every.plan.world_size
    is_met = same and len(every.groups) == ranks and not folded.differing and folded.no_formula is None
    print(
        f"{name:22} {ranks:6} ranks {'one slow' if slow else 'all alike':10} {_how(folded)}, {'equal' if is_met else 'DIFFERENT'}",
        flush=True,
    )
    return is_met


def _how(found: VirtualRun) -> str:
    return f"{found.repeats} repeat the code of 3" if found.repeats else f"{len(found.groups)} groups"


def _is_in_time(name: str, workers: int) -> bool:
    before = _spent_s()
    try:
        found = _simulate(name, workers, Conditions(), work=1)
    except LaunchError as error:
        print(f"{name:22} {workers:6} workers: {error.diagnostics[0].message}  MISSED", flush=True)
        return False
    took_s, most = _spent_s() - before, resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024
    is_exact = found.differing == 0 and (found.plan.world_size > min(LIMITS_S) or found.no_formula is None)
    is_met = took_s <= LIMITS_S[workers] and most <= MOST_BYTES and is_exact
    bytes_of = "not compared" if found.no_formula else f"{found.pairs:,} pairs, {found.differing} differ"
    print(
        f"{name:22} {workers:6} workers {_how(found)}, {took_s:.1f} s, {most / 1e6:.0f} MB, bytes: {bytes_of}{'' if is_met else '  MISSED'}",
        flush=True,
    )
    return is_met


def _spent_s() -> float:
    usages = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(one.ru_utime + one.ru_stime for one in usages)


def _curve(name: str, known: list[Place], *, most: int) -> Iterator[list[Place]]:
    """Measure a curve, and yield it after each new point."""
    found = list(known)
    for workers in SIZES:
        if workers > most:
            break
        if any(one.workers == workers for one in known):
            continue
        try:
            run = _simulate(name, workers, Conditions(steps=2))
        except LaunchError as error:
            print(f"{name:22} {workers:6} workers: {error.diagnostics[0].message}", flush=True)
            break
        computing = max(one.computing_ms for one in run.groups)
        ranks = [one for one in run.groups if one.steps and one.computing_ms > computing / 2]  # no servers
        slowest = max(ranks, key=lambda one: (one.step_ms, one.exposed_ms))
        parts = (slowest.computing_ms, slowest.exposed_ms, slowest.waiting_ms)
        place = Place(
            workers, run.plan.world_size, slowest.step_ms, *(part / slowest.step_ms for part in parts), slowest.role
        )
        print(
            f"{name:22} {workers:6} workers {place.ranks:6} ranks {place.step_ms:10.2f} ms: {place.computing:6.1%} computing, "
            f"{place.exposed:6.1%} communication, {place.waiting:6.1%} waiting, of {place.role}",
            flush=True,
        )
        found = sorted([*found, place], key=lambda one: one.workers)
        yield found


def _read(folder: Path) -> dict[str, list[Place]]:
    numbers = folder / "scaling.json"
    content = json.loads(numbers.read_text(encoding="utf-8")) if numbers.exists() else {}
    return {name: [Place(**one) for one in places] for name, places in content.items()}


def _write(new: dict[str, list[Place]], folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    curves = _read(folder) | new
    content = {name: [vars(one) for one in curves[name]] for name in (*FOLDS, *OTHERS) if name in curves}
    (folder / "scaling.json").write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    charts = [_chart("ranks that fold", curves, FOLDS), _chart("ranks with times of their own", curves, OTHERS)]
    note = "the share of a step that the slowest rank computes, %; to the right, workers as powers of two"
    (folder / "scaling.svg").write_text(
        render_charts_svg("Weak scaling on a virtual clock", charts, note=note), encoding="utf-8"
    )
    (folder / "where-recipes-stop-scaling.md").write_text(_page(curves), encoding="utf-8")


def _page(curves: dict[str, list[Place]]) -> str:
    sizes = sorted({one.workers for places in curves.values() for one in places})
    names = [name for name in (*FOLDS, *OTHERS) if curves.get(name)]
    table = [f"| recipe | {' | '.join(f'{size:,} workers' for size in sizes)} |", "|---|" + "---:|" * len(sizes)]
    for name in names:
        shares = {one.workers: f"{one.computing:.0%}" for one in curves[name]}
        table.append(f"| `{name}` | {' | '.join(shares.get(size, '') for size in sizes)} |")
    ends: dict[int, list[str]] = {}
    for name in names:
        ends.setdefault(curves[name][-1].workers, []).append(f"`{name}`")
    told = [f"- to {most:,} workers: {', '.join(ends[most])}" for most in sorted(ends, reverse=True)]
    reasons = "\n".join(f"- {_reason(name, curves[name])}" for name in names)
    return PAGE.format(table="\n".join(table), reasons=reasons, ends="\n".join(told))


def _reason(name: str, places: list[Place]) -> str:
    """Say where a recipe stops scaling, and what the slowest worker does then in place of computing."""
    ends = next((one for one in places if one.computing < HALF), None)
    shown = places[-1] if ends is None else ends
    rest = f"communication takes {shown.exposed:.0%} of a step and waiting for other ranks {shown.waiting:.0%}"
    where = (
        f"does not stop up to {shown.workers:,} workers" if ends is None else f"stops before {shown.workers:,} workers"
    )
    return f"`{name}` {where}: there, {rest}{WHY.get(name, '')}."


def _chart(title: str, curves: dict[str, list[Place]], names: Sequence[str]) -> Chart:
    points = {
        name: tuple((math.log2(one.workers), 100 * one.computing) for one in curves.get(name, ())) for name in names
    }
    return Chart(title, tuple(Curve(name, found) for name, found in points.items() if found))


if __name__ == "__main__":
    sys.exit(main())
