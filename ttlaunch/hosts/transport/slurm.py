"""A host of a Slurm job: every command is a step of the job, started by srun, whose streams are those of the command.

Nothing else is opened between the machines. The command itself goes over standard input, so that no command line and no
record of Slurm's shows it. A step lasts until the daemons that its command has left behind have ended: Slurm kills what is
left of a step.
"""

import contextlib
import os
import re
import socket
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence

from ttlaunch import contract
from ttlaunch.errors import HostError, Trouble
from ttlaunch.hosts.transport.any_shell import as_printf_text
from ttlaunch.hosts.transport.deadline import render_seconds
from ttlaunch.hosts.transport.local import LocalProcess
from ttlaunch.hosts.transport.transport import CHUNK, CONNECT_S, run
from ttlaunch.system_reason import system_reason

_ASK_S = 5.0
_LAST_INPUT_S = 0.3
_END_S = 1.0
_LAST_STATE_S, _TICK_S = 1.0, 0.1
_LONGEST = 200
_FIREWALL = (
    "every node must be able to open connections to this machine: a firewall may be in between, and `SrunPortRange=` in "
    "slurm.conf limits the ports"
)
_NO_DAEMON = "or munge or slurmd does not answer there: `srun --nodelist=HOST true` tries it by hand"
WHERE_COMMANDS_ARE = "run ttlaunch where Slurm's commands are installed, such as a login node"
ENDED_STATES = {
    "BOOT_FAIL",
    "CANCELLED",
    "COMPLETED",
    "DEADLINE",
    "FAILED",
    "NODE_FAIL",
    "OUT_OF_MEMORY",
    "PREEMPTED",
    "TIMEOUT",
}
"""What Slurm calls the states of a job that has ended."""

_OF_THE_TASK = re.compile(r"srun: error: \S+: task \d+: |srun: (Force )?Terminat|srun: launch/slurm: ")
"""What srun says about every command that does not end with status 0."""

_OF_SLURM = re.compile(rb"(?:srun|slurmstepd[^\s:]*): [^\n]*\n?")
"""What Slurm adds to the standard error of a command; it may follow a line that the command has not ended."""

# Constant, since everybody may see it. `read` takes the first line and not one byte more. `contract.STEP_PIPE` is the writing end of
# a pipe from which nobody gets a byte: it ends when the command and all its daemons have ended, and the step with it. If Slurm ends
# the step, the pipe loses its reader, by which an agent notices that.
_STEP = rf"""
IFS= read -r command || exit 1
USER=$(id -un)
case "$USER" in "" | *[!A-Za-z0-9._-]*) HOME=/ ;; *) eval "HOME=~$USER" ;; esac
PATH=/usr/local/bin:/usr/bin:/bin:/usr/local/sbin:/usr/sbin:/sbin
SHELL=/bin/sh LOGNAME=$USER
export HOME PATH USER SHELL LOGNAME
unset $(env | sed -n '/^SLURM_JOB_ID=/d; /^SLURM_CONF=/d; /^SLURM_LAUNCH_NODE_IPADDR=/d; s/^\(SLURM[A-Z0-9_]*\)=.*/\1/p')
cd "$HOME" 2>/dev/null || cd /
exec 7>&1
status=$({{ {{ /bin/sh -c "$(printf %b "$command")" {contract.STEP_PIPE}>&1 >&7 7>&- 8>&-; echo $? >&8; }} | while read -r _; do :; done; }} 8>&1)
exit "${{status:-1}}"
"""


def slurm_environment(environment: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return the variables for a command of Slurm's: without those of a job that this process may be in, which change its options."""
    known = os.environ if environment is None else environment
    return {
        name: value for name, value in known.items() if name == "SLURM_CONF" or not name.startswith(("SLURM", "SRUN_"))
    }


def ask_slurm(*command: str, timeout_s: float = _ASK_S) -> subprocess.CompletedProcess[str]:
    """Run a command of Slurm's that only asks; one that does not answer in time has status 124.

    Raises:
        FileNotFoundError: This machine does not have the command.
    """
    try:
        return subprocess.run(
            command,
            env=slurm_environment(),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=timeout_s,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return subprocess.CompletedProcess(command, 124, "", f"{command[0]}: no answer within {timeout_s:g} s")


class SlurmTransport:
    """A host of a Slurm job.

    Args:
        host: The name of the node.
        job: The number of the job, which must have been started.
    """

    def __init__(self, host: str, job: str) -> None:
        self.host = host
        self.addresses: tuple[str, str] | None = None
        self.bytes_per_s = None
        self._job = job
        self._lock = threading.Lock()
        self._processes: list[SlurmProcess] = []

    def connect(self, *, timeout_s: float = CONNECT_S) -> None:
        """Start a step that does nothing, to learn whether the host starts steps and by which addresses it was reached."""
        if self.addresses is not None:
            return
        try:
            answer = run(self, 'printf "%s" "$SLURM_LAUNCH_NODE_IPADDR"', timeout_s=timeout_s)
        except HostError as error:
            raise self._explain(error, timeout_s) from error
        if answer.status:
            raise self._explain(
                HostError(self.host, Trouble.STEP, f"srun ended with status {answer.status}"), timeout_s
            )
        theirs = _address_of(self.host)
        self.addresses = (answer.stdout.decode("ascii", "replace"), theirs) if theirs else None

    def start(self, command: str, *, timeout_s: float = CONNECT_S) -> "SlurmProcess":
        try:
            child = subprocess.Popen(
                self._argv(),
                env=slurm_environment(),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                bufsize=0,
                start_new_session=True,  # an interrupt typed at the terminal is not for the steps
            )
        except OSError as error:
            words, hints = f"srun cannot be started on this machine: {system_reason(error)}", (WHERE_COMMANDS_ARE,)
            raise HostError(self.host, Trouble.STEP, words, hints=hints) from error
        process = SlurmProcess(self.host, child)
        with self._lock:
            self._processes = [*(one for one in self._processes if not one.has_ended), process]
        process.write(as_printf_text(command).encode() + b"\n", timeout_s=timeout_s)
        return process

    def close(self) -> None:
        """Close the streams of all commands; steps go on until their commands and daemons end."""
        self.addresses = None
        with self._lock:
            processes, self._processes = self._processes, []
        for process in processes:
            process.kill()

    def _argv(self) -> list[str]:
        return [
            "srun",
            f"--jobid={self._job}",
            f"--nodelist={self.host}",
            *("--nodes=1", "--ntasks=1", "--overlap", "--mpi=none", "--cpu-bind=none"),
            *("--export=NONE", "--chdir=/", "--job-name=ttlaunch"),
            # Without a pause for whole lines, which frames do not have; byte for byte all the same.
            *("--unbuffered", "--quiet", "--kill-on-bad-exit=0"),
            *("/bin/sh", "-c", _STEP),
        ]

    def _explain(self, error: HostError, timeout_s: float) -> HostError:
        """Say in place of an error of srun what Slurm knows about the job and the host."""
        with contextlib.suppress(FileNotFoundError):
            ended = why_job_ended(self._job)
            if ended:
                return HostError(self.host, Trouble.ENDED, ended)
            state = state_of_host(self.host)
            if state:
                look = f"`scontrol show node {self.host}` says more"
                return HostError(self.host, Trouble.STEP, f"{state}; {error.evidence}", hints=(look,))
        if error.trouble is Trouble.TIMED_OUT:
            waited = f"no step has answered within {render_seconds(timeout_s)}"
            return HostError(self.host, Trouble.STEP, waited, hints=(_FIREWALL, _NO_DAEMON))
        return HostError(self.host, Trouble.STEP, error.evidence, hints=error.hints or (_FIREWALL,))


class SlurmProcess(LocalProcess):
    """One step: an srun with the streams of its command."""

    def read(self, most: int = CHUNK, *, timeout_s: float) -> bytes:
        data = super().read(most, timeout_s=timeout_s)
        if not data and (errors := self._errors()):
            raise HostError(self._host, Trouble.LOST, errors)
        return data

    def stderr(self) -> bytes:
        return _OF_SLURM.sub(b"", super().stderr())

    def kill(self) -> None:
        """End srun and leave the step to its command, which reads the end of its input.

        srun is given the time to pass this end on, which it does not do once it is killed.
        """
        self.close_stdin()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._child.wait(_LAST_INPUT_S)
        super().kill()

    def _errors(self) -> str:
        """Return what srun itself has to say, if that is more than how the command ended."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._child.wait(_END_S)
        lines = super().stderr().decode("utf-8", "replace").splitlines()
        own = [line for line in lines if line.startswith("srun: error: ") and not _OF_THE_TASK.match(line)]
        return one_line([line.removeprefix("srun: error: ") for line in own])


def state_of_job(job: str) -> tuple[str, str] | None:
    """Return Slurm's words for the state of a job and for the reason, empty ones if it knows no such job; None if it does not answer.

    Raises:
        FileNotFoundError: This machine does not have `scontrol`.
    """
    answer = ask_slurm("scontrol", "--oneliner", "show", "job", job)
    if answer.returncode:
        return ("", "") if "Invalid job id" in answer.stderr else None
    return _value("JobState", answer.stdout), _value("Reason", answer.stdout)


def why_job_ended(job: str) -> str | None:
    """Return in words how a job has ended; None if it runs, or if Slurm does not answer."""
    until = time.monotonic() + _LAST_STATE_S
    # As long as processes of the job are left on a host, Slurm shows only this, for `KillWait` seconds or longer.
    while (found := state_of_job(job)) and found[0] == "COMPLETING" and time.monotonic() < until:
        time.sleep(_TICK_S)
    if found is None:
        return None
    state, reason = found
    if not state:
        return f"Slurm no longer knows job {job}"
    if state == "COMPLETING":
        return f"Slurm is ending job {job}"
    if state not in ENDED_STATES:
        return None
    return f"Slurm has ended job {job}: {state}" + (f" ({reason})" if reason not in {"", "None"} else "")


def state_of_host(host: str) -> str | None:
    """Return in words why Slurm starts nothing on a host; None if it does, or if Slurm does not answer."""
    answer = ask_slurm("scontrol", "--oneliner", "show", "node", host)
    state, reason = _value("State", answer.stdout), _value("Reason", answer.stdout)
    # An asterisk: it does not answer, and Slurm has not given it up yet.
    if answer.returncode or not ("*" in state or re.search(r"DOWN|DRAIN|FAIL|POWERED_DOWN|REBOOT", state)):
        return None
    return f"its state in Slurm is {state}" + (f" ({reason})" if reason else "")


def one_line(lines: Sequence[str]) -> str:
    """Join what a program has said to a clause, each line once."""
    return "; ".join(dict.fromkeys(line.strip() for line in lines if line.strip()))[:_LONGEST]


def _value(name: str, text: str) -> str:
    """Return the value of a key in the output of `scontrol --oneliner show`; values may have spaces."""
    match = re.search(rf"(?:^| ){name}=(.*?)(?= \[| [A-Z]\w*=|$)", text.strip())
    return match[1][:_LONGEST] if match else ""


def _address_of(host: str) -> str | None:
    try:
        return str(socket.getaddrinfo(host, None, socket.AF_INET, socket.SOCK_STREAM)[0][4][0])
    except OSError:
        return None
