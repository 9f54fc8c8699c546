"""What comparing replicas costs, and which flipped bits it finds: `PYTHONPATH=. python benchmarks/replicas.py [--trials 100]`.

First, for each shipped recipe as it stands in its `train.yaml`: the processor time of a rank for the digests of its tensors, alone,
the median of 31, and that of the busiest rank for a step; all ranks of the recipe train in this process, one after the other. A step of a
run takes at least as long as its busiest rank computes. To be met: with the default of `verify_interval`, digests take at most 1 %
of a step.

Then trials, each with a random recipe, tensor, rank, value and bit. The bit is flipped after the update of the step that is compared.
To be met: every flip is found, in the right rank if three ranks or more hold the tensor.

Last, flips in any of the nine steps before the comparison of step 10. An update may undo a flip, such as that of the lowest bit of
a moment. To be met: a flip is found unless all copies of all tensors have equal bits again.
"""

import argparse
import random
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterable
from pathlib import Path

import torch
from torch import Tensor

from tests.runtime.flips import KINDS, Trainings, comparing, flipping
from ttlaunch import contract
from ttlaunch.app.library import plan
from ttlaunch.running.runs.run_folder import write_plan
from ttlaunch.runtime.checkpoint.digests import ReplicaDigests, as_words
from ttlaunch.runtime.context import RankContext
from ttlaunch.runtime.simulate import simulate
from ttlaunch.runtime.world import Rank, read_world
from ttlaunch.spec.recipe.sections import TrainingConfig

RECIPES = [
    "data_parallel",
    "classic_dp",
    "zero",
    "sync_ps",
    "hierarchical_parallel",
    "pipeline_parallel",
    "tensor_parallel",
    "local_sgd",
    "diloco",
]
STEPS, REPEATS = 12, 31
LIMIT = 0.01
INTERVAL = TrainingConfig().verify_interval


Held = Callable[[], Iterable[tuple[str, Tensor]]]


def main() -> int:
    """Print both tables; status 1 if a limit is missed."""
    parser = argparse.ArgumentParser(description="The cost of comparing replicas, and the flips that it finds.")
    parser.add_argument("--trials", type=int, default=100)
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="ttl-replicas-") as scratch:
        folder = Path(scratch)
        print(f"{'recipe':22} {'tensors':>8} {'digests ms':>11} {'step ms':>8} {'of a step':>10} {'limit':>6}")
        met = [_cost_is_met(recipe, folder / recipe) for recipe in RECIPES]
        met.append(_flips_are_found(options.trials, folder / "same", last=2))
        met.append(_flips_are_found(options.trials, folder / "later", last=10))
    return 0 if all(met) else 1


def _cost_is_met(recipe: str, folder: Path) -> bool:
    planned = plan(recipe, set={"training_config.steps": STEPS, "scheduler_config.warmup_steps": 1})
    write_plan(planned, folder, run_id="benchmark")
    began, steps_ms, count = dict[Rank, float](), dict[Rank, float](), 0
    digests_ms = defaultdict[Rank, list[float]](list)

    def note(ctx: RankContext, step: int, held: Held) -> None:
        """The thread of a rank computes nothing but its steps; the last comparison also measures the digests."""
        nonlocal count
        if step == 1:
            began[ctx.rank] = time.thread_time()
        if step == STEPS:
            steps_ms.setdefault(ctx.rank, 1e3 * (time.thread_time() - began[ctx.rank]) / (STEPS - 1))
        if step == STEPS and (tensors := list(held())):
            digests = ReplicaDigests(None, write=lambda **_: None)
            for repeat in range(REPEATS):
                before = time.thread_time()
                digests.report(repeat, held())
                digests_ms[ctx.rank].append(1e3 * (time.thread_time() - before))
            count = max(count, len(tensors))

    with comparing(note):
        outcome = simulate(read_world(folder / contract.PLAN_FILE), folder, saves=False)
    assert (outcome.errors, outcome.findings) == ({}, [])
    step_ms = max(steps_ms.values())
    digest_ms = max((statistics.median(one) for one in digests_ms.values()), default=0.0)
    share = digest_ms / INTERVAL / step_ms
    verdict = "met" if share <= LIMIT else "MISSED"
    print(f"{recipe:22} {count:8} {digest_ms:11.2f} {step_ms:8.1f} {share:10.2%} {LIMIT:6.0%} {verdict}", flush=True)
    return share <= LIMIT


def _flips_are_found(trials: int, folder: Path, *, last: int) -> bool:
    """Flip bits in steps up to `last`, the only one that is compared after the first; print what was found."""
    draw = random.Random(last)  # noqa: S311 - the same flips in every run
    found = blamed = undone = ties = 0
    known: dict[str, tuple[Trainings, dict[str, list[int]]]] = {}
    for _ in range(trials):
        kind = draw.choice(list(KINDS))
        if kind not in known:
            (folder / kind).mkdir(parents=True)
            trainings = Trainings(kind, folder / kind, steps=last, verify_interval=last, validation_interval=last)
            known[kind] = trainings, trainings.shared_tensors(last)
        trainings, holders = known[kind]
        name = draw.choice(sorted(holders))
        rank = draw.choice(holders[name])
        step = last if last == 2 else draw.randrange(1, last)
        after: dict[int, dict[str, Tensor]] = {}

        def keep(ctx: RankContext, at: int, held: Held, after: dict[int, dict[str, Tensor]] = after) -> None:
            if at == last:
                after.setdefault(ctx.rank, {}).update((name, one.detach().clone()) for name, one in held())

        with comparing(keep), flipping(rank, name, draw, step=step):
            watch = trainings.run()
        if watch.difference is None:
            undone += _are_equal(after)
            continue
        found += 1
        ties += not watch.difference.odd
        blamed += watch.difference.odd == (rank,)
    when = "in the compared step" if last == 2 else f"1 to {last - 1} steps before"
    met = found + undone == trials and blamed + ties == found
    print(
        f"{trials} flips {when}: {found} found, {blamed} in the right rank, {ties} of two copies (no rank is blamed), "
        f"{undone} undone by an update: {'met' if met else 'MISSED'}"
    )
    return met


def _are_equal(tables: dict[int, dict[str, Tensor]]) -> bool:
    """Whether all copies of each tensor have equal bits."""
    first: dict[str, Tensor] = {}
    pairs = [(one, first.setdefault(name, one)) for table in tables.values() for name, one in table.items()]
    return all(torch.equal(as_words(one), as_words(other)) for one, other in pairs)


if __name__ == "__main__":
    sys.exit(main())
