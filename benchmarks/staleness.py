"""What a lead is good for: waiting of `classic_dp` with several bounds, where steps take between 1 and 3 times as long.

    PYTHONPATH=. python benchmarks/staleness.py [--rounds 3] [--workers 2] [--bounds 0 4] [--results FILE]

Runs with different bounds take turns, with the same delays: before each step a worker sleeps `--milliseconds` times a factor
from 1 to 3, drawn from round, worker and step (`benchmarks/jittered/trainer.py` around the recipe's own trainer). Model,
text and batch are the recipe's own. Waiting is what the ranks' telemetry says: time in which a worker could do nothing but wait
for a message, all workers together, within steps, the first ten left out; sleeping is none. The loss is that of the last
validation, after equally many samples.

To be met, as medians of the rounds: K = 4 cuts waiting by 40 % or more against K = 0, and its loss is at most 5 % higher.
"""

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

from ttlaunch.running.metrics.telemetry import read_telemetry

_RECIPE = Path(__file__).parents[1] / "recipes" / "classic_dp"
_JITTERED = Path(__file__).parent / "jittered" / "trainer.py"
_WARM_UP = 10


class Measured(NamedTuple):
    """One run.

    Attributes:
        waited_s: By all workers together.
        share: Of their steps' time.
        step_ms: Mean of a step.
        loss: Of the last validation.
        staleness: Average and maximum, as the run says.
    """

    waited_s: float
    share: float
    step_ms: float
    loss: float
    staleness: tuple[float, float]


def main() -> None:
    """Print a row for each bound, and whether the targets are met."""
    parser = argparse.ArgumentParser(description="Measure waiting with bounded staleness under random delays.")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--bounds", type=int, nargs="+", default=[0, 4])
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--milliseconds", type=float, default=40.0)
    parser.add_argument("--results", type=Path)
    options = parser.parse_args()
    found: dict[int, list[Measured]] = {bound: [] for bound in options.bounds}
    with tempfile.TemporaryDirectory(prefix="ttl-bench-") as folder:
        for number in range(options.rounds):
            for bound in options.bounds:
                found[bound].append(_run(bound, options, seed=number, folder=Path(folder)))
    print(f"{options.workers} workers, {options.steps} steps, {options.rounds} rounds; load {os.getloadavg()[0]:.1f}")
    print("  K   waited      of steps   step       loss     staleness")
    for bound, runs in found.items():
        median = [statistics.median(run[at] for run in runs) for at in range(4)]
        ages = [statistics.median(run.staleness[at] for run in runs) for at in range(2)]
        print(
            f"{bound:3} {median[0]:8.2f} s {median[1]:9.1%} {median[2]:8.1f} ms {median[3]:9.4f}"
            f"   {ages[0]:.2f}, at most {ages[1]:.0f}"
        )
    if {0, 4} <= set(options.bounds):
        _judge(found[0], found[4])
    if options.results:
        rows = {bound: [run._asdict() for run in runs] for bound, runs in found.items()}
        options.results.write_text(json.dumps({"load": os.getloadavg(), "bounds": rows}, indent=1), encoding="utf-8")


def _judge(strict: list[Measured], bounded: list[Measured]) -> None:
    pairs = list(zip(strict, bounded, strict=True))
    cut = statistics.median(1 - one.waited_s / zero.waited_s for zero, one in pairs)
    higher = statistics.median(one.loss / zero.loss - 1 for zero, one in pairs)
    print(f"waiting cut by {cut:.0%}   (at least 40 %: {'met' if cut >= 0.40 else 'NOT MET'})")
    print(f"loss {higher:+.1%}   (at most +5 %: {'met' if higher <= 0.05 else 'NOT MET'})")


def _run(bound: int, options: argparse.Namespace, *, seed: int, folder: Path) -> Measured:
    recipe = folder / f"jittered-{seed}-{bound}"
    shutil.copytree(_RECIPE, recipe, ignore=shutil.ignore_patterns("__pycache__"))
    (recipe / "trainer.py").rename(recipe / "undisturbed.py")
    shutil.copy(_JITTERED, recipe / "trainer.py")
    jitter = {"seed": seed, "seconds": options.milliseconds / 1e3}
    (recipe / "jitter.json").write_text(json.dumps(jitter), encoding="utf-8")
    settings = {
        "training_config.steps": options.steps,
        "training_config.validation_interval": 10**6,
        "checkpoint_config.interval": "null",
        "multihost_config.num_workers": options.workers,
        "classic_dp_config.staleness_bound": bound,
    }
    words = [word for key, value in settings.items() for word in ("--set", f"{key}={value}")]
    hosts = folder / "hosts.txt"
    hosts.write_text(f"localhost slots={options.workers}\n", encoding="utf-8")
    command = [
        sys.executable,
        "-m",
        "ttlaunch",
        "run",
        str(recipe),
        "--hostfile",
        str(hosts),
        "--format",
        "json",
        *words,
    ]
    answer = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    if answer.returncode:
        sys.exit(answer.stdout + answer.stderr)
    report = json.loads(answer.stdout)
    telemetry = read_telemetry(folder / "runs" / report["run_id"], world_size=options.workers)
    assert telemetry is not None
    steps = range(_WARM_UP + 1, options.steps + 1)
    waited = sum(times.get(step, 0) for book in telemetry for times in book.waits.values() for step in steps) / 1e6
    spent = sum(book.steps[step] for book in telemetry for step in steps) / 1e6
    results = report["results"]
    staleness = float(results["staleness average"]), float(results["staleness maximum"])
    step_ms = spent / len(telemetry) / len(steps) * 1e3
    return Measured(waited, waited / spent, step_ms, report["last_validation"], staleness)


if __name__ == "__main__":
    main()
