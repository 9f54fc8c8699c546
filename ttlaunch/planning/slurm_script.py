"""Write the batch script of a run that Slurm starts later, and the file with the variables that it reads.

The script holds nothing but what Slurm needs and the path of its own folder. `scontrol show job`, the command lines of processes and the
script itself can be read by others, so values that a user has set are in the folder's files, which only the user can read.
"""

import math
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

ENVIRONMENT_FILE = "environment.sh"
LOG_FILE = "job.log"
PACKAGE_FOLDER = "code/package"

_SAVING_S = 30
"""The time that a run has after the grace period of its ranks, to collect their files and to write its report."""

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*\Z")
_NO_SIGN = re.compile(r"[^A-Za-z0-9_.-]+")
_LONGEST_NAME = 40
_OF_THE_SESSION = (
    "SLURM",
    "SBATCH_",
    "SRUN_",
    "SSH_",
    "XDG_RUNTIME_DIR",
    "XDG_SESSION",
    "DBUS_",
    "DISPLAY",
    "WAYLAND_",
)
"""Beginnings of names of variables that are about the machine or the job in which a run was submitted."""
_OF_THE_SHELL = {"_", "SHLVL", "PWD", "OLDPWD", "HOSTNAME", "PPID", "UID", "EUID"}


@dataclass(frozen=True)
class BatchScript:
    """What a batch script depends on.

    Attributes:
        name: The name of the recipe or program.
        folder: The job's folder, which every host of the job sees.
        python: The interpreter that has submitted the run.
        options: The hosts that are asked for, as options of sbatch.
        grace_s: The time that ranks have to save after an order to end.
        requeue: Whether Slurm may start the job again.
    """

    name: str
    folder: Path
    python: str
    options: Sequence[str]
    grace_s: float
    requeue: bool

    @property
    def signal_s(self) -> int:
        """Return how long before its time limit the job is told; Slurm may do so up to a minute earlier."""
        return math.ceil(self.grace_s) + _SAVING_S


def render_batch_script(script: BatchScript) -> str:
    """Render `job.sbatch`; `sbatch` has to be called in the job's folder."""
    options = [
        f"--job-name=ttlaunch-{_NO_SIGN.sub('-', script.name)[:_LONGEST_NAME]}",
        *script.options,
        f"--output={LOG_FILE}",
        "--open-mode=append",
        f"--signal=B:USR1@{script.signal_s}",
        "--requeue" if script.requeue else "--no-requeue",
        "--export=NONE",
    ]
    folder = shlex.quote(str(script.folder))
    start = "import sys; sys.path.insert(0, sys.argv[1]); import ttlaunch; del sys.path[0]; from ttlaunch.cli.job import main; main()"
    lines = [
        "#!/bin/sh",
        *(f"#SBATCH {option}" for option in options),
        # Slurm starts the script in another folder if the job's is not there.
        f'cd -- {folder} || {{ echo "$(hostname) does not see the folder of this job" >&2; exit 4; }}',
        f". ./{ENVIRONMENT_FILE} || exit 4",
        # Slurm sends the signal of the time limit to the process of the script alone, so ttlaunch takes its place.
        f"exec {shlex.quote(script.python)} -P -c {shlex.quote(start)} {folder}/{PACKAGE_FOLDER}",
    ]
    return "\n".join(lines) + "\n"


def render_variables(environment: Mapping[str, str]) -> str:
    """Render a shell script that sets the variables of the submitting shell, but for those of its session and of Slurm."""
    kept = {
        name: value
        for name, value in sorted(environment.items())
        if _NAME.match(name) and name not in _OF_THE_SHELL and not name.startswith(_OF_THE_SESSION)
    }
    return "".join(f"export {name}={shlex.quote(value)}\n" for name, value in kept.items())
