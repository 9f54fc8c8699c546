"""`python -m ttlaunch.runtime.virtual`: run all ranks of a plan on a virtual clock, and say how each spends the time of a step.

Every role's own function runs in this process, with tensors that have sizes and no values (`hollow.py`). Operations cost the time
that their work takes (`work.py`), messages that of the ports that they share (`comm/fair_network.py`). Ranks that do the same run once
(`comm/virtual_world.py`). No real time is measured, so the result is the same on any machine, except where a recipe reads a real clock
itself. It is in `virtual.json` in the folder that the environment names.
"""

import faulthandler
import json
import os
import random
import sys
from collections import Counter
from collections.abc import Hashable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from ttlaunch import contract
from ttlaunch.rank_exceptions.describe import describe
from ttlaunch.records.parser import BadRecord, read
from ttlaunch.records.virtual import VIRTUAL_FILE, VIRTUAL_ORDER_FILE, VirtualFault, VirtualOrder
from ttlaunch.runtime.alike import divided, first_classes, places_by_role, spans, with_witnesses
from ttlaunch.runtime.comm.in_process import InProcessWorld
from ttlaunch.runtime.comm.protocol import Communicator
from ttlaunch.runtime.comm.routes import Routes
from ttlaunch.runtime.comm.virtual_clock import Link, Spent, VirtualClock
from ttlaunch.runtime.comm.virtual_fates import Deed, FateOrder, Fates, RankEndedError
from ttlaunch.runtime.comm.virtual_world import Classes, NotAlikeError, VirtualOutcome, VirtualWorld
from ttlaunch.runtime.context import RankContext, build_data
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
from ttlaunch.spec.recipe.blocks import aligned_subtrees, contiguous_blocks
from ttlaunch.spec.recipe.corpus import Corpus
from ttlaunch.spec.recipe.importing import import_recipe_module
from ttlaunch.spec.recipe.sections import ConfigFile, TrainingFile

_ONE_BUCKET = 1e5
"""Megabytes that hold the gradient of any model here."""

_MOST_CLASSES = 64
"""More classes of equal ranks than these are not tried: each of them costs as much as a rank or two."""

_MOST_RANKS = 256
"""How many ranks may run that are not alike, at 0.2 to 1 s each."""


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


def run_virtually(world: World, order: VirtualOrder, *, known: dict[Hashable, Found] | None = None) -> dict[str, Any]:
    """Run every role to the end of its last step.

    Args:
        world: The plan.
        order: What is simulated, and under which conditions.
        known: What operations return, found in simulations before this one in the same process; None: nothing yet.

    Raises:
        ValueError: The time of a micro-batch was given for a recipe that trains no model; or ranks are too many for each to run, and
            they are not alike.

    Cost: about 30 µs for each operation of torch and each message, of all ranks together that run: one or two of each class.
    """
    recipe = import_recipe_module(world.recipe_folder, "recipe").RECIPE
    cfg = read_config(recipe, _shortened(world.config, order.steps))
    corpus = read_checked_corpus(recipe, world)
    trainer = import_recipe_module(world.recipe_folder, world.trainer)
    flops_per_s = order.gflops * 1e9
    if order.compute_s:
        flops_per_s = _flops_of_micro_batch(cfg, world, corpus) / order.compute_s
    slowness = {Rank(int(rank)): factor for rank, factor in order.slow.items()}
    slow_links = {Rank(int(rank)): factor for rank, factor in order.slow_links.items()}
    link = Link(order.latency_s, order.bytes_per_s, slow_links, _routes(order, world))
    faults = [_fate_order(index, one) for index, one in enumerate(order.faults)]
    jitter = _Jitter(order.jitter, order.seed)
    known = {} if known is None else known
    play = _Play(world, cfg, corpus, trainer, link, slowness, flops_per_s, faults, jitter, order.warm_up, known)
    if jitter.part and world.size > _MOST_RANKS:
        raise ValueError(f"no more than {_MOST_RANKS} ranks can be simulated with jitter, which makes each one differ")
    folds = order.fold and order.network is None and not jitter.part
    ranks = [Rank(rank) for rank in range(world.size)]
    classes = first_classes(world.roles, _differences(play)) if folds else tuple((rank,) for rank in ranks)
    return _run_folded(play, classes) | {"flops_per_s": flops_per_s}


def _differences(play: "_Play") -> list[Hashable]:
    """Return for each rank what may make it another one than those with its role: its speed, its port, its faults, its share of the data."""
    hits: dict[Rank, list[int]] = {}
    for fault in play.faults:
        for rank in fault.ranks:
            hits.setdefault(rank, []).append(fault.index)
    blocks = _blocks(play.cfg, play.corpus, play.world.roles)
    ranks = [Rank(rank) for rank in range(play.world.size)]
    return [
        (play.slowness.get(rank), play.link.slowness.get(rank), tuple(hits.get(rank, ())), blocks[rank])
        for rank in ranks
    ]


def _routes(order: VirtualOrder, world: World) -> Routes | None:
    """Return the links that the ranks share.

    Raises:
        ValueError: They belong to other ranks, or a route names links that are not there.
    """
    network = order.network
    if network is None:
        return None
    speeds, latencies = dict(enumerate(network.bytes_per_s)), dict(enumerate(network.latencies_s))
    named = {link for one in network.routes for link in one.links}
    if len(network.places) != world.size or not named <= speeds.keys() & latencies.keys():
        raise ValueError("the links between ranks are those of another plan")
    if world.size > _MOST_RANKS:
        raise ValueError(f"no more than {_MOST_RANKS} ranks can be simulated that share links or ports")
    return Routes(network.places, {(one.source, one.dest): one.links for one in network.routes}, speeds, latencies)


def _run_folded(play: "_Play", classes: Classes) -> dict[str, Any]:
    """Run one rank of each class, and divide classes until all of their ranks are alike, or let every rank run.

    Raises:
        ValueError: There are too many ranks for each to run.
    """
    reason, size = None, play.world.size
    while len(classes) < size:
        try:
            return play.run(classes) | {"not_folded": None}
        except NotAlikeError as error:
            reason = error.reason
            finer = divided(classes, error.classes, play.seen)
        if not len(classes) < len(finer) <= _MOST_CLASSES:
            break
        classes = finer
    if reason is not None and size > _MOST_RANKS:
        raise ValueError(f"no more than {_MOST_RANKS} ranks can be simulated that are not alike: {reason}")
    return play.run(tuple((Rank(rank),) for rank in range(size))) | {"not_folded": reason}


def _fate_order(index: int, fault: VirtualFault) -> FateOrder:
    ranks = frozenset(Rank(rank) for span in fault.ranks for rank in range(span.first, span.last + 1))
    return FateOrder(index, Deed(fault.deed), ranks, step=fault.step, at_s=fault.at_s)


@dataclass(frozen=True)
class _Jitter:
    """By how much the speed of a rank differs from step to step.

    Attributes:
        part: The most by which a step's computing differs from the usual time, as a part of it; 0: none.
    """

    part: float
    seed: int

    def factor(self, rank: Rank, step: int) -> float:
        """Return how many times as long a rank computes in a step, drawn evenly around 1."""
        drawn = random.Random(f"jitter {self.seed} {rank} {step}").random()  # noqa: S311 - nothing secret
        return 1.0 + self.part * (2.0 * drawn - 1.0)


@dataclass
class _Play:
    """All that the simulation of a plan needs.

    Attributes:
        seen: What representatives have seen of other ranks when they were last run; see `VirtualOutcome`.
    """

    world: World
    cfg: ConfigFile
    corpus: Corpus | None
    trainer: ModuleType
    link: Link
    slowness: Mapping[Rank, float]
    flops_per_s: float
    faults: Sequence[FateOrder]
    jitter: _Jitter
    warm_up: int
    known: dict[Hashable, Found] = field(default_factory=dict)
    seen: Mapping[tuple[Rank, Rank], int] = field(default_factory=dict)

    def run(self, classes: Classes) -> dict[str, Any]:
        """Run the first rank of each class, and the last one as a witness, which must get the same times.

        Raises:
            NotAlikeError: Ranks of a class do not do the same.
        """
        divided_ones = with_witnesses(classes)
        first = [ranks[0] for ranks in divided_ones]
        clock = VirtualClock(first, slowness=self.slowness)
        fates = Fates(self.faults, first, clock)
        virtual = VirtualWorld(
            self.world.roles, clock, self.link, classes=divided_ones, carries=has_values, fates=fates
        )
        self.seen = virtual.seen
        training = self.cfg.training_config if isinstance(self.cfg, TrainingFile) else None
        facts = {} if training is None else {"micro_batches": training.micro_batches}
        timed = {
            rank: _TimedSteps(
                rank, self.warm_up, clock=clock, virtual=virtual, facts=facts, fates=fates, jitter=self.jitter
            )
            for rank in first
        }
        outcome = virtual.run({rank: partial(self._live, rank, virtual, timed[rank]) for rank in first})
        for error in outcome.errors.values():
            if len(first) < self.world.size:
                raise NotAlikeError(f"{type(error).__name__}: {error}")
        ranks = [timed[ranks[0]].as_json() for ranks in classes]
        for place, members in enumerate(classes):
            if len(members) > 1 and timed[members[-1]].as_json() != ranks[place]:
                raise NotAlikeError(f"rank {members[0]} and rank {members[-1]} take different times", place)
        return {
            "classes": [{"members": spans(members), **one} for members, one in zip(classes, ranks, strict=True)],
            "edges": _edges(outcome, classes),
            "findings": [finding.message for finding in outcome.findings],
            "made": [{**vars(one), "ranks": _members(one.ranks, divided_ones)} for one in fates.made],
            "errors": [
                _described(rank, error, at_s=clock.now_s(rank), folder=self.world.recipe_folder)
                for rank, error in outcome.errors.items()
            ],
        }

    def _live(self, rank: Rank, virtual: VirtualWorld, timed: "_TimedSteps") -> None:
        """Run the role of a rank to its end, or until the rank is ended."""
        communicator = virtual.communicator(rank)
        ctx = _context(self.world, rank, communicator, cfg=self.cfg, corpus=self.corpus, traffic=timed.traffic)
        spend = spending(partial(virtual.compute, rank), flops_per_s=self.flops_per_s)
        try:
            with Hollow(known=self.known, spend=spend):
                getattr(self.trainer, self.world.roles[rank])(self.cfg, ctx)
            timed.end = "done"
        except RankEndedError:
            timed.end = "ended"


def _members(ranks: Sequence[Rank], classes: Classes) -> list[dict[str, int]]:
    """Return all ranks for which some representatives stand."""
    found = sorted(rank for members in classes if members[0] in ranks for rank in members)
    return spans(found) if found else []


def _described(rank: Rank, error: BaseException, *, at_s: float, folder: Path) -> dict[str, Any]:
    found = describe(error, folder=str(folder))
    return {"rank": rank, "at_s": at_s, **{name: found[name] for name in ("type", "module", "message", "file", "line")}}


def _edges(outcome: VirtualOutcome, classes: Classes) -> list[dict[str, int]]:
    """Count, for the first rank of each class, to how many ranks of each class it has sent the same."""
    place_of = {rank: place for place, ranks in enumerate(classes) for rank in ranks}
    first = {ranks[0]: place for place, ranks in enumerate(classes)}
    rows: Counter[tuple[int, int, int, int, int]] = Counter()
    for (source, dest), count in outcome.messages.items():
        if source in first:
            sent = count, outcome.message_bytes[source, dest], outcome.step_bytes[source, dest]
            rows[first[source], place_of[dest], *sent] += 1
    names = ("source", "dest", "messages", "bytes", "step_bytes")
    return [{**dict(zip(names, row, strict=True)), "peers": peers} for row, peers in sorted(rows.items())]


def _blocks(cfg: ConfigFile, corpus: Corpus | None, roles: Sequence[str]) -> list[Hashable]:
    """Return for each rank what decides how much it computes: its blocks of the micro-batches of a step and of a validation."""
    if not isinstance(cfg, TrainingFile) or corpus is None:
        return [None] * len(roles)
    data, found = build_data(corpus, cfg), list[Hashable]()
    last = data.validation_micro_batches - 1
    for role in dict.fromkeys(roles):
        count = roles.count(role)
        steps = contiguous_blocks(cfg.training_config.micro_batches, count)
        looks = contiguous_blocks(data.validation_micro_batches, count)
        found += [
            (tuple(map(len, aligned_subtrees(one))), len(look), last in look)
            for one, look in zip(steps, looks, strict=True)
        ]
    return [found[place] for place in places_by_role(roles)]


def _context(
    world: World,
    rank: Rank,
    communicator: Communicator,
    *,
    cfg: ConfigFile,
    corpus: Corpus | None,
    traffic: TrafficCounter | None = None,
) -> RankContext:
    return _VirtualContext(
        world=world,
        rank=rank,
        communicator=communicator,
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
    ctx, work = _context(world, Rank(0), alone.communicator(Rank(0)), cfg=cfg, corpus=corpus), Work()
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

    def __init__(
        self,
        rank: Rank,
        warm_up: int,
        *,
        clock: VirtualClock,
        virtual: VirtualWorld,
        facts: Mapping[str, int],
        fates: Fates,
        jitter: _Jitter,
    ) -> None:
        self._warm_up = warm_up
        self.owners = TensorOwners()
        self.end = "waits"
        self.traffic = TrafficCounter(profile=self)
        self.traffic.note(**facts)
        self._rank, self._clock, self._world = rank, clock, virtual
        self._fates, self._jitter = fates, jitter
        self._before = Spent()
        self._each_s: list[float] = []
        self._in_steps = Spent()

    def begin_step(self, step: int) -> None:
        if self._jitter.part:
            self._clock.set_jitter(self._rank, self._jitter.factor(self._rank, step))
        self._before = self._clock.spent(self._rank)
        self._world.enter_step(self._rank, is_step=True)

    def end_step(self, step: int) -> dict[str, int]:
        if step > self._warm_up:
            spent = self._clock.spent(self._rank).since(self._before)
            known = self._in_steps
            self._in_steps = Spent(
                known.computing_s + spent.computing_s,
                known.exposed_s + spent.exposed_s,
                known.waiting_s + spent.waiting_s,
            )
            self._each_s.append(spent.all_s)
        self._world.enter_step(self._rank, is_step=False)
        self._fates.report(self._rank, step)
        return {}

    def mark(self, _name: str) -> AbstractContextManager[Any]:
        return nullcontext()

    def close(self) -> None:
        """Leave nothing behind."""

    def as_json(self) -> dict[str, Any]:
        spent = self._in_steps if self._each_s else self._clock.spent(self._rank)
        return {
            "steps": len(self._each_s),
            "all_s": spent.all_s,
            **vars(spent),
            "each_s": self._each_s,
            "facts": self.traffic.facts,
            "end": "stopped" if self._rank in self._fates.halted else self.end,
            "last_step": self._fates.last_step(self._rank),
            "last_s": self._clock.now_s(self._rank),
        }


if __name__ == "__main__":
    main()
