"""What audits cost, and which faults they catch: `PYTHONPATH=. python benchmarks/audits.py [--faults 200] [--ranks 20] [--pairs 3]`.

Faults: in each trial one rank of a small training flips a bit of a gradient, or of what a layer hands on, in a random step; all ranks train in this
process, through the code of a run, with one of the recipes that can be audited, 2 to 4 workers and an audit in every `K`th step. To be met: the share
that is caught agrees with 1/K (95 % interval); a fault in an audited step is always caught and no other one is; with three workers or more, the host
that is named is always the right one.

Ranks: the same, on real ranks and with `ttlaunch chaos`, with three workers of `data_parallel`.

Cost: pairs of trainings with and without audits take turns, over gRPC, whose waits take no processor time. The processor time of all ranks and the
time of a step are those between the first steps and the last. To be met at 2 and 4 workers: audits take at most 1.25/K of a step.
Workers that share cores wait for each other, so the processor time decides, and the time is shown beside it.

The same command goes on after the last trial, see `kept_trials.py`.
"""

import argparse
import json
import math
import random
import shutil
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

from kept_trials import Row, add_options, exit_status, make_missing, open_folder
from trainings import step_ends, train

from tests.lab.recorded_runs import TINY, record_run
from tests.lab.test_audits import LAYOUTS, failure_of, status_of
from ttlaunch import contract
from ttlaunch.records.audits import FLIPPED
from ttlaunch.runtime import simulate
from ttlaunch.runtime.context import RankContext
from ttlaunch.runtime.flipped_bit import FlippedPassContext

RECIPES = Path(__file__).parents[1] / "recipes"
INTERVAL, STEPS = 4, 8
"""K, and the steps of a trial: a multiple of K, so that 1/K of them are audited."""
COST_INTERVAL, COST_STEPS, SKIPPED = 5, 120, 20
LIMIT = 1.25
WORKERS = (2, 4)
STEP_ENDS = "            loop.end_step(step, loss=loss"
TELLS_TIME = "            ctx.note(f'processor {step} {time.process_time()}')\n"


def main() -> int:
    """Make the trials that are missing, and compare; status 1 if a limit is missed, 3 if trials are missing."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--faults", type=int, default=200)
    parser.add_argument("--ranks", type=int, default=20)
    parser.add_argument("--pairs", type=int, default=3)
    add_options(parser, folder=".benchmarks/audits")
    given = parser.parse_args()
    folder = open_folder(given)
    wanted = dict(_trials(given, folder))
    chosen = make_missing(wanted, folder, for_s=given.for_s)
    met = [_faults_are_met(chosen, kind) for kind in ("fault", "rank") if any(one["kind"] == kind for one in chosen)]
    met += [_cost_is_met(chosen, workers) for workers in WORKERS if any(one.get("pair") == workers for one in chosen)]
    return exit_status(are_met=all(met), made=len(chosen), wanted=len(wanted))


def _trials(given: argparse.Namespace, folder: Path) -> Iterator[tuple[str, Callable[[], Row]]]:
    """Name every trial, and say how it is made."""
    yield from ((f"fault {case}", partial(_fault, case, folder)) for case in range(given.faults))
    yield from ((f"rank {case}", partial(_fault_of_ranks, case, folder)) for case in range(given.ranks))
    for pair in range(given.pairs):
        for workers in WORKERS:
            for audited in (True, False) if pair % 2 else (False, True):
                name = f"cost {workers} {pair} {'with' if audited else 'without'}"
                yield name, partial(_training, folder, workers=workers, audited=audited)


def _fault(case: int, folder: Path) -> Row:
    """Train in this process, with a fault in one rank and a host for each."""
    draw = random.Random(f"audits {case}")  # noqa: S311 - no secret
    layout, workers = list(LAYOUTS)[case % len(LAYOUTS)], draw.choice((2, 3, 3, 4))
    rank, step, of_gradient = draw.randrange(workers), draw.randrange(1, STEPS + 1), draw.random() < 0.5

    def make(**known: Any) -> RankContext:
        if known["rank"] != rank:
            return RankContext(**known)
        return FlippedPassContext(step - 1, of_gradient=of_gradient, draw=draw, **known)

    recipe, changed = LAYOUTS[layout]
    keys = {
        "training_config.audit_interval": INTERVAL,
        "training_config.steps": STEPS,
        "training_config.verify_interval": None,
        "checkpoint_config.interval": None,
        "multihost_config.num_workers": workers,
    }
    run = record_run(
        recipe, folder / "runs", changed=changed | keys, during=patch.object(simulate, "RankContext", make)
    )
    failure = failure_of(run)[1]
    flipped = (run / contract.progress_file(rank)).read_text(encoding="utf-8").count(FLIPPED)
    row = {
        "kind": "fault",
        "layout": layout,
        "workers": workers,
        "rank": rank,
        "step": step,
        "flipped": flipped,
        "status": status_of(run),
        "caught": None if failure is None else failure.step,
        "named": None if failure is None else failure.host,
        "right": failure is not None and failure.host == f"box-{rank}",
    }
    shutil.rmtree(run)
    return row


def _fault_of_ranks(case: int, folder: Path) -> Row:
    """Have `ttlaunch chaos` flip a bit in one of three real ranks."""
    draw = random.Random(f"audits of ranks {case}")  # noqa: S311 - no secret
    rank, step, verb = draw.randrange(3), draw.randrange(2, STEPS + 1), draw.choice(("gradient", "activation"))
    keys = {
        **TINY,
        "multihost_config.num_workers": 3,
        "training_config.steps": STEPS,
        "checkpoint_config.interval": None,
    }
    words = [word for key, value in keys.items() for word in ("--set", f"{key}={json.dumps(value)}")]
    plan = f"flip-{verb} rank={rank} at step={step - 1}"
    command = [sys.executable, "-m", "ttlaunch", "chaos", "data_parallel", *words, "--audit", f"1/{INTERVAL}"]
    answer = subprocess.run(
        [*command, "--plan", plan, "--format", "json"], cwd=folder, capture_output=True, text=True, check=False
    )
    try:
        report = json.loads(answer.stdout)["report"]
    except ValueError:
        raise SystemExit(answer.stdout + answer.stderr) from None
    failure = report["failure"] or {}
    is_audited = failure.get("class") == "audited"
    return {
        "kind": "rank",
        "workers": 3,
        "rank": rank,
        "step": step,
        "flipped": 1,
        "status": report["status"],
        "caught": failure["step"] if is_audited else None,
        "named": failure.get("rank"),
        "right": is_audited and failure["rank"] == rank,
    }


def _faults_are_met(known: list[Row], kind: str) -> bool:
    rows = [one for one in known if one["kind"] == kind]
    due = [one for one in rows if one["step"] % INTERVAL == 0]
    caught = [one for one in rows if one["caught"] is not None]
    decided = [one for one in caught if one["workers"] > 2]
    right, both = sum(one["right"] for one in decided), [one for one in caught if one["workers"] == 2]
    low, high = _wilson(len(caught), len(rows))
    wrong = [one["trial"] for one in rows if (one["caught"] == one["step"]) != (one in due) or one["flipped"] != 1]
    # Real ranks flip after a first step only, so fewer of their steps may be audited or not.
    steps = range(1 if kind == "fault" else 2, STEPS + 1)
    promised = sum(step % INTERVAL == 0 for step in steps) / len(steps)
    met = low <= promised <= high and not wrong and right == len(decided)
    where = "in this process" if kind == "fault" else "on real ranks"
    print(f"{len(rows)} faults {where}, K = {INTERVAL}: {len(caught)} caught, {len(caught) / len(rows):.1%}", end="")
    print(f" (95 % interval {low:.1%} to {high:.1%}, promised {promised:.1%}); {len(due)} were in an audited step")
    print(f"  with three workers or more the right host is named in {right} of {len(decided)}", end="")
    print(f"; with two, the one that contradicts itself in {sum(one['right'] for one in both)} of {len(both)}", end="")
    print(f": {'met' if met else f'MISSED {wrong}'}")
    return met


def _wilson(hits: int, count: int) -> tuple[float, float]:
    """Return the 95 % interval of a share.

    Source: E. B. Wilson, "Probable Inference, the Law of Succession, and Statistical Inference", JASA 22(158), 1927.
    """
    z, share = 1.96, hits / count
    middle = (share + z * z / (2 * count)) / (1 + z * z / count)
    half = z / (1 + z * z / count) * math.sqrt(share * (1 - share) / count + z * z / (4 * count * count))
    return middle - half, middle + half


def _training(folder: Path, *, workers: int, audited: bool) -> Row:
    """Train on real ranks, and measure a step: the time that it takes, and the processor time of all ranks."""
    recipe = folder / "recipes/audited"
    if not recipe.is_dir():
        shutil.copytree(RECIPES / "data_parallel", recipe, ignore=shutil.ignore_patterns("__pycache__"))
        text = (recipe / "trainer.py").read_text(encoding="utf-8")
        if text.count(STEP_ENDS) != 1:
            raise SystemExit(f"recipes/data_parallel/trainer.py has not one line `{STEP_ENDS.strip()}`")
        text = text.replace(STEP_ENDS, TELLS_TIME + STEP_ENDS).replace(
            "import torch\n", "import time\n\nimport torch\n", 1
        )
        (recipe / "trainer.py").write_text(text, encoding="utf-8")
    settings = {
        "training_config.steps": COST_STEPS,
        "training_config.validation_interval": COST_STEPS,
        "checkpoint_config.interval": "null",
        "multihost_config.num_workers": workers,
        "multihost_config.socket_type": "grpc",
        "training_config.audit_interval": COST_INTERVAL if audited else "null",
    }
    run = train(str(recipe), settings, folder=folder)
    ends, steps = step_ends(run), COST_STEPS - SKIPPED
    used_s = sum(_processor_s(run, rank, COST_STEPS) - _processor_s(run, rank, SKIPPED) for rank in range(workers))
    row = {"kind": "cost", "pair": workers, "audited": audited, "step_s": (ends[-1] - ends[SKIPPED - 1]) / steps}
    shutil.rmtree(run)
    return row | {"processor_s": used_s / steps}


def _processor_s(run: Path, rank: int, step: int) -> float:
    """The processor time of a rank up to the end of a step, as it has noted."""
    records = map(contract.read_record, (run / contract.progress_file(rank)).read_bytes().splitlines())
    notes = [one["text"].split() for one in records if one and one["kind"] == contract.KIND_NOTE]
    return next(float(words[2]) for words in notes if words[:2] == ["processor", str(step)])


def _cost_is_met(known: list[Row], workers: int) -> bool:
    rows = [one for one in known if one.get("pair") == workers]
    if {one["audited"] for one in rows} != {True, False}:
        return True  # nothing to compare yet
    costs = {}
    for what in ("processor_s", "step_s"):
        plain, audited = (statistics.median(one[what] for one in rows if one["audited"] is on) for on in (False, True))
        costs[what] = plain, audited / plain - 1
    limit = LIMIT / COST_INTERVAL
    (used_s, used), (_, longer) = costs["processor_s"], costs["step_s"]
    met = used <= limit
    print(
        f"{workers} workers, {len(rows)} trainings, audits in every {COST_INTERVAL}th step: processor time {used:+.1%}",
        end="",
    )
    print(f" of a step of {used_s * 1e3:.0f} ms (limit {limit:.1%}: {'met' if met else 'MISSED'}); time {longer:+.1%}")
    return met


if __name__ == "__main__":
    sys.exit(main())
