"""What a batch script of `ttlaunch submit` becomes on the first host of its Slurm job: one start of a submitted run.

The first start begins as it was submitted. If Slurm has started the job before, this start goes on from the newest good checkpoint of
those before it. When the time limit is near, Slurm sends SIGUSR1 to this process; the run saves its step, and the job asks Slurm to be
started again, unless the start has come no further than the ones before it.
"""

import os
import signal
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ttlaunch import contract
from ttlaunch.app.execute import RunOptions, marks_of_command
from ttlaunch.app.find_start import search_checkpoint
from ttlaunch.app.run_spec import RunSpec
from ttlaunch.app.slurm_hosts import with_variables_of_job
from ttlaunch.app.slurm_job import Start, made_progress, note_start, read_order, read_starts
from ttlaunch.cli.console import print_lines, reporting_errors, show_diagnostics
from ttlaunch.cli.dialogue import TerminalDialogue
from ttlaunch.cli.last_resort import status_of
from ttlaunch.cli.run import start_and_watch
from ttlaunch.diagnostics import Diagnostic, Format, LaunchError, shown
from ttlaunch.hosts.transport.slurm import ask_slurm
from ttlaunch.running.restarts import write_follow_up
from ttlaunch.spec.topology.slurm_request import JOB_VARIABLE

if TYPE_CHECKING:
    from ttlaunch.app.outcome import Outcome
    from ttlaunch.app.supervisor_process import Begun
    from ttlaunch.running.runs.run_folder import RunFolder

_ASK_S = 20.0
_MANY = 100_000


def main() -> None:
    """Start the run of the job whose folder is the current one, and exit with its status."""
    sys.exit(status_of(lambda: _start(Path.cwd(), os.environ)))


def _start(folder: Path, variables: Mapping[str, str]) -> int:
    with reporting_errors(form=Format.FULL):
        order, restarts = read_order(folder), _number(variables.get("SLURM_RESTART_COUNT", "0"))
        if not order:
            raise LaunchError([Diagnostic("P031", f"{shown(folder, longest=300)} holds no submitted run")])
        os.chdir(order["working_folder"])
        status = _run(folder, order, variables, restarts=restarts)
        if status == contract.STATUS_TIME_LIMIT:
            return _after_time_limit(folder, variables[JOB_VARIABLE], requeue=order["requeue"])
        return status
    return contract.STATUS_DONE


def _run(folder: Path, order: Mapping[str, Any], variables: Mapping[str, str], *, restarts: int) -> int:
    from ttlaunch.app.prepare_run import prepare
    from ttlaunch.app.restarts import run_with_restarts
    from ttlaunch.app.sinks import with_sinks
    from ttlaunch.running.metrics.sinks import SinkChoice

    marks = marks_of_command()
    # Slurm counts tasks on each host up to the most that were asked for; the ranks are to be spread as in the plan.
    known = {**variables, "SLURM_TASKS_PER_NODE": ",".join(map(str, order["slots"]))}
    spec = with_variables_of_job(RunSpec.from_json(order["spec"]), known)
    found = _newest_checkpoint(read_starts(folder)) if restarts else None
    if restarts:
        print_lines(
            [
                f"start {restarts + 1} of this job, from {f'the newest checkpoint of {found.name}' if found else 'the beginning'}"
            ]
        )
    dialogue = TerminalDialogue(Format.FULL)
    prepared = prepare(replace(spec, resume=str(found)) if found else spec, dialogue)
    changed = {"runs_dir": Path(order["options"]["runs_dir"]), "restarts": restarts, "marks": marks}
    options = RunOptions(**{**order["options"], **changed})
    sinks = [SinkChoice(kind, place) for kind, place in order["sinks"]]

    def work(begun: "Begun") -> "list[Outcome]":
        def note(run: "RunFolder") -> None:
            note_start(folder, run.path, restarts=restarts)
            begun(run)

        told = with_sinks(sinks, note)
        return run_with_restarts(prepared, options, dialogue, most=order["max_restarts"], ready=None, begun=told)

    chosen = range(prepared.plan.world_size)
    return start_and_watch(work, chosen, detach=False, form=Format.FULL, verbose=False)


def _newest_checkpoint(starts: list[Start]) -> Path | None:
    """Return the newest run with a checkpoint that can be read; None if there is none."""
    for start in reversed(starts):
        folder = start.run.parent
        checkpoint, _ = search_checkpoint(str(start.run), runs_dir=folder, working_folder=folder)
        if checkpoint is not None:
            return start.run
    return None


def _after_time_limit(folder: Path, job: str, *, requeue: bool) -> int:
    """Have Slurm start the job again, if it may and if it gets further each time, and return the exit status."""
    starts = read_starts(folder)
    if not requeue or not starts:
        return contract.STATUS_TIME_LIMIT
    last = starts[-1].run
    if not made_progress(starts):
        furthest = max(start.reached for start in starts)
        message = f"Slurm job {job} is not started again: this start came no further than step {furthest}"
        hints = ("ask for more time with `--time`", "the run is saved only when a step ends: make steps shorter")
        show_diagnostics([Diagnostic("R070", message, hints=hints)], form=Format.FULL)
        write_follow_up(last, no_progress=1)
        return contract.STATUS_NO_PROGRESS
    write_follow_up(last, requeued=job)
    print_lines([f"the time limit is near; Slurm starts job {job} again when it has hosts"])
    # Slurm ends this process as soon as it has taken the order.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    answer = ask_slurm("scontrol", "requeue", job, timeout_s=_ASK_S)
    if answer.returncode == 0:
        return contract.STATUS_TIME_LIMIT
    words = shown(answer.stderr.strip(), longest=300)
    hint = f"`ttlaunch run … --resume {last.name}` goes on from what is saved"
    show_diagnostics(
        [Diagnostic("R071", f"Slurm does not start job {job} again: {words}", hints=(hint,))], form=Format.FULL
    )
    write_follow_up(last, requeued=None)
    return contract.STATUS_TIME_LIMIT


def _number(text: str) -> int:
    return int(text) if text.isascii() and text.isdecimal() and int(text) < _MANY else 0
