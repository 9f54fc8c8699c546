"""`python -m ttlaunch.runtime.virtual`: run all ranks of a plan on a virtual clock, and say how each spends the time of a step.

Every role's own function runs in this process, with tensors that have sizes and no values (`hollow.py`). Operations cost the time
that their work takes (`work.py`), messages that of the ports that they share (`comm/fair_network.py`). Ranks that do the same run once
(`comm/virtual_world.py`). No real time is measured, so the result is the same on any machine, except where a recipe reads a real clock
itself. It is in `virtual.json` in the folder that the environment names.
"""

import gc
import json
import math
import os
import sys
from collections.abc import Hashable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from ttlaunch import contract
from ttlaunch.no_cycles import collection_paused
from ttlaunch.rank_exceptions.describe import describe
from ttlaunch.records.parser import BadRecord, read
from ttlaunch.records.virtual import VIRTUAL_FILE, VIRTUAL_ORDER_FILE, VirtualFault, VirtualOrder
from ttlaunch.runtime.alike import (
    combed_classes,
    divided,
    edges_of,
    exchange_within_roles,
    first_classes,
    periods,
    place_of_witness,
    places_within_role,
    spans,
    with_witnesses,
)
from ttlaunch.runtime.comm.class_world import ClassWorld
from ttlaunch.runtime.comm.in_process import InProcessWorld
from ttlaunch.runtime.comm.programs import Program
from ttlaunch.runtime.comm.protocol import Communicator
from ttlaunch.runtime.comm.routes import Routes
from ttlaunch.runtime.comm.turns import Script
from ttlaunch.runtime.comm.virtual_clock import Link, VirtualClock
from ttlaunch.runtime.comm.virtual_fates import Deed, FateOrder, Fates, RankEndedError
from ttlaunch.runtime.comm.virtual_world import Classes, NotAlikeError, VirtualOutcome, VirtualWorld
from ttlaunch.runtime.context import build_data
from ttlaunch.runtime.data.batches import micro_batches
from ttlaunch.runtime.entry import read_checked_corpus, read_config
from ttlaunch.runtime.hollow import Found, Hollow, has_values
from ttlaunch.runtime.parallel.gradients.bucket_tuning import UNMEASURED
from ttlaunch.runtime.same_code import ranks_of_code, repeat_virtually, write_program
from ttlaunch.runtime.share_code import programs_of_shares, run_programs
from ttlaunch.runtime.telemetry.records import print_error
from ttlaunch.runtime.telemetry.traffic_counter import TrafficCounter
from ttlaunch.runtime.timed_steps import Jitter, TimedSteps
from ttlaunch.runtime.training.passes import differentiate
from ttlaunch.runtime.training.rank_model import build_model
from ttlaunch.runtime.virtual_context import virtual_context
from ttlaunch.runtime.virtual_process import prepare_process
from ttlaunch.runtime.work import Work, spending
from ttlaunch.runtime.world import Rank, World, read_world
from ttlaunch.spec.recipe.blocks import aligned_subtrees, contiguous_blocks
from ttlaunch.spec.recipe.corpus import Corpus
from ttlaunch.spec.recipe.importing import import_recipe_module
from ttlaunch.spec.recipe.sections import ConfigFile, TrainingFile

_MOST_CLASSES = 64
"""More classes of equal ranks than these are not tried: each of them costs as much as a rank or two."""

_MOST_RANKS = 256
"""How many ranks may run that are not alike, at 0.2 to 1 s each."""


def main() -> None:
    """Run the plan that the environment names; status 1 if a rank fails."""
    prepare_process()
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
    cfg = _unmeasured(read_config(recipe, _shortened(world.config, order.steps)))
    corpus = read_checked_corpus(recipe, world)
    trainer = import_recipe_module(world.recipe_folder, world.trainer)
    flops_per_s = order.gflops * 1e9
    needs_flops = order.compute_s or order.times_micro_batch
    flops = _flops_of_micro_batch(cfg, world, corpus) if needs_flops else 0
    if order.compute_s:
        flops_per_s = flops / order.compute_s
    slowness = {Rank(int(rank)): factor for rank, factor in order.slow.items()}
    slow_links = {Rank(int(rank)): factor for rank, factor in order.slow_links.items()}
    link = Link(order.latency_s, order.bytes_per_s, slow_links, _routes(order, world))
    faults = [_fate_order(index, one) for index, one in enumerate(order.faults)]
    jitter = Jitter(order.jitter, order.seed)
    known = {} if known is None else known
    compression = getattr(cfg, "compression_config", None)
    reads_bytes = recipe.is_asynchronous or compression is None or compression.kind != "none"
    play = _Play(
        world, cfg, corpus, trainer, link, slowness, flops_per_s, faults, jitter, order.warm_up, reads_bytes, known
    )
    if not order.fold:
        found = play.run(_singles(world)) | {"not_folded": None}
    elif jitter.part or order.network is not None:  # each rank has its own times
        found = _run_same_code(play, None)
    else:
        found = _run_folded(play)
    return found | {"flops_per_s": flops_per_s, "micro_batch_s": flops / flops_per_s}


def _differences(play: "_Play", *, period: int = 1) -> list[Hashable]:
    """Return for each rank what may make it another one than those with its role: its speed, its port, its faults, its share of the data."""
    hits: dict[Rank, list[int]] = {}
    for fault in play.faults:
        for rank in fault.ranks:
            hits.setdefault(rank, []).append(fault.index)
    blocks = _blocks(play.cfg, play.corpus, play.world.roles, period=period)
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
    return Routes(network.places, {(one.source, one.dest): one.links for one in network.routes}, speeds, latencies)


def _run_folded(play: "_Play") -> dict[str, Any]:
    """Run one rank of each class of the coarsest division found whose ranks are alike; without one, each rank gets its own times.

    Raises:
        ValueError: There are too many ranks for that.
    """
    roles = play.world.roles
    first = first_classes(roles, _differences(play))
    try:
        return play.run(first, stops_at_shares=not play.faults) | {"not_folded": None}
    except NotAlikeError as error:
        failed = error
    if play.has_shares and not play.faults:
        with suppress(NotAlikeError), collection_paused():
            return play.run_shares() | {"not_folded": None}
        try:  # now to where messages show who is not alike
            return play.run(first) | {"not_folded": None}
        except NotAlikeError as error:
            failed = error
    reason, finer = failed.reason, divided(first, failed.classes, play.seen)
    rows = periods(roles, play.seen)
    if not exchange_within_roles(roles, play.seen):
        # Ranks that only a server serves differ more and more, the more often they are divided.
        return _run_same_code(play, reason)
    combed = [combed_classes(roles, _differences(play, period=period), period) for period in rows]
    return _run_coarsest(play, [finer, *combed]) or _run_same_code(play, reason)


def _run_coarsest(play: "_Play", divisions: Iterable[Classes]) -> dict[str, Any] | None:
    """Try divisions, those with few classes first, and divide further those whose ranks are not alike.

    Returns:
        The result; None if there are no divisions left, or if they would cost more than twice as much as to run every rank, where that is possible.
    """
    most = min(_MOST_CLASSES, play.world.size - 1)
    left, tried = dict.fromkeys(divisions, 0), set[Classes]()
    affordable = 2 * play.world.size if play.world.size <= _MOST_RANKS else math.inf
    while left := {one: found for one, found in left.items() if len(one) <= most and one not in tried}:
        # Of equally coarse ones the newest: what was seen last has divided it, and others fail for that only after a whole step.
        classes = min(left, key=lambda one: (len(one), -left[one], one))
        tried.add(classes)
        affordable -= len(with_witnesses(classes))
        if affordable < 0:
            break
        gc.collect()  # models that the division before has left, in circles of errors and the threads that raised them
        try:
            return play.run(classes) | {"not_folded": None}
        except NotAlikeError as error:
            finer = divided(classes, error.classes, play.seen)
        if len(finer) > len(classes):
            left[finer] = len(tried)
    return None


def _run_same_code(play: "_Play", reason: str | None) -> dict[str, Any]:
    """Let every rank have its own times, and run the code of ranks that do the same three times in all.

    Args:
        play: The simulation.
        reason: Why ranks are not alike; None if nobody has looked.

    Raises:
        ValueError: There are too many ranks for each to run its own code, and that is not the same.
    """
    groups, why = ranks_of_code(play.world.roles, _blocks(play.cfg, play.corpus, play.world.roles)), reason
    if groups:
        try:
            return play.run(_singles(play.world), groups) | {"not_folded": reason}
        except NotAlikeError as error:
            why = error.reason if reason is None else f"{reason}, and {error.reason}"
    if play.world.size > _MOST_RANKS:
        raise ValueError(f"no more than {_MOST_RANKS} ranks can run their own code: {why or 'no two are alike'}")
    gc.collect()  # as above
    return play.run(_singles(play.world)) | {"not_folded": reason}


def _singles(world: World) -> Classes:
    return tuple((Rank(rank),) for rank in range(world.size))


def _fate_order(index: int, fault: VirtualFault) -> FateOrder:
    ranks = frozenset(Rank(rank) for span in fault.ranks for rank in range(span.first, span.last + 1))
    return FateOrder(index, Deed(fault.deed), ranks, step=fault.step, at_s=fault.at_s)


@dataclass
class _Play:
    """All that the simulation of a plan needs.

    Attributes:
        reads_bytes: Whether ranks read what is in bytes: a codec's packed numbers, or what an asynchronous gradient says of itself.
        seen: What representatives have seen of other ranks when they were last run; see `VirtualOutcome`.
        has_shares: Whether some of them had shares of unequal size.
    """

    world: World
    cfg: ConfigFile
    corpus: Corpus | None
    trainer: ModuleType
    link: Link
    slowness: Mapping[Rank, float]
    flops_per_s: float
    faults: Sequence[FateOrder]
    jitter: Jitter
    warm_up: int
    reads_bytes: bool
    known: dict[Hashable, Found] = field(default_factory=dict)
    seen: Mapping[tuple[Rank, Rank], int] = field(default_factory=dict)
    has_shares: bool = False

    def run(
        self, classes: Classes, same_code: Sequence[Sequence[Rank]] = (), *, stops_at_shares: bool = False
    ) -> dict[str, Any]:
        """Run the first rank of each class, and the last one as a witness, which must get the same times.

        Args:
            classes: The classes.
            same_code: Groups of ranks, each a class of its own, that repeat one program.
            stops_at_shares: Whether to refuse at once if a rank notes shares of unequal size.

        Raises:
            NotAlikeError: Ranks of a class, or of a group, do not do the same.
        """
        parts = with_witnesses(classes)
        first = [ranks[0] for ranks in parts]
        clock = VirtualClock(first, slowness=self.slowness)
        fates = Fates(self.faults, first, clock)
        virtual = VirtualWorld(self.world.roles, clock, self.link, classes=parts, carries=self._carries, fates=fates)
        self.seen = virtual.seen
        programs = self._programs(same_code)
        known = {"clock": clock, "virtual": virtual, "fates": fates, "stops_at_shares": stops_at_shares}
        timed = {rank: self._timed_steps(rank, **known) for rank in first}
        scripts = {
            rank: _repeating(program, rank, virtual=virtual, timed=timed[rank]) for rank, program in programs.items()
        }
        lives = {rank: partial(self._live, rank, virtual, timed[rank]) for rank in first if rank not in scripts}
        try:
            outcome = virtual.run(lives, scripts)
        finally:
            for program in programs.values():
                program.close()
            self.has_shares = any(one.traffic.has_shares for one in timed.values())
        if same_code or len(first) < self.world.size:
            _refuse_mistakes(outcome)
        times = _checked(classes, timed)
        return {
            "classes": times,
            "edges": edges_of(outcome, classes),
            "repeats": spans(sorted(programs)) if programs else [],
            "findings": [finding.message for finding in outcome.findings],
            "made": [{**vars(one), "ranks": _members(one.ranks, parts)} for one in fates.made],
            "errors": _errors(outcome, clock, folder=self.world.recipe_folder),
        }

    def run_shares(self) -> dict[str, Any]:
        """Run one rank of each class of ranks with equal shares, by what the code of a few of them does.

        Raises:
            NotAlikeError: The code of the others does not follow from that.
        """
        ranks = (Rank(rank) for rank in range(self.world.size))
        blocks = _blocks(self.cfg, self.corpus, self.world.roles)
        classes, programs = programs_of_shares(
            self.world.roles,
            blocks,
            {rank: (self.slowness.get(rank), self.link.slowness.get(rank)) for rank in ranks},
            live=self._run_role,
            carries=self._carries,
            flops_per_s=self.flops_per_s,
            known=self.known,
        )
        first = [members[0] for members in classes]
        clock = VirtualClock(first, slowness=self.slowness)
        fates, virtual = Fates((), first, clock), ClassWorld(classes, clock, self.link)
        timed = {rank: self._timed_steps(rank, clock=clock, virtual=virtual, fates=fates) for rank in first}
        run_programs(programs, virtual, timed)
        times = [{"members": spans(members), **timed[members[0]].as_json()} for members in classes]
        nothing: dict[str, Any] = {name: [] for name in ("repeats", "findings", "made", "errors")}
        return {"classes": times, "edges": programs.edges(), **nothing}

    def _carries(self, tensor: Tensor) -> bool:
        """Whether the values of a message matter; most bytes are numbers that have none, and may be as many as those of a gradient."""
        return has_values(tensor) and (tensor.dtype is not torch.uint8 or self.reads_bytes)

    def _programs(self, same_code: Sequence[Sequence[Rank]]) -> dict[Rank, Program]:
        """Return the program of each rank that repeats one."""
        found: dict[Rank, Program] = {}
        for ranks in same_code:
            program = write_program(
                ranks, self._run_role, carries=self._carries, flops_per_s=self.flops_per_s, known=self.known
            )
            found |= dict.fromkeys(ranks, program)
        return found

    def _timed_steps(self, rank: Rank, **known: Any) -> TimedSteps:
        training = self.cfg.training_config if isinstance(self.cfg, TrainingFile) else None
        facts = {} if training is None else {"micro_batches": training.micro_batches}
        return TimedSteps(rank, self.warm_up, facts=facts, jitter=self.jitter, **known)

    def _live(self, rank: Rank, virtual: VirtualWorld, timed: TimedSteps) -> None:
        """Run the role of a rank to its end, or until the rank is ended."""
        try:
            spend = spending(partial(virtual.compute, rank), flops_per_s=self.flops_per_s)
            with Hollow(known=self.known, spend=spend):
                self._run_role(rank, virtual.communicator(rank), timed.traffic)
            timed.end = "done"
        except RankEndedError:
            timed.end = "ended"

    def _run_role(self, rank: Rank, communicator: Communicator, traffic: TrafficCounter) -> None:
        ctx = virtual_context(self.world, rank, communicator, cfg=self.cfg, corpus=self.corpus, traffic=traffic)
        getattr(self.trainer, self.world.roles[rank])(self.cfg, ctx)


def _repeating(program: Program, rank: Rank, *, virtual: VirtualWorld, timed: TimedSteps) -> Script:
    """Repeat a program to its end, or until the rank is ended."""
    try:
        yield from repeat_virtually(program, rank, virtual=virtual, timed=timed)
        timed.end = "done"
    except RankEndedError:
        timed.end = "ended"


def _checked(classes: Classes, timed: Mapping[Rank, TimedSteps]) -> list[dict[str, Any]]:
    """Return the times of each class.

    Raises:
        NotAlikeError: The first and the last rank of a class have different ones.
    """
    found = [timed[members[0]].as_json() for members in classes]
    for place, members in enumerate(classes):
        if len(members) > 1 and timed[members[-1]].as_json() != found[place]:
            reason = f"rank {members[0]} and rank {members[-1]} take different times"
            raise NotAlikeError(reason, place_of_witness(classes, members))
    return [{"members": spans(members), **one} for members, one in zip(classes, found, strict=True)]


def _refuse_mistakes(outcome: VirtualOutcome) -> None:
    """Refuse what looks like a mistake of the recipe where not every rank has run its own code: ranks may not be alike.

    Raises:
        NotAlikeError: There is one.
    """
    for error in outcome.errors.values():
        raise NotAlikeError(f"{type(error).__name__}: {error}")
    for finding in outcome.findings:
        raise NotAlikeError(finding.message)


def _members(ranks: Sequence[Rank], classes: Classes) -> list[dict[str, int]]:
    """Return all ranks for which some representatives stand."""
    found = sorted(rank for members in classes if members[0] in ranks for rank in members)
    return spans(found) if found else []


def _errors(outcome: VirtualOutcome, clock: VirtualClock, *, folder: Path) -> list[dict[str, Any]]:
    """Describe the exceptions of ranks."""
    names = ("type", "module", "message", "file", "line")
    described = {rank: describe(error, folder=str(folder)) for rank, error in outcome.errors.items()}
    return [
        {"rank": rank, "at_s": clock.now_s(rank), **{name: found[name] for name in names}}
        for rank, found in described.items()
    ]


def _blocks(cfg: ConfigFile, corpus: Corpus | None, roles: Sequence[str], *, period: int = 1) -> list[Hashable]:
    """Return for each rank what decides how much it computes: its blocks of the micro-batches of a step and of a validation.

    Args:
        cfg: The configuration.
        corpus: The data.
        roles: The role of each rank.
        period: So many ranks of a role, one after the other, have one share.
    """
    if not isinstance(cfg, TrainingFile) or corpus is None:
        return [None] * len(roles)
    data, found = build_data(corpus, cfg), dict[str, list[Hashable]]()
    last = data.validation_micro_batches - 1
    for role in dict.fromkeys(roles):
        count = max(1, roles.count(role) // period)
        steps = contiguous_blocks(cfg.training_config.micro_batches, count)
        looks = contiguous_blocks(data.validation_micro_batches, count)
        found[role] = [
            (tuple(map(len, aligned_subtrees(one))), len(look), last in look)
            for one, look in zip(steps, looks, strict=True)
        ]
    places = places_within_role(roles)
    return [found[role][min(place // period, len(found[role]) - 1)] for role, place in zip(roles, places, strict=True)]


def _shortened(config: Mapping[str, Any], steps: int) -> dict[str, Any]:
    """Return the configuration with few steps."""
    shortened = {name: dict(section) if isinstance(section, dict) else section for name, section in config.items()}
    if "training_config" in shortened:
        shortened["training_config"]["steps"] = steps
    scheduler = shortened.get("scheduler_config", {})
    for key in ("warmup_steps", "hold_steps"):
        if key in scheduler:
            scheduler[key] = 0
    return shortened


def _unmeasured(cfg: ConfigFile) -> ConfigFile:
    """Return the configuration with the buckets with which a run begins, where that would then measure which size is quickest."""
    hosts = getattr(cfg, "multihost_config", None)
    if hosts is None or hosts.bucket_megabytes is not None:
        return cfg
    return cfg.model_copy(update={"multihost_config": hosts.model_copy(update={"bucket_megabytes": UNMEASURED})})


def _flops_of_micro_batch(cfg: ConfigFile, world: World, corpus: Corpus | None) -> int:
    """Count the operations of a forward and a backward pass of one micro-batch through the whole model."""
    if not isinstance(cfg, TrainingFile):
        raise ValueError("`--compute-ms` was given, and this recipe has no model with micro-batches")  # noqa: TRY004
    alone = InProcessWorld(world.roles, carries=has_values)
    ctx, work = virtual_context(world, Rank(0), alone.communicator(Rank(0)), cfg=cfg, corpus=corpus), Work()
    with Hollow():
        model = build_model(cfg, ctx)
        _, x_BT, y_BT = next(iter(micro_batches(cfg, ctx, 1)))
    with Hollow(spend=work.add):
        differentiate(model, x_BT, y_BT, masks=model.masks(1, 0))
    return work.flops


if __name__ == "__main__":
    main()
