"""Run all ranks of a recipe on a virtual clock, in one process: what a step would take, and where its time would go."""

import contextlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ttlaunch import contract
from ttlaunch.app.predict import NotPredicted, run_hollow
from ttlaunch.diagnostics import LaunchError, usage_error
from ttlaunch.diagnostics.launch_error import usage_mistake
from ttlaunch.engines.process import end_process, start_process
from ttlaunch.lab.virtual_bytes import bytes_of_pairs, count_differing
from ttlaunch.lab.virtual_faults import Patience, VirtualVerdict, check_virtual_faults, judge_virtually, order_faults
from ttlaunch.planning.faults import Fault, render_faults
from ttlaunch.planning.launch_plan import LaunchPlan
from ttlaunch.planning.routes import Network, network_of
from ttlaunch.records.parser import BadRecord, read
from ttlaunch.records.virtual import VIRTUAL_ERROR_FILE, VIRTUAL_FILE, VIRTUAL_ORDER_FILE, VirtualClass, VirtualEnd
from ttlaunch.running.metrics.traffic import expected_traffic
from ttlaunch.running.runs.files import read_file
from ttlaunch.running.runs.run_folder import write_plan
from ttlaunch.system_reason import system_reason

if TYPE_CHECKING:
    from ttlaunch.spec.recipe.traffic import Traffic

GFLOPS = 50.0
"""How many 10^9 floating-point operations a rank computes in a second, unless the time of a micro-batch is given: a few cores of a CPU."""

_MODULE, _MODULE_OF_MANY = "ttlaunch.runtime.virtual", "ttlaunch.runtime.virtual_plans"
_LOOK_S = 0.2

_MOST_COMPARED = 1024
"""Up to so many ranks, a formula's bytes of each pair of them are made and compared."""


@dataclass(frozen=True)
class Conditions:
    """What the virtual machines and their network are like.

    Attributes:
        steps: How many steps are simulated.
        warm_up: How many of them, the first ones, do not count: what a step sends may arrive in the next one.
        compute_ms: The time of the forward and backward pass of one micro-batch through the whole model; None: by its
            operations, `GFLOPS` in a second.
        link_us: The time that the first byte of a message travels.
        link_gbps: What each rank can send, and receive, in a second, in 10^9 bits.
        slow: Ranks that take longer to compute, and how many times as long.
        slow_link: Ranks whose port is slower, and how many times.
        fold: Whether ranks that do the same run once.
        over_links: Whether messages cross the links of the mesh graph; None: if the recipe's sockets do.
        jitter, seed: In each step each rank computes faster or slower by up to this part, drawn with the seed.
        faults: What happens to ranks and hosts.
        patience: How long the run waits before it counts a host as lost, or itself as hanging.
        times_micro_batch: Whether to find out how long a micro-batch takes.
    """

    steps: int = 3
    warm_up: int = 0
    compute_ms: float | None = None
    link_us: float = 50.0
    link_gbps: float = 10.0
    slow: Mapping[int, float] = field(default_factory=dict)
    slow_link: Mapping[int, float] = field(default_factory=dict)
    fold: bool = True
    over_links: bool | None = None
    jitter: float = 0.0
    seed: int = 0
    faults: tuple[Fault, ...] = ()
    patience: Patience = field(default_factory=Patience)
    times_micro_batch: bool = False

    def as_json(self) -> dict[str, Any]:
        by_text = {
            name: {str(rank): one for rank, one in getattr(self, name).items()} for name in ("slow", "slow_link")
        }
        own = {"faults": render_faults(self.faults), "gflops": GFLOPS if self.compute_ms is None else None}
        known = {name: one for name, one in vars(self).items() if name != "times_micro_batch"}  # it changes no result
        return {**known, **by_text, **own, "patience": vars(self.patience)}

    def order(self, plan: LaunchPlan) -> bytes:
        """Return them as the process of a plan's ranks reads them."""
        content = {
            "steps": self.steps,
            "warm_up": self.warm_up,
            "gflops": GFLOPS,
            "compute_s": (self.compute_ms or 0.0) / 1e3,
            "latency_s": self.link_us / 1e6,
            "bytes_per_s": self.link_gbps * 1e9 / 8,
            "slow": {str(rank): factor for rank, factor in self.slow.items()},
            "slow_links": {str(rank): factor for rank, factor in self.slow_link.items()},
            "fold": self.fold,
            "network": self._network(network_of(plan, over_links=self.over_links)),
            "jitter": self.jitter,
            "seed": self.seed,
            "faults": order_faults(self.faults, plan),
            "times_micro_batch": self.times_micro_batch,
        }
        return json.dumps(content).encode()

    def _network(self, network: Network | None) -> dict[str, Any] | None:
        """Return the speed and the latency of each directed link; the slowest of the ranks at one of its ends slows it down."""
        if network is None:
            return None
        slowed = dict.fromkeys(range(2 * len(network.capacities)), 1.0)
        for rank, factor in self.slow_link.items():
            place = network.places[rank]
            ends = [route[0] for (a, _), route in network.routes.items() if a == place]
            ends += [route[-1] for (_, b), route in network.routes.items() if b == place]
            slowed |= {link: max(slowed[link], factor) for link in ends}
        directed = [(link, factor) for link, factor in slowed.items()]
        return {
            "places": network.places,
            "bytes_per_s": [self.link_gbps * 1e9 / 8 * network.capacities[k // 2] / factor for k, factor in directed],
            "latencies_s": [self.link_us / 1e6 * network.hops[k // 2] for k, _ in directed],
            "routes": [{"source": a, "dest": b, "links": route} for (a, b), route in network.routes.items()],
        }


@dataclass(frozen=True)
class StepTime:
    """The mean step of each of some ranks that do the same, in milliseconds, and each of its steps; of ranks that count no steps, all that they did.

    Attributes:
        ranks: The ranks, as the first and last one of each row of them.
    """

    ranks: tuple[tuple[int, int], ...]
    role: str
    steps: int
    step_ms: float
    computing_ms: float
    exposed_ms: float
    waiting_ms: float
    each_ms: tuple[float, ...]

    @property
    def members(self) -> Iterator[int]:
        return (rank for first, last in self.ranks for rank in range(first, last + 1))

    def as_json(self) -> dict[str, Any]:
        return {**vars(self), "ranks": [list(one) for one in self.ranks], "each_ms": list(self.each_ms)}


@dataclass(frozen=True)
class VirtualRun:
    """What a run would take.

    Attributes:
        groups: The times of all ranks, those that do the same together.
        step_ms: The mean step of the ranks whose steps take longest; None if no rank counts steps.
        edges: What each rank of a group sends to how many ranks (`peers`) of another one; `source` and `dest` are places in `groups`.
        pairs, step_bytes: How many pairs of ranks send, and their bytes within the steps.
        differing: How many pairs sent other bytes than the recipe's formula says; 0 without a formula.
        no_formula: Why there is no formula, as a clause.
        not_folded: Why every rank has times of its own although equal ones were to run once, as a clause; None if that is not so.
        verdict: How the run would end; None if no fault was ordered.
        repeats: How many ranks have times of their own and repeat what the code of a few of them does.
        formula_step_bytes: What all ranks together send in each step by the formula, without what they send in some steps only; None
            without a formula.
        micro_batch_s: The time of a micro-batch on a rank that is not slow; 0 if it was not asked for.
        facts: The numbers of rank 0 for the formula.
    """

    plan: LaunchPlan
    conditions: Conditions
    groups: tuple[StepTime, ...]
    step_ms: float | None
    edges: tuple[Mapping[str, int], ...]
    pairs: int
    step_bytes: int
    differing: int
    no_formula: str | None
    not_folded: str | None
    verdict: VirtualVerdict | None = None
    repeats: int = 0
    formula_step_bytes: int | None = None
    micro_batch_s: float = 0.0
    facts: Mapping[str, int] = field(default_factory=dict)

    @property
    def slowest(self) -> StepTime | None:
        """Return the ranks whose steps take longest, of equal ones those that compute most; None if no rank counts steps."""
        steps = (one for one in self.groups if one.steps)
        return max(steps, key=lambda one: (one.step_ms, one.computing_ms), default=None)

    def as_json(self) -> dict[str, Any]:
        return {
            "conditions": self.conditions.as_json(),
            "step_ms": self.step_ms,
            "groups": [one.as_json() for one in self.groups],
            "edges": list(self.edges),
            "pairs": self.pairs,
            "step_bytes": self.step_bytes,
            "differing_pairs": self.differing,
            "no_formula": self.no_formula,
            "not_folded": self.not_folded,
            "repeats": self.repeats,
            "verdict": None if self.verdict is None else self.verdict.as_json(),
        }


def check_conditions(conditions: Conditions, *, world_size: int) -> None:
    """Refuse slow ranks that do not exist.

    Raises:
        LaunchError: There is one.
    """
    named = [("slow", *one) for one in conditions.slow.items()] + [
        ("slow-link", *one) for one in conditions.slow_link.items()
    ]
    for option, rank, factor in named:
        if rank >= world_size:
            raise usage_error(
                f"`--{option} {rank}={factor:g}` names rank {rank}, but there are only {world_size}",
                f"a rank from 0 to {world_size - 1}",
            )


def run_virtually(plan: LaunchPlan, conditions: Conditions) -> VirtualRun:
    """Run all ranks of a recipe's plan on a virtual clock, in a child process.

    Raises:
        LaunchError: A rank fails although no fault was ordered, the messages of the ranks do not match, or a slow rank or the target
            of a fault does not exist.
    """
    check_conditions(conditions, world_size=plan.world_size)
    check_virtual_faults(conditions.faults, plan)
    with tempfile.TemporaryDirectory(prefix="ttl-plan-") as folder:
        write_plan(plan, Path(folder))
        found = run_hollow(
            _MODULE,
            Path(folder) / contract.PLAN_FILE,
            Path(plan.working_folder),
            variables={**plan.environment, **plan.secrets},
            result=VIRTUAL_FILE,
            order=(VIRTUAL_ORDER_FILE, conditions.order(plan)),
        )
    if isinstance(found, NotPredicted):
        raise _failed(found.reason)
    return read_result(plan, conditions, found)


def run_each_virtually(
    orders: Sequence[tuple[LaunchPlan, Conditions]], *, done: Callable[[int], None] = lambda _: None
) -> list[VirtualRun | LaunchError]:
    """Run several plans on virtual clocks, one after the other in one child process, which imports torch once.

    Args:
        orders: The plans of recipes, which share a working folder, and the conditions of each.
        done: Is called now and then with the number of plans that are done.

    Returns:
        For each plan the result, or why there is none.
    """
    if not orders:
        return []
    first = orders[0][0]
    with tempfile.TemporaryDirectory(prefix="ttl-plans-") as place:
        folders = [Path(place) / str(number) for number in range(len(orders))]
        for folder, (plan, conditions) in zip(folders, orders, strict=True):
            write_plan(plan, folder)
            (folder / VIRTUAL_ORDER_FILE).write_bytes(conditions.order(plan))
        given = {
            contract.ENV_RUN_DIR: place,
            contract.ENV_PLAN: str(folders[0] / contract.PLAN_FILE),
            "CUDA_VISIBLE_DEVICES": "",
        }
        environment = {**os.environ, **first.environment, **first.secrets, **given}
        command = [sys.executable, "-m", _MODULE_OF_MANY, str(len(orders))]
        try:
            process = start_process(command, folder=Path(first.working_folder), environment=environment)
        except OSError as error:
            raise _failed(f"no process can be started in {first.working_folder}: {system_reason(error)}") from error
        try:
            while True:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.communicate(timeout=_LOOK_S)
                    break
                done(sum((folder / name).exists() for folder in folders for name in (VIRTUAL_FILE, VIRTUAL_ERROR_FILE)))
        finally:
            end_process(process, patience_s=1.0)
        return [_kept_result(*order, folder) for order, folder in zip(orders, folders, strict=True)]


def _kept_result(plan: LaunchPlan, conditions: Conditions, folder: Path) -> VirtualRun | LaunchError:
    """Return what the process of several plans has written about one of them."""
    found, error = (read_file(folder / name) for name in (VIRTUAL_FILE, VIRTUAL_ERROR_FILE))
    if found is None:
        reason = "their process ended before it came to them" if error is None else error.decode(errors="replace")
        return _failed(reason)
    try:
        check_conditions(conditions, world_size=plan.world_size)
        return read_result(plan, conditions, found)
    except LaunchError as refused:
        return refused


def read_result(plan: LaunchPlan, conditions: Conditions, found: bytes) -> VirtualRun:
    """Return what the process of all ranks has written.

    Raises:
        LaunchError: It wrote nothing that can be used, or the messages of the ranks do not match.
    """
    end = _parsed(plan, conditions, found)
    is_broken = bool(conditions.faults or end.errors)
    verdict = judge_virtually(plan, conditions.faults, end, patience=conditions.patience) if is_broken else None
    if verdict is not None and verdict.failure is not None and not conditions.faults:
        raise _failed(verdict.failure.message, *verdict.failure.evidence[:1], code=verdict.failure.code)
    roles = [row.role for row in plan.ranks]
    groups = tuple(_step_time(one, roles[one.members[0].first]) for one in end.classes)
    flows, reason = _flows(plan.as_json(), roles, end, steps=conditions.steps, is_broken=is_broken)
    formula = None if flows is None else bytes_of_pairs(flows, world_size=plan.world_size, steps=conditions.steps)
    counts = [sum(1 for _ in one.members) for one in groups]
    return VirtualRun(
        plan,
        conditions,
        groups,
        step_ms=max((one.step_ms for one in groups if one.steps), default=None),
        edges=tuple(vars(one) for one in end.edges),
        pairs=sum(counts[one.source] * one.peers for one in end.edges),
        step_bytes=sum(counts[one.source] * one.peers * one.step_bytes for one in end.edges),
        differing=0 if formula is None else count_differing(formula, [one.members for one in groups], end.edges),
        no_formula=reason,
        not_folded=end.not_folded,
        repeats=sum(1 + span.last - span.first for span in end.repeats),
        verdict=verdict,
        formula_step_bytes=None if flows is None else sum(one.per_step for one in flows if one.every == 1),
        micro_batch_s=end.micro_batch_s,
        facts=next(one.facts for one in end.classes if any(span.first == 0 for span in one.members)),
    )


def _parsed(plan: LaunchPlan, conditions: Conditions, found: bytes) -> VirtualEnd:
    end = read(VirtualEnd, found)
    if (
        isinstance(end, BadRecord)
        or not _has_all_ranks(end, plan.world_size)
        or any(one.index >= len(conditions.faults) for one in end.made)
    ):
        raise _failed("the process of all ranks wrote nothing that can be used")
    if end.findings:
        raise _failed(end.findings[0], "`ttlaunch simulate` without `--virtual` shows the lines on both sides")
    return end


def _has_all_ranks(end: VirtualEnd, world_size: int) -> bool:
    """Whether each rank is in one class, and all edges are between classes."""
    rows = sorted((span.first, span.last) for one in end.classes for span in one.members)
    ends = [-1, *(last for _, last in rows)]
    follow = all(first == before + 1 and first <= last for before, (first, last) in zip(ends, rows, strict=False))
    known = all(max(one.source, one.dest) < len(end.classes) for one in end.edges)
    return follow and known and ends[-1] == world_size - 1 and all(one.members for one in end.classes)


def _failed(reason: str, *hints: str, code: str = "R003") -> LaunchError:
    mistake = usage_mistake(f"the ranks on the virtual clock failed: {reason}", *hints, code=code)
    return LaunchError([mistake], status=contract.STATUS_RANK_FAILED)


def _step_time(one: VirtualClass, role: str) -> StepTime:
    per_step_ms = 1e3 / max(1, one.steps)
    return StepTime(
        tuple((span.first, span.last) for span in one.members),
        role,
        one.steps,
        step_ms=one.all_s * per_step_ms,
        computing_ms=one.computing_s * per_step_ms,
        exposed_ms=one.exposed_s * per_step_ms,
        waiting_ms=one.waiting_s * per_step_ms,
        each_ms=tuple(time_s * 1e3 for time_s in one.each_s),
    )


def _flows(
    content: dict[str, Any], roles: list[str], end: VirtualEnd, *, steps: int, is_broken: bool
) -> tuple[Sequence["Traffic"] | None, str | None]:
    """Return what the recipe's formula says of each pair of ranks; or None, and why there is none."""
    if is_broken:
        return None, "the run was broken"
    config = {**content["config"]}
    if "training_config" in config:
        config["training_config"] = {**config["training_config"], "steps": steps}
    if len(roles) > _MOST_COMPARED:
        return None, f"there are more than {_MOST_COMPARED:,} ranks"
    facts_of = {
        rank: one.facts for one in end.classes for span in one.members for rank in range(span.first, span.last + 1)
    }
    facts = [facts_of[rank] for rank in range(len(roles))]
    return expected_traffic({**content, "config": config}, roles=roles, facts=facts, runs_recipe=True)
