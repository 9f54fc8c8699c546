"""Weak scaling of every recipe: two ranks on two cores, each with as much work as one process has alone; and its defaults.

    python benchmarks/weak_scaling.py [--rounds 3] [--steps 30] [--recipe NAME ...] [--no-defaults]

Efficiency is tokens/s of the recipe with two workers, over tokens/s of two processes that train side by side and know nothing
of each other: what two processes on this machine take from each other in caches and memory is in both, so what is left is
communication, waiting and further ranks. Recipe and reference take turns; medians of the rounds are compared. The model is
compute-bound: 4 blocks of width 256, 8 sequences of 128 tokens for each worker, 3.3 million values, so that 13 MB of gradient
meet about 20 GFLOP in each step of each worker. To be met: 0.95, by recipes whose workers have the whole model. Those that
split it, or that have servers beside two workers on two cores, are told and not judged. Buckets have 4 MB from the first step
on, since trying sizes out takes the first 17 steps of a run. Steps are enough for what happens only every 8 or 10 of them.

Defaults: `ttlaunch run RECIPE` as it is, which has to end within 30 s with a loss that has fallen.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from ttlaunch.lab.comparison.measure import measure_run
from ttlaunch.spec.recipe.discovery import find_recipe, list_recipes, load_recipe

LIMIT, LONGEST_S = 0.95, 30.0
WORKERS, SEQUENCES, LENGTH = 2, 8, 128
_ROOT = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
_BUCKETS = "multihost_config.bucket_megabytes"
_SPLITS_THE_MODEL = {"pipeline_parallel", "tensor_parallel"}


def main() -> int:
    """Print both tables; status 1 if a limit is missed."""
    parser = argparse.ArgumentParser(description="Measure weak scaling on two cores.")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--recipe", action="append", help="of these alone; repeatable")
    parser.add_argument("--no-defaults", action="store_true")
    options = parser.parse_args()
    names = options.recipe or [one.name for one in list_recipes(Path.cwd()) if _trains(one.name)]
    with tempfile.TemporaryDirectory(prefix="ttl-weak-") as scratch:
        print(f"{'recipe':24} {'ranks':>5} {'tokens/s':>9} {'of two alone':>13}  {'least':>6} {'most':>6}")
        is_met = [_scaling(name, Path(scratch, name), rounds=options.rounds, steps=options.steps) for name in names]
        if not options.no_defaults:
            print(f"\n{'recipe, as it is':24} {'seconds':>8} {'first loss':>11} {'last loss':>10}")
            is_met += [_defaults(name, Path(scratch, f"{name}-defaults")) for name in names]
    print(
        f"\nlimits: {LIMIT} where judged, {LONGEST_S:.0f} s and a loss that falls; {'all met' if all(is_met) else 'MISSED'}"
    )
    return 0 if all(is_met) else 1


def _trains(name: str) -> bool:
    recipe = load_recipe(find_recipe(name, working_folder=Path.cwd()))
    return bool(recipe.uses_data)


def _scaling(name: str, folder: Path, *, rounds: int, steps: int) -> bool:
    """One line of the first table."""
    ratios, speeds, ranks = [], [], 0
    for at in range(rounds):
        alone = _together([_words("data_parallel", steps=steps, workers=1)] * WORKERS, folder / f"alone-{at}")
        (run,) = _together([_words(name, steps=steps, workers=WORKERS)], folder / f"recipe-{at}")
        ranks = sum(run.ranks.values())
        speeds.append(run.tokens_per_s or 0.0)
        ratios.append(speeds[-1] / sum(one.tokens_per_s or 0.0 for one in alone))
    efficiency = statistics.median(ratios)
    is_judged = name not in _SPLITS_THE_MODEL and ranks == WORKERS
    is_met = efficiency >= LIMIT or not is_judged
    mark = "" if is_judged else "  not judged"
    least, most = min(ratios), max(ratios)
    line = f"{name:24} {ranks:5} {statistics.median(speeds):9,.0f} {efficiency:13.3f}  {least:6.3f} {most:6.3f}{mark}"
    print(line if is_met else f"{line}  MISSED", flush=True)
    return is_met


def _words(recipe: str, *, steps: int, workers: int) -> list[str]:
    """The command line of a run whose workers have the same work each."""
    batch = SEQUENCES * workers
    settings = {
        "training_config": f"{{steps: {steps}, batch_size: {batch}, micro_batch_size: 2, validation_sequences: 2, "
        f"validation_interval: {steps + 1}}}",
        "transformer_config": f"{{num_blocks: 4, num_heads: 4, embedding_dim: 256, max_sequence_length: {LENGTH}}}",
        "checkpoint_config": "{interval: null}",
        "scheduler_config": "{warmup_steps: 2}",
    }
    if _BUCKETS not in load_recipe(find_recipe(recipe, working_folder=Path.cwd())).unread:
        settings[_BUCKETS] = "4"
    size = ["--ranks", "1"] if workers == 1 else []
    return [recipe, *size, *(word for key, value in settings.items() for word in ("--set", f"{key}={value}"))]


def _together(lines: Sequence[list[str]], folder: Path) -> list:
    """Runs that go on at the same time, measured."""
    processes = [_start(words, folder / str(at)) for at, words in enumerate(lines)]
    reports = [_report(process) for process in processes]
    return [measure_run(folder / str(at) / report["run_id"]) for at, report in enumerate(reports)]


def _start(words: Sequence[str], folder: Path) -> subprocess.Popen[str]:
    argv = [sys.executable, "-m", "ttlaunch", "run", *words, "--format", "json", "--runs-dir", str(folder)]
    environment = {**os.environ, **_ROOT}
    return subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)


def _report(process: subprocess.Popen[str]) -> dict:
    out, err = process.communicate()
    if process.returncode != 0:
        raise SystemExit(f"a run has failed: {(out + err)[-2000:]}")
    return json.loads(out)


def _defaults(name: str, folder: Path) -> bool:
    """One line of the second table."""
    report = _report(_start([name], folder))
    first, last, seconds = report["first_validation"], report["last_validation"], report["duration_s"]
    is_met = seconds < LONGEST_S and last < first
    print(f"{name:24} {seconds:8.1f} {first:11.3f} {last:10.3f}{'' if is_met else '  MISSED'}", flush=True)
    return is_met


if __name__ == "__main__":
    sys.exit(main())
