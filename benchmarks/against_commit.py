"""What this checkout costs against another one: start-up, launch, steps, messages, checkpoints, in interleaved pairs.

    git worktree add ../base COMMIT
    python benchmarks/against_commit.py ../base [--seconds 280] [--only NAME]

Both run with this interpreter and its packages, each from its own tree; which of a pair is first takes turns. Shown is the
median over pairs of the ratio here / there, with a 95 % interval from drawing pairs anew. To be met: an upper end of at most
1.05 on a machine that nothing else uses. Where others use it, the interval says how little is known.
"""

import argparse
import itertools
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

HERE = Path(__file__).parents[1]
LIMIT = 1.05
_DRAWS = 2000
_LEAST_PAIRS = 3
_SKIPPED = 5  # steps in which buckets are tuned and caches fill
_SMALL = {
    "training_config.steps": 60,
    "training_config.validation_interval": 1000,
    "checkpoint_config.interval": "null",
}


def main() -> None:
    """Print a line for each measurement."""
    parser = argparse.ArgumentParser(description="Measure this checkout against another one.")
    parser.add_argument("base", type=Path, help="the other checkout")
    parser.add_argument("--seconds", type=float, default=280.0, help="for all measurements together")
    parser.add_argument("--only", choices=sorted(MEASUREMENTS), help="one of them alone")
    options = parser.parse_args()
    names = [options.only] if options.only else list(MEASUREMENTS)
    for name in names:
        pairs = take_pairs(MEASUREMENTS[name], options.base.resolve(), options.seconds / len(names))
        low, middle, high = interval([ours / theirs for ours, theirs in pairs])
        ours, theirs = (statistics.median(column) for column in zip(*pairs, strict=True))
        verdict = "" if high <= LIMIT else "   over the limit"
        print(
            f"{name:12} here {ours * 1e3:9.3f} ms  there {theirs * 1e3:9.3f} ms  ratio {middle:.3f} [{low:.3f}, {high:.3f}]"
            f"  limit {LIMIT}  {len(pairs)} pairs{verdict}",
            flush=True,
        )


def take_pairs(measure: Callable[[Path], float], base: Path, seconds: float) -> list[tuple[float, float]]:
    """Seconds here and there, pair by pair, for as long as there is time."""
    for tree in (HERE, base):
        measure(tree)  # byte code and page cache are filled from here on
    pairs: list[tuple[float, float]] = []
    end = time.monotonic() + seconds
    for number in itertools.count():
        if time.monotonic() > end and len(pairs) >= _LEAST_PAIRS:
            return pairs
        first, second = (HERE, base) if number % 2 else (base, HERE)
        taken = {first: measure(first)}
        taken[second] = measure(second)
        pairs.append((taken[HERE], taken[base]))
    raise AssertionError


def interval(ratios: list[float]) -> tuple[float, float, float]:
    """The median, between the ends of its 95 % interval."""
    draw = random.Random(0)  # noqa: S311 - no secret
    medians = sorted(statistics.median(draw.choices(ratios, k=len(ratios))) for _ in range(_DRAWS))
    return medians[int(0.025 * _DRAWS)], statistics.median(ratios), medians[int(0.975 * _DRAWS)]


def command(tree: Path, *words: str) -> tuple[list[str], dict[str, str]]:
    """How ttlaunch is started from a tree."""
    environment = {**os.environ, "PYTHONPATH": str(tree), "NO_COLOR": "1", "OMP_NUM_THREADS": "1"}
    return [sys.executable, "-m", "ttlaunch", *words], environment


def whole_command(*words: str) -> Callable[[Path], float]:
    """Seconds from the start of a short command to its end."""

    def measure(tree: Path) -> float:
        argv, environment = command(tree, *words)
        began = time.perf_counter()
        subprocess.run(argv, env=environment, cwd=tree, stdout=subprocess.DEVNULL, check=True)
        return time.perf_counter() - began

    return measure


def first_line(tree: Path) -> float:
    """Seconds from the start of `ttlaunch run` to the first line that a rank has printed."""
    with tempfile.TemporaryDirectory() as folder:
        argv, environment = command(tree, "run", "-n", "2", "--", "echo", "here")
        began = time.perf_counter()
        with subprocess.Popen(argv, env=environment, cwd=folder, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            taken = next(time.perf_counter() - began for line in process.stdout if "here" in line)
            process.stdout.read()
        return taken


def step(recipe: str, **changes: object) -> Callable[[Path], float]:
    """Seconds of the median step of rank 0, under supervision as every run has it."""
    settings = {**_SMALL, **changes}
    words = [word for key, value in settings.items() for word in ("--set", f"{key}={value}")]

    def measure(tree: Path) -> float:
        with tempfile.TemporaryDirectory() as folder:
            argv, environment = command(tree, "run", recipe, *words, "--format", "json")
            answer = subprocess.run(argv, env=environment, cwd=folder, capture_output=True, text=True, check=True)
            run = Path(folder, "runs", json.loads(answer.stdout)["run_id"])
            lines = (run / "records/rank-0.progress.jsonl").read_text(encoding="utf-8").splitlines()
        ends = [record["time"] for record in map(json.loads, lines) if record["kind"] == "step"]
        return statistics.median(after - before for before, after in itertools.pairwise(ends[_SKIPPED:]))

    return measure


def all_reduce(tree: Path) -> float:
    """Seconds for a gigabyte in an all-reduce over our messages, as `fabric_minimal` measures it."""
    with tempfile.TemporaryDirectory() as folder:
        argv, environment = command(tree, "run", "fabric_minimal", "-n", "2", "--format", "json")
        answer = subprocess.run(argv, env=environment, cwd=folder, capture_output=True, text=True, check=True)
        results = json.loads(answer.stdout)["results"]
    return 1.0 / float(results["gigabytes_per_second"])


MEASUREMENTS = {
    "--help": whole_command("--help"),
    "validate": whole_command("validate"),
    "first line": first_line,
    "step": step("data_parallel"),
    "three tiers": step("hierarchical_parallel"),
    "checkpoint": step("data_parallel", **{"checkpoint_config.interval": 1, "checkpoint_config.keep": 1}),
    "messages": all_reduce,
}

if __name__ == "__main__":
    main()
