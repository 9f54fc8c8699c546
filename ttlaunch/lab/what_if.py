"""What a step would take if something were different: a slower link, a slower network, fewer ranks or more of them."""

import itertools
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ttlaunch.app.dialogue import Dialogue
from ttlaunch.app.run_spec import RunSpec
from ttlaunch.diagnostics import LaunchError, usage_error
from ttlaunch.lab.simulate import plan_simulation
from ttlaunch.lab.virtual import Conditions, VirtualRun, run_virtually
from ttlaunch.planning.launch_plan import LaunchPlan
from ttlaunch.spec.recipe.declare import Per
from ttlaunch.spec.recipe.importing import import_recipe_module

_WORKERS = "multihost_config.num_workers"
_BATCH = "training_config.batch_size"


@dataclass(frozen=True)
class Variant:
    """A simulation that differs from the first one in one thing.

    Attributes:
        name: What differs.
        found: The result; None if there is none.
        reason: Why there is none, as a clause.
    """

    name: str
    found: VirtualRun | None
    reason: str | None = None

    @property
    def sequences_per_s(self) -> float | None:
        """Return how many sequences are trained on in a second; None if no rank counts steps."""
        if self.found is None or self.found.step_ms is None:
            return None
        return _batch(self.found.plan) / self.found.step_ms * 1e3

    def as_json(self) -> dict[str, Any]:
        result = None if self.found is None else {"ranks": self.found.plan.world_size, **self.found.as_json()}
        return {"name": self.name, "result": result, "reason": self.reason, "sequences_per_s": self.sequences_per_s}


Simulates = Callable[[LaunchPlan, Conditions], VirtualRun]


def what_if(
    spec: RunSpec, conditions: Conditions, dialogue: Dialogue, *, run: Simulates = run_virtually
) -> list[Variant]:
    """Simulate a run as it is described, then with one thing changed at a time.

    Args:
        spec: The run.
        conditions: What its machines and their network are like.
        dialogue: Gets warnings.
        run: Simulates a plan.

    Raises:
        LaunchError: It cannot be simulated as it is described, or nothing in it says how many ranks share the work.
    """
    plan = plan_simulation(spec, dialogue, has_room=True)
    first = run(plan, conditions)
    key, count = _counted(plan)
    last = plan.world_size - 1

    def variant(name: str, *, changed: RunSpec = spec, under: Conditions = conditions) -> Variant:
        try:
            return Variant(name, run(plan_simulation(changed, dialogue, has_room=True), under))
        except LaunchError as error:
            return Variant(name, None, error.diagnostics[0].message)

    def resized(name: str, workers: int, *, times: int = 1) -> Variant:
        if workers < 1:
            return Variant(name, None, "none would be left")
        values = (f"{key}={workers}", f"{_BATCH}={times * _batch(plan)}")
        # The number of ranks follows from the configuration.
        changed = replace(spec, ranks=None, overrides=(*spec.overrides, *values))
        return variant(name, changed=changed, under=_without(conditions, range(workers, count)))

    slower = replace(conditions, slow_link={**conditions.slow_link, last: 2 * conditions.slow_link.get(last, 1.0)})
    less = "one host less" if len({row.host for row in plan.ranks}) > 1 else "one worker less"
    return [
        Variant("as described", first),
        variant(f"rank {last}'s link at half speed", under=slower),
        variant("all links at half speed", under=replace(conditions, link_gbps=conditions.link_gbps / 2)),
        resized(less, count - _on_last_host(plan)),
        resized("twice the workers", 2 * count),
        resized("twice the workers, twice the batch", 2 * count, times=2),
    ]


def _without(conditions: Conditions, gone: range) -> Conditions:
    """Leave out what is said of workers that are no longer there."""
    slow = {rank: one for rank, one in conditions.slow.items() if rank not in gone}
    slow_link = {rank: one for rank, one in conditions.slow_link.items() if rank not in gone}
    return replace(conditions, slow=slow, slow_link=slow_link)


def _batch(plan: LaunchPlan) -> int:
    return int(plan.as_json()["config"]["training_config"]["batch_size"])


def _on_last_host(plan: LaunchPlan) -> int:
    """Return how many ranks the last host has, or 1 if there is only one host."""
    hosts = [row.host for row in plan.ranks]
    return hosts.count(hosts[-1]) if len(set(hosts)) > 1 else 1


def _counted(plan: LaunchPlan) -> tuple[str, int]:
    """Return the key of the configuration that says how many ranks share the work, and its value."""
    content = plan.as_json()
    recipe = import_recipe_module(Path(content["recipe"]["folder"]), "recipe").RECIPE
    layout = next(one for one in recipe.layouts if one.name == content["layout"])
    counts = [count for count in layout.roles.values() if not isinstance(count, int)]
    keys = list(itertools.chain.from_iterable(count.keys if isinstance(count, Per) else [_WORKERS] for count in counts))
    # Where a model is split, its replicas share the work; otherwise the workers do.
    key = next((one for one in keys if "replicas" in one), keys[0] if keys else None)
    if key is None:
        raise usage_error("`--what-if` was given, but nothing in this layout says how many ranks share the work")
    value: Any = content["config"]
    for part in key.split("."):
        value = value.get(part) if isinstance(value, dict) else None
    if not isinstance(value, int):
        raise usage_error(f"`--what-if` was given, but `{key}` is no number")
    return key, value
