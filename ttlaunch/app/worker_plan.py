"""Plan a worker that joins a run from this machine: the run's recipe and configuration, as this machine has them.

Code and texts do not travel. The recipe is found here by its name, or where the user says, and the run's configuration is checked by it.
"""

import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ttlaunch.agent import SHIM
from ttlaunch.app.check_data import check_data
from ttlaunch.app.dialogue import Dialogue, stop_on_errors
from ttlaunch.app.resolve import undefined_references
from ttlaunch.diagnostics import Blame, Diagnostic, LaunchError, listed, shown
from ttlaunch.engines.agents import Agents
from ttlaunch.planning.launch_plan import ElasticLimits, LaunchPlan, RankRow, RecipeProgram
from ttlaunch.planning.make import Surroundings, plan_program
from ttlaunch.records.coordinator import RunDescription
from ttlaunch.spec.topology.load import load_topology_files
from ttlaunch.spec.topology.model import Topology

if TYPE_CHECKING:
    from ttlaunch.spec.recipe.config import LoadedConfig
    from ttlaunch.spec.recipe.declare import Recipe

CONFIG_NAME = "the run's configuration"
_DATA_KEY = "training_config.data_path"
_DATA_HINT = "`--data FILE` names the same text on this machine"
_RECIPE_HINT = "`--recipe DIR` names the run's recipe on this machine"
_ELSEWHERE = "on another machine"


def plan_worker(
    run: RunDescription, dialogue: Dialogue, *, working_folder: Path, recipe: str | None = None, data: str | None = None
) -> LaunchPlan:
    """Make the plan of a worker that has no number yet: everything that `numbered` does not change is decided and checked here.

    Args:
        run: What the coordinator says about the run.
        dialogue: Receives warnings, and wraps the import of the recipe.
        working_folder: The folder to which relative paths are relative, and in which the rank starts.
        recipe: The name or the folder of the recipe on this machine; None for the name that it has in the run.
        data: The training text on this machine; None for the path in the run's configuration.

    Raises:
        LaunchError: The recipe is not here, or the run calls it by a path; or this machine's recipe cannot use the configuration, or the
            text cannot be read.
    """
    from ttlaunch.spec.recipe.discovery import find_recipe, load_recipe

    if recipe is None:
        _check_name(run)
    found = find_recipe(recipe or run.recipe, working_folder=working_folder)
    if isinstance(found, Diagnostic):
        raise LaunchError([replace(found, hints=(*found.hints, _RECIPE_HINT))])
    with dialogue.recipe_code():
        loaded_recipe = load_recipe(found)
    if isinstance(loaded_recipe, Diagnostic):
        raise LaunchError([loaded_recipe])
    _check_role(run, loaded_recipe)
    config, program_data = _configuration(run, loaded_recipe, dialogue, data=data, working_folder=working_folder)
    program = RecipeProgram(found.name, str(found.folder), run.layout, config, program_data)
    surroundings = Surroundings(working_folder, dict(os.environ), sys.executable, str(SHIM), Agents(sys.executable))
    command = (sys.executable, "-m", "ttlaunch.runtime")
    plan = plan_program(
        program, _this_machine(working_folder), surroundings, command=command, roles=(run.role,), flows=()
    )
    limits = run.elastic
    return replace(
        plan,
        elastic=ElasticLimits(
            limits.minimum, limits.maximum, limits.micro_batches, limits.first, has_local_steps=limits.has_local_steps
        ),
    )


def numbered(plan: LaunchPlan, number: int, *, host: str) -> LaunchPlan:
    """Give a worker its number: a rank finds itself in the plan's row of that number.

    Args:
        plan: The result of `plan_worker`.
        number: The number.
        host: The name of this machine among the run's hosts. No other worker may have it: workers of one host share a folder.
    """
    (own,) = plan.ranks
    others = [RankRow(rank, _ELSEWHERE, 0, own.role, later=True) for rank in range(number)]
    environment = {**own.environment, "TT_RUN_RANK": str(number)}
    return replace(plan, ranks=(*others, replace(own, rank=number, host=host, environment=environment, later=True)))


def _check_name(run: RunDescription) -> None:
    """Refuse a path: the run may not choose a folder of this machine whose `recipe.py` is then imported."""
    if "/" in run.recipe or run.recipe.startswith((".", "~")):
        message = f"the run calls its recipe `{shown(run.recipe)}`, which is no name; nothing of it was imported"
        raise LaunchError([Diagnostic("R083", message, hints=(_RECIPE_HINT,), blame=Blame.HOSTS)])


def _check_role(run: RunDescription, recipe: "Recipe") -> None:
    layouts = {layout.name: layout.roles for layout in recipe.in_elastic_form().layouts}
    if run.role not in layouts.get(run.layout, {}):
        here = [role for roles in layouts.values() for role in roles]
        message = f"the run's workers have the role `{shown(run.role)}`, and this machine's recipe has {listed(here, last='and')}"
        hint = "the recipe must be the same on both machines; `ttlaunch recipes show` prints this machine's"
        raise LaunchError([Diagnostic("R083", message, hints=(hint,), blame=Blame.HOSTS)])


def _configuration(
    run: RunDescription, recipe: "Recipe", dialogue: Dialogue, *, data: str | None, working_folder: Path
) -> "tuple[dict[str, Any], dict[str, Any] | None]":
    """Check the run's configuration by this machine's recipe, and read this machine's text."""
    from ttlaunch.spec.recipe.config import load_config, override_config

    loaded = load_config(recipe, None, name=CONFIG_NAME, standard_input=run.config.encode())
    if data is not None:
        loaded = override_config(recipe, loaded, [f"{_DATA_KEY}={_quoted(data)}"], option="--data")
    found: list[Diagnostic] = [*loaded.diagnostics, *undefined_references(loaded)]
    stop_on_errors(found, dialogue)
    if not recipe.uses_data:
        return _values(loaded), None
    described, mistake = check_data(loaded, working_folder)
    if mistake is not None:
        hints = (*mistake.hints, _DATA_HINT) if data is None else mistake.hints
        raise LaunchError([replace(mistake, hints=hints)])
    return _values(loaded), described


def _values(loaded: "LoadedConfig") -> dict[str, Any]:
    return loaded.checked.model_dump(mode="json")


def _quoted(text: str) -> str:
    """Write a path as YAML."""
    return "'" + text.replace("'", "''") + "'"


def _this_machine(working_folder: Path) -> Topology:
    loaded = load_topology_files(None, None, environment={}, working_folder=working_folder)
    assert loaded.topology is not None  # noqa: S101 - this text has no mistake
    return loaded.topology
