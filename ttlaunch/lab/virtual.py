"""Run all ranks of a recipe on a virtual clock, in one process: what a step would take, and where its time would go."""

import json
import tempfile
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ttlaunch import contract
from ttlaunch.app.predict import NotPredicted, run_hollow
from ttlaunch.diagnostics import LaunchError, usage_error
from ttlaunch.diagnostics.launch_error import usage_mistake
from ttlaunch.planning.launch_plan import LaunchPlan
from ttlaunch.records.parser import BadRecord, read
from ttlaunch.records.virtual import VIRTUAL_FILE, VIRTUAL_ORDER_FILE, VirtualEnd, VirtualRank
from ttlaunch.running.metrics.traffic import expected_traffic
from ttlaunch.running.runs.run_folder import write_plan

GFLOPS = 50.0
"""How many 10^9 floating-point operations a rank computes in a second, unless the time of a micro-batch is given: a few cores of a CPU."""

_MODULE = "ttlaunch.runtime.virtual"


@dataclass(frozen=True)
class Conditions:
    """What the virtual machines and their network are like.

    Attributes:
        steps: How many steps are simulated.
        compute_ms: The time of the forward and backward pass of one micro-batch through the whole model; None: by its
            operations, `GFLOPS` in a second.
        link_us: The time that the first byte of a message travels.
        link_gbps: What each rank can send, and receive, in a second, in 10^9 bits.
        slow: Ranks that take longer to compute, and how many times as long.
    """

    steps: int = 3
    compute_ms: float | None = None
    link_us: float = 50.0
    link_gbps: float = 10.0
    slow: Mapping[int, float] = field(default_factory=dict)

    def order(self) -> bytes:
        """Return them as the process of the ranks reads them."""
        content = {
            "steps": self.steps,
            "gflops": GFLOPS,
            "compute_s": (self.compute_ms or 0.0) / 1e3,
            "latency_s": self.link_us / 1e6,
            "bytes_per_s": self.link_gbps * 1e9 / 8,
            "slow": {str(rank): factor for rank, factor in self.slow.items()},
        }
        return json.dumps(content).encode()


@dataclass(frozen=True)
class StepTime:
    """The mean step of one rank, in milliseconds, and each of its steps; of a rank that counts no steps, all that it did."""

    rank: int
    role: str
    steps: int
    step_ms: float
    computing_ms: float
    exposed_ms: float
    waiting_ms: float
    each_ms: tuple[float, ...]

    def as_json(self) -> dict[str, Any]:
        return {**vars(self), "each_ms": list(self.each_ms)}


@dataclass(frozen=True)
class VirtualRun:
    """What a run would take.

    Attributes:
        step_ms: The mean step of the rank whose steps take longest; None if no rank counts steps.
        edges: For each pair of ranks the messages and bytes of the whole simulation, the bytes within its steps, and those that
            the recipe's formula gives for them, which are None without a formula.
        no_formula: Why there is no formula, as a clause.
    """

    plan: LaunchPlan
    conditions: Conditions
    ranks: tuple[StepTime, ...]
    step_ms: float | None
    edges: tuple[Mapping[str, Any], ...]
    no_formula: str | None

    @property
    def differing(self) -> int:
        """How many pairs of ranks sent other bytes than the formula says."""
        return sum(one["formula"] not in {None, one["step_bytes"]} for one in self.edges)

    def as_json(self) -> dict[str, Any]:
        known = {**vars(self.conditions), "slow": {str(rank): one for rank, one in self.conditions.slow.items()}}
        return {
            "conditions": {**known, "gflops": GFLOPS if self.conditions.compute_ms is None else None},
            "step_ms": self.step_ms,
            "ranks": [one.as_json() for one in self.ranks],
            "edges": list(self.edges),
            "differing_edges": self.differing,
            "no_formula": self.no_formula,
        }


def check_conditions(conditions: Conditions, *, world_size: int) -> None:
    """Refuse slow ranks that do not exist.

    Raises:
        LaunchError: There is one.
    """
    for rank, factor in conditions.slow.items():
        if rank >= world_size:
            raise usage_error(
                f"`--slow {rank}={factor:g}` names rank {rank}, but there are only {world_size}",
                f"a rank from 0 to {world_size - 1}",
            )


def run_virtually(plan: LaunchPlan, conditions: Conditions) -> VirtualRun:
    """Run all ranks of a recipe's plan on a virtual clock, in a child process.

    Raises:
        LaunchError: A rank fails, the messages of the ranks do not match, or a slow rank does not exist.
    """
    check_conditions(conditions, world_size=plan.world_size)
    content = plan.as_json()
    with tempfile.TemporaryDirectory(prefix="ttl-plan-") as folder:
        write_plan(plan, Path(folder))
        found = run_hollow(
            _MODULE,
            Path(folder) / contract.PLAN_FILE,
            Path(plan.working_folder),
            variables={**plan.environment, **plan.secrets},
            result=VIRTUAL_FILE,
            order=(VIRTUAL_ORDER_FILE, conditions.order()),
        )
    if isinstance(found, NotPredicted):
        raise _failed(found.reason)
    end = read(VirtualEnd, found)
    if isinstance(end, BadRecord) or len(end.ranks) != plan.world_size:
        raise _failed("the process of all ranks wrote nothing that can be used")
    if end.findings:
        raise _failed(end.findings[0], "`ttlaunch simulate` without `--virtual` shows the lines on both sides")
    roles = [row.role for row in plan.ranks]
    ranks = tuple(_step_time(one, roles[one.rank]) for one in end.ranks)
    formula, reason = _formula(content, roles, end, steps=conditions.steps)
    edges = tuple(
        {**vars(one), "formula": None if formula is None else formula[one.source, one.dest]} for one in end.edges
    )
    step_ms = max((one.step_ms for one in ranks if one.steps), default=None)
    return VirtualRun(plan, conditions, ranks, step_ms, edges, reason)


def _failed(reason: str, *hints: str) -> LaunchError:
    mistake = usage_mistake(f"the ranks on the virtual clock failed: {reason}", *hints, code="R003")
    return LaunchError([mistake], status=contract.STATUS_RANK_FAILED)


def _step_time(one: VirtualRank, role: str) -> StepTime:
    per_step_ms = 1e3 / max(1, one.steps)
    return StepTime(
        one.rank,
        role,
        one.steps,
        step_ms=one.all_s * per_step_ms,
        computing_ms=one.computing_s * per_step_ms,
        exposed_ms=one.exposed_s * per_step_ms,
        waiting_ms=one.waiting_s * per_step_ms,
        each_ms=tuple(time_s * 1e3 for time_s in one.each_s),
    )


def _formula(
    content: dict[str, Any], roles: list[str], end: VirtualEnd, *, steps: int
) -> tuple[Counter[tuple[int, int]] | None, str | None]:
    """Return the bytes within the steps of each pair of ranks by the recipe's formula; or None, and why there is none."""
    config = {**content["config"]}
    if "training_config" in config:
        config["training_config"] = {**config["training_config"], "steps": steps}
    facts = [one.facts for one in end.ranks]
    flows, reason = expected_traffic({**content, "config": config}, roles=roles, facts=facts, runs_recipe=True)
    if flows is None:
        return None, reason
    found: Counter[tuple[int, int]] = Counter()
    for one in flows:
        times = sum(step % one.every == 0 or step == steps for step in range(1, steps + 1))
        found[one.source, one.dest] += one.per_step * times + one.in_first_step
    return found, None
