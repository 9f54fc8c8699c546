"""Compare the processor time of a step with shadows to that of the same step of ranks that stay: what it costs that every owner may be lost.

    python benchmarks/elastic_shadows.py [--rounds 5] [--minutes 10] [--fresh]

The same recipe runs with and without `--elastic`, both over gRPC on this machine with one torch thread a rank, and trains the same weights. A
step is long: a model of 3.2 million parameters, and 8 micro-batches. Processor time is that of all processes of a run, launcher included,
between the ends of two of its steps. (The difference of a short and a longer run, divided by the steps, had the noise of two starts, which take
as long as ten steps.) To be met: the median over the rounds at most 1.05 for each recipe.

Ways take turns. Each round is a line in `.benchmarks/elastic_shadows.jsonl`; the same command goes on after the last one, whatever code it was
made with. Ends with 1 if a limit is missed.
"""

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil
from trainings import step_ends

from ttlaunch import contract

ROOT = Path(__file__).parents[1]
KEPT = ROOT / ".benchmarks" / "elastic_shadows.jsonl"
LIMIT = 1.05
_FIRST, _LAST = 4, 16
"""The steps between whose ends processor time is counted."""
_LOOK_S = 0.05
_MOST_S = 300.0
_MODEL = ("transformer_config.embedding_dim=256", "transformer_config.num_blocks=4")
_WORK = (
    "training_config.batch_size=32",
    "training_config.micro_batch_size=4",
    "training_config.validation_interval=100",
)
RECIPES: dict[str, tuple[list[str], str]] = {
    "hierarchical_parallel": (["hierarchical_parallel", "-n", "4"], "4:4"),
    "sync_ps": (["sync_ps", "--set", "multihost_config.num_workers=3"], "4:4"),
    "zero, stage 1": (["zero", "-n", "3", "--set", "zero_config.stage=1"], "3:3"),
    "zero, stage 3": (["zero", "-n", "3", "--set", "zero_config.stage=3"], "3:3"),
}
"""The command, and the bounds of its elastic form."""

Line = dict[str, Any]


def main() -> int:
    """Make the rounds that are missing, and print what all have measured."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--fresh", action="store_true", help="measure everything anew")
    options = parser.parse_args()
    KEPT.parent.mkdir(exist_ok=True)
    if options.fresh:
        KEPT.unlink(missing_ok=True)
    ends = time.monotonic() + 60 * options.minutes
    for number in range(options.rounds):
        for recipe, (words, bounds) in RECIPES.items():
            if len(_kept(recipe)) <= number and time.monotonic() < ends:
                stays, comes = _step_s(words), _step_s([*words, "--elastic", bounds])
                _keep({"recipe": recipe, "stays": stays, "elastic": comes})
    return _show()


def _show() -> int:
    missed = 0
    for recipe in RECIPES:
        lines = _kept(recipe)
        if not lines:
            continue
        ratios = [sum(line["elastic"].values()) / sum(line["stays"].values()) for line in lines]
        middle = statistics.median(ratios)
        missed += middle > LIMIT
        stays, comes = (statistics.median(sum(line[name].values()) for line in lines) for name in ("stays", "elastic"))
        beside = [statistics.median(line[name]["beside"] for line in lines) for name in ("stays", "elastic")]
        print(
            f"{recipe:22} {len(lines)} rounds: {stays:.3f} s of processors a step, elastic {comes:.3f} s "
            f"(of these launcher and shims {beside[0]:.3f}, {beside[1]:.3f}): "
            f"{middle:.3f} ({min(ratios):.3f} to {max(ratios):.3f}; limit {LIMIT:g})"
        )
    print(f"{missed} missed (at most 0); load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")
    return int(missed > 0)


def _step_s(words: list[str]) -> dict[str, float]:
    """Return the processor seconds of a step, of the ranks and of what stands beside them."""
    ttlaunch = str(Path(sys.executable).with_name("ttlaunch"))
    sets = [*_MODEL, *_WORK, f"training_config.steps={_LAST + 1}", "multihost_config.socket_type=grpc"]
    command = [ttlaunch, "run", *words, "--engine", "agents", *(word for one in sets for word in ("--set", one))]
    with tempfile.TemporaryDirectory() as place, Path(place, "said").open("w+") as said:
        run = subprocess.Popen(command, cwd=place, stdout=said, stderr=said)
        try:
            begun, before = _after(_FIRST, run, Path(place))
            ended, after = _after(_LAST, run, Path(place))
            status = run.wait(_MOST_S)
            said.seek(0)
            assert status == 0, said.read()
        finally:
            run.terminate()
            run.wait()
    return {kind: (after[kind] - before[kind]) / (ended - begun) for kind in before}


def _after(step: int, run: "subprocess.Popen[bytes]", place: Path) -> tuple[int, dict[str, float]]:
    """Wait until a step is made; return which one is the newest by then, and the processor seconds so far."""
    latest = time.monotonic() + _MOST_S
    while time.monotonic() < latest and run.poll() is None:
        made = [len(step_ends(one)) for one in place.glob("runs/[!.]*-*")]
        if made and made[0] >= step:
            return made[0], _processor_s(run.pid)
        time.sleep(_LOOK_S)
    raise TimeoutError(f"step {step} was not made: {(place / 'said').read_text()}")


def _processor_s(view: int) -> dict[str, float]:
    found = {"ranks": 0.0, "beside": 0.0}
    first = psutil.Process(view)
    for process in [first, *first.children(recursive=True)]:
        with contextlib.suppress(psutil.Error):
            times, environment = process.cpu_times(), process.environ()
            found["ranks" if contract.ENV_RANK in environment else "beside"] += times.user + times.system
    return found


def _keep(line: Line) -> None:
    with KEPT.open("a") as file:
        file.write(json.dumps(line) + "\n")


def _kept(recipe: str) -> list[Line]:
    lines = KEPT.read_text().splitlines() if KEPT.exists() else []
    return [line for line in map(json.loads, lines) if line["recipe"] == recipe]


if __name__ == "__main__":
    sys.exit(main())
