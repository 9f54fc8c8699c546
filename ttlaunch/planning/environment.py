"""The environment each rank receives, compatible with programs written for the vendor's launcher.

In ascending precedence: variables of the launching shell with a vendor prefix, the managed variables, the `global_env` of
the cluster and of the bindings, a rank's own `env_overrides`, and `--env`, which the topology already contains. A rank
keeps the variables that it inherits on its host, except managed ones: a `TT_MESH_ID` that is still set in a user's shell
must never reach a rank.
"""

from collections.abc import Collection, Mapping
from pathlib import Path

from ttlaunch import contract
from ttlaunch.diagnostics import Blame, Diagnostic
from ttlaunch.planning.launch_plan import LaunchPlan, is_python
from ttlaunch.spec.topology.model import Binding, Topology
from ttlaunch.spec.topology.variables import MANAGED

PASSED_PREFIXES = ("TT_", "ARCH_", "WH_", "TTNN_", "RELIABILITY_MODE", "DEEPSEEK_", "MESH_")


def plan_environment(topology: Topology, *, shell: Mapping[str, str], working_folder: Path) -> dict[str, str]:
    """Return the variables that every rank gets.

    Args:
        topology: The cluster.
        shell: The launching shell's environment.
        working_folder: The folder in which `ttlaunch` was started.
    """
    folder = str(working_folder)
    shared = {k: v for k, v in shell.items() if k.startswith(PASSED_PREFIXES) and k not in MANAGED}
    if topology.meshes:
        home = shell.get("TT_METAL_HOME", folder)
        shared |= {
            "TT_METAL_HOME": home,
            "TT_METAL_RUNTIME_ROOT": shell.get("TT_METAL_RUNTIME_ROOT", home),
            "TT_MESH_GRAPH_DESC_PATH": str(topology.mesh_graph_path),
            "LD_LIBRARY_PATH": shell.get("LD_LIBRARY_PATH", f"{folder}/build/lib"),
        }
    shared |= {
        "PYTHONPATH": shell.get("PYTHONPATH", folder),
        "PYTHONUNBUFFERED": "1",
        "TT_RUN_ORIGINAL_CWD": folder,
    }
    shared |= {k: shell[k] for k in ("HOME", "USER", "PATH", "VIRTUAL_ENV", "PYTHONHOME") if k in shell}
    return {**shared, **topology.cluster.environment, **topology.global_environment}


def plan_rank_environment(rank: int, binding: Binding | None, topology: Topology) -> dict[str, str]:
    """Return the variables of one rank alone; a managed one is left out if the cluster or the bindings set it for all ranks."""
    own = {"TT_RUN_RANK": str(rank)}
    if binding is not None:
        own["TT_MESH_ID"] = str(binding.mesh_id if binding.local_mesh_id is None else binding.local_mesh_id)
        if binding.mesh_graph_path is not None:
            own["TT_MESH_GRAPH_DESC_PATH"] = str(binding.mesh_graph_path)
        if binding.subcontext_id is not None:
            own["TT_RUN_SUBCONTEXT_ID"] = str(binding.subcontext_id)
            own["TT_RUN_SUBCONTEXT_SIZES"] = ",".join(map(str, topology.subcontext_sizes))
        if binding.mesh_host_rank is not None:
            own["TT_MESH_HOST_RANK"] = str(binding.mesh_host_rank)
    for_all = {**topology.cluster.environment, **topology.global_environment}
    own = {name: value for name, value in own.items() if name not in for_all}
    return own | dict(binding.environment if binding is not None else {})


def check_reserved(plan: LaunchPlan, *, on_command_line: Collection[str]) -> list[Diagnostic]:
    """Report variables for all ranks that only the launcher and the engine can set, because each rank has another value.

    Args:
        plan: The plan, with the variables that users gave for all ranks.
        on_command_line: The names of those that `--env` gives; the files of the cluster give the others.
    """
    names, by_us = plan.engine.names, contract.TORCH_PLACE if is_python(plan) else ()
    by_engine = {
        name for name in plan.environment if name in names.rank_variables or name.startswith(names.place_prefixes)
    }
    setter = names.launcher if names.has_mpi else "an engine with MPI"
    return [
        Diagnostic(
            "P067",
            f"`{name}` is set for all ranks, but {setter if name in by_engine else 'ttlaunch'} sets it for each",
            notes=("given by `--env`" if name in on_command_line else "given in the files of the cluster",),
            hints=("leave it out: `-n` and the hostfile say how many ranks there are, and where",),
            blame=Blame.COMMAND_LINE if name in on_command_line else Blame.DESCRIPTION,
        )
        for name in plan.environment
        if name in by_engine or name in by_us
    ]
