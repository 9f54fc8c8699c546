"""Make the plan of a run: resolve the request, find the engine, and plan the ranks."""

import os
import platform
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from ttlaunch import contract
from ttlaunch.agent import SHIM
from ttlaunch.app.asked_engine import refuse_warm
from ttlaunch.app.dialogue import Dialogue
from ttlaunch.app.resolve import ResolvedSpec, resolve
from ttlaunch.app.run_spec import RunSpec
from ttlaunch.diagnostics import Diagnostic, LaunchError, shown, usage_mistake
from ttlaunch.engines.base import Capability, Engine, EngineFinder
from ttlaunch.engines.choose import find_engine, suitable_engines
from ttlaunch.hosts.transport.local import is_this_machine
from ttlaunch.planning.environment import check_reserved
from ttlaunch.planning.launch_plan import CommandProgram, LaunchPlan
from ttlaunch.planning.make import Surroundings, plan_command
from ttlaunch.profiling import ENV_PROFILE_STEPS, parse_steps
from ttlaunch.quick_dataclass import dataclass
from ttlaunch.spec.topology.model import Topology
from ttlaunch.spec.topology.variables import variables_named

_QUIET = "99"
"""The log level at which torch's profiler prints nothing."""


@dataclass(frozen=True)
class PreparedRun:
    """A plan with what it was made from."""

    plan: LaunchPlan
    topology: Topology
    surroundings: Surroundings
    engine: Engine
    resolved_config: str
    request: RunSpec
    description: ResolvedSpec

    @property
    def is_here(self) -> bool:
        """Whether all ranks run on this machine."""
        return all(host in self.surroundings.local_hosts for host in self.plan.hosts)


def prepare(request: RunSpec, dialogue: Dialogue, *, working_folder: Path | None = None) -> PreparedRun:
    """Check everything and make a plan; nothing is started and nothing is written.

    Args:
        request: The specification of the run.
        dialogue: Receives the warnings.
        working_folder: The folder in which ranks start and to which relative paths are relative; None for the current one.

    Raises:
        LaunchError: A diagnostic is an error; the exception has all diagnostics.
    """
    working_folder = working_folder or Path.cwd()
    description = resolve(request, working_folder=working_folder, dialogue=dialogue)
    local_hosts = _local_hosts(description)
    python = _python(description, local_hosts)
    engine = _find_engine(description, request, python=python)
    found = list(description.diagnostics)
    if isinstance(engine, Diagnostic):
        raise LaunchError([*found, engine])
    if request.first is not None and Capability.ADD_RANK not in engine.can:
        raise ValueError(f"no rank can be added with {engine.name}")
    surroundings = Surroundings(
        working_folder, dict(os.environ), python, str(SHIM), engine, description.mpi_args, local_hosts
    )
    plan = make_plan(description, request, surroundings)
    if isinstance(plan, Diagnostic):
        found.append(plan)
    if isinstance(plan, Diagnostic) or plan is None or description.topology is None:
        raise LaunchError(found)
    reserved = check_reserved(plan, on_command_line=variables_named(request.env))
    if reserved:
        raise LaunchError([*found, *reserved])
    local = local_hosts.intersection(plan.hosts)
    if len(local) > 1:
        from ttlaunch.hosts.doctor.identity import check_local_names

        found += check_local_names(local, topology=description.topology, hostname=platform.node())
        raise LaunchError(found)
    dialogue.warn(found)
    resolved = _resolved(description)
    return PreparedRun(plan, description.topology, surroundings, engine, resolved, request, description)


def _find_engine(description: ResolvedSpec, request: RunSpec, *, python: str) -> Engine | Diagnostic:
    """Find the engine that the options name, or one that suits the program."""
    program = description.python
    engines: Sequence[EngineFinder]
    if description.engine is not None:
        engines = [description.engine]
    else:
        choice = description.choice
        needs_mpi = choice.loaded.uses_mpi if choice else program is None or program.uses_mpi
        engines = suitable_engines(uses_mpi=needs_mpi or request.mpi_args is not None)
        engines = engines[:1] if request.mpi_args is not None else engines  # only the first one understands them
    engine = find_engine(python=python, search_path=os.environ.get("PATH"), engines=engines)
    if isinstance(engine, Diagnostic) and description.engine is None and description.command and not program:
        return replace(engine, hints=(*engine.hints, "`--engine agents` starts a program that does not use MPI"))
    if isinstance(engine, Diagnostic) or not request.warm or not description.ok:
        return engine
    if description.command and not program:  # the warning that it has no effect is all there is to say
        return engine
    return refuse_warm(engine, program) or engine


def _resolved(description: ResolvedSpec) -> str:
    """Render the recipe's complete configuration as a file; empty for a program."""
    choice = description.choice
    if choice is None:
        return ""
    from ttlaunch.spec.recipe.config import (
        render_resolved,
    )  # imported only for recipes: other programs start sooner without it

    return render_resolved(choice.recipe, choice.loaded)


def _local_hosts(description: ResolvedSpec) -> frozenset[str]:
    hosts = description.topology.hosts if description.topology else ()
    return frozenset(str(host.name) for host in hosts if is_this_machine(host.name))


def _python(description: ResolvedSpec, local_hosts: frozenset[str]) -> str:
    """Choose the interpreter of ranks on this machine: the cluster's, if all its hosts are this machine, else this one."""
    topology = description.topology
    given = topology.cluster.python if topology and len(local_hosts) == len(topology.hosts) else None
    return given or sys.executable


def make_plan(
    description: ResolvedSpec, request: RunSpec, surroundings: Surroundings
) -> LaunchPlan | Diagnostic | None:
    """Make the plan of a resolved specification; None if the specification has errors."""
    if not description.ok or description.topology is None:
        return None
    if description.command is not None:
        return _plan_of_command(description.command, description, request, surroundings=surroundings)
    if description.choice is None or description.layout is None:
        return None
    from ttlaunch.planning.recipe_plan import plan_recipe

    choice, layout = description.choice, description.layout
    plan = plan_recipe(
        choice,
        layout,
        description.topology,
        surroundings=surroundings,
        replay=request.replay,
        updates=request.updates,
        epochs=request.epochs,
        warm=request.warm,
    )
    if description.elastic is not None:
        from ttlaunch.planning.elastic import plan_replacements

        elastic = plan_replacements(plan, description.elastic, description.choice)
        if isinstance(elastic, Diagnostic):
            return elastic
        plan = elastic
    wrong = _wrong_profile_steps(request, description)
    asked = {contract.ENV_TRACE_STEPS: request.trace_steps, ENV_PROFILE_STEPS: request.profile_steps}
    more = {name: str(value) for name, value in asked.items() if value is not None}
    more |= {"KINETO_LOG_LEVEL": _QUIET} if request.profile_steps is not None else {}
    return wrong or (replace(plan, environment={**plan.environment, **more}) if more else plan)


def _plan_of_command(
    command: tuple[str, ...], description: ResolvedSpec, request: RunSpec, *, surroundings: Surroundings
) -> LaunchPlan | Diagnostic:
    assert description.topology is not None  # noqa: S101 - the specification has no errors
    if request.trace_steps is not None:
        return usage_mistake(f"`--trace` was given, but {description.name} is a program and no recipe")
    if request.profile_steps is not None:
        message = f"`--profile-steps` was given, but {description.name} is a program and no recipe"
        return usage_mistake(message)
    python = description.python
    program = CommandProgram(
        description.name,
        command,
        is_python=python is not None,
        uses_mpi=python is None or python.uses_mpi,
        is_independent=request.independent,
        warm=request.warm and python is not None and not description.starts_cold,
    )
    plan = plan_command(program, description.topology, surroundings, ranks=description.ranks)
    return plan if request.first is None or isinstance(plan, Diagnostic) else _with_later_ranks(plan, request.first)


def _with_later_ranks(plan: LaunchPlan, first: int) -> LaunchPlan:
    """Return the plan of a run that begins with the first ranks; `prepare` has chosen an engine to which the others can be added.

    Raises:
        ValueError: The plan has fewer ranks, or none would start.
    """
    if not 1 <= first <= plan.world_size:
        raise ValueError(f"{first} of {plan.world_size} ranks cannot start at first")
    return replace(plan, ranks=tuple(replace(row, later=row.rank >= first) for row in plan.ranks))


def _wrong_profile_steps(request: RunSpec, description: ResolvedSpec) -> Diagnostic | None:
    """Describe what is wrong with `--profile-steps`; None if nothing is, or the option was not given."""
    text = request.profile_steps
    if text is None:
        return None
    steps = parse_steps(text)
    if steps is None:
        hints = ("`--profile-steps 5-7`, or one step, such as `--profile-steps 5`",)
        return usage_mistake(f"`--profile-steps {shown(text)}` names no steps", *hints)
    training = getattr(description.choice and description.choice.loaded.config, "training_config", None)
    if training is not None and steps[0] > training.steps:
        last = f"the last step of this run is {training.steps}"
        return usage_mistake(f"`--profile-steps {text}` begins after the end: {last}")
    return None
