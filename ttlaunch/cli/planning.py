"""What `run` and `plan` share: check the description, find the engine, make the plan; or leave with diagnostics."""

import os
import sys
from dataclasses import dataclass
from pathlib import Path

from ttlaunch.agent import SHIM
from ttlaunch.cli.console import refuse, show_diagnostics
from ttlaunch.cli.describe import Description, Request, describe
from ttlaunch.diagnostics import Diagnostic, Format
from ttlaunch.launch.engine import find_openmpi
from ttlaunch.plan.launch_plan import LaunchPlan
from ttlaunch.plan.make import Surroundings, plan_command, plan_recipe
from ttlaunch.recipe.config import render_resolved
from ttlaunch.topology.model import Topology


@dataclass(frozen=True)
class Prepared:
    """A plan with what it was made from."""

    plan: LaunchPlan
    topology: Topology
    surroundings: Surroundings
    resolved_config: str


def prepare(request: Request, *, form: Format, verbose: bool) -> Prepared:
    """Check everything and plan; shows every diagnostic, and leaves if one of them is an error."""
    working_folder = Path.cwd()
    description = describe(request, working_folder=working_folder, shell=os.environ)
    python = (description.topology.cluster.python if description.topology else None) or sys.executable
    engine = find_openmpi(python=python, search_path=os.environ.get("PATH"))
    found = list(description.diagnostics)
    if isinstance(engine, Diagnostic):
        refuse([*found, engine], form=form, verbose=verbose)
    surroundings = Surroundings(working_folder, dict(os.environ), python, str(SHIM), engine, description.mpi_args)
    plan = _plan(description, request, surroundings)
    if isinstance(plan, Diagnostic):
        found.append(plan)
    if isinstance(plan, Diagnostic) or plan is None or description.topology is None:
        refuse(found, form=form, verbose=verbose)
    show_diagnostics(found, form=form, verbose=verbose)
    choice = description.choice
    resolved = render_resolved(choice.recipe, choice.loaded) if choice else ""
    return Prepared(plan, description.topology, surroundings, resolved)


def _plan(description: Description, request: Request, surroundings: Surroundings) -> LaunchPlan | Diagnostic | None:
    if not description.ok or description.topology is None:
        return None
    if description.command is not None:
        return plan_command(
            description.command, description.topology, surroundings, ranks=request.ranks, name=description.name
        )
    if description.choice is None or description.layout is None:
        return None
    return plan_recipe(description.choice, description.layout, description.topology, surroundings)
