"""The plan of a recipe: assign its roles to ranks, and check every rule that needs both recipe and topology."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ttlaunch.diagnostics import Diagnostic, has_errors
from ttlaunch.planning.audits import check_audits
from ttlaunch.planning.devices import check_devices
from ttlaunch.planning.fabric import check_fabric
from ttlaunch.planning.launch_plan import LaunchPlan, RecipeProgram
from ttlaunch.planning.make import Surroundings, plan_program
from ttlaunch.planning.roles import RoleLayout, plan_roles
from ttlaunch.spec.recipe.config import LoadedConfig, check_config
from ttlaunch.spec.recipe.declare import Recipe
from ttlaunch.spec.recipe.recorded_epochs import RecordedEpoch
from ttlaunch.spec.recipe.recorded_updates import RecordedUpdate
from ttlaunch.spec.topology.model import Topology

_RANK_MODULE = ("-m", "ttlaunch.runtime")


@dataclass(frozen=True)
class RecipeChoice:
    """A recipe with its configuration.

    Attributes:
        data: Path, SHA-256 and size of the training text; None if the recipe reads none.
        start: The files with the first weights, as in `RecipeProgram`; None if weights are drawn from the seed.
        is_naive: Whether ranks run the functions of `naive.py`.
    """

    name: str
    folder: Path
    recipe: Recipe
    loaded: LoadedConfig
    data: Mapping[str, Any] | None = None
    start: Mapping[str, Any] | None = None
    is_naive: bool = False


def check_recipe(
    choice: RecipeChoice, topology: Topology, *, ranks: int | None
) -> tuple[RoleLayout | None, list[Diagnostic]]:
    """Assign the roles to ranks, apply every rule that needs both recipe and topology, and return all mistakes at once."""
    if choice.loaded.config is None:
        return None, []
    layout = plan_roles(choice.recipe, choice.loaded, topology, ranks=ranks)
    if isinstance(layout, Diagnostic):
        last = choice.recipe.layouts[-1]
        return None, [*check_config(choice.recipe, choice.loaded, last), layout]
    found = check_config(choice.recipe, choice.loaded, layout.layout)
    found += [
        *check_fabric(choice.loaded, topology, layout),
        *check_devices(choice.loaded, topology, layout.layout, recipe=choice.recipe),
        *check_audits(choice.name, choice.recipe, choice.loaded, layout=layout),
    ]
    return (None if has_errors(found) else layout), found


def plan_recipe(
    choice: RecipeChoice,
    layout: RoleLayout,
    topology: Topology,
    *,
    surroundings: Surroundings,
    replay: tuple[int, ...] = (),
    updates: tuple[RecordedUpdate, ...] = (),
    epochs: tuple[RecordedEpoch, ...] = (),
    warm: bool = False,
) -> LaunchPlan:
    """Plan a recipe whose checks have passed; see `RecipeProgram` for `replay`, `updates`, `epochs` and `warm`."""
    program = RecipeProgram(
        name=choice.name,
        folder=str(choice.folder),
        layout=layout.layout.name,
        config=choice.loaded.checked.model_dump(mode="json"),
        data=choice.data,
        start=choice.start,
        replay=replay,
        updates=updates,
        epochs=epochs,
        is_naive=choice.is_naive,
        warm=warm,
    )
    flows = tuple((flow.source, flow.target, str(flow.pattern)) for flow in layout.flows)
    command = (surroundings.python, *_RANK_MODULE)
    return plan_program(program, topology, surroundings, command=command, roles=layout.roles, flows=flows)
