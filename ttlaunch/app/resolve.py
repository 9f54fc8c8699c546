"""Read and check everything that a run's specification names: topology, recipe, configuration and data.

All mistakes are collected.
"""

import os
import shutil
import sys
from collections.abc import Sequence
from dataclasses import field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from ttlaunch.app.asked_engine import asked_engine, refuse_recipe, warn_of_early_variable, warn_of_warm, with_engine
from ttlaunch.app.dialogue import Dialogue, Unattended
from ttlaunch.app.python_program import PythonProgram, look_at_python
from ttlaunch.app.resolve_cluster import names_slurm, resolve_cluster
from ttlaunch.app.run_spec import RunSpec
from ttlaunch.app.torchrun_options import ranks_of
from ttlaunch.diagnostics import (
    Diagnostic,
    Label,
    Severity,
    Source,
    counted,
    has_errors,
    shown,
    usage_mistake,
)
from ttlaunch.quick_dataclass import dataclass

if TYPE_CHECKING:
    from ttlaunch.app.slurm_hosts import SlurmHosts
    from ttlaunch.engines.base import EngineFinder
    from ttlaunch.planning.elastic import Bounds
    from ttlaunch.planning.recipe_plan import RecipeChoice
    from ttlaunch.planning.roles import RoleLayout
    from ttlaunch.spec.named_folders import NamedFolder
    from ttlaunch.spec.recipe.config import LoadedConfig
    from ttlaunch.spec.recipe.declare import Recipe
    from ttlaunch.spec.topology.model import Topology


_LONGEST_MESSAGE = 500
_ROOM = Source("what Slurm is asked for", "slurm-1 slots=65536")
SCRIPT_PREFIX = ("-m", "mpi4py")
"""The options with which an interpreter runs a Python script as a rank."""


THREADS = "ranks that share a host get OMP_NUM_THREADS=1, as under torchrun; set it to change that"
"""The remark of a plan that a run makes too."""


@dataclass
class ResolvedSpec:
    """A run specification after reading and checking.

    Attributes:
        topology: The cluster's topology; None if it has errors.
        choice: The recipe and its configuration; None if the target is no recipe or cannot be used.
        layout: The layout of the recipe's roles on the cluster; None if no layout fits.
        command: The command line of every rank if the target is no recipe.
        name: The name of the recipe or program.
        python: What is known about a program in Python; None for any other target.
        ranks: The number of ranks that the options ask for; None if they leave it open.
        files: The files of the topology that were read.
        descriptor_found: A text that says where the mesh graph descriptor was found.
        mpi_args: Further arguments for the engine's command.
        engine: The engine that `--engine` names; None if it names none.
        remarks: What the options changed besides what they name, for the plan that is shown.
        slurm: The hosts that Slurm gives, or is asked for; None for any other cluster.
        elastic: How many workers of a recipe make a step, where workers come and go.
        starts_cold: Whether ranks are no forks although `--warm` is given, which a diagnostic says.
        starts_with_too_few: Whether `--ranks` gives fewer of them than make a step, which a diagnostic says.
    """

    diagnostics: list[Diagnostic] = field(default_factory=list)
    topology: "Topology | None" = None
    choice: "RecipeChoice | None" = None
    layout: "RoleLayout | None" = None
    command: tuple[str, ...] | None = None
    name: str = ""
    python: PythonProgram | None = None
    ranks: int | None = None
    files: list[str] = field(default_factory=list)
    descriptor_found: str | None = None
    mpi_args: tuple[str, ...] = ()
    engine: "EngineFinder | None" = None
    remarks: list[str] = field(default_factory=list)
    slurm: "SlurmHosts | None" = None
    elastic: "Bounds | None" = None
    starts_cold: bool = False
    starts_with_too_few: bool = False

    @property
    def ok(self) -> bool:
        return not has_errors(self.diagnostics)


def resolve(
    request: RunSpec,
    *,
    working_folder: Path | None = None,
    dialogue: Dialogue | None = None,
    hosts: Source | None = None,
) -> ResolvedSpec:
    """Read and check everything that a specification names; nothing is started and nothing is written.

    Args:
        request: The specification.
        working_folder: The folder to which relative paths are relative; None for the current folder.
        dialogue: Wraps the import of a recipe, whose code may print; None to wrap nothing.
        hosts: The text of a hostfile that is in no file, in place of what the specification names; None for the latter.
    """
    working_folder, dialogue = working_folder or Path.cwd(), dialogue or Unattended()
    needed = None
    if hosts is None and _is_open_to_slurm(request, working_folder):
        # Slurm has to be asked for as many ranks as the bindings or the recipe have, which are read as if there were room for all.
        first = _resolve_on(request, working_folder, dialogue, hosts=_ROOM)
        if not first.ok:
            return first
        needed = first.layout.world_size if first.layout else first.topology.world_size if first.topology else None
    return _resolve_on(request, working_folder, dialogue, hosts=hosts, needed=needed)


def _is_open_to_slurm(request: RunSpec, working_folder: Path) -> bool:
    """Whether Slurm is asked for hosts, and only the target or its bindings say for how many ranks."""
    if not names_slurm(request) or request.ranks is not None or request.nproc_per_node is not None:
        return False
    from ttlaunch.app.slurm_hosts import job_variables

    is_recipe = not (request.target is None or request.is_command or is_script(request.target, working_folder))
    return job_variables(request) is None and (is_recipe or request.rank_bindings is not None)


def _resolve_on(
    request: RunSpec, working_folder: Path, dialogue: Dialogue, *, hosts: Source | None, needed: int | None = None
) -> ResolvedSpec:
    """Resolve a specification on these hosts; `needed` is the number of ranks to ask Slurm for if no option says it."""
    result = ResolvedSpec()
    result.engine, found = asked_engine(request.engine)
    result.diagnostics += found
    cluster = resolve_cluster(request, working_folder, engine=result.engine, hosts=hosts, needed=needed)
    result.topology, result.slurm, result.mpi_args = cluster.topology, cluster.slurm, cluster.mpi_args
    result.files, result.descriptor_found = cluster.files, cluster.descriptor_found
    result.diagnostics += cluster.diagnostics
    result.remarks += [cluster.slurm.remark] if cluster.slurm and cluster.topology else []
    request = _with_number_of_ranks(result, request, working_folder)
    if request.target is None:
        return result
    if request.is_command:
        _resolve_command(result, request, working_folder)
    elif is_script(request.target, working_folder):
        _resolve_script(result, request, working_folder)
    else:
        _resolve_recipe(result, request, working_folder, dialogue=dialogue)
    if request.warm and result.command is not None:
        _check_warm(result, working_folder)
    return result


def _check_warm(result: ResolvedSpec, working_folder: Path) -> None:
    """Warn of `--warm` for a program whose ranks cannot be forks of a process that has imported torch."""
    from ttlaunch.app.early_variables import early_variable

    if result.python is None:
        result.diagnostics.append(warn_of_warm(result.name))
    elif why := early_variable(result.python, working_folder):
        result.starts_cold = True
        result.diagnostics.append(warn_of_early_variable(why))


def _takes_all_slots(result: ResolvedSpec, request: RunSpec, working_folder: Path) -> bool:
    """Whether a program has a rank for every slot without an option: on hosts of Slurm, whose slots are what it was asked for."""
    if result.slurm is None or result.topology is None or result.topology.bindings or request.target is None:
        return False
    return request.is_command or is_script(request.target, working_folder)


def _with_number_of_ranks(result: ResolvedSpec, request: RunSpec, working_folder: Path) -> RunSpec:
    """Put the number of ranks into a specification that gives it by torchrun's options, and note it in the result."""
    ranks = request.ranks if result.topology is None else ranks_of(request, result.topology)
    if isinstance(ranks, Diagnostic):
        result.diagnostics.append(ranks)
        return request
    if ranks is None and result.topology and _takes_all_slots(result, request, working_folder):
        ranks = len(result.topology.slots)
    result.ranks = ranks
    if ranks is not None and not result.slurm and request.ranks is None:
        result.remarks.append(f"torchrun's options ask for the same as `--ranks {ranks}`")
    return replace(request, ranks=ranks)


def is_script(target: str, working_folder: Path) -> bool:
    """Whether a target is a program rather than a recipe: a `.py` file, or any existing file."""
    return target.endswith(".py") or os.path.isfile(working_folder / target)  # noqa: PTH113 - never raises


def _resolve_script(result: ResolvedSpec, request: RunSpec, working_folder: Path) -> None:
    script = working_folder / str(request.target)
    if not script.is_file():
        name, problem = shown(request.target), _no_file(script)
        result.diagnostics.append(usage_mistake(f"{name} {problem}" if problem else f"there is no script {name}"))
        return
    _refuse_recipe_options(result, request)
    # A link stays one, as under torchrun: the script may look for files beside the name by which it was started.
    path = str(script.parent.resolve() / script.name)
    result.name = script.stem
    if script.suffix != ".py" and not os.access(script, os.X_OK):
        result.diagnostics.append(_unusable_program(str(request.target), script))
    if script.suffix == ".py":
        _set_python(
            result, (sys.executable, path, *request.arguments), working_folder, is_independent=request.independent
        )
    # `-m mpi4py` aborts the world when a rank raises; a bare interpreter would hang in MPI_Finalize.
    names_mpi = result.python is not None and result.python.uses_mpi and result.python.why
    mpi = SCRIPT_PREFIX if names_mpi else ()
    prefix = (sys.executable, *mpi) if script.suffix == ".py" else ()
    result.command = (*prefix, path, *request.arguments)


def _no_file(path: Path) -> str:
    """Say what a path is that is no regular file; empty if there is nothing."""
    if path.is_dir():
        return "is a folder and no script"
    if path.exists():
        return "is no regular file, and so no script"
    return "is a link to a file that does not exist" if path.is_symlink() else ""


def _unusable_program(program: str, path: Path) -> Diagnostic:
    """Say why a program cannot be run; `path` is the file or folder of its name, if there is one."""
    name = shown(f"./{program}" if program[:1] == "-" else program)  # a word that begins with a dash is an option
    if path.is_file() and path.suffix == ".ipynb":
        from ttlaunch.app.check_python import notebook_mistake

        return notebook_mistake(program)
    if path.is_file() and path.suffix == ".py":
        hint = f"`-- python {name}` runs it with the Python of your shell, `ttlaunch run {name}` with that of ttlaunch"
        return usage_mistake(f"`{name}` is a Python script and no program that can be run by its name", hint)
    if "/" not in program and path.is_file():
        return usage_mistake(
            f"`{name}` is a file of this folder, and there is no program of this name", f"`-- ./{name}`"
        )
    if "/" in program and path.is_dir():
        return usage_mistake(f"`{name}` is a folder and no program", "a recipe's folder goes before `--`")
    if path.is_file():
        hint = f"`chmod +x {name}` makes it a program, or name what is to run it: `-- bash {name}`"
        return usage_mistake(f"`{name}` is not executable", hint)
    hint = "a recipe's name goes before `--`"
    if "/" in program:
        known = shutil.which(path.name)
        hint = (
            f"`-- {shown(path.name)}` is {shown(known)}"
            if known
            else "a relative path begins in the folder where the command is typed"
        )
    return usage_mistake(f"there is no program `{name}` to run", hint)


def _resolve_command(result: ResolvedSpec, request: RunSpec, working_folder: Path) -> None:
    program = str(request.target)
    beside = working_folder / program if "/" in program else None
    if _is_here(result) and not shutil.which(str(beside) if beside else program, path=os.environ.get("PATH")):
        result.diagnostics.append(_unusable_program(program, working_folder / program))
    _refuse_recipe_options(result, request)
    result.command = (program, *request.arguments)
    result.name = Path(program).name
    _set_python(result, result.command, working_folder, is_independent=request.independent)


def _set_python(result: ResolvedSpec, command: Sequence[str], working_folder: Path, *, is_independent: bool) -> None:
    """Note whether the command starts a Python program, and for the plan that is shown what its ranks get."""
    result.python = look_at_python(command, working_folder)
    if result.python is not None:
        from ttlaunch.app.check_python import check_python

        # The interpreter of `ttlaunch run SCRIPT` is the cluster's, if its description names one.
        named = result.topology.cluster.python if result.topology else None
        is_ours = result.python.interpreter == sys.executable
        checked = replace(result.python, interpreter=named) if named and is_ours else result.python
        bound = result.topology.world_size if result.topology else None
        num_ranks = bound or result.ranks or 1
        given = {**result.topology.cluster.environment, **result.topology.global_environment} if result.topology else {}
        result.diagnostics += check_python(
            checked,
            working_folder=working_folder,
            is_here=_is_here(result),
            num_ranks=num_ranks,
            has_own_path="PYTHONPATH" in given,
        )
        result.python, mpi = with_engine(result.python, result.engine)
        result.remarks.append(f"ranks get the variables that torchrun sets, such as RANK and MASTER_ADDR; {mpi}")
        if is_independent:
            result.remarks.append("each rank is meant to train by itself")
        if result.topology is not None:
            is_open = (
                bound is None and result.ranks is None and result.ok
            )  # options that contradict the hosts say a number, too
            _look_at_places(result, result.topology, num_ranks, is_open=is_open)


def _look_at_places(result: ResolvedSpec, topology: "Topology", num_ranks: int, *, is_open: bool) -> None:
    """Warn if a Python program leaves hosts idle because nobody said how many ranks it has, and note how many threads ranks get."""
    hosts = [slot.host.name for slot in topology.slots[:num_ranks]]
    if is_open and len(topology.hosts) > 1:
        slots = counted(len(topology.slots), "slot")
        message = f"{result.name} starts with 1 rank, although `{topology.name}` has {slots}"
        place = Label(topology.hosts[-1].span, f"{slots} on {counted(len(topology.hosts), 'host')}")
        hint = f"`-n {len(topology.slots)}` starts a rank in each slot, `-n 1` says that one is meant"
        result.diagnostics.append(Diagnostic("P069", message, place, hints=(hint,), severity=Severity.WARNING))
    given = {*os.environ, *topology.cluster.environment, *topology.global_environment}
    if len(set(hosts)) < len(hosts) and "OMP_NUM_THREADS" not in given:
        result.remarks.append(THREADS)


def _is_here(result: ResolvedSpec) -> bool:
    """Whether all hosts are this machine; on other hosts, the program is looked for later."""
    from ttlaunch.hosts.transport.local import is_this_machine

    return result.topology is None or all(is_this_machine(host.name) for host in result.topology.hosts)


def _refuse_recipe_options(result: ResolvedSpec, request: RunSpec) -> None:
    unused = [
        f"`{name}`"
        for name, value in (
            ("-c", request.config_file),
            ("--set", request.overrides),
            ("--naive", request.naive),
            ("--elastic", request.elastic),
            ("--audit", request.audit),
        )
        if value
    ]
    if unused:
        verb = "configure" if len(unused) > 1 else "configures"
        message = f"{' and '.join(unused)} {verb} recipes; {shown(request.target)} is a program"
        hint = "leave `--naive` out" if unused == ["`--naive`"] else "give its own arguments after `--`"
        result.diagnostics.append(usage_mistake(message, hint))
    if request.resume is not None:
        from ttlaunch.app.find_start import refuse_resume_of_program

        result.diagnostics.append(refuse_resume_of_program(str(request.target), is_command=request.is_command))


def _check_hiding(found: "NamedFolder") -> list[Diagnostic]:
    """Warn if a recipe of the current folder has the name of a built-in recipe and hides it."""
    if not found.hides:
        return []
    message = f"the recipe `{found.name}` is the one in {shown(found.folder, longest=_LONGEST_MESSAGE)}"
    hint = f"rename that folder to use the built-in recipe `{found.name}`, which it hides"
    return [Diagnostic("P051", message, hints=(hint,), severity=Severity.WARNING)]


def _resolve_recipe(result: ResolvedSpec, request: RunSpec, working_folder: Path, *, dialogue: Dialogue) -> None:
    from ttlaunch.app.check_data import check_data
    from ttlaunch.app.find_start import find_start
    from ttlaunch.planning.recipe_plan import RecipeChoice, check_recipe
    from ttlaunch.spec.recipe.discovery import find_recipe

    found = find_recipe(str(request.target), working_folder=working_folder)
    with dialogue.recipe_code():
        recipe = found if isinstance(found, Diagnostic) else _load(found, request)
    if isinstance(found, Diagnostic) or isinstance(recipe, Diagnostic):
        result.diagnostics.append(recipe if isinstance(recipe, Diagnostic) else found)  # type: ignore[arg-type]
        return
    result.name = found.name
    result.diagnostics += _check_hiding(found)
    if request.independent:
        message = f"`--independent` is for scripts; {found.name} is a recipe, whose ranks train one model"
        result.diagnostics.append(usage_mistake(message, "leave `--independent` out"))
    if request.arguments:
        message = f"`{shown(' '.join(request.arguments))}` follows the recipe `{found.name}`, which takes no arguments"
        result.diagnostics.append(usage_mistake(message, "`--set KEY=VALUE` configures a recipe"))
    loaded = _configure(result, request, recipe, found=found, working_folder=working_folder)
    result.diagnostics += refuse_recipe(result.engine, uses_mpi=loaded.uses_mpi)
    undefined = undefined_references(loaded)
    result.diagnostics += undefined
    data = None
    if loaded.config is not None and recipe.uses_data and not undefined:
        data, mistake = check_data(loaded, working_folder)
        result.diagnostics += [mistake] if mistake else []
    result.choice = RecipeChoice(found.name, found.folder, recipe, loaded, data, is_naive=request.naive)
    if loaded.config is not None and not undefined:
        start, mistakes = find_start(
            result.choice, resume=request.resume, runs_dir=request.runs_dir, working_folder=working_folder
        )
        result.choice = replace(result.choice, start=start)
        result.diagnostics += mistakes
    if result.topology is not None:
        ranks = None if result.starts_with_too_few else request.ranks  # said already, with the number that is needed
        result.layout, mistakes = check_recipe(result.choice, result.topology, ranks=ranks)
        result.diagnostics += mistakes


def _load(found: "NamedFolder", request: RunSpec) -> "Recipe | Diagnostic":
    """Import a recipe's declaration, in the form that the options ask for."""
    from ttlaunch.spec.recipe.discovery import load_naive, load_recipe

    recipe = (load_naive if request.naive else load_recipe)(found)
    if request.elastic is None or isinstance(recipe, Diagnostic):
        return recipe
    from ttlaunch.planning.elastic import elastic_form

    return elastic_form(recipe)


def _let_workers_come_and_go(
    result: ResolvedSpec, request: RunSpec, recipe: "Recipe", *, loaded: "LoadedConfig"
) -> "LoadedConfig":
    """Check `--elastic`, and return the configuration with which workers can come and go."""
    from ttlaunch.planning.elastic import over_grpc, parse_bounds, refuse

    if request.naive:
        message = "`--elastic` was given with `--naive`, and the ranks of a naive form stay the same"
        result.diagnostics.append(usage_mistake(message, "leave one of them out"))
        return loaded
    bounds = parse_bounds(str(request.elastic))
    if isinstance(bounds, Diagnostic):
        result.diagnostics.append(bounds)
        return loaded
    loaded = over_grpc(recipe, loaded)
    mistakes = refuse(result.name, recipe, loaded, bounds=bounds, ranks=request.ranks)
    result.diagnostics += mistakes
    result.elastic = bounds if not mistakes else None
    result.starts_with_too_few = request.ranks is not None and request.ranks < bounds.minimum
    return loaded


def _configure(
    result: ResolvedSpec, request: RunSpec, recipe: "Recipe", *, found: "NamedFolder", working_folder: Path
) -> "LoadedConfig":
    """Read the recipe's configuration, and apply what `--set`, `--ranks` and `--naive` change."""
    from ttlaunch.app.initial_weights import take_sizes
    from ttlaunch.app.training_file import read_training
    from ttlaunch.planning.audits import with_audits
    from ttlaunch.planning.given_ranks import set_ranks
    from ttlaunch.spec.recipe.config import naive_config, unused_by_naive

    loaded = read_training(request, recipe, found, working_folder=working_folder)
    loaded = with_audits(recipe, loaded, request.audit)
    result.diagnostics += _other_kind(loaded) or loaded.diagnostics
    if not request.naive:
        loaded, mistakes = take_sizes(recipe, loaded, working_folder, is_own_file=request.config_file is None)
        result.diagnostics += mistakes
    cluster = result.topology
    if (
        request.ranks is not None
        and cluster is not None
        and not cluster.bindings
        and request.ranks <= len(cluster.slots)
    ):
        loaded, remark = set_ranks(recipe, loaded, request.ranks)
        result.remarks += [remark] if remark else []
    if request.elastic is not None:
        loaded = _let_workers_come_and_go(result, request, recipe, loaded=loaded)
    if request.naive:
        remark = unused_by_naive(loaded)
        result.remarks += [remark] if remark else []
        loaded, mistakes = naive_config(found.name, recipe, loaded)
        result.diagnostics += mistakes
    return loaded


def _other_kind(loaded: "LoadedConfig") -> list[Diagnostic]:
    """Return the one mistake if a file of a cluster was given as the training file; nothing for a training file."""
    from ttlaunch.spec.topology.recognise import Kind, OtherKind, explain_other_kinds, kind_of_content

    source = loaded.root.span.source
    kind = kind_of_content(source) if has_errors(loaded.diagnostics) else None
    return list(explain_other_kinds([OtherKind(source, Kind.TRAIN, kind)])) if kind and kind is not Kind.TRAIN else []


def undefined_references(loaded: "LoadedConfig") -> list[Diagnostic]:
    """Report every `env:NAME` in the configuration whose variable this shell does not have."""
    from ttlaunch.contract import referred_variable

    found = []
    for key, value in loaded.strings():
        name = referred_variable(value)
        if name is not None and name not in os.environ:
            span = loaded.span(key)
            message = f"`{key}` is `{value}`, and this shell has no variable `{name}`"
            found.append(Diagnostic("C029", message, Label(span) if span else None, hints=(f"`export {name}=…`",)))
    return found
