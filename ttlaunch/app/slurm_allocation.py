"""Ask Slurm for the hosts of a run, wait for them, and give them back when the run has ended, however it ends.

salloc holds the job. It runs a program that waits for the end of its input, which this process holds: when this process ends, even
by SIGKILL, the input ends, and salloc gives the hosts back. While the job waits in the queue, the kernel tells salloc of our end.
"""

import contextlib
import os
import re
import select
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import field

from ttlaunch.agent import PARENT_DEATH
from ttlaunch.app.dialogue import Dialogue
from ttlaunch.app.prepare_run import PreparedRun, prepare
from ttlaunch.app.signals import interruptible
from ttlaunch.app.slurm_hosts import with_variables_of_job
from ttlaunch.diagnostics import Blame, Diagnostic, LaunchError, Severity, shown
from ttlaunch.hosts.transport.slurm import ENDED_STATES, WHERE_COMMANDS_ARE, ask_slurm, one_line, state_of_job
from ttlaunch.quick_dataclass import dataclass
from ttlaunch.spec.topology.slurm_request import SlurmRequest

_TICK_S = 0.2
_ASK_EVERY_S = 2.0
_END_S = 10.0
_LAST_WORDS_S = 1.0
SILENT_S = 5.0
SILENT = "Slurm has not answered yet; its commands try again for up to a minute if munge or the controller does not answer; Ctrl-C gives up"
"""What is said of a command of Slurm's that has said nothing itself for `SILENT_S` seconds."""
_OVER = {"", "COMPLETING", *ENDED_STATES}
_END = b"\0\0"
_CHUNK = 65536
_HOLD = "env -0; printf '\\0'; exec cat >/dev/null"
"""What salloc runs: it prints the job's variables, an empty one last, and then waits for the end of its input."""

_TRIES_AGAIN = re.compile(r"Did you start munged|cannot stat file .* retrying")
_JOB = re.compile(r"(?:Pending|Granted) job allocation ([0-9]+)")
_WORDS = {
    "Priority": "other jobs come first",
    "Resources": "the hosts that it needs are in use",
    "Dependency": "it depends on another job",
    "BeginTime": "its time to begin has not come",
    "JobHeldUser": "its user holds it",
    "JobHeldAdmin": "an administrator holds it",
    "Licenses": "it waits for a licence",
    "PartitionDown": "the partition is down",
    "PartitionInactive": "the partition is inactive",
    "PartitionNodeLimit": "the partition does not give so many hosts to a job",
    "PartitionTimeLimit": "the partition does not give hosts for so long",
    "PartitionConfig": "the partition does not give what it asks for",
    "AccountNotAllowed": "its account may not use the partition",
    "QOSNotAllowed": "its quality of service may not be used in the partition",
    "BadConstraints": "no hosts have what it asks for",
}
_NEVER = {
    "PartitionDown",
    "PartitionInactive",
    "PartitionNodeLimit",
    "PartitionTimeLimit",
    "PartitionConfig",
    "AccountNotAllowed",
    "QOSNotAllowed",
    "BadConstraints",
}
"""Reasons for which a job stays in the queue until somebody changes the job or the cluster."""


@contextlib.contextmanager
def on_hosts_of_slurm(prepared: PreparedRun, request: SlurmRequest, dialogue: Dialogue) -> Iterator[PreparedRun]:
    """Give a run the hosts that it asks Slurm for; they are given back at the end of the context.

    Yields:
        The run planned on its hosts.

    Raises:
        LaunchError: Slurm does not give them, or the run cannot be planned on them.
    """
    allocation = _Salloc(request)
    try:
        with interruptible():
            variables = allocation.wait(dialogue)
        yield prepare(
            with_variables_of_job(prepared.request, variables),
            dialogue,
            working_folder=prepared.surroundings.working_folder,
        )
    finally:
        allocation.release(dialogue)


@dataclass
class _Salloc:
    """One salloc, from the request until the job has ended."""

    request: SlurmRequest
    job: str | None = None
    _said: list[str] = field(default_factory=list)
    _process: "subprocess.Popen[bytes] | None" = None

    def wait(self, dialogue: Dialogue) -> Mapping[str, str]:
        """Ask for the hosts and wait for them; report why they do not come.

        Raises:
            LaunchError: Slurm refuses the request, will never meet it, or cannot be asked.
        """
        process, listening = self._start()
        assert process.stdout is not None  # noqa: S101 - all three streams are pipes
        received, asked, reason = b"", time.monotonic(), ""
        began, is_told = asked, False
        while not received.endswith(_END):
            if select.select([process.stdout], [], [], _TICK_S)[0]:
                part = os.read(process.stdout.fileno(), _CHUNK)
                if not part:
                    process.wait()
                    listening.join(_LAST_WORDS_S)
                    raise LaunchError([self._refused()])
                received += part
            elif self.job is None and any(_TRIES_AGAIN.search(line) for line in self._said):
                raise LaunchError([self._refused()])  # salloc would try for a minute
            elif self.job is None and not is_told and time.monotonic() - began > SILENT_S:
                is_told = True
                dialogue.waiting(SILENT)
            elif self.job is not None and time.monotonic() - asked > _ASK_EVERY_S:
                reason, asked = self._report(reason, dialogue), time.monotonic()
        pairs = (line.decode("utf-8", "replace").partition("=") for line in received.split(b"\0") if b"=" in line)
        variables = {name: value for name, _, value in pairs}
        # Slurm counts tasks on each host up to the most that were asked for; the ranks are to be spread as in the plan.
        return {**variables, "SLURM_TASKS_PER_NODE": ",".join(map(str, self.request.slots))}

    def release(self, dialogue: Dialogue) -> None:
        """Give the hosts back, or leave the queue, and see to it that Slurm has done so."""
        process = self._process
        if process is None:
            return
        assert process.stdin is not None  # noqa: S101 - all three streams are pipes
        process.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            if self._is_waiting():
                process.terminate()  # salloc leaves the queue; once it has the hosts, the end of the input is its order
            process.wait(_END_S)
        if process.poll() is None:
            process.kill()
            process.wait()
        if self.job is not None:
            end_job(self.job, dialogue)

    def _start(self) -> "tuple[subprocess.Popen[bytes], threading.Thread]":
        for name, purpose in (("salloc", "Slurm is asked for hosts"), ("srun", "they are reached")):
            if shutil.which(name) is None:
                message, hint = f"this machine has no `{name}`, with which {purpose}", WHERE_COMMANDS_ARE
                raise LaunchError([Diagnostic("H043", message, hints=(hint,), blame=Blame.HOSTS)])
        if missing := missing_configuration():
            raise LaunchError([missing])
        options = [*self.request.options(), "--job-name=ttlaunch", "--no-kill"]
        command = ["salloc", *options, "/bin/sh", "-c", _HOLD]
        self._process = process = subprocess.Popen(
            [sys.executable, "-I", "-S", str(PARENT_DEATH), *command],
            cwd="/",
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,  # an interrupt typed at the terminal is ours to handle
        )
        listening = threading.Thread(target=self._listen, args=(process,), daemon=True)
        listening.start()
        return process, listening

    def _listen(self, process: "subprocess.Popen[bytes]") -> None:
        """Keep what salloc says, and find the job's number in it."""
        assert process.stderr is not None  # noqa: S101 - all three streams are pipes
        for line in process.stderr:
            text = line.decode("utf-8", "replace").strip()
            self._said.append(text)
            if match := _JOB.search(text):
                self.job = match[1]

    def _is_waiting(self) -> bool:
        return not any("Granted job allocation" in line for line in self._said)

    def _report(self, before: str, dialogue: Dialogue) -> str:
        """Report why the job waits, if that has changed.

        Raises:
            LaunchError: It would wait for ever.
        """
        answer = ask_slurm("squeue", "--noheader", f"--jobs={self.job}", "--states=PENDING", "--format=%r")
        reason = answer.stdout.strip()
        if answer.returncode or not reason or reason == before:
            return before
        name = reason.split(",")[0].strip("()")
        words = _in_words(name)
        if name in _NEVER:
            raise LaunchError([self._request_mistake(words, name)])
        if name != "None":
            dialogue.waiting(f"Slurm job {self.job} waits in the queue: {words}; Ctrl-C cancels it")
        return reason

    def _refused(self) -> Diagnostic:
        """Turn what salloc has said into a diagnostic."""
        lines = [line.removeprefix("salloc: ").removeprefix("error: ") for line in self._said]
        text = one_line(lines) or "salloc has ended without a word"
        return explain_slurm(text) or self._request_mistake(text, "")

    def _request_mistake(self, why: str, name: str) -> Diagnostic:
        options = " ".join(self.request.options())
        notes = (f"Slurm was asked for: {options}",)
        place = f"`--partition={self.request.partition}`" if self.request.partition else "the default partition"
        hint = f"`sinfo --partition={self.request.partition}`" if self.request.partition else "`sinfo`"
        told = f" ({name})" if name else ""
        return Diagnostic(
            "H046",
            f"Slurm gives no hosts: {shown(why, longest=300)}{told}",
            notes=notes,
            hints=(f"{hint} shows what {place} has, and for how long",),
            blame=Blame.HOSTS,
        )


def end_job(job: str, dialogue: Dialogue) -> None:
    """Cancel a job, unless it has ended, until Slurm says so; warn if it does not within `_END_S` seconds.

    salloc tells Slurm of its end once. A controller that is away then keeps the hosts for the job, and one that has forgotten the
    last seconds, as it does when it is killed, gives it hosts again. Asking takes some 10 ms.
    """
    until = time.monotonic() + _END_S
    with contextlib.suppress(FileNotFoundError):
        while (found := state_of_job(job)) is None or found[0] not in _OVER:
            if time.monotonic() > until:
                dialogue.warn([_may_hold_hosts(job)])
                return
            if found is not None:
                ask_slurm("scancel", job)
            time.sleep(_TICK_S)


def _may_hold_hosts(job: str) -> Diagnostic:
    message = (
        f"Slurm's controller has not said within {_END_S:g} s that job {job} has ended, which may still hold its hosts"
    )
    hint = f"`scancel {job}` gives them back as soon as it answers; `scontrol ping` says which controllers are up"
    return Diagnostic("H045", message, hints=(hint,), severity=Severity.WARNING, blame=Blame.HOSTS)


def warn_of_waiting(job: str, reason: str) -> list[Diagnostic]:
    """Warn of a submitted job that Slurm will not start before somebody changes it or the cluster.

    Args:
        job: The number of the job.
        reason: Slurm's word for why the job waits.
    """
    if reason not in _NEVER:
        return []
    message = f"Slurm job {job} stays in the queue until somebody changes it or the cluster: {_in_words(reason)} ({shown(reason)})"
    hints = (f"`ttlaunch stop {job}` takes it out of the queue",)
    return [Diagnostic("H046", message, hints=hints, severity=Severity.WARNING, blame=Blame.HOSTS)]


def missing_configuration() -> Diagnostic | None:
    """Report a `SLURM_CONF` that names no file that can be read; Slurm's commands would look for it for a minute."""
    named = os.environ.get("SLURM_CONF")
    if not named or os.access(named, os.R_OK):
        return None
    return _without_configuration(f"`SLURM_CONF` names {shown(named)}, which cannot be read")


def _without_configuration(note: str) -> Diagnostic:
    message = "Slurm's commands find no configuration on this machine"
    hint = "run ttlaunch on a login node, or name the cluster's file: `SLURM_CONF=/path/to/slurm.conf`"
    return Diagnostic("H049", message, notes=(note,), hints=(hint,), blame=Blame.HOSTS)


def explain_slurm(text: str) -> Diagnostic | None:
    """Explain why a command of Slurm's could not ask Slurm; None if it could.

    Args:
        text: What the command has said.
    """
    if re.search(r"configuration source|fetch_config|s_p_parse_file: cannot stat", text):
        return _without_configuration(_evidence(text))
    if re.search(r"[Mm]unge|authentication error", text):
        return _without_munge(text)
    if re.search(r"Unable to contact slurm controller|Socket timed out|no answer within|Unable to establish con", text):
        message = "Slurm's controller does not answer"
        hint = "`scontrol ping` says which controllers are up"
        return Diagnostic("H045", message, notes=(_evidence(text),), hints=(hint,), blame=Blame.HOSTS)
    return None


def _without_munge(text: str) -> Diagnostic:
    message = "Slurm's commands cannot prove here who you are: munge does not answer"
    hint = "`munge -n` tries it by hand; an administrator starts munged, with the key of the cluster"
    return Diagnostic("H044", message, notes=(_evidence(text),), hints=(hint,), blame=Blame.HOSTS)


def _evidence(text: str) -> str:
    return f"Slurm's command said: {shown(one_line(text.splitlines()), longest=300)}"


def _in_words(reason: str) -> str:
    """Put a reason of Slurm's into words; one without words is shown as it is."""
    if reason.startswith(("ReqNodeNotAvail", "Nodes required for job are DOWN")):
        return "hosts that it needs are down, drained or reserved"
    if reason.startswith(("QOS", "Assoc")):
        return f"a limit of the account or the quality of service is reached ({shown(reason)})"
    return _WORDS.get(reason, shown(reason))
