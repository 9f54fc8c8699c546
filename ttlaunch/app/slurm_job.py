"""A run that was submitted to Slurm: its folder, its state in the queue, and from where each start of it goes on.

`runs/job-TIME-xxxxxx/` holds what was submitted: `job.sbatch`, the variables and the order, a copy of the code, and what the job prints.
The runs that the job has started are in `runs/` beside it, as those of `ttlaunch run` are. `started.jsonl` lists them.
"""

import contextlib
import json
import os
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import field
from pathlib import Path
from typing import Any

from ttlaunch import contract
from ttlaunch.diagnostics import shown
from ttlaunch.hosts.transport.slurm import ENDED_STATES, ask_slurm
from ttlaunch.planning.slurm_script import LOG_FILE
from ttlaunch.quick_dataclass import dataclass
from ttlaunch.records.regular_files import read_tail
from ttlaunch.running.checkpoints.complete import newest_step
from ttlaunch.running.report import Report, read_report
from ttlaunch.running.runs.files import Tail, read_object_if_any, write_whole
from ttlaunch.running.runs.overview import RunSummary

JOB_PREFIX = "job-"
SCRIPT_FILE = "job.sbatch"
ORDER_FILE = "order.json"
_JOB_FILE = "job.json"
_STARTED_FILE = "started.jsonl"
_FIELDS = 5
_TAIL_BYTES = 65536
_CANCELLED = re.compile(r"\*\*\* JOB [0-9]+ ON \S+ CANCELLED AT \S+( DUE TO [A-Z ]{1,40})? \*\*\*")
_WAITS, _RUNS = {"PENDING", "REQUEUED", "REQUEUE_HOLD", "SPECIAL_EXIT", "CONFIGURING"}, {"RUNNING", "COMPLETING"}


@dataclass(frozen=True)
class Start:
    """A run that a job has started.

    Attributes:
        run: The run's folder.
        restarts: How often Slurm had started the job again before this run.
    """

    run: Path
    restarts: int

    @property
    def report(self) -> Report | None:
        """Return the run's report; None if it has not ended, or was cut off."""
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            return read_report(self.run)
        return None

    @property
    def reached(self) -> int:
        """Return the last step that the run is known to have finished, counted from the beginning of training."""
        report = self.report
        return max(report.steps if report else 0, newest_step(self.run) or 0)


@dataclass(frozen=True)
class Job:
    """A run that was submitted.

    Attributes:
        number: Slurm's number of the job.
        name: The name of the recipe or program.
        submitted: When it was submitted, seconds since the epoch.
    """

    folder: Path
    number: str
    name: str
    submitted: float

    @property
    def starts(self) -> list[Start]:
        """Return the runs that the job has started, oldest first."""
        return read_starts(self.folder)


@dataclass(frozen=True)
class QueueState:
    """What Slurm says about a job.

    Attributes:
        state: Slurm's own word, such as PENDING; empty if Slurm does not know the job any more.
        reason: Slurm's word for why it waits; empty if there is none.
        nodes: The hosts, as Slurm writes them.
        restarts: How often Slurm has started it again.
    """

    state: str = ""
    reason: str = ""
    nodes: str = ""
    restarts: int = 0

    @property
    def waits(self) -> bool:
        return self.state in _WAITS

    @property
    def runs(self) -> bool:
        return self.state in _RUNS

    @property
    def text(self) -> str:
        """Return the state in words, for a line of a list."""
        if self.waits:
            return f"waiting ({self.reason or self.state})"
        return f"running on {self.nodes}" if self.runs else self.state.lower().replace("_", " ") or "not in the queue"


def write_job(folder: Path, *, number: str, name: str, submitted: float) -> None:
    """Record the number that Slurm has given a job.

    Raises:
        OSError: The file cannot be written.
    """
    write_whole(folder / _JOB_FILE, json.dumps({"job": number, "name": name, "submitted": submitted}) + "\n")


def read_jobs(runs_folder: Path) -> list[Job]:
    """Return the jobs that were submitted with this folder of runs, oldest first."""
    found = []
    for path in sorted(runs_folder.glob(f"{JOB_PREFIX}*/{_JOB_FILE}")):
        known = read_object_if_any(path)
        number, name, submitted = known.get("job"), known.get("name"), known.get("submitted")
        if isinstance(number, str) and number.isdecimal() and isinstance(name, str) and isinstance(submitted, float):
            found.append(Job(path.parent, number, shown(name), submitted))
    return found


def find_job(where: str, runs_folder: Path) -> Job | None:
    """Return the newest job with this number or folder, or that has started the run with this path; None if there is none."""
    return next((job for job in reversed(read_jobs(runs_folder)) if where in {job.number, job.folder.name}), None)


def job_of_run(run: Path) -> Job | None:
    """Return the job that has started a run; None if no job in the same folder of runs has."""
    jobs = reversed(read_jobs(run.parent))
    return next((job for job in jobs if any(start.run == run for start in job.starts)), None)


def why_slurm_ended(run: Path) -> str | None:
    """Return in words why Slurm has ended the job of a run; None if it has not, or if the run is no submitted one.

    Slurm writes the reason to the job's log before it kills the job, which may have no time to write a report.
    """
    job = job_of_run(run)
    if job is None or job.starts[-1].run != run:
        return None
    try:
        tail = read_tail(job.folder / LOG_FILE, most=_TAIL_BYTES).decode("utf-8", "replace")
    except OSError:
        return None
    found = _CANCELLED.findall(tail)
    if not found:
        return None
    reason = found[-1].removeprefix(" DUE TO ").lower()
    return (
        f"Slurm ended job {job.number} because of its {reason}"
        if reason
        else f"cancelled by scancel of Slurm job {job.number}"
    )


def note_start(folder: Path, run: Path, *, restarts: int) -> None:
    """Record that a job has begun a run."""
    line = json.dumps({"run": run.name, "restarts": restarts}) + "\n"
    with open(folder / _STARTED_FILE, "a", encoding="utf-8", opener=contract.open_private) as file:
        file.write(line)


def read_starts(folder: Path) -> list[Start]:
    """Return the runs that the job of a folder has begun, oldest first; they lie beside the folder."""
    found = []
    for line in Tail(folder / _STARTED_FILE).read():
        record = contract.read_record(line) or {}
        run, restarts = record.get("run"), record.get("restarts")
        if isinstance(run, str) and run == os.path.basename(run) and run and isinstance(restarts, int):  # noqa: PTH119 - it is a text
            found.append(Start(folder.parent / run, restarts))
    return found


def made_progress(starts: Sequence[Start]) -> bool:
    """Whether the last start of a job has finished a step that no start before it had.

    A program without steps is taken at its word: it has said with `--requeue` that it goes on from where it was.
    """
    if not starts:
        return False
    last = starts[-1].restarts
    now, before = [one for one in starts if one.restarts == last], [one for one in starts if one.restarts != last]
    report = now[-1].report
    if report is not None and report.layout is None:
        return True
    began = int(report.began_from["step"]) if report is not None and report.began_from else 0
    return max(one.reached for one in now) > max([began, *(one.reached for one in before)])


@dataclass(frozen=True)
class Queue:
    """What Slurm says about jobs.

    Attributes:
        problem: Why Slurm could not be asked; empty if it was.
    """

    states: Mapping[str, QueueState] = field(default_factory=dict)
    problem: str = ""

    def of(self, job: Job) -> QueueState:
        return self.states.get(job.number, QueueState())


def ask_queue(jobs: Collection[Job]) -> Queue:
    """Ask Slurm about jobs, all at once."""
    if not jobs:
        return Queue()
    wanted = "JobID:|,State:|,RestartCnt:|,Reason:|,NodeList:|"
    numbers = ",".join(job.number for job in jobs)
    try:
        answer = ask_slurm("squeue", "--noheader", "--states=all", f"--jobs={numbers}", f"--Format={wanted}")
    except FileNotFoundError:
        return Queue(problem="this machine has no `squeue`")
    if answer.returncode and "Invalid job id" not in answer.stderr:
        return Queue(problem=shown(answer.stderr.strip(), longest=200))
    return Queue(dict(_parse(line) for line in answer.stdout.splitlines() if line.count("|") >= _FIELDS))


def _parse(line: str) -> tuple[str, QueueState]:
    number, state, restarts, reason, nodes = [part.strip() for part in line.split("|")[:5]]
    reason = "" if reason in {"None", "(null)"} else shown(reason, longest=100)
    count = int(restarts) if restarts.isdecimal() else 0
    return number, QueueState(shown(state), reason, shown(nodes, longest=100), count)


def has_ended(state: QueueState) -> bool:
    """Whether a job will not run any more."""
    return state.state in ENDED_STATES or not state.state


@dataclass(frozen=True)
class OldJobs:
    """What `runs clean` may do with the jobs that were submitted with a folder of runs.

    Attributes:
        removable: The jobs that have ended and whose runs are gone, as runs without ranks.
        held: The runs of jobs that wait, run, or cannot be asked about: the job may go on from what they have saved.
        problem: Why Slurm could not be asked; empty if it was.
    """

    removable: Sequence[RunSummary]
    held: Collection[Path]
    problem: str


def old_jobs(runs_folder: Path, going: Collection[Path]) -> OldJobs:
    """Find out which jobs have ended.

    Args:
        runs_folder: The folder of runs.
        going: The folders of runs that are to be removed.
    """
    jobs = read_jobs(runs_folder)
    queue = ask_queue(jobs)
    ended = [job for job in jobs if not queue.problem and has_ended(queue.of(job))]
    held = {start.run for job in jobs if job not in ended for start in job.starts}
    without_runs = [job for job in ended if all(one.run in going or not one.run.exists() for one in job.starts)]
    return OldJobs([_summary(job) for job in without_runs], held, queue.problem)


def _summary(job: Job) -> RunSummary:
    return RunSummary(
        folder=job.folder,
        name=job.name,
        state="submitted",
        step=0,
        total_steps=None,
        loss=None,
        ranks=0,
        started=job.submitted,
        ended=job.submitted,
        machine=None,
    )


def read_order(folder: Path) -> dict[str, Any]:
    """Return what `submit` has written for the job, as it was written."""
    return read_object_if_any(folder / ORDER_FILE)
