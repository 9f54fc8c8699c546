"""An elastic run on a virtual clock: its epochs, what each change of the members costs, and the verdict that the run would get.

Each number of workers is simulated as a run of its own (`lab/virtual.py`): that gives the time and the bytes of a step of an epoch.
`lab/virtual_members.py` says which epochs there are, with the coordinator of a run. The functions that judge a run judge the result.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ttlaunch.app.dialogue import Dialogue
from ttlaunch.app.run_spec import RunSpec
from ttlaunch.contract import worker_name
from ttlaunch.diagnostics import LaunchError, has_errors, usage_error
from ttlaunch.hosts.transport.local import is_this_machine
from ttlaunch.lab.simulate import plan_simulation
from ttlaunch.lab.virtual import Conditions, VirtualRun, check_conditions
from ttlaunch.lab.virtual_costs import START_S, WorkerCosts
from ttlaunch.lab.virtual_elastic_faults import PLAYED, TARGETS, Happening, judge_elastic
from ttlaunch.lab.virtual_faults import VirtualVerdict, not_simulated
from ttlaunch.lab.virtual_members import Epoch, Process, VirtualMembers
from ttlaunch.planning.fault_checks import check_faults, scope_of
from ttlaunch.planning.faults import Fault
from ttlaunch.planning.launch_plan import LaunchPlan
from ttlaunch.spec.recipe.declare import Elastic
from ttlaunch.spec.recipe.importing import import_recipe_module


@dataclass(frozen=True)
class EpochTime:
    """An epoch with the simulation of its workers."""

    epoch: Epoch
    run: VirtualRun

    @property
    def step_ms(self) -> float:
        """The time of a step, as a simulation of as many workers has it."""
        assert self.run.step_ms is not None  # noqa: S101 - workers count steps
        return self.run.step_ms

    def as_json(self) -> dict[str, Any]:
        own = vars(self.epoch)
        lists = {"members": list(self.epoch.members), "reasons": list(self.epoch.reasons)}
        blocks = [list(block) for block in self.epoch.blocks]
        sent = {"step_bytes": self.run.formula_step_bytes, "differing_pairs": self.run.differing}
        return {**own, **lists, "blocks": blocks, "step_ms": self.step_ms, **sent, "no_formula": self.run.no_formula}


@dataclass(frozen=True)
class VirtualElasticRun:
    """What an elastic run would take.

    Attributes:
        steps: How many steps it was to make.
        start_s: How long a worker takes from its start until it can get the state.
        state_bytes, mean_bytes: What a worker that comes gets of a state, and of a mean gradient.
        workers: The processes of all workers that were started, by number.
        over_s: When the run would be over, in seconds after the begin of its first step.
    """

    plan: LaunchPlan
    conditions: Conditions
    steps: int
    start_s: float
    state_bytes: int
    mean_bytes: int
    epochs: tuple[EpochTime, ...]
    workers: dict[int, Process]
    over_s: float
    verdict: VirtualVerdict

    def as_json(self) -> dict[str, Any]:
        workers = [
            {
                "worker": worker_name(number),
                "host": one.host,
                "started_s": one.started_s,
                "ready_s": one.ready_s,
                "gone_s": one.gone_s,
                "why": one.why or None,
                "states": one.taken[0],
                "means": one.taken[1],
                "bytes": self.bytes_taken(one),
            }
            for number, one in sorted(self.workers.items())
        ]
        return {
            "conditions": self.conditions.as_json(),
            "steps": self.steps,
            "start_s": self.start_s,
            "epochs": [one.as_json() for one in self.epochs],
            "workers": workers,
            "over_s": self.over_s,
            "verdict": self.verdict.as_json(),
        }

    def bytes_taken(self, process: Process) -> int:
        """Return how many bytes of the state and of mean gradients a worker has got from others."""
        return process.taken[0] * self.state_bytes + process.taken[1] * self.mean_bytes


def run_elastic_virtually(
    spec: RunSpec, conditions: Conditions, dialogue: Dialogue, *, steps: int | None = None, start_s: float = START_S
) -> VirtualElasticRun:
    """Simulate a run whose workers come and go.

    Args:
        spec: The run, with `elastic`.
        conditions: What its machines and their network are like, and its faults.
        dialogue: Gets warnings.
        steps: How many steps it makes; None: as many as its training file says.
        start_s: How long a worker takes from its start until it can get the state.

    Raises:
        LaunchError: The run cannot be elastic, or it cannot be simulated; or a fault or a slow rank is not possible.
    """
    plan = plan_simulation(spec, dialogue, has_room=True)
    assert plan.elastic is not None  # noqa: S101 - the run has `elastic`
    _refuse_other_messages(plan)
    config = plan.as_json()["config"]["training_config"]
    steps = int(config["steps"]) if steps is None else steps
    check_conditions(conditions, world_size=len(plan.ranks))
    _check_faults(conditions.faults, plan, steps=steps)
    costs = WorkerCosts(spec, plan, replace(conditions, faults=(), times_micro_batch=True), steps=steps)
    costs.start_s = start_s
    costs.look_ahead(conditions.faults)
    members = VirtualMembers(plan.elastic, hosts=[row.host for row in plan.ranks], steps=steps, costs=costs)
    happening = Happening(conditions.faults, plan.ranks, members)
    members.run()
    assert members.over_s is not None  # noqa: S101 - it has run
    epochs = tuple(EpochTime(one, costs.run_of(one.members)) for one in members.epochs)
    verdict = judge_elastic(plan, conditions.faults, members, happening=happening)
    known = plan, conditions, steps, start_s, costs.state_bytes, costs.mean_bytes
    return VirtualElasticRun(*known, epochs, members.processes, members.over_s, verdict)


def _refuse_other_messages(plan: LaunchPlan) -> None:
    """Refuse recipes of which an epoch is not what a run of as many ranks is."""
    content = plan.as_json()["recipe"]
    recipe = import_recipe_module(Path(content["folder"]), "recipe").RECIPE
    form = recipe.elastic
    assert isinstance(form, Elastic)  # noqa: S101 - the plan was made
    if form.has_local_steps:
        why = "a change of its members also loses local steps, of which the virtual clock knows nothing"
    elif form.slots is not None or form.servers or form.traffic is not recipe.traffic:
        why = "its members send other messages than ranks that stay, which alone can be simulated"
    else:
        return
    message = f"`--elastic` cannot be simulated for {content['name']}: {why}"
    raise usage_error(message, "`ttlaunch chaos` takes it, and `data_parallel` can be simulated")


def _check_faults(faults: Sequence[Fault], plan: LaunchPlan, *, steps: int) -> None:
    scope = scope_of(plan, is_here=all(map(is_this_machine, plan.hosts)))
    is_played = [one.verb in PLAYED and one.target.kind in TARGETS for one in faults]
    found = list(
        check_faults(
            [one for one, is_ours in zip(faults, is_played, strict=True) if is_ours], replace(scope, last_step=steps)
        )
    )
    reason = "while workers come and go, only their own ends, joins and departures are simulated"
    found += [not_simulated(one, reason) for one, is_ours in zip(faults, is_played, strict=True) if not is_ours]
    if has_errors(found):
        raise LaunchError(found)
