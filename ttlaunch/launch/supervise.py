"""Watch a run from start to end: pass output on, notice the first failure, end what does not end by itself.

One loop, no threads: it reads mpirun's output, polls the ranks' records, and after a failure, a Ctrl-C or a SIGTERM
gives mpirun a moment before it terminates, then kills it. Whatever still carries the run's id is then killed too.
"""

import shutil
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from ttlaunch import contract
from ttlaunch.launch.attribution import Failure, first_failure
from ttlaunch.launch.output import FROM_A_RANK, MpirunOutput, View
from ttlaunch.launch.process import kill_run_processes, start_mpirun
from ttlaunch.launch.report import Report, combine_digests, make_report, write_report
from ttlaunch.launch.run_folder import RunFolder, append_event, make_scratch_folder
from ttlaunch.launch.watch import Phase, RankState, Watch
from ttlaunch.plan.launch_plan import LaunchPlan
from ttlaunch.plan.openmpi import scratch_settings

_TICK_S = 0.1
_AFTER_FAILURE_S = 1.5  # mpirun usually ends within 0.5 s of the first rank that fails
_AFTER_TERM_S = 1.5
_TAIL_LINES = 12


@dataclass
class _Ending:
    """Why and since when the run is being ended."""

    status: str = "done"
    signal_number: int | None = None
    since: float | None = None
    terminated: float | None = None
    killed: bool = False
    failure: Failure | None = None
    lost_shims: dict[int, float] = field(default_factory=dict)


def supervise(plan: LaunchPlan, folder: RunFolder, *, environment: Mapping[str, str], view: View) -> Report:
    """Run the plan to its end, whatever that is, and write `report.json`.

    Args:
        plan: What to start; its files are already in `folder`.
        folder: The run folder.
        environment: What mpirun inherits.
        view: Told about everything as it happens.
    """
    scratch = make_scratch_folder()
    settings = {**plan.engine.environment, **scratch_settings(plan.engine.name, str(scratch))}
    inherited = {name: value for name, value in environment.items() if name not in plan.managed}
    started = time.monotonic()
    append_event(folder, "start", engine=plan.engine.name, plan=plan.hash)
    watch, ending = Watch(plan, folder), _Ending()
    try:
        with _signals(ending):
            process = start_mpirun(
                plan.engine.argv,
                folder=folder.path,
                environment={**inherited, **settings, contract.ENV_RUN_ID: folder.run_id},
            )
            _loop(process, watch, ending, folder, view)
            leftovers = kill_run_processes(folder.run_id)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    report = _conclude(plan, folder, watch, ending, process.returncode, time.monotonic() - started, len(leftovers))
    view.tick(watch.ranks)
    write_report(report, folder)
    append_event(folder, "end", status=report.status, exit_status=report.exit_status)
    return report


def _loop(process: subprocess.Popen[bytes], watch: Watch, ending: _Ending, folder: RunFolder, view: View) -> None:
    with MpirunOutput(process, folder.file(contract.LOGS_DIR), view) as output:
        while process.poll() is None:
            output.read(_TICK_S)
            for state, record in watch.poll():
                view.record(state, record)
            view.tick(watch.ranks)
            _notice_lost_shims(watch, ending)
            _end_if_needed(process, watch, ending, folder)
        output.drain()
    for state, record in watch.poll():
        view.record(state, record)


def _notice_lost_shims(watch: Watch, ending: _Ending) -> None:
    """A shim that is gone without having written how its rank ended was killed itself."""
    if ending.since is not None:
        return
    for state in watch.ranks:
        pid = state.started.get("shim_pid")
        if pid and state.exit is None and _is_gone(int(pid)):
            ending.lost_shims.setdefault(state.row.rank, time.time())


def _is_gone(pid: int) -> bool:
    try:
        status = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace")
    except OSError:
        return True
    return status.rpartition(")")[2].split()[0] in {"Z", "X"}


def _end_if_needed(process: subprocess.Popen[bytes], watch: Watch, ending: _Ending, folder: RunFolder) -> None:
    now = time.monotonic()
    if ending.since is None and (
        any(state.phase is Phase.FAILED for state in watch.ranks) or ending.lost_shims or ending.signal_number
    ):
        ending.since = now
        append_event(folder, "ending", signal=ending.signal_number)
    if ending.since is None:
        return
    patience = 0.0 if ending.signal_number else _AFTER_FAILURE_S
    if ending.terminated is None and now - ending.since >= patience:
        process.terminate()
        ending.terminated = now
    elif ending.terminated is not None and not ending.killed and now - ending.terminated >= _AFTER_TERM_S:
        process.kill()
        ending.killed = True


@contextmanager
def _signals(ending: _Ending) -> Iterator[None]:
    """Turn Ctrl-C, SIGTERM and a closed terminal into the run's end instead of ours."""

    def note(number: int, _frame: object) -> None:
        ending.signal_number = ending.signal_number or number

    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    previous = {number: signal.signal(number, note) for number in numbers}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def _conclude(
    plan: LaunchPlan,
    folder: RunFolder,
    watch: Watch,
    ending: _Ending,
    returncode: int,
    duration_s: float,
    leftovers: int,
) -> Report:
    # A killed mpirun takes its shims along, so they are not the ones to name.
    mpirun_was_killed = returncode < 0 and ending.terminated is None
    lost_shims = {} if mpirun_was_killed else ending.lost_shims
    failure = first_failure(watch.ranks, lost_shims=lost_shims, ordered=ending.signal_number is not None)
    status, exit_status = "done", contract.STATUS_DONE
    if failure is None and ending.signal_number is None and returncode != 0:
        failure = _mpirun_failure(folder, returncode)
    if ending.signal_number == signal.SIGINT:
        status, exit_status = "interrupted", contract.STATUS_INTERRUPTED
    elif ending.signal_number:
        status, exit_status = "terminated", contract.STATUS_TERMINATED
    if failure is None and status == "done" and not combine_digests([rank.digests for rank in watch.ranks])[1]:
        failure = different_parameters(watch.ranks)
    if failure is not None and status == "done":
        status, exit_status = "failed", contract.STATUS_RANK_FAILED
    if status != "done":
        _mark_stopped(watch.ranks, failure)
    return make_report(
        plan,
        folder,
        watch.ranks,
        status=status,
        exit_status=exit_status,
        duration_s=duration_s,
        failure=failure,
        leftovers=leftovers,
    )


def _mark_stopped(ranks: list[RankState], failure: Failure | None) -> None:
    """Tell the ranks that broke or finished from those that were only stopped."""
    for state in ranks:
        ended_by_itself = state.error is not None or (failure is not None and failure.rank == state.row.rank)
        if state.phase is not Phase.DONE and not ended_by_itself:
            state.phase = Phase.STOPPED


def different_parameters(ranks: list[RankState]) -> Failure:
    """Ranks finished with different bits in a parameter they share: a result nobody should trust."""
    first: dict[str, tuple[RankState, str]] = {}
    for state in ranks:
        for name, digest in state.digests.items():
            other, known = first.setdefault(name, (state, digest))
            if known != digest:
                cause = f"ended with other bits in `{name}` than rank {other.row.rank} ({other.row.role})"
                row = state.row
                return Failure("R009", row.rank, row.role, row.host, None, cause, time.time())
    raise AssertionError("called although all parameters agree")


def _mpirun_failure(folder: RunFolder, returncode: int) -> Failure:
    """Mpirun failed and no rank did: its own last words are the evidence."""
    how = f"was killed by {signal.Signals(-returncode).name}" if returncode < 0 else f"exited with status {returncode}"
    words = folder.file(f"{contract.LOGS_DIR}/mpirun.stderr").read_text(encoding="utf-8", errors="replace").splitlines()
    said = tuple(line.strip() for line in words if line.strip(" -\t") and not line.startswith(FROM_A_RANK.decode()))
    return Failure(
        "R008", None, None, None, None, f"mpirun {how}; no rank had failed", time.time(), None, said[-_TAIL_LINES:]
    )
