"""What must be true of this machine before a run starts: packages of the ranks, the MPI they load, local hosts."""

import importlib.metadata
import os
import platform
import re
import socket
import subprocess

from ttlaunch.diagnostics import Diagnostic, Label, listed, shown
from ttlaunch.plan.launch_plan import LaunchPlan, RecipeProgram
from ttlaunch.plan.openmpi import OpenMpi
from ttlaunch.topology.model import Topology

_RANK_PACKAGES = ("torch", "mpi4py", "numpy", "pydantic")
_ASK_MPI4PY = "from mpi4py import MPI; print(MPI.Get_library_version())"
_OPEN_MPI = re.compile(r"Open MPI v?(\d+)")
_DEADLINE_S = 30.0
_LOCAL_NAMES = {"localhost", "localhost.localdomain", "ip6-localhost"}


def check_machine(plan: LaunchPlan, topology: Topology, engine: OpenMpi, *, python: str) -> list[Diagnostic]:
    """Every reason why this plan cannot start from this machine; empty if there is none."""
    found = _remote_hosts(plan, topology)
    if isinstance(plan.program, RecipeProgram):
        found += _fabric(plan.program)
        packages = _packages()
        found += packages or _mpi4py_pairing(engine, python)
    return found


def is_local(host: str) -> bool:
    """Whether a name from a hostfile means this machine."""
    names = {socket.gethostname(), platform.node(), *_LOCAL_NAMES}
    return (
        host in names or host.split(".", 1)[0] in {name.split(".", 1)[0] for name in names} or host.startswith("127.")
    )


def _remote_hosts(plan: LaunchPlan, topology: Topology) -> list[Diagnostic]:
    remote = [host for host in plan.hosts if not is_local(host)]
    if not remote:
        return []
    first = next(host for host in topology.hosts if host.name == remote[0])
    many = len(remote) > 1
    which = f"{len(remote)} hosts are" if many else f"host `{shown(remote[0])}` is"
    return [
        Diagnostic(
            "H006",
            f"{which} not this machine; this version starts ranks on the launching machine only",
            Label(first.span, f"this machine is {socket.gethostname()}"),
            notes=(f"other machines: {listed(remote, last='and')}",) if many else (),
            hints=("`ttlaunch plan … --write DIR` writes the command and files that start it by hand",),
        )
    ]


def _fabric(program: RecipeProgram) -> list[Diagnostic]:
    multihost = program.config.get("multihost_config", {})
    if multihost.get("socket_type") != "fabric":
        return []
    return [
        Diagnostic(
            "H007",
            "`socket_type: fabric` needs ranks with linked devices; on this machine ranks have host memory only",
            hints=("`--set multihost_config.socket_type=mpi`",),
        )
    ]


def _packages() -> list[Diagnostic]:
    missing = []
    for package in _RANK_PACKAGES:
        try:
            importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            missing.append(package)
    if not missing:
        return []
    return [
        Diagnostic(
            "H005",
            f"ranks need {listed(missing, last='and')}, not installed for this Python; nothing was started",
            hints=("`pip install 'ttlaunch[train]' -c constraints.txt`",),
        )
    ]


def _mpi4py_pairing(engine: OpenMpi, python: str) -> list[Diagnostic]:
    """mpi4py loads whichever libmpi it finds first; one that is not mpirun's starts N worlds of one rank each."""
    environment = {**os.environ, "MPI4PY_RC_INITIALIZE": "0"}
    try:
        answer = subprocess.run(
            [python, "-c", _ASK_MPI4PY],
            capture_output=True,
            text=True,
            timeout=_DEADLINE_S,
            check=False,
            env=environment,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return [Diagnostic("H004", f"mpi4py does not answer: {shown(error)}")]
    library = " ".join(answer.stdout.strip().partition("\n")[0].split(",")[0].split())
    match = _OPEN_MPI.search(library)
    if answer.returncode == 0 and match and int(match[1]) == engine.version[0]:
        return []
    if answer.returncode != 0:
        reason = shown((answer.stderr.strip().splitlines() or ["no message"])[-1], longest=200)
        return [Diagnostic("H004", "mpi4py finds no MPI library", notes=(reason,), hints=(_REPAIR,))]
    return [
        Diagnostic(
            "H004",
            f"mpi4py is paired with another MPI: it loads {shown(library)}, mpirun is {engine.name}",
            notes=(f"mpirun: {engine.mpirun}",),
            hints=(_REPAIR,),
        )
    ]


_REPAIR = "`pip install --force-reinstall mpi4py 'openmpi>=5.0.8,<6'` gives mpi4py and mpirun the same library"
