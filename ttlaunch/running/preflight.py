"""Check this machine before a run whose ranks are all on it: the Python packages, and the MPI library that ranks load."""

import os
import re
import shutil
import subprocess
from collections.abc import Collection
from pathlib import Path

from ttlaunch.agent.tracing import may_trace
from ttlaunch.diagnostics import Blame, Diagnostic, Severity, listed, shown
from ttlaunch.engines.base import Capability, Engine
from ttlaunch.planning.launch_plan import GRPC_PACKAGES, LaunchPlan, RecipeProgram
from ttlaunch.running.runs.record_inputs import installed_version

_START_PACKAGES = ("safetensors",)  # also needed by ranks that begin from a checkpoint or weights
_ASK_MPI4PY = "from mpi4py import MPI; print(MPI.Get_library_version())"
_INTERPRETER = re.compile(r"python[0-9.]*t?$")
_DEADLINE_S = 30.0


def check_machine(plan: LaunchPlan, engine: Engine, *, python: str) -> list[Diagnostic]:
    """Return every reason why a plan whose ranks all run on this machine cannot start."""
    uses_mpi = Capability.MPI in engine.can
    if isinstance(plan.program, RecipeProgram):
        return check_packages(plan.program) or (_mpi4py_pairing(engine, python) if uses_mpi else [])
    program = shutil.which(plan.rank_command[0]) if plan.program.is_python and plan.program.uses_mpi else None
    is_interpreter = program is not None and _INTERPRETER.match(Path(program).name)
    # The program may use MPI without mpi4py, so only a wrong library counts.
    return _mpi4py_pairing(engine, program, must_answer=False) if uses_mpi and program and is_interpreter else []


def check_listeners() -> list[Diagnostic]:
    """Warn if MPI will listen on all interfaces of this machine, because its sockets cannot be moved."""
    try:
        if may_trace():
            return []
    except OSError:  # no process can be started, which the run itself will report
        return []
    message = "MPI listens on all networks of this machine: it does not let a process trace its children"
    hint = "in a container, `docker run --cap-add SYS_PTRACE`; elsewhere, a firewall"
    return [Diagnostic("H041", message, severity=Severity.WARNING, hints=(hint,), blame=Blame.HOSTS)]


def check_packages(program: RecipeProgram, *, without: Collection[str] = ()) -> list[Diagnostic]:
    """Report the packages that a recipe's ranks need and this Python lacks, except those in `without`."""
    needed = (*program.packages, *(_START_PACKAGES if program.start else ()))
    missing = [name for name in needed if name not in without and installed_version(name) is None]
    message = f"ranks need {listed(missing, last='and')}, not installed for this Python; nothing was started"
    extras = "train,grpc" if set(GRPC_PACKAGES).intersection(missing) else "train"
    hint = f"`pip install 'ttlaunch[{extras}]' -c constraints.txt`"
    return [Diagnostic("H005", message, hints=(hint,), blame=Blame.HOSTS)] if missing else []


def _mpi4py_pairing(engine: Engine, python: str, *, must_answer: bool = True) -> list[Diagnostic]:
    """Check that mpi4py loads the engine's own libmpi; with another one, each rank would be alone in a world of its own.

    Args:
        engine: The engine that starts the ranks.
        python: Their interpreter.
        must_answer: Whether an mpi4py that is missing or finds no library is a mistake too.
    """
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
        return [Diagnostic("H004", f"mpi4py does not answer: {shown(error)}", blame=Blame.HOSTS)]
    library = " ".join(answer.stdout.strip().partition("\n")[0].split(",")[0].split())
    if engine.pairs_with(library) if answer.returncode == 0 else not must_answer:
        return []
    if answer.returncode != 0:
        message = "mpi4py finds no MPI library"
        note = shown((answer.stderr.strip().splitlines() or ["no message"])[-1], longest=200)
    else:
        program = engine.signature.program
        message = f"mpi4py is paired with another MPI: it loads {shown(library)}, {program} is {engine.name}"
        note = f"{program}: {engine.program}"
    return [Diagnostic("H004", message, notes=(note,), hints=(engine.pairing_repair,), blame=Blame.HOSTS)]
