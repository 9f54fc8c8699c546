"""Summarise many runs quickly: of the ranks' files, only the beginning and the end are read."""

from collections.abc import Iterable
from pathlib import Path

from ttlaunch import contract
from ttlaunch.quick_dataclass import dataclass
from ttlaunch.records.parser import BadRecord
from ttlaunch.records.ranks import AnyProgress, Ready, StepDone, read_progress
from ttlaunch.records.regular_files import read_regular, read_tail
from ttlaunch.running.runs.facts import run_folders
from ttlaunch.running.runs.files import read_object_if_any
from ttlaunch.running.runs.launcher import is_running, read_launcher, runs_with_processes
from ttlaunch.running.runs.registry import Registry, RegistryError
from ttlaunch.running.runs.run_folder import start_time

_TAIL_BYTES = 8192
_HEAD_BYTES = 4096


@dataclass(frozen=True)
class RunSummary:
    """The summary of a run, for one line of a list.

    Attributes:
        state: "running", "done", "failed", "interrupted", "terminated", "time limit"; "cut off" if its launcher was killed; "elsewhere" if
            another machine started it and the folder has no report of its end.
        step, total_steps: The largest that any rank reported.
        loss: The loss in the latest step for which a rank reported one; None if no rank did.
        started, ended: Seconds since the epoch; None if unknown.
        machine: The machine on which its launcher ran; None if unknown.
    """

    folder: Path
    name: str
    state: str
    step: int
    total_steps: int | None
    loss: float | None
    ranks: int
    started: float | None
    ended: float | None
    machine: str | None

    @property
    def is_over(self) -> bool:
        return self.state not in {"running", "elsewhere"}


def list_runs(runs_folder: Path, registry: Registry | None) -> tuple[list[RunSummary], RegistryError | None]:
    """List the runs in a folder and in the registry, oldest first; also return why the registry could not be read."""
    folders = {path.resolve() for path in run_folders(runs_folder)}
    problem = None
    try:
        folders |= {entry.folder for entry in registry.entries() if _has_plan(entry.folder)} if registry else set()
    except RegistryError as error:
        problem = error
    return summarise(folders), problem


def summarise(folders: Iterable[Path]) -> list[RunSummary]:
    """Summarise runs, oldest first."""
    with_processes = runs_with_processes()
    found = [_summary(folder, with_processes) for folder in folders]
    return sorted(found, key=lambda run: (run.started or 0.0, run.folder.name))


def _summary(folder: Path, with_processes: frozenset[str]) -> RunSummary:
    plan, report = read_object_if_any(folder / contract.PLAN_FILE), read_object_if_any(folder / contract.REPORT_FILE)
    launcher = read_launcher(folder)
    state = str(report.get("status", "cut off"))
    if is_running(folder, with_processes=with_processes):
        state = "running"
    elif not report and launcher is not None and not launcher.is_here:
        state = "elsewhere"
    rows = plan.get("ranks")
    rows = rows if isinstance(rows, list) else []
    step, total, loss = _progress(folder, len(rows))
    program = plan.get("recipe") or plan.get("command") or {}
    return RunSummary(
        folder=folder,
        name=str(program.get("name", "?")) if isinstance(program, dict) else "?",
        state=state,
        step=step,
        total_steps=total,
        loss=loss,
        ranks=sum(not (isinstance(row, dict) and row.get("later")) for row in rows),
        started=start_time(folder.name),
        ended=_ended(folder) if state != "running" else None,
        machine=launcher.machine if launcher else None,
    )


def _progress(folder: Path, ranks: int) -> tuple[int, int | None, float | None]:
    """Return the largest step and total number of steps of any rank, and the newest loss in the ranks' last records."""
    step: int = 0
    total: int | None = None
    known: tuple[int, float | None] = (0, None)
    for rank in range(ranks):
        head, tail = _ends(folder / contract.progress_file(rank))
        for record in head:
            if isinstance(record, Ready) and record.total_steps is not None:
                total = max(total or 0, record.total_steps)
        for record in tail:
            if isinstance(record, StepDone):
                step = max(step, record.step)
                if record.loss is not None and record.step >= known[0]:
                    known = (record.step, record.loss)
    return step, total, known[1]


def _ends(path: Path) -> tuple[list[AnyProgress], list[AnyProgress]]:
    """Return the records at the beginning and at the end of a file; in a short file, records can be in both."""
    try:
        head, tail = read_regular(path, most=_HEAD_BYTES), read_tail(path, most=_TAIL_BYTES)
    except OSError:
        return [], []
    return _records(head.split(b"\n")[:-1]), _records(tail.split(b"\n")[:-1])


def _records(lines: list[bytes]) -> list[AnyProgress]:
    found = [read_progress(line) for line in lines]
    return [record for record in found if not isinstance(record, BadRecord)]


def _ended(folder: Path) -> float | None:
    """Return when a run's report was written; without a report, its events, and without these, its plan."""
    for name in (contract.REPORT_FILE, contract.EVENTS_FILE, contract.PLAN_FILE):
        try:
            return (folder / name).stat().st_mtime
        except OSError:
            continue
    return None


def _has_plan(folder: Path) -> bool:
    return (folder / contract.PLAN_FILE).is_file()
