"""`python -m ttlaunch.runtime.predict`: find what each rank of a plan will hold and send, before it is started.

Every role's own function runs in this process, with tensors that have sizes and no values (`ttlaunch/runtime/hollow.py`), until each
rank has done two steps. `StepMemory` counts them as it does in a run that is profiled, so a prediction misses only what
a run does outside of tensors. The result is `prediction.json` in the folder that the environment names.
"""

import faulthandler
import json
import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext, suppress
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ttlaunch import contract
from ttlaunch.records.prediction import MAPPED_FROM, PREDICTION_FILE
from ttlaunch.runtime.checkpoint.checkpoints import HasParameters, HasState
from ttlaunch.runtime.checkpoint.digests import factor_bytes
from ttlaunch.runtime.comm.in_process import InProcessWorld
from ttlaunch.runtime.context import RankContext, build_data
from ttlaunch.runtime.early_stop import make_early_stop
from ttlaunch.runtime.entry import read_checked_corpus, read_config
from ttlaunch.runtime.hollow import Hollow, has_values
from ttlaunch.runtime.resident import peak_resident_bytes
from ttlaunch.runtime.telemetry.memory import StepMemory, TensorOwners
from ttlaunch.runtime.telemetry.records import ProgressWriter, print_error
from ttlaunch.runtime.telemetry.traffic_counter import FORWARD, TrafficCounter
from ttlaunch.runtime.workspaces import Products, grown_by, kept_by, resident, take_small_step
from ttlaunch.runtime.world import Rank, World, read_world
from ttlaunch.spec.recipe.corpus import Corpus
from ttlaunch.spec.recipe.importing import import_recipe_module
from ttlaunch.spec.recipe.sections import ConfigFile, TrainingFile

_STEP = 2
"""The step whose memory counts: in the first one, ranks still make what they use in all later ones."""


def main() -> None:
    """Predict for the plan that the environment names; status 1 if a rank fails, or its messages do not match."""
    faulthandler.enable()
    torch.set_num_threads(1)
    run_dir = Path(os.environ[contract.ENV_RUN_DIR])
    try:
        found = predict(read_world(Path(os.environ[contract.ENV_PLAN])), run_dir)
    except Exception as error:  # noqa: BLE001  the launcher shows why there is no prediction
        print_error(error)
        sys.exit(contract.STATUS_RANK_FAILED)
    (run_dir / PREDICTION_FILE).write_text(json.dumps(found) + "\n", encoding="utf-8")


def predict(world: World, run_dir: Path) -> dict[str, Any]:
    """Run every role without values until each rank has done its second step.

    Raises:
        RuntimeError: The messages of the ranks do not match; besides, whatever a role raises.

    Cost: about the time that torch takes to dispatch the operations of two steps and a validation of all ranks together.
    """
    recipe = import_recipe_module(world.recipe_folder, "recipe").RECIPE
    cfg = read_config(recipe, _shortened(world.config) if recipe.is_asynchronous else world.config)
    corpus = read_checked_corpus(recipe, world)
    trainer = import_recipe_module(world.recipe_folder, world.trainer)
    beside = {**_import_libraries(world), **_prepare_data(corpus, cfg)}
    in_process = InProcessWorld(world.roles, carries=has_values)
    unfinished = {Rank(rank) for rank in range(world.size)}
    facts = {"micro_batches": cfg.training_config.micro_batches} if isinstance(cfg, TrainingFile) else {}
    measured = {rank: _Measured(rank, unfinished, end=in_process.end, facts=facts) for rank in unfinished}

    def live(rank: Rank) -> None:
        ctx = _NotedContext(
            world=world,
            rank=rank,
            communicator=in_process.communicator(rank),
            records=ProgressWriter(run_dir, rank),
            device=torch.device("cpu"),
            corpus=corpus,
            early_stop=make_early_stop(cfg, world.start),
            traffic=measured[rank].traffic,
        )
        with Hollow(spend=measured[rank].products.note):
            getattr(trainer, world.roles[rank])(cfg, ctx)

    outcome = in_process.run({rank: partial(live, rank) for rank in measured})
    for error in outcome.errors.values():
        raise error
    if outcome.findings:
        raise RuntimeError(outcome.findings[0].message)
    kept = cache(partial(kept_by, threads=cfg.device_config.threads_per_rank))  # most ranks have the same products
    ranks = [{**one.as_json(), "workspace_bytes": kept(tuple(one.products))} for _, one in sorted(measured.items())]
    return {**beside, "ranks": ranks}


def _shortened(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the configuration with few steps: where ranks wait for none, a fast one would do all of its own first."""
    training = config["training_config"]
    return {**config, "training_config": {**training, "steps": min(training["steps"], _STEP + 1)}}


def _import_libraries(world: World) -> dict[str, int]:
    """Import what ranks exchange messages with, and do a step; return the bytes that this process has in memory then, and what the step has added."""
    if world.uses_mpi:
        import mpi4py  # noqa: PLC0415

        mpi4py.rc.initialize = False  # a program that mpirun has not started may wait for it for ever
        from mpi4py import MPI  # noqa: F401, PLC0415
    else:
        from ttlaunch.runtime.comm.grpc import communicator  # noqa: F401, PLC0415
    found = resident()
    step = grown_by(take_small_step)
    return {
        "library_bytes": found.together,
        "library_shared_bytes": found.shared,
        "computing_bytes": step.together,
        "computing_shared_bytes": step.shared,
    }


def _prepare_data(corpus: Corpus | None, cfg: ConfigFile) -> dict[str, int]:
    """Prepare the training data once, as each rank does; return what it takes then, and at most until then."""
    if corpus is None or not isinstance(cfg, TrainingFile):
        return {}
    before = resident().together
    with suppress(OSError):  # without it, the peak may be an earlier one
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    data = build_data(corpus, cfg)
    after, most = resident().together, peak_resident_bytes()
    del data
    return {"data_bytes": max(0, after - before), "data_most_bytes": max(0, most - before)}


class _NotedContext(RankContext):
    """A rank that notes what it keeps beside the tensors of a step: a copy of what it saves, and factors for comparisons."""

    saves = compares = False

    def compare(self, step: int, held: Callable[[], Iterable[tuple[str, Tensor]]]) -> None:
        """Compare nothing, but note what a comparison keeps."""
        if not self.compares:
            self.compares = True
            self.traffic.note(factor_bytes=factor_bytes(tensor for _, tensor in held()))
        super().compare(step, held)

    def checkpoint(self, step: int, model: HasParameters, optimizer: HasState, *, owners: Sequence[Rank] = ()) -> bool:
        """Save nothing."""
        if self.rank in (owners or self.ranks(self.role)) and not self.saves:
            self.saves = True
            self.traffic.note(saves=1)
        return super().checkpoint(step, model, optimizer, owners=owners)


class _CountedPasses(TrafficCounter):
    """Also counts the forward passes of a step: a rank has as many gradients to add up."""

    passes = 0

    def enter(self, phase: str, *, micro_batch: int | None = None) -> None:
        self.passes += phase == FORWARD
        super().enter(phase, micro_batch=micro_batch)


class _Measured:
    """What one rank holds in its second step; stands where a rank that is profiled has its profiler."""

    is_active = False

    def __init__(self, rank: Rank, unfinished: set[Rank], *, end: Callable[[], Any], facts: Mapping[str, int]) -> None:
        """Measure a rank of which some facts are known, and `end` all when none is unfinished."""
        self.owners, self.products = TensorOwners(), Products()
        self.traffic = _CountedPasses(profile=self)
        self.traffic.note(**facts)
        self._rank, self._unfinished, self._end = rank, unfinished, end
        self._memory: StepMemory | None = None
        self._passes = 0
        self._counting = ExitStack()

    def begin_step(self, step: int) -> None:
        if step <= _STEP:  # a training may have one step only
            self._memory = self._counting.enter_context(StepMemory(self.owners, mapped_from=MAPPED_FROM))

    def end_step(self, step: int) -> dict[str, int]:
        self._counting.close()
        self._passes, self.traffic.passes = self.traffic.passes, 0
        if step == _STEP:
            self._unfinished.discard(self._rank)
            if not self._unfinished:
                self._end()
        return {}

    def mark(self, _name: str) -> AbstractContextManager[Any]:
        return nullcontext()

    def close(self) -> None:
        """Leave nothing behind."""

    def as_json(self) -> dict[str, Any]:
        facts, one = {**self.traffic.facts, "passes": self._passes}, self._memory
        if one is None:
            return {"facts": facts, "held": {}, "memory": {}}
        pieces = {"extent": one.extent, "left": one.left, "small": one.small}
        return {"facts": facts, "held": one.held, "memory": {**one.peaks, **pieces}}


if __name__ == "__main__":
    main()
