"""Watch a run from start to end: pass output on, notice the first failure, end what does not end by itself.

One loop: it reads mpirun's output, polls the ranks' records, and after a failure, a Ctrl-C or a SIGTERM does what
`ending.py` decides. Whatever still carries the run's id is then killed too, by the crew that stands beside the ranks.
"""

import contextlib
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from ttlaunch import contract
from ttlaunch.agent.last_word import leave_word
from ttlaunch.launch.boxes import drop_evidence, keep_boxes
from ttlaunch.launch.conclude import Ending, conclude, folder_failure
from ttlaunch.launch.crew import Crew
from ttlaunch.launch.ending import (
    AFTER_TERM_S,
    USUAL_GRACE,
    Act,
    Grace,
    RunEnd,
    Say,
    SignalMpirun,
    SignalRanks,
    stopped,
)
from ttlaunch.launch.engine import with_home
from ttlaunch.launch.hang.hangs import HangWatch
from ttlaunch.launch.hosts.silence import SilenceWatch
from ttlaunch.launch.measured.trace import write_trace
from ttlaunch.launch.printed.merge import MergedWriter
from ttlaunch.launch.printed.output import MpirunOutput, View
from ttlaunch.launch.process import end_mpirun, start_mpirun
from ttlaunch.launch.report import Report, write_report
from ttlaunch.launch.runs.run_folder import RunFolder, append_event
from ttlaunch.launch.saved.checkpoints import CheckpointKeeper
from ttlaunch.launch.saved.lost_checkpoints import LostCheckpoints
from ttlaunch.launch.watch import Watch
from ttlaunch.plan.launch_plan import LaunchPlan
from ttlaunch.plan.openmpi import scratch_settings

_TICK_S = 0.1


def supervise(
    plan: LaunchPlan,
    folder: RunFolder,
    *,
    environment: Mapping[str, str],
    view: View,
    watch: Watch,
    crew: Crew,
    scratch: Path,
    grace: Grace = USUAL_GRACE,
    hang_timeout_s: float | None = None,
) -> Report:
    """Run the plan to its end, whatever that is, and write `report.json`.

    Args:
        plan: What to start; its files are already in `folder`.
        folder: The run folder.
        environment: What mpirun inherits.
        view: Told about everything as it happens.
        watch: What is known of the ranks; nothing yet.
        crew: Who stands beside the ranks where they run.
        scratch: A short, private folder for sockets and shared memory, of this path on every host.
        grace: What ranks may take to leave once an end was ordered.
        hang_timeout_s: How long no rank may move; None: see `HangWatch`.
    """
    started = time.monotonic()
    ending, leftovers, lost = Ending(), 0, LostCheckpoints(view)
    hangs = HangWatch(plan, folder, crew, timeout_s=hang_timeout_s)
    silence = SilenceWatch(folder, view)
    end = RunEnd(ending, plan, grace_s=grace.seconds)
    with _signals(end):  # to the last: however often it is pressed, Ctrl-C leaves a report
        with CheckpointKeeper(plan, folder) as checkpoints, MergedWriter(folder.path, watch) as merged:
            variables = _variables(plan, folder, environment, crew=crew, scratch=scratch)
            process = start_mpirun(plan.engine.argv, folder=folder.path, environment=variables)
            try:
                append_event(folder, "start", engine=plan.engine.name, plan=plan.hash, mpirun=process.pid)
                _loop(process, watch, ending, folder, view, crew, checkpoints, lost, hangs, silence, merged, end)
            except OSError as error:
                ending.failure = folder_failure(error)
            finally:
                ending.killing_since = time.time()
                end_mpirun(process, patience_s=AFTER_TERM_S)
                leftovers = _collect(crew, folder, plan)
                _finish(checkpoints, watch, ending, crew, silence, merged)
                _pass_on(watch, view)
                lost.notice(watch.ranks, checkpoints.lost)
        report = conclude(plan, folder, watch, ending, process.returncode, time.monotonic() - started, leftovers)
        report = replace(report, lost_checkpoints=lost.clean_up(folder.path), stopped=stopped(ending, folder, grace))
        view.tick(watch.ranks)
        write_trace(folder.path, plan.ranks)
        _write_down(report, folder)
    return report


def _variables(
    plan: LaunchPlan, folder: RunFolder, environment: Mapping[str, str], *, crew: Crew, scratch: Path
) -> dict[str, str]:
    """What mpirun sees: what it inherits, secrets, its own settings, and what tells ranks which run they are of."""
    name = plan.engine.name
    settings = {**plan.engine.environment, **scratch_settings(name, str(scratch)), **crew.settings(name)}
    inherited = {name: value for name, value in with_home(environment).items() if name not in plan.managed}
    own = {contract.ENV_RUN_ID: folder.run_id, contract.ENV_START: "", contract.ENV_SCRATCH: str(scratch)}
    return {**inherited, **plan.secrets, **settings, **own}


def _write_down(report: Report, folder: RunFolder) -> None:
    drop_evidence(folder.path, is_done=report.status == "done")
    with contextlib.suppress(OSError):  # a folder that cannot be written any more is the failure the report names
        write_report(report, folder)
        append_event(folder, "end", status=report.status, exit_status=report.exit_status)


def _loop(
    process: subprocess.Popen[bytes],
    watch: Watch,
    ending: Ending,
    folder: RunFolder,
    view: View,
    crew: Crew,
    checkpoints: CheckpointKeeper,
    lost: LostCheckpoints,
    hangs: HangWatch,
    silence: SilenceWatch,
    merged: MergedWriter,
    end: RunEnd,
) -> None:
    with MpirunOutput(process, folder.file(contract.LOGS_DIR), view) as output:
        while process.poll() is None:
            folder.path.stat()  # files that are open take what is written although nobody finds it any more
            output.read(_TICK_S)
            merged.poll()
            _pass_on(watch, view)
            checkpoints.check()
            lost.notice(watch.ranks, checkpoints.lost)
            view.tick(watch.ranks)
            _notice_losses(watch, ending, crew, silence)
            _notice_hang(hangs, watch, ending)
            for act in end.decide(time.monotonic(), watch.ranks):
                _carry_out(act, process, folder, view, crew, watch)
        output.drain()
    _pass_on(watch, view)


def _collect(crew: Crew, folder: RunFolder, plan: LaunchPlan) -> int:
    """End what is left, keep the ranks' black boxes, and say how many processes were left."""
    leftovers = crew.end()
    keep_boxes(crew.boxes, folder.path, world_size=plan.world_size)
    return leftovers


def _finish(
    checkpoints: CheckpointKeeper,
    watch: Watch,
    ending: Ending,
    crew: Crew,
    silence: SilenceWatch,
    merged: MergedWriter,
) -> None:
    try:
        merged.finish()
        checkpoints.finish()
        _notice_losses(watch, ending, crew, silence)
    except OSError as error:
        ending.failure = ending.failure or folder_failure(error)


def _pass_on(watch: Watch, view: View) -> None:
    for state, record in watch.poll():
        view.record(state, record)


def _notice_hang(hangs: HangWatch, watch: Watch, ending: Ending) -> None:
    if ending.since is None and ending.failure is None:
        ending.failure = hangs.check(watch.ranks)


def _notice_losses(watch: Watch, ending: Ending, crew: Crew, silence: SilenceWatch) -> None:
    """Shims count until the run is being ended, which takes them along; hosts count to the last."""
    losses = crew.losses(watch.ranks)
    if ending.since is None:
        ending.lost_shims.update(losses.shims)
    ending.lost_hosts.update(losses.hosts)
    silence.notice(losses)


def _carry_out(
    act: Act, process: subprocess.Popen[bytes], folder: RunFolder, view: View, crew: Crew, watch: Watch
) -> None:
    """Do what was decided about the run's end."""
    match act:
        case Say(text):
            view.output("stderr", text.encode())
        case SignalRanks(number, word):
            append_event(folder, "signal", number=number, **(word or {}))
            if word is not None:
                leave_word(str(folder.path), word)
            crew.signal_ranks(watch.ranks, number, word=word)
        case SignalMpirun(number):
            append_event(folder, "ending" if number == signal.SIGTERM else "killing", signal=number)
            process.send_signal(number)


@contextmanager
def _signals(end: RunEnd) -> Iterator[None]:
    """Turn Ctrl-C, SIGTERM and a closed terminal into the run's end instead of ours."""

    def note(number: int, _frame: object) -> None:
        end.order(number)

    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
    previous = {number: signal.signal(number, note) for number in numbers}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
