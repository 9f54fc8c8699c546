"""Read everything in a run's folder: the plan, the ranks' records, the telemetry, the report."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ttlaunch import contract
from ttlaunch.running.metrics.telemetry import OUTSIDE_STEPS, RankTelemetry, read_telemetry
from ttlaunch.running.metrics.traffic import Settlement, settle
from ttlaunch.running.report import check_parts
from ttlaunch.running.runs.facts import facts_in, with_joined
from ttlaunch.running.runs.files import read_object
from ttlaunch.running.runs.launcher import is_running
from ttlaunch.running.runs.registry import was_started_here
from ttlaunch.running.runs.run_folder import RunFolder, clock_in, read_events
from ttlaunch.running.start_times import StartTimes, read_start_times
from ttlaunch.running.watch import RankState, Watch


@dataclass(frozen=True)
class Recorded:
    """Everything that is known of a run.

    Attributes:
        plan: The content of `plan.json`.
        report: The content of `report.json`; None before the run has ended.
        is_running: Whether the launcher or other processes of the run are alive on this machine.
        ranks: The states of all ranks.
        telemetry: The telemetry of all ranks; None if a rank has written none.
        traffic: The comparison with the recipe's formula; None without telemetry.
        start: Where the time from Enter to the first step went; None before that step, and for runs of older versions.
    """

    path: Path
    plan: Mapping[str, Any]
    report: Mapping[str, Any] | None
    is_running: bool
    ranks: list[RankState]
    telemetry: list[RankTelemetry] | None
    traffic: Settlement | None
    start: StartTimes | None = None

    @property
    def status(self) -> str:
        """The status in the report; without one, `running` or `cut off`."""
        if self.report is not None:
            return str(self.report["status"])
        return "running" if self.is_running else "cut off"

    @property
    def name(self) -> str:
        return facts_in(self.plan).name


def read_run(
    path: Path,
    *,
    ranks: Sequence[RankState] | None = None,
    telemetry: list[RankTelemetry] | None = None,
    with_telemetry: bool = True,
) -> Recorded:
    """Read everything that a run's folder contains so far.

    Args:
        path: The run's folder.
        ranks: The states of its ranks; None to read their records.
        telemetry: The telemetry of all planned ranks, each of which has written some; None to read it.
        with_telemetry: Whether to read the telemetry, and so the traffic; its size grows with that of the run.

    Raises:
        OSError, ValueError: The file of the plan or of the report cannot be read, or has another content.
    """
    plan = read_object(path / contract.PLAN_FILE)
    facts = facts_in(plan)
    planned = len(facts.ranks)
    has_ended = (path / contract.REPORT_FILE).is_file()
    report = read_object(path / contract.REPORT_FILE) if has_ended else None
    if report is not None:
        check_parts(report)
    if ranks is None:
        watch = Watch(with_joined(facts, path), RunFolder(path.name, path))
        for clock in filter(None, map(clock_in, read_events(path))):
            watch.set_clock(*clock)
        watch.read_all()
        ranks = watch.ranks
    is_done = report is not None and report.get("status") == "done"
    known = read_telemetry(path, world_size=planned) if with_telemetry and telemetry is None else telemetry
    traffic = None
    if known is not None:
        runs_recipe = was_started_here(path, plan.get("hash"))
        traffic = settle(path, plan, ranks[:planned], is_done=is_done, runs_recipe=runs_recipe, telemetry=known)
    return Recorded(
        path=path,
        plan=plan,
        report=report,
        is_running=not has_ended and is_running(path),
        ranks=list(ranks),
        telemetry=known,
        traffic=traffic,
        start=read_start_times(path, ranks[:planned], plan) if with_telemetry else None,
    )


def bytes_per_step(recorded: Recorded) -> tuple[float | None, bool]:
    """Return the bytes sent in a step, and whether all of them were counted."""
    steps = max((state.step for state in recorded.ranks), default=0)
    if recorded.telemetry is None or recorded.traffic is None or not steps:
        return None, False
    counted = sum(
        row.size * row.steps_until(row.last)
        for entry in recorded.telemetry
        for row in entry.sent
        if row.phase not in OUTSIDE_STEPS and row.first > 0
    )
    hidden = [edge.expected for edge in recorded.traffic.edges if edge.size is None]
    return (counted + sum(size or 0 for size in hidden)) / steps, not hidden
