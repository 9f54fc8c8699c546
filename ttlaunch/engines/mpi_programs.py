"""What the launchers of MPI have in common: how they are found, what they start on a host, and how their daemons start there."""

import os
import shlex
import shutil
import subprocess
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path

from ttlaunch import contract
from ttlaunch.diagnostics import Blame, Diagnostic, shown
from ttlaunch.engines.base import DaemonStart
from ttlaunch.engines.process import with_home
from ttlaunch.planning.engine import EngineSignature, OverHosts, dotted
from ttlaunch.quick_dataclass import dataclass
from ttlaunch.system_reason import system_reason

PLACE_IN_MPI = (
    *("OMPI_COMM_WORLD_", "OMPI_UNIVERSE_SIZE", "PMIX_RANK", "PMIX_NAMESPACE", "PMIX_SERVER_"),
    *("PMI_RANK", "PMI_SIZE", "PMI_LOCAL", "PMI_FD", "PMI_ID", "PMI_PORT", "MPI_LOCAL"),
)
"""Beginnings of the variables by which any MPI tells a process which rank it is, for `EngineNames.place_prefixes`."""

_VERSION_S = 10.0  # for `--version`
_LONGEST_PATH = 300  # characters of a path in a message
_SYSTEM_PREFIXES = {"/usr", "/usr/local"}


@dataclass(frozen=True)
class FoundProgram:
    """A launcher of a version that can be used.

    Attributes:
        path: Absolute path of the program.
        version: Such as `(5, 0, 11)`.
    """

    path: str
    version: tuple[int, ...]


def find_program(
    signature: EngineSignature, *, python: str, search_path: str | None, install: str
) -> FoundProgram | Diagnostic:
    """Find a launcher and ask for its `--version`; one beside the interpreter wins, whether or not its environment is activated.

    Args:
        signature: How the engine is recognised.
        python: Interpreter of the ranks.
        search_path: `PATH` of the shell; None for that of this process.
        install: The hint that says how the engine is installed.
    """
    unusable = partial(Diagnostic, hints=(install,), blame=Blame.HOSTS)
    name = signature.program
    beside = Path(python).parent / name
    program = str(beside) if beside.is_file() else shutil.which(name, path=search_path)
    if program is None:
        note = f"looked beside {shown(python, longest=_LONGEST_PATH)} and in PATH"
        return unusable("H001", f"no `{name}` on this machine; nothing was started", notes=(note,))
    answer = _ask_version(program, unusable)
    if isinstance(answer, Diagnostic):
        return answer
    first_line = shown((answer.stdout + answer.stderr).strip().partition("\n")[0])
    version = signature.version_in(answer.stdout)
    if version is None:
        note = f"`{name} --version` says: {first_line or 'nothing'}"
        return unusable("H003", f"{program} is not {signature.title}; nothing was started", notes=(note,))
    refusal = signature.refusal(version)
    if refusal is not None:
        message = f"{program} is {signature.title} {dotted(version)}; {refusal}"
        return unusable("H003", message, notes=(first_line,))
    return FoundProgram(program, version)


def _ask_version(program: str, unusable: Callable[..., Diagnostic]) -> subprocess.CompletedProcess[str] | Diagnostic:
    try:
        return subprocess.run(
            [program, "--version"],
            capture_output=True,
            text=True,
            timeout=_VERSION_S,
            check=False,
            env=with_home(os.environ),
        )
    except OSError as error:
        return unusable("H001", f"{program} cannot be started: {system_reason(error)}")
    except subprocess.TimeoutExpired:
        return unusable("H001", f"{program} does not answer `--version` within {_VERSION_S:g} s")


def host_command(over_hosts: OverHosts) -> tuple[str, ...]:
    """Return the command that a launcher starts on every host: a script in the run's folder, which may be below the host's home.

    Users who start the launcher themselves can name another script in `TTLAUNCH_START`.
    """
    home = "" if over_hosts.remote_folder.startswith("/") else '"$HOME"/'
    runs = f"{shlex.quote(over_hosts.remote_folder.removeprefix('~/'))}/{contract.RUNS_DIR}"
    script = f'{home}{runs}/"${contract.ENV_RUN_ID}"/{contract.START_FILE}'
    choose = f'[ -n "${contract.ENV_START}" ] || {contract.ENV_START}={script}; exec sh "${contract.ENV_START}"'
    return ("sh", "-c", choose)


def daemon_command(command: str, start: DaemonStart, *, prefix_variables: Iterable[str] = ()) -> str:
    """Return the shell command that starts a launcher's daemon on a host, with the host's paths and variables.

    Args:
        command: The daemon's own command.
        start: How the daemon starts on this host.
        prefix_variables: Variables that name the launcher's folder, unless it belongs to the system.
    """
    variables: Mapping[str, str] = start.environment
    # Standard input has the secrets as `export` lines. `. /dev/stdin` cannot read them if it is a socket.
    lines = ['eval "$(cat)"']
    if start.prefix not in _SYSTEM_PREFIXES:
        variables = {**variables, **dict.fromkeys(prefix_variables, start.prefix)}
        lines.append(f"LD_LIBRARY_PATH={shlex.quote(start.prefix)}/lib${{LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}}")
        lines.append("export LD_LIBRARY_PATH")
    lines.append(f"PATH={shlex.quote(start.programs)}:{shlex.quote(start.prefix)}/bin:$PATH; export PATH")
    lines += [f"export {name}={shlex.quote(value)}" for name, value in variables.items()]
    return "; ".join([*lines, f"exec {command}"])
