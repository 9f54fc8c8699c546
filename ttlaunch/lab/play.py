"""Simulate a run: one child process plays all ranks and reports what is wrong with their messages."""

import json
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ttlaunch import contract
from ttlaunch.engines.process import end_process, start_at_terminal, start_process
from ttlaunch.planning.launch_plan import LaunchPlan
from ttlaunch.records.parser import BadRecord, read
from ttlaunch.records.ranks import AnyProgress
from ttlaunch.records.replay import ORDER_FILE, ReplayOrder
from ttlaunch.records.replay import as_json as order_as_json
from ttlaunch.records.simulation import SimulatedEdge, SimulatedFinding, SimulationEnd, as_json
from ttlaunch.running.bad_records import BadLine, report_bad_records
from ttlaunch.running.checkpoints.complete import LostCheckpoints, complete_checkpoints, remove_old
from ttlaunch.running.conclude import compared_replicas, different_parameters, folder_failure
from ttlaunch.running.failures.attribution import first_failure
from ttlaunch.running.failures.audited import audited_failure
from ttlaunch.running.failures.divergence import divergence, with_first_micro_batch
from ttlaunch.running.failures.failure import Failure
from ttlaunch.running.logs.output import EVERY_LINE, EngineOutput, View
from ttlaunch.running.report import Report, make_report
from ttlaunch.running.runs.files import read_file
from ttlaunch.running.runs.run_folder import RunFolder, write_plan
from ttlaunch.running.watch import Phase, RankState, Watch

_MODULE = "ttlaunch.runtime.simulate"
_TICK_S = 0.1
_AFTER_TERM_S = 1.0


@dataclass(frozen=True)
class Played:
    """The result of a simulated run.

    Attributes:
        findings: Mistakes in the messages, as `ttlaunch.runtime.comm.findings` writes them.
        edges: Messages and bytes by source and destination.
        peak_memory_bytes: The peak memory of the process that played all ranks; None if it did not finish.
    """

    report: Report
    findings: tuple[SimulatedFinding, ...]
    edges: tuple[SimulatedEdge, ...]
    peak_memory_bytes: int | None

    def as_json(self) -> dict[str, Any]:
        known = {"findings": as_json(self.findings), "edges": as_json(self.edges)}
        values = {**known, "peak_memory_bytes": self.peak_memory_bytes}
        return {**self.report.as_json(), **values}


def play_ranks(
    plan: LaunchPlan,
    path: Path,
    *,
    python: str,
    environment: Mapping[str, str],
    view: View,
    run_id: str,
    saves: bool = False,
    order: ReplayOrder | None = None,
    cancelled: threading.Event | None = None,
) -> Played:
    """Run all ranks of the plan in one child process, to the end or to the first mistake.

    Args:
        plan: The plan of a recipe; its engine is not started. Variables of single ranks are not set, because all ranks share one process.
        path: An empty folder for the records.
        python: Interpreter of the ranks.
        environment: Variables for the child; those of the plan take precedence.
        view: Receives output and records as they arrive.
        run_id: The id in the environment of the child's processes.
        saves: Whether checkpoints are saved, as in a run.
        order: What to replay of a run, in place of running to the end; a debugger in it has this process's terminal.
        cancelled: The child ends when another thread sets it.

    Raises:
        OSError: The folder cannot be written at the start. If it cannot be written later, the simulation fails instead.
    """
    folder = RunFolder(run_id, path)
    for name in (contract.LOGS_DIR, contract.RECORDS_DIR):
        folder.file(name).mkdir()
    write_plan(plan, folder.path)
    watch, started = Watch(plan, folder), time.monotonic()
    lost, uncompleted, broken = LostCheckpoints(view), dict[int, str](), None
    start = start_process if order is None else _prepare(order, folder)
    command = [python, "-m", _MODULE, *(["--checkpoints"] if saves else [])]
    process = start(command, folder=Path(plan.working_folder), environment=_environment(plan, folder, environment))
    try:
        try:
            _follow(process, watch, folder=folder, view=view, cancelled=cancelled)
        finally:
            end_process(process, patience_s=_AFTER_TERM_S)
        _update_view(watch, watch.records(), folder=folder, view=view)
        if saves:
            _complete_checkpoints(plan, folder, uncompleted, watch=watch)
    except OSError as error:
        broken = folder_failure(error)
    lost.notice(watch.ranks, uncompleted)
    played = _conclude(plan, folder, watch, broken=broken, returncode=process.returncode, started=started)
    _update_view(watch, watch.records(), folder=folder, view=view)  # bad records that were found since
    return replace(played, report=replace(played.report, lost_checkpoints=lost.clean_up(folder.path)))


def _prepare(order: ReplayOrder, folder: RunFolder) -> Callable[..., subprocess.Popen[bytes]]:
    """Write down what is to be replayed, and return what starts the process: a debugger needs the terminal."""
    folder.file(ORDER_FILE).write_text(json.dumps(order_as_json(order)), encoding="utf-8")
    return start_process if order.line is None else start_at_terminal


def _complete_checkpoints(plan: LaunchPlan, folder: RunFolder, uncompleted: dict[int, str], *, watch: Watch) -> None:
    watch.replicas.settle({})  # no rank reports any more digests
    content = plan.as_json()
    config = content["config"].get("checkpoint_config") or {}
    lose = uncompleted.setdefault if config.get("on_error") == "continue" else None
    replicas = watch.replicas if plan.world_size > 1 else None
    complete_checkpoints(
        folder.path, content, run_id=folder.run_id, lose=lose, complain=watch.bad.add, replicas=replicas
    )
    if config:
        remove_old(folder.path, keep=config["keep"], keep_every=config["keep_every"])


def _conclude(
    plan: LaunchPlan, folder: RunFolder, watch: Watch, *, broken: Failure | None, returncode: int, started: float
) -> Played:
    written = _read(folder, watch)
    findings = written.findings
    failure = _failure(plan, watch, broken, findings=findings, returncode=returncode)
    if failure is None and not findings:
        failure = divergence(watch.ranks, plan.as_json()["config"])
    failure = with_first_micro_batch(failure, watch.ranks, run_id="")
    report = make_report(
        plan,
        folder,
        watch.ranks,
        status="failed" if failure or findings else "done",
        exit_status=contract.STATUS_RANK_FAILED if failure or findings else contract.STATUS_DONE,
        duration_s=time.monotonic() - started,
        failure=None if findings else failure,
        leftovers=0,
        complain=watch.bad.add,
    )
    return Played(report, findings, written.edges, written.peak_memory_bytes)


def _environment(plan: LaunchPlan, folder: RunFolder, inherited: Mapping[str, str]) -> dict[str, str]:
    kept = {name: value for name, value in inherited.items() if name not in plan.managed}
    return {
        **kept,
        **contract.fill_references(plan.environment, plan.secrets),
        **plan.secrets,
        contract.ENV_RUN_ID: folder.run_id,
        contract.ENV_RUN_DIR: str(folder.path),
        contract.ENV_PLAN: str(folder.file(contract.PLAN_FILE)),
        contract.ENV_WORLD_SIZE: str(plan.world_size),
        "PYTHONUNBUFFERED": "1",
    }


def _follow(
    process: subprocess.Popen[bytes],
    watch: Watch,
    *,
    folder: RunFolder,
    view: View,
    cancelled: threading.Event | None,
) -> None:
    if process.stdout is None:  # it has the terminal, and somebody sits there
        process.wait()
        return
    with EngineOutput(process, folder.file(contract.LOGS_DIR), view, shown=EVERY_LINE) as output:
        while process.poll() is None and not (cancelled and cancelled.is_set()):
            output.read(_TICK_S)
            _update_view(watch, watch.look(), folder=folder, view=view)
        if process.poll() is not None:
            output.drain()


def _update_view(
    watch: Watch, records: Iterator[tuple[RankState, AnyProgress]], *, folder: RunFolder, view: View
) -> None:
    for state, record in records:
        view.record(state, record)
    report_bad_records(watch.bad, [state.row for state in watch.ranks], folder=folder, output=view.output)
    view.tick(watch.ranks)


def _failure(
    plan: LaunchPlan,
    watch: Watch,
    broken: Failure | None,
    *,
    findings: tuple[SimulatedFinding, ...],
    returncode: int,
) -> Failure | None:
    """Find the first rank that failed by itself, or another reason why the simulation failed."""
    audited = audited_failure(plan, watch.audits)
    failure = audited or first_failure(watch.ranks, lost_shims={}, stopped=False) or broken
    if failure is None and not findings and returncode != 0:
        how = f"was killed by signal {-returncode}" if returncode < 0 else f"ended with status {returncode}"
        failure = Failure(code="R003", cause=f"the process of all ranks {how}", time=time.time())
    watch.replicas.settle({})
    failure = failure or compared_replicas(plan, watch.replicas) or different_parameters(plan, watch.ranks)
    for state in watch.ranks:
        if state.phase is not Phase.DONE and state.error is None:
            state.phase = Phase.STOPPED
    return failure


def _read(folder: RunFolder, watch: Watch) -> SimulationEnd:
    """Read what the process of all ranks wrote at its end; empty if it wrote nothing."""
    data, nothing = (
        read_file(folder.file(contract.SIMULATION_FILE)),
        SimulationEnd(findings=(), edges=(), peak_memory_bytes=None),
    )
    found = nothing if data is None else read(SimulationEnd, data)
    if isinstance(found, BadRecord):
        watch.bad.add(BadLine(watch.ranks[0].row.rank, contract.SIMULATION_FILE, None, found.reason))
        return nothing
    return found
