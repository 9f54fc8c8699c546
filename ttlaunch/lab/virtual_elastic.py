"""An elastic run on a virtual clock: its epochs, what each change of the members costs, and the verdict that the run would get.

Each number of workers is simulated as a run of its own, whose ranks stay (`lab/virtual.py`): that gives the time of a step of an epoch. Its bytes are
those of the recipe's formula for members.
`lab/virtual_members.py` says which epochs there are, with the coordinator of a run. The functions that judge a run judge the result.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from ttlaunch.app.dialogue import Dialogue
from ttlaunch.app.run_spec import RunSpec
from ttlaunch.contract import worker_name
from ttlaunch.diagnostics import LaunchError, has_errors, usage_error
from ttlaunch.hosts.transport.local import is_this_machine
from ttlaunch.lab.simulate import plan_simulation
from ttlaunch.lab.virtual import Conditions, VirtualRun, check_conditions, run_each_virtually
from ttlaunch.lab.virtual_costs import START_S, SimulatesEach, WorkerCosts
from ttlaunch.lab.virtual_elastic_faults import PLAYED, TARGETS, Happening, judge_elastic
from ttlaunch.lab.virtual_faults import VirtualVerdict, not_simulated
from ttlaunch.lab.virtual_leads import StepsAhead
from ttlaunch.lab.virtual_members import VirtualMembers, Work
from ttlaunch.lab.virtual_processes import Epoch, Process
from ttlaunch.lab.virtual_steps import StepsTogether
from ttlaunch.lab.virtual_tasks import TasksHandedOut
from ttlaunch.planning.fault_checks import check_faults, scope_of
from ttlaunch.planning.faults import Fault
from ttlaunch.planning.launch_plan import ElasticLimits, LaunchPlan
from ttlaunch.running.metrics.epoch_traffic import members_step_bytes
from ttlaunch.spec.recipe.declare import Elastic, Recipe
from ttlaunch.spec.recipe.importing import import_recipe_module

_MOST = 1000
"""The largest number of tasks or of steps that a recipe may declare; those of the built-in ones are at most 100."""


@dataclass(frozen=True)
class EpochTime:
    """An epoch with the simulation of its workers.

    Attributes:
        run: Ranks that stay and do what the members do, apart from what keeps a copy of a state at another member.
        step_ms: The time of a step; where workers take steps of their own, on average from one agreement to the next, and where a
            server hands out tasks, from one update to the next.
        step_bytes: What the members send in each step by the recipe's formula, without what they send in some steps only; None without
            a formula.
        is_counted: Whether members send the very messages of ranks that stay, which the simulation has counted.
    """

    epoch: Epoch
    run: VirtualRun
    step_ms: float
    step_bytes: int | None
    is_counted: bool

    def as_json(self) -> dict[str, Any]:
        own = vars(self.epoch)
        lists = {"members": list(self.epoch.members), "reasons": list(self.epoch.reasons)}
        blocks = [list(block) for block in self.epoch.blocks]
        sent = {"step_bytes": self.step_bytes, "differing_pairs": self.differing, "no_formula": self.no_formula}
        return {**own, **lists, "blocks": blocks, "step_ms": self.step_ms, **sent}

    @property
    def differing(self) -> int:
        """How many pairs of members sent other bytes than the formula says, as far as they were counted."""
        return self.run.differing if self.is_counted else 0

    @property
    def no_formula(self) -> str | None:
        """Why there is no formula, as a clause; None if there is one."""
        if self.is_counted:
            return self.run.no_formula
        return "it has none for members that come and go" if self.step_bytes is None else None


@dataclass(frozen=True)
class VirtualElasticRun:
    """What an elastic run would take.

    Attributes:
        steps: How many steps it was to make.
        start_s: How long a worker takes from its start until it can get the state.
        workers: The processes of all workers that were started, by number.
        over_s: When the run would be over, in seconds after the begin of its first step.
    """

    plan: LaunchPlan
    conditions: Conditions
    steps: int
    start_s: float
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
                "bytes": one.got,
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


def run_elastic_virtually(
    spec: RunSpec,
    conditions: Conditions,
    dialogue: Dialogue,
    *,
    steps: int | None = None,
    start_s: float = START_S,
    simulate: SimulatesEach = run_each_virtually,
) -> VirtualElasticRun:
    """Simulate a run whose workers come and go.

    Args:
        spec: The run, with `elastic`.
        conditions: What its machines and their network are like, and its faults.
        dialogue: Gets warnings.
        steps: How many steps it makes; None: as many as its training file says.
        start_s: How long a worker takes from its start until it can get the state.
        simulate: Simulates plans of workers that stay; by default in a process of their own, which imports torch.

    Raises:
        LaunchError: The run cannot be elastic, or it cannot be simulated; or a fault or a slow rank is not possible.
    """
    plan = plan_simulation(spec, dialogue, has_room=True)
    assert plan.elastic is not None  # noqa: S101 - the run has `elastic`
    recipe = _recipe_of(plan)
    config = plan.as_json()["config"]["training_config"]
    steps = int(config["steps"]) if steps is None else steps
    check_conditions(conditions, world_size=len(plan.ranks))
    _check_faults(conditions.faults, plan, steps=steps)
    assert isinstance(recipe.elastic, Elastic)  # noqa: S101 - the plan was made
    of_steps = replace(conditions, faults=(), times_micro_batch=True)
    clock_gap = _number("clock_gap", recipe, plan)
    costs = WorkerCosts(spec, plan, of_steps, steps=steps, form=recipe.elastic, clock_gap=clock_gap, simulate=simulate)
    costs.start_s = start_s
    costs.look_ahead(conditions.faults)
    hosts = [row.host for row in plan.ranks]
    work = _work_of(recipe, plan)
    members = VirtualMembers(plan.elastic, hosts=hosts, steps=steps, costs=costs, work=work)
    happening = Happening(conditions.faults, plan.ranks, members, lease_s=conditions.patience.lease_s)
    members.run()
    assert members.over_s is not None  # noqa: S101 - it has run
    is_counted = recipe.elastic.traffic is recipe.traffic
    epochs = tuple(_timed(one, costs, plan, is_counted=is_counted) for one in members.epochs)
    verdict = judge_elastic(plan, conditions.faults, members, happening=happening)
    return VirtualElasticRun(plan, conditions, steps, start_s, epochs, members.processes, members.over_s, verdict)


def _work_of(recipe: Recipe, plan: LaunchPlan) -> Callable[[VirtualMembers], Work]:
    """Return what the members of a run do in an epoch."""
    assert isinstance(recipe.elastic, Elastic)  # noqa: S101 - the plan was made
    if most_in_hand := _number("tasks_in_hand", recipe, plan):
        return partial(TasksHandedOut, most_in_hand=most_in_hand)
    clock_gap = _number("clock_gap", recipe, plan)
    return partial(StepsAhead, clock_gap=clock_gap) if clock_gap else StepsTogether


def _number(name: str, recipe: Recipe, plan: LaunchPlan) -> int:
    """Return a number that a recipe declares in its `Elastic`, which may depend on the configuration.

    Raises:
        LaunchError: It is no number that a run could have.
    """
    given = getattr(recipe.elastic, name)
    if callable(given):
        given = given(recipe.config.model_validate_json(json.dumps(plan.as_json()["config"])))
    if not isinstance(given, int) or isinstance(given, bool) or not 0 <= given <= _MOST:
        raise usage_error(
            f"`--elastic` cannot be simulated for {plan.as_json()['recipe']['name']}: `{name}` is {given!r}",
            f"`{name}` of its `Elastic` is a whole number from 0 to {_MOST}, or a function that returns one",
        )
    return given


def _timed(epoch: Epoch, costs: WorkerCosts, plan: LaunchPlan, *, is_counted: bool) -> EpochTime:
    run, step_ms = costs.run_of(epoch.members), costs.mean_step_ms(epoch.members)
    if is_counted:
        return EpochTime(epoch, run, step_ms, run.formula_step_bytes, is_counted)
    facts = [dict(run.facts)] * len(epoch.members)
    size = members_step_bytes(plan.as_json(), facts=facts, blocks=epoch.blocks)
    return EpochTime(epoch, run, step_ms, size, is_counted)


def _recipe_of(plan: LaunchPlan) -> Recipe:
    """Return the recipe of a plan.

    Raises:
        LaunchError: No run whose ranks stay has steps like those of its epochs.
    """
    content, limits = plan.as_json()["recipe"], plan.elastic
    recipe = import_recipe_module(Path(content["folder"]), "recipe").RECIPE
    form = recipe.elastic
    assert isinstance(recipe, Recipe) and isinstance(form, Elastic) and limits is not None  # noqa: S101, PT018 - the plan was made
    if form.has_local_steps:
        return recipe
    tasks, gap = (_number(name, recipe, plan) for name in ("tasks_in_hand", "clock_gap"))
    refusal = _refusal(form, limits, has_tasks=tasks > 0, leads=gap > 0)
    if refusal is None:
        return recipe
    why, hint = refusal
    raise usage_error(f"`--elastic` cannot be simulated for {content['name']}: {why}", hint)


def _refusal(form: Elastic, limits: ElasticLimits, *, has_tasks: bool, leads: bool) -> tuple[str, str] | None:
    """Return why steps of a recipe cannot be simulated, and what mends it; None if they can."""
    keeps = limits.kept_bytes or limits.shadow_bytes
    refusals = (
        (
            limits.hands_out_tasks and not has_tasks,
            "it does not say how many tasks of its server a worker has at a time",
            "`tasks_in_hand` of its `Elastic` says so",
        ),
        (
            has_tasks and not limits.hands_out_tasks,
            "it says how many tasks of its server a worker has at a time, and no server hands out tasks",
            "leave out `tasks_in_hand` of its `Elastic`",
        ),
        (
            leads and (limits.servers or keeps),
            "it says that its members lead each other, and they wait in each step, for a server or to keep its mean",
            "leave out `clock_gap` of its `Elastic`",
        ),
        (
            not (leads or limits.hands_out_tasks or keeps),
            "its members keep no mean gradient for one that lacks a step, as where messages of several steps overlap",
            "`clock_gap` of its `Elastic` says by how many steps they may lead each other; `ttlaunch chaos` takes all",
        ),
        (
            limits.servers and not limits.hands_out_tasks and not form.as_roles,
            "it does not say which ranks that stay do what its members do",
            "`as_roles` of its `Elastic` says so",
        ),
    )
    return next(((why, hint) for is_so, why, hint in refusals if is_so), None)


def _check_faults(faults: Sequence[Fault], plan: LaunchPlan, *, steps: int) -> None:
    scope = scope_of(plan, is_here=all(map(is_this_machine, plan.hosts)))
    is_played = [one.verb in PLAYED and one.target.kind in TARGETS for one in faults]
    found = list(
        check_faults(
            [one for one, is_ours in zip(faults, is_played, strict=True) if is_ours], replace(scope, last_step=steps)
        )
    )
    reason = "while workers come and go, only what happens to themselves and to the network of a host is simulated"
    found += [not_simulated(one, reason) for one, is_ours in zip(faults, is_played, strict=True) if not is_ours]
    if has_errors(found):
        raise LaunchError(found)
