"""What the report of a run says beside its tables, as data: for the command line, for JSON, and for the page."""

import math
from typing import Any

from ttlaunch.app.run_diagnostics import lost_output_diagnostics, traffic_diagnostics
from ttlaunch.diagnostics import Diagnostic, shown
from ttlaunch.running.failures.failure import Failure
from ttlaunch.running.membership.journal import epochs_so_far
from ttlaunch.running.metrics.communication import OperationCost, communication_costs
from ttlaunch.running.metrics.served import served_work
from ttlaunch.running.metrics.telemetry import memory_of_ranks
from ttlaunch.running.metrics.times import StepTimes, step_times
from ttlaunch.running.readers.recorded import Recorded
from ttlaunch.running.readers.waits import Wait, waits_now
from ttlaunch.running.restarts import read_follow_up
from ttlaunch.running.watch import RankState


def report_as_json(recorded: Recorded) -> dict[str, Any]:
    """Return what `ttlaunch report --format json` prints, without its diagnostics; times are by rank."""
    work = served_work(recorded.telemetry or ())
    by_rank = [step_times([entry]) for entry in recorded.telemetry or ()]
    rows = (recorded.report or {}).get("ranks") or ()
    lasts = {row["rank"]: row.get("last_operation") for row in rows}
    return {
        "run_id": recorded.path.name,
        "name": recorded.name,
        "layout": recorded.plan.get("layout"),
        "status": recorded.status,
        "ended_by": ended_by(recorded),
        "steps": max((state.step for state in recorded.ranks), default=0),
        "tokens_per_s": max((state.tokens_per_s or 0 for state in recorded.ranks), default=0) or None,
        "samples_per_s": max((state.samples_per_s or 0 for state in recorded.ranks), default=0) or None,
        "ranks": [
            {
                "rank": state.row.rank,
                "role": state.row.role,
                "host": state.row.host,
                "last_operation": lasts.get(state.row.rank),
                **({"metrics": metrics} if (metrics := last_metrics(recorded, state)) else {}),
            }
            for state in recorded.ranks
        ],
        **({"start_times": recorded.start.as_json()} if recorded.start else {}),
        **({"epochs": epochs} if (epochs := epochs_of(recorded)) else {}),
        **({"waits": [one.as_json() for one in waits]} if (waits := waits_of(recorded)) else {}),
        **({"served": work.as_json()} if work else {}),
        "traffic": recorded.traffic.as_json() if recorded.traffic else None,
        "communication": [cost.as_json() for cost in communication_of(recorded)],
        "memory": [one.as_json() for one in memory_of_ranks(recorded.telemetry or ())],
        "times": [times.as_json() for times in by_rank if times is not None],
    }


def epochs_of(recorded: Recorded) -> list[dict[str, Any]]:
    """Return the epochs of an elastic run: of its report, or before it has one, of its journal; none of any other run."""
    if recorded.report is not None:
        return [dict(epoch) for epoch in recorded.report.get("epochs") or ()]
    return epochs_so_far(recorded.path) if recorded.plan.get("elastic") else []


def waits_of(recorded: Recorded) -> list[Wait]:
    """Return who waits for whom at this moment; nothing of a run that is not active on this machine."""
    if not recorded.is_running:
        return []
    return waits_now(recorded.path, recorded.ranks, is_recipe=recorded.plan.get("recipe") is not None)


def report_diagnostics(recorded: Recorded) -> list[Diagnostic]:
    """Return what the report of a run warns of: output that is lost, and bytes that differ from the formula."""
    return [
        *lost_output_diagnostics((recorded.report or {}).get("ranks") or ()),
        *traffic_diagnostics(recorded.traffic, [state.row.role for state in recorded.ranks]),
    ]


def ended_by(recorded: Recorded) -> str:
    """Describe what ended the run; empty if it completed."""
    if recorded.report is None or recorded.status == "terminated":
        from ttlaunch.app.slurm_job import why_slurm_ended

        if why := why_slurm_ended(recorded.path):
            return why
    if recorded.report is None:
        if recorded.is_running:
            return "still running; this is what is written so far"
        return "no report was written, and none of its processes is on this machine; its launcher was killed, or it runs elsewhere"
    failure = recorded.report.get("failure")
    if failure:
        known = {name: failure.get(name) for name in ("code", "rank", "role", "host", "step", "cause", "when")}
        return f"{failure['code']}: {Failure(**known, time=None).message}"
    follow_up = read_follow_up(recorded.path)
    if follow_up.get("requeued"):
        return f"the time limit of Slurm job {shown(str(follow_up['requeued']))}, which was started again"
    signals = {"interrupted": "Ctrl-C", "terminated": "SIGTERM", "time limit": "the time limit of the batch system"}
    return signals.get(recorded.status, "")


def why_no_telemetry(recorded: Recorded) -> str:
    """Explain why there are no numbers to show."""
    if recorded.plan.get("elastic"):
        return "bytes and times are not summed up where workers come and go"
    if recorded.report is None and recorded.is_running:
        return "nothing about bytes and times yet: ranks write their telemetry every few seconds"
    if recorded.plan.get("recipe") is None:
        return "nothing about bytes and times: the run was of a program, and only ranks of recipes keep telemetry"
    return "nothing about bytes and times: not every rank kept telemetry; it ended too early, or was made by an older ttlaunch"


def times_by_role(recorded: Recorded) -> dict[str, "StepTimes"]:
    """Summarise the steps of the ranks of each role; without roles whose ranks have finished no step."""
    telemetry, found = recorded.telemetry or [], {}
    for role in dict.fromkeys(state.row.role for state in recorded.ranks):
        times = step_times([entry for entry in telemetry if recorded.ranks[entry.rank].row.role == role])
        if times is not None:
            found[role] = times
    return found


def communication_of(recorded: Recorded) -> list[OperationCost]:
    """Return the cost of each operation of each role."""
    rows = [state.row for state in recorded.ranks]
    return communication_costs(recorded.telemetry or (), rows, folder=recorded.path)


def last_operations_of(recorded: Recorded) -> dict[str, str]:
    """Return the last operation of each rank before the run failed or hung, if it is known."""
    rows = (recorded.report or {}).get("ranks") or ()
    if recorded.status not in {"failed", "hung"}:
        return {}
    return {f"{row['rank']} {row['role']}": row["last_operation"]["text"] for row in rows if row.get("last_operation")}


def last_metrics(recorded: Recorded, state: RankState) -> dict[str, float | str]:
    """Return the last value of each number that a script's rank printed or sent, NaN and infinities as text; none of a recipe, which has tables of its own."""
    values = state.metrics if recorded.plan.get("recipe") is None else {}
    return {name: value if math.isfinite(value) else str(value) for name, value in values.items()}
