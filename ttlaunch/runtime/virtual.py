"""`python -m ttlaunch.runtime.virtual`: run all ranks of a plan on a virtual clock, and say how each spends the time of a step.

Every role's own function runs in this process, with tensors that have sizes and no values (`hollow.py`). Operations cost the time
that their work takes (`work.py`), messages that of the clock's ports (`comm/virtual_clock.py`). No real time is measured, so the result is the
same on any machine, except where a recipe reads a real clock itself. It is in `virtual.json` in the folder that the environment names.
"""

import faulthandler
import json
import os
import sys
from collections.abc import Hashable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ttlaunch import contract
from ttlaunch.records.parser import BadRecord, read
from ttlaunch.records.virtual import VIRTUAL_FILE, VIRTUAL_ORDER_FILE, VirtualOrder
from ttlaunch.runtime.comm.in_process import InProcessWorld
from ttlaunch.runtime.comm.virtual_clock import Link, Spent, VirtualClock
from ttlaunch.runtime.context import RankContext
from ttlaunch.runtime.data.batches import micro_batches
from ttlaunch.runtime.early_stop import make_early_stop
from ttlaunch.runtime.entry import read_checked_corpus, read_config
from ttlaunch.runtime.hollow import Found, Hollow, has_values
from ttlaunch.runtime.telemetry.memory import TensorOwners
from ttlaunch.runtime.telemetry.records import ProgressWriter, print_error
from ttlaunch.runtime.telemetry.traffic_counter import TrafficCounter
from ttlaunch.runtime.training.passes import differentiate
from ttlaunch.runtime.training.rank_model import build_model
from ttlaunch.runtime.work import Work, spending
from ttlaunch.runtime.world import Rank, World, read_world
from ttlaunch.spec.recipe.corpus import Corpus
from ttlaunch.spec.recipe.importing import import_recipe_module
from ttlaunch.spec.recipe.sections import ConfigFile, TrainingFile

_ONE_BUCKET = 1e5
"""Megabytes that hold the gradient of any model here."""


def main() -> None:
    """Run the plan that the environment names; status 1 if a rank fails."""
    faulthandler.enable()
    torch.set_num_threads(1)
    run_dir = Path(os.environ[contract.ENV_RUN_DIR])
    order = read(VirtualOrder, (run_dir / VIRTUAL_ORDER_FILE).read_bytes())
    if isinstance(order, BadRecord):
        raise SystemExit(order.reason)
    try:
        found = run_virtually(read_world(Path(os.environ[contract.ENV_PLAN])), order)
    except Exception as error:  # noqa: BLE001  the launcher shows why there is no result
        print_error(error)
        sys.exit(contract.STATUS_RANK_FAILED)
    (run_dir / VIRTUAL_FILE).write_text(json.dumps(found) + "\n", encoding="utf-8")


def run_virtually(world: World, order: VirtualOrder) -> dict[str, Any]:
    """Run every role to the end of its last step.

    Raises:
        ValueError: The time of a micro-batch was given for a recipe that trains no model.
        BaseException: Whatever a role raises.

    Cost: about 30 µs for each operation of torch and each message, of all ranks together.
    """
    recipe = import_recipe_module(world.recipe_folder, "recipe").RECIPE
    cfg = read_config(recipe, _shortened(world.config, order.steps))
    corpus = read_checked_corpus(recipe, world)
    trainer = import_recipe_module(world.recipe_folder, world.trainer)
    flops_per_s = order.gflops * 1e9
    if order.compute_s:
        flops_per_s = _flops_of_micro_batch(cfg, world, corpus) / order.compute_s
    slowness = {Rank(int(rank)): factor for rank, factor in order.slow.items()}
    clock = VirtualClock(world.size, Link(order.latency_s, order.bytes_per_s), slowness=slowness)
    in_process = InProcessWorld(world.roles, carries=has_values, clock=clock)
    facts = {"micro_batches": cfg.training_config.micro_batches} if isinstance(cfg, TrainingFile) else {}
    timed = {rank: _TimedSteps(rank, clock, facts) for rank in map(Rank, range(world.size))}

    known: dict[Hashable, Found] = {}

    def live(rank: Rank) -> None:
        ctx = _context(world, rank, in_process, cfg=cfg, corpus=corpus, traffic=timed[rank].traffic)
        with Hollow(known=known, spend=spending(partial(clock.compute, rank), flops_per_s=flops_per_s)):
            getattr(trainer, world.roles[rank])(cfg, ctx)

    outcome = in_process.run({rank: partial(live, rank) for rank in timed})
    for error in outcome.errors.values():
        raise error
    edges = [
        {
            "source": source,
            "dest": dest,
            "messages": count,
            "bytes": outcome.message_bytes[source, dest],
            "step_bytes": clock.step_bytes[source, dest],
        }
        for (source, dest), count in sorted(outcome.messages.items())
    ]
    findings = [finding.message for finding in outcome.findings]
    ranks = [one.as_json() for _, one in sorted(timed.items())]
    return {"ranks": ranks, "edges": edges, "findings": findings, "flops_per_s": flops_per_s}


def _context(
    world: World,
    rank: Rank,
    in_process: InProcessWorld,
    *,
    cfg: ConfigFile,
    corpus: Corpus | None,
    traffic: TrafficCounter | None = None,
) -> RankContext:
    return _VirtualContext(
        world=world,
        rank=rank,
        communicator=in_process.communicator(rank),
        records=_NoRecords(),
        device=torch.device("cpu"),
        corpus=corpus,
        early_stop=make_early_stop(cfg, None),
        traffic=traffic,
    )


def _shortened(config: Mapping[str, Any], steps: int) -> dict[str, Any]:
    """Return the configuration with few steps, and with one bucket where a run would measure which size is quickest."""
    shortened = {name: dict(section) if isinstance(section, dict) else section for name, section in config.items()}
    if "training_config" in shortened:
        shortened["training_config"]["steps"] = steps
    scheduler = shortened.get("scheduler_config", {})
    for key in ("warmup_steps", "hold_steps"):
        if key in scheduler:
            scheduler[key] = 0
    hosts = shortened.get("multihost_config", {})
    if "bucket_megabytes" in hosts and hosts["bucket_megabytes"] is None:
        hosts["bucket_megabytes"] = _ONE_BUCKET
    return shortened


def _flops_of_micro_batch(cfg: ConfigFile, world: World, corpus: Corpus | None) -> int:
    """Count the operations of a forward and a backward pass of one micro-batch through the whole model."""
    if not isinstance(cfg, TrainingFile):
        raise ValueError("`--compute-ms` was given, and this recipe has no model with micro-batches")  # noqa: TRY004
    alone = InProcessWorld(world.roles, carries=has_values)
    ctx, work = _context(world, Rank(0), alone, cfg=cfg, corpus=corpus), Work()
    with Hollow():
        model = build_model(cfg, ctx)
        _, x_BT, y_BT = next(iter(micro_batches(cfg, ctx, 1)))
    with Hollow(spend=work.add):
        differentiate(model, x_BT, y_BT, masks=model.masks(1, 0))
    return work.flops


class _VirtualContext(RankContext):
    """A rank without values: there is nothing to compare or to keep."""

    def report_parameters(self, named_parameters: Iterable[tuple[str, Tensor]]) -> None:
        """Report nothing."""


class _NoRecords(ProgressWriter):
    """Writes nothing: nobody follows ranks that end within seconds, and thousands of files would be many."""

    def __init__(self) -> None:
        """Open no file."""

    def write(self, kind: str, **values: object) -> None:
        """Write nothing."""

    def close(self) -> None:
        """Close nothing."""


class _TimedSteps:
    """How one rank spends its steps; stands where a rank that is profiled has its profiler."""

    is_active = False

    def __init__(self, rank: Rank, clock: VirtualClock, facts: Mapping[str, int]) -> None:
        self.owners = TensorOwners()
        self.traffic = TrafficCounter(profile=self)
        self.traffic.note(**facts)
        self._rank, self._clock = rank, clock
        self._before = Spent()
        self._each_s: list[float] = []
        self._in_steps = Spent()

    def begin_step(self, _step: int) -> None:
        self._before = self._clock.spent(self._rank)
        self._clock.enter_step(self._rank, is_step=True)

    def end_step(self, _step: int) -> dict[str, int]:
        spent = self._clock.spent(self._rank).since(self._before)
        known = self._in_steps
        self._in_steps = Spent(
            known.computing_s + spent.computing_s,
            known.exposed_s + spent.exposed_s,
            known.waiting_s + spent.waiting_s,
        )
        self._each_s.append(spent.all_s)
        self._clock.enter_step(self._rank, is_step=False)
        return {}

    def mark(self, _name: str) -> AbstractContextManager[Any]:
        return nullcontext()

    def close(self) -> None:
        """Leave nothing behind."""

    def as_json(self) -> dict[str, Any]:
        spent = self._in_steps if self._each_s else self._clock.spent(self._rank)
        return {
            "rank": self._rank,
            "steps": len(self._each_s),
            "all_s": spent.all_s,
            **vars(spent),
            "each_s": self._each_s,
            "facts": self.traffic.facts,
        }


if __name__ == "__main__":
    main()
