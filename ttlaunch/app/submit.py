"""Submit a run to Slurm: check it as `run` does, write all that it needs into a folder of its own, and hand the batch script to sbatch."""

import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

from ttlaunch import contract
from ttlaunch.app.dialogue import Dialogue, Unattended
from ttlaunch.app.execute import RunOptions
from ttlaunch.app.prepare_run import PreparedRun, prepare
from ttlaunch.app.run_spec import RunSpec
from ttlaunch.app.slurm_allocation import SILENT, SILENT_S, explain_slurm, missing_configuration, warn_of_waiting
from ttlaunch.app.slurm_job import JOB_PREFIX, ORDER_FILE, SCRIPT_FILE, Job, ask_queue, write_job
from ttlaunch.diagnostics import Blame, Diagnostic, LaunchError, Severity, file_error, shown, usage_error
from ttlaunch.hosts.sync.release import Release, make_release
from ttlaunch.hosts.sync.write_release import ChangedFileError, write_release
from ttlaunch.hosts.transport.slurm import one_line, slurm_environment
from ttlaunch.planning.launch_plan import RecipeProgram
from ttlaunch.planning.slurm_script import ENVIRONMENT_FILE, BatchScript, render_batch_script, render_variables
from ttlaunch.quick_dataclass import dataclass
from ttlaunch.running.ending import keeps_checkpoints
from ttlaunch.spec.topology.slurm_request import JOB_VARIABLE, SlurmRequest, is_slurm

if TYPE_CHECKING:
    from ttlaunch.running.metrics.sinks import SinkChoice

_SUBMIT_S = 60.0
_LONGEST = 300


@dataclass(frozen=True)
class Submission:
    """A run that has been checked and can be submitted.

    Attributes:
        prepared: The plan, on hosts that Slurm has not chosen yet.
        request: What Slurm is asked for.
        options: How the plan is executed.
        requeue: Whether the job starts again after its time limit, and when Slurm has lost a host.
        max_restarts: How often each start may restart by itself after a failure.
        sinks: The sinks of the run's metrics.
    """

    prepared: PreparedRun
    request: SlurmRequest
    options: RunOptions
    requeue: bool
    max_restarts: int
    sinks: "Sequence[SinkChoice]"

    def script(self, folder: Path) -> str:
        """Return the batch script, as it is in the job's folder."""
        return _batch_script(self.prepared, self.request, folder, grace_s=self.options.grace_s, requeue=self.requeue)


def planned_script(prepared: PreparedRun) -> str | None:
    """Return the batch script that `submit` would hand to Slurm without further options; None if no job is asked for."""
    slurm = prepared.description.slurm
    if slurm is None or slurm.request is None:
        return None
    options = RunOptions(prepared.request.runs_dir)
    folder = prepared.request.runs_dir.absolute() / f"{JOB_PREFIX}TIME"
    requeue = keeps_checkpoints(prepared.plan)
    return _batch_script(prepared, slurm.request, folder, grace_s=options.grace_s, requeue=requeue)


def _batch_script(prepared: PreparedRun, request: SlurmRequest, folder: Path, *, grace_s: float, requeue: bool) -> str:
    return render_batch_script(
        BatchScript(
            name=prepared.plan.program.name,
            folder=folder,
            python=sys.executable,
            options=request.options(),
            grace_s=grace_s,
            requeue=requeue,
        )
    )


def check_submission(
    spec: RunSpec,
    options: RunOptions,
    dialogue: Dialogue,
    *,
    requeue: bool | None,
    max_restarts: int,
    sinks: "Sequence[SinkChoice]",
) -> Submission:
    """Check everything that can be checked before Slurm has chosen hosts.

    Args:
        spec: The specification of the run.
        options: How the plan is executed.
        dialogue: Receives the warnings.
        requeue: Whether the job may start again; None: if it is a recipe that keeps checkpoints.
        max_restarts: How often each start may restart by itself after a failure.
        sinks: The sinks of the run's metrics.

    Raises:
        LaunchError: The run cannot be planned, or not be submitted from here.
    """
    if not is_slurm(spec.on):
        message = f"`submit` hands runs to Slurm, and `--on {shown(spec.on)}` names other hosts"
        raise usage_error(message, "`--on slurm:PARTITION`")
    job = os.environ.get(JOB_VARIABLE)
    if job and spec.allocation is None:
        message = f"this shell is in Slurm job {shown(job)}, and a job submits no other"
        hints = ("`ttlaunch run --on slurm` uses the hosts of the job", "submit from a login node")
        raise LaunchError([Diagnostic("P060", message, hints=hints, blame=Blame.COMMAND_LINE)])
    prepared = prepare(spec, dialogue)
    slurm = prepared.description.slurm
    assert slurm is not None  # noqa: S101 - `--on slurm` was checked above
    assert slurm.request is not None  # noqa: S101 - this process is in no job
    again = keeps_checkpoints(prepared.plan) if requeue is None else requeue
    return Submission(prepared, slurm.request, options, again, max_restarts, sinks)


def submit(submission: Submission, dialogue: Dialogue) -> tuple[Path, str]:
    """Write the job's folder and hand the script to Slurm; return the folder and the job's number.

    Raises:
        LaunchError: The code cannot be copied, the copy lacks something that the run needs, or Slurm refuses the job.
    """
    if missing := missing_configuration():
        raise LaunchError([missing])
    prepared = submission.prepared
    program = prepared.plan.program
    recipe = Path(program.folder) if isinstance(program, RecipeProgram) else None
    release, found = make_release(prepared.surroundings.working_folder, recipe=recipe)
    if release is None:
        raise LaunchError(found)
    dialogue.warn([*found, *_warn_of_script(_outside(prepared, release), release)])
    folder = _make_folder(submission.options.runs_dir)
    try:
        _fill(folder, submission, release)
        number = _sbatch(folder, submission.request, dialogue)
        write_job(folder, number=number, name=program.name, submitted=time.time())
    except BaseException as error:
        shutil.rmtree(folder, ignore_errors=True)
        if isinstance(error, ChangedFileError):
            raise LaunchError(
                [Diagnostic("P048", str(error), hints=("submit it again once its files are written",))]
            ) from error
        if isinstance(error, OSError):
            raise file_error(folder, error) from error
        raise
    job = Job(folder, number, program.name, 0.0)
    dialogue.warn(warn_of_waiting(number, ask_queue([job]).of(job).reason))
    return folder, number


def _make_folder(runs_dir: Path) -> Path:
    stamp = datetime.now(UTC).strftime("%Y-%m-%dT%H-%M-%S")
    try:
        runs_dir.mkdir(parents=True, exist_ok=True)
        ignore = runs_dir / ".gitignore"
        if not ignore.exists():
            ignore.write_text("*\n", encoding="utf-8")
        return Path(tempfile.mkdtemp(prefix=f"{JOB_PREFIX}{stamp}-", dir=runs_dir.resolve()))
    except OSError as error:
        raise file_error(runs_dir, error) from error


def _fill(folder: Path, submission: Submission, release: Release) -> None:
    """Write everything that the job reads.

    Raises:
        LaunchError: The copy of the code lacks something that the run needs.
        OSError: A file cannot be written.
    """
    code = folder / "code"
    code.mkdir(mode=0o700)
    write_release(release, code)
    working_folder = code / release.working_folder
    spec = _on_copy(submission.prepared, folder, code=code, release=release)
    # What the copy lacks is found now, and not when the job has waited for hours.
    prepare(spec, Unattended(), working_folder=working_folder)
    order = {
        "spec": spec.as_json(),
        "options": {**asdict(submission.options), "runs_dir": str(folder.parent)},
        "slots": list(submission.request.slots),
        "working_folder": str(working_folder),
        "requeue": submission.requeue,
        "max_restarts": submission.max_restarts,
        "sinks": [(choice.kind, choice.place) for choice in submission.sinks],
    }
    for name, text in (
        (ORDER_FILE, json.dumps(order)),
        (ENVIRONMENT_FILE, render_variables(os.environ)),
        (SCRIPT_FILE, submission.script(folder)),
    ):
        with open(folder / name, "x", encoding="utf-8", opener=contract.open_private) as file:
            file.write(text)


def _on_copy(prepared: PreparedRun, folder: Path, *, code: Path, release: Release) -> RunSpec:
    """Return the specification with the copies in place of what it names of the project.

    Raises:
        OSError: The resolved configuration cannot be written.
    """
    spec, program = replace(prepared.request, runs_dir=folder.parent), prepared.plan.program
    if not isinstance(program, RecipeProgram):
        if (outside := _outside(prepared, release)) is not None:
            return replace(spec, target=str(outside))
        path = Path(spec.target or "")
        is_named = path.is_absolute() and path.is_relative_to(release.project)
        return (
            replace(spec, target=str(code / contract.PROJECT_DIR / path.relative_to(release.project)))
            if is_named
            else spec
        )
    assert release.recipe is not None  # noqa: S101 - the release was made with the recipe
    train = folder / contract.TRAIN_FILE
    train.write_text(prepared.resolved_config, encoding="utf-8")
    text = (program.config.get("training_config") or {}).get("data_path")
    start = program.start or {}
    return replace(
        spec,
        target=str(code / release.recipe),
        config_file=str(train),
        # Data are not copied: ranks read the file that was checked.
        overrides=()
        if text is None
        else (f"training_config.data_path={json.dumps(str(prepared.surroundings.working_folder / text))}",),
        resume=start["origin"] if start.get("step") else None,
    )


def _outside(prepared: PreparedRun, release: Release) -> Path | None:
    """Return the path of a script that is not in the copy of the project; None for any other target."""
    spec = prepared.request
    if spec.is_command or isinstance(prepared.plan.program, RecipeProgram):
        return None
    path = Path(os.path.normpath(Path(prepared.surroundings.working_folder, spec.target or "")))
    return None if path.is_relative_to(release.project) else path


def _warn_of_script(path: Path | None, release: Release) -> list[Diagnostic]:
    if path is None:
        return []
    message = f"`{shown(path)}` is not in the project `{shown(release.project)}`, so the job has no copy of it"
    notes = ("the job runs the script as it is when Slurm starts the job, each time",)
    hints = (f"`cd {shown(path.parent)}` before `submit`",)
    return [Diagnostic("P073", message, notes=notes, hints=hints, severity=Severity.WARNING)]


def _sbatch(folder: Path, request: SlurmRequest, dialogue: Dialogue) -> str:
    """Hand the script to Slurm, and return the job's number.

    Raises:
        LaunchError: Slurm refuses it, or there is no Slurm.
    """
    # Variables such as SBATCH_PARTITION would override what the script says.
    environment = {name: value for name, value in slurm_environment().items() if not name.startswith("SBATCH_")}
    silent = threading.Timer(SILENT_S, dialogue.waiting, (SILENT,))
    silent.daemon = True
    silent.start()
    try:
        answer = subprocess.run(
            ["sbatch", "--parsable", SCRIPT_FILE],
            cwd=folder,
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_SUBMIT_S,
            check=False,
        )
    except FileNotFoundError as error:
        message = "this machine has no `sbatch`, with which jobs are submitted to Slurm"
        hint = "submit where Slurm's commands are installed, such as a login node"
        raise LaunchError([Diagnostic("P062", message, hints=(hint,), blame=Blame.HOSTS)]) from error
    except subprocess.TimeoutExpired as error:
        said = error.stderr.decode("utf-8", "replace") if isinstance(error.stderr, bytes) else ""
        late = explain_slurm(f"{said} sbatch: no answer within {_SUBMIT_S:g} s")
        raise LaunchError([late] if late else []) from error
    finally:
        silent.cancel()
    # A site's plugin may print lines of its own before the number.
    number = answer.stdout.strip().rpartition("\n")[2].partition(";")[0]
    if answer.returncode == 0 and number.isdecimal():
        return number
    lines = [line.removeprefix("sbatch: ").removeprefix("error: ") for line in answer.stderr.splitlines()]
    raise LaunchError([explain_slurm(answer.stderr) or _refused(one_line(lines), request)])


def _refused(words: str, request: SlurmRequest) -> Diagnostic:
    place = f" --partition={request.partition}" if request.partition else ""
    return Diagnostic(
        "P061",
        f"Slurm refuses the job: {shown(words, longest=_LONGEST)}",
        notes=(f"it was asked for: {' '.join(request.options())}",),
        hints=(f"`sinfo{place}` shows partitions, their state and their limits",),
        blame=Blame.HOSTS,
    )
