"""Place ranks by the virtual clock: what they send to each other in a step is simulated, and so is the step in the proposed order."""

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from ttlaunch.app.dialogue import Dialogue
from ttlaunch.app.run_spec import RunSpec
from ttlaunch.diagnostics import Diagnostic
from ttlaunch.lab.simulate import plan_simulation
from ttlaunch.lab.virtual import Conditions, VirtualRun, run_virtually
from ttlaunch.planning.launch_plan import LaunchPlan
from ttlaunch.planning.place import Proposal, propose_placement
from ttlaunch.planning.roles import RoleLayout
from ttlaunch.spec.topology.model import Rank, Topology


@dataclass(frozen=True)
class StepTimes:
    """The time of a step on the virtual clock, in milliseconds, in the present order and in the one that is proposed."""

    before_ms: float
    after_ms: float

    def as_json(self) -> dict[str, Any]:
        return dict(vars(self))


def place_by_time(
    spec: RunSpec,
    topology: Topology,
    layout: RoleLayout,
    *,
    conditions: Conditions,
    dialogue: Dialogue,
    run: Callable[[LaunchPlan, Conditions], VirtualRun] = run_virtually,
) -> tuple[Proposal, StepTimes] | Diagnostic:
    """Propose an order of hosts by the bytes of a simulated step, and keep the present one if no step becomes quicker.

    Args:
        spec: The run.
        topology: Its cluster.
        layout: The recipe's layout on it.
        conditions: What the machines and the channels of the links are like.
        dialogue: Gets warnings.
        run: Simulates a plan.

    Raises:
        LaunchError: The run cannot be simulated.

    Cost: two simulations, of a second for each rank or less, besides the search.
    """
    plan = plan_simulation(spec, dialogue)
    under = replace(conditions, over_links=True)
    now = run(plan, under)
    before_ms = _step_ms(now)
    proposal = propose_placement(topology, layout, weights=_bytes_of_pairs(now) or None)
    if isinstance(proposal, Diagnostic) or not proposal.improves:
        return proposal if isinstance(proposal, Diagnostic) else (proposal, StepTimes(before_ms, before_ms))
    after_ms = _step_ms(run(_moved(plan, proposal), under))
    if after_ms >= before_ms:
        return _as_it_is(topology, proposal), StepTimes(before_ms, before_ms)
    return proposal, StepTimes(before_ms, after_ms)


def _step_ms(found: VirtualRun) -> float:
    """Return the time of a step, or if no rank counts steps, of all that the ranks do."""
    return max(one.step_ms for one in found.groups)


def _bytes_of_pairs(found: VirtualRun) -> Mapping[tuple[Rank, Rank], float]:
    """Return what each pair of ranks sends to each other in a step; nothing if ranks stand for others, which share no links."""
    ranks = [list(one.members) for one in found.groups]
    if any(len(members) > 1 for members in ranks):
        return {}
    key = "step_bytes" if found.step_ms is not None else "bytes"
    sent: Counter[tuple[Rank, Rank]] = Counter()
    for edge in found.edges:
        ends = sorted((ranks[edge["source"]][0], ranks[edge["dest"]][0]))
        sent[Rank(ends[0]), Rank(ends[1])] += edge[key]
    steps = found.conditions.steps
    return {pair: size / steps for pair, size in sorted(sent.items()) if size}


def _moved(plan: LaunchPlan, proposal: Proposal) -> LaunchPlan:
    rows = [
        replace(row, host=str(slot.host.name), slot=slot.index, mesh_id=int(binding.mesh_id))
        for row, slot, binding in zip(plan.ranks, proposal.slots, proposal.bindings, strict=True)
    ]
    return replace(plan, ranks=tuple(rows))


def _as_it_is(topology: Topology, proposal: Proposal) -> Proposal:
    return replace(
        proposal,
        hosts=topology.hosts,
        bindings=topology.bindings,
        slots=topology.slots[: len(topology.bindings)],
        after=proposal.before,
        pairs=tuple(pair._replace(after=pair.before) for pair in proposal.pairs),
    )
