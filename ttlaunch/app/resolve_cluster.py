"""Read the cluster of a run: a configuration, single files, or hosts that Slurm gives.

All mistakes are collected.
"""

import os
from dataclasses import field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from ttlaunch.app.dialogue import Dialogue
from ttlaunch.app.run_spec import RunSpec, short_name
from ttlaunch.diagnostics import Diagnostic, LaunchError, Source, has_errors, shown, usage_mistake
from ttlaunch.quick_dataclass import dataclass

if TYPE_CHECKING:
    from ttlaunch.app.slurm_hosts import SlurmHosts
    from ttlaunch.engines.base import EngineFinder
    from ttlaunch.spec.topology.load import Loaded
    from ttlaunch.spec.topology.model import Topology


@dataclass
class ResolvedCluster:
    """The cluster of a run after reading and checking.

    Attributes:
        topology: None if it has errors.
        slurm: The hosts that Slurm gives, or is asked for; None for any other cluster.
        files: The files that were read.
        descriptor_found: A text that says where the mesh graph descriptor was found.
        mpi_args: Further arguments for the engine's command.
    """

    diagnostics: list[Diagnostic] = field(default_factory=list)
    topology: "Topology | None" = None
    slurm: "SlurmHosts | None" = None
    files: list[str] = field(default_factory=list)
    descriptor_found: str | None = None
    mpi_args: tuple[str, ...] = ()


def resolve_cluster(
    request: RunSpec,
    working_folder: Path,
    *,
    engine: "EngineFinder | None",
    hosts: Source | None = None,
    needed: int | None = None,
) -> ResolvedCluster:
    """Read the cluster that `--on` names, or the options `--hostfile`, `--rank-bindings` and `--mpi-args`.

    Args:
        request: The specification of the run.
        working_folder: The folder to which relative paths are relative.
        engine: The engine that `--engine` names, whose arguments `--mpi-args` has.
        hosts: The text of a hostfile that is in no file, in place of what the specification names.
        needed: The number of ranks to ask Slurm for if no option says it.
    """
    from ttlaunch.spec.topology.variables import given_variables

    files, found = _named_files(request, engine)
    result = ResolvedCluster(found, mpi_args=files.passed)
    if hosts is None and names_slurm(request) and not has_errors(result.diagnostics):
        from ttlaunch.app.slurm_hosts import slurm_hosts

        result.slurm, mistakes = slurm_hosts(request, ranks=needed)
        result.diagnostics += mistakes
        hosts = result.slurm.hosts if result.slurm else None
    if has_errors(result.diagnostics):
        return result
    loaded = _load(request, replace(files, hosts=hosts or files.hosts), working_folder)
    if isinstance(loaded, Diagnostic):
        result.diagnostics.append(loaded)
        return result
    result.topology = loaded.topology
    if result.topology and result.slurm:
        result.topology = replace(result.topology, name=request.on, job=result.slurm.job)
        result.diagnostics += result.slurm.check_devices(result.topology)
    if result.topology and request.excluded:
        from ttlaunch.spec.topology.without_hosts import leave_out

        result.topology = leave_out(result.topology, request.excluded, max_ranks=request.ranks)
    variables, mistakes = given_variables(request.env, environment=os.environ)
    result.diagnostics += [*loaded.diagnostics, *mistakes]
    if result.topology and variables:
        result.topology = result.topology.with_variables(variables)
    result.files = [short_name(path, working_folder) for path in loaded.files]
    result.descriptor_found = loaded.descriptor_found
    return result


def _load(request: RunSpec, files: "_NamedFiles", working_folder: Path) -> "Loaded | Diagnostic":
    """Read the files that options name, or else the configuration of `--on`."""
    from ttlaunch.spec.topology.discovery import find_configuration
    from ttlaunch.spec.topology.load import load_topology, load_topology_files

    if files.any:
        return load_topology_files(
            files.hostfile,
            files.rank_bindings,
            hosts=files.hosts,
            environment=os.environ,
            working_folder=working_folder,
        )
    found = find_configuration(request.on, working_folder=working_folder)
    if isinstance(found, Diagnostic):
        return found
    return load_topology(found.folder, name=found.name, environment=os.environ, working_folder=working_folder)


def names_slurm(request: RunSpec) -> bool:
    """Whether options mention Slurm; cheap, because most runs do not."""
    options = (request.nodes, request.time_limit, request.gres, request.account, request.qos)
    return request.on.startswith("slurm") or any(value is not None for value in options)


def load_cluster(on: str, hostfile: Path | None, dialogue: Dialogue) -> "Topology":
    """Read the cluster that `--on` or `--hostfile` names, for a command that only needs its hosts.

    Raises:
        LaunchError: The cluster's description has errors.
    """
    found = resolve_cluster(RunSpec(target=None, on=on, hostfile=hostfile), Path.cwd(), engine=None)
    if found.slurm is not None and found.slurm.job is None:
        message = "`--on slurm` asks for hosts only for a run; this command uses those of a job"
        found.diagnostics.append(
            usage_mistake(message, "run it in the shell of `salloc`, or in the script of `sbatch`")
        )
    if found.topology is None or has_errors(found.diagnostics):
        raise LaunchError(found.diagnostics)
    dialogue.warn(found.diagnostics)
    return found.topology


@dataclass(frozen=True)
class _NamedFiles:
    """The files and hosts that options other than `--on` name.

    Attributes:
        hosts: The hosts in `--mpi-args`, as the text of a hostfile.
        passed: The arguments in `--mpi-args` that are passed to the engine unchanged.
    """

    hostfile: Path | None = None
    rank_bindings: Path | None = None
    hosts: Source | None = None
    passed: tuple[str, ...] = ()

    @property
    def any(self) -> bool:
        """Whether these options, and not `--on`, describe the cluster."""
        return not (self.hostfile is None and self.rank_bindings is None and self.hosts is None)


def _named_files(request: RunSpec, engine: "EngineFinder | None") -> tuple[_NamedFiles, list[Diagnostic]]:
    """Collect the files and hosts that options name, and report options that name the hosts twice."""
    found: list[Diagnostic] = []
    named = _NamedFiles(request.hostfile, request.rank_bindings)
    given = (("--hostfile", request.hostfile), ("--rank-bindings", request.rank_bindings))
    options = [f"`{name}`" for name, value in given if value]
    if request.mpi_args is not None:
        from ttlaunch.engines.choose import ENGINES

        arguments, found = (engine or ENGINES[0]).parse_arguments(request.mpi_args)
        if arguments.rankfile:
            path, mistake = arguments.rankfile
            found[found.index(mistake)] = _with_hostfile(mistake, path)
        if arguments.hosts or arguments.hostfile:
            options.append("`--mpi-args`")
            if request.hostfile:
                found.append(usage_mistake("`--hostfile` and `--mpi-args` both name hosts; one was expected"))
        hostfile = Path(arguments.hostfile) if arguments.hostfile else request.hostfile
        named = _NamedFiles(hostfile, request.rank_bindings, arguments.hosts, arguments.passed)
    from_slurm = request.on.partition(":")[0] == "slurm" and not (named.hostfile or named.hosts)
    if options and request.on != "local" and not from_slurm:
        message = (
            f"{' and '.join(options)} and configuration `{shown(request.on)}` both describe a cluster; one was expected"
        )
        found.append(usage_mistake(message, f"leave out {' and '.join(options)}, or the configuration"))
    return named, found


def _with_hostfile(mistake: Diagnostic, rankfile: str) -> Diagnostic:
    """Add to the mistake of naming a rankfile which hostfile places the ranks alike."""
    from ttlaunch.spec.located.codes import TOPOLOGY
    from ttlaunch.spec.located.source import read_source
    from ttlaunch.spec.topology.hosts import hostfile_of_rankfile

    source, _ = read_source(Path.cwd() / rankfile, codes=TOPOLOGY, what="a rankfile")
    hint = hostfile_of_rankfile(source) if source else ""
    return replace(mistake, hints=(*mistake.hints, f"{hint}; `--hostfile FILE` names it")) if hint else mistake
