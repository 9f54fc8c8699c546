"""A run as its folder tells of it afterwards, or while it runs: the plan, the ranks' records, the books, the report."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ttlaunch import contract
from ttlaunch.planning.launch_plan import LaunchPlan, RankRow, RecipeProgram
from ttlaunch.running.metrics.books import Book, read_books
from ttlaunch.running.metrics.traffic import Settlement, settle
from ttlaunch.running.runs.json_files import read_object
from ttlaunch.running.runs.launcher import is_running
from ttlaunch.running.runs.run_folder import RunFolder
from ttlaunch.running.watch import RankState, Watch

LATEST = "latest"


@dataclass(frozen=True)
class Recorded:
    """What is known of a run.

    Attributes:
        plan: The content of `plan.json`.
        report: The content of `report.json`; None before the run has ended.
        is_running: Whether its launcher or processes of it are alive on this machine.
        books: None if its ranks have left none.
        traffic: Likewise.
    """

    path: Path
    plan: Mapping[str, Any]
    report: Mapping[str, Any] | None
    is_running: bool
    ranks: list[RankState]
    books: list[Book] | None
    traffic: Settlement | None

    @property
    def status(self) -> str:
        """As in the report; else whether it still runs or was cut off."""
        if self.report is not None:
            return str(self.report["status"])
        return "running" if self.is_running else "cut off"

    @property
    def name(self) -> str:
        return _facts(self.plan).name


@dataclass(frozen=True)
class RunFacts:
    """What a view has to know of a run.

    Attributes:
        name: Of the recipe or program.
        topology: Name of the cluster's description.
        ranks: Row by row.
        is_recipe: Whether its ranks tell of what they do.
    """

    name: str
    topology: str
    ranks: tuple[RankRow, ...]
    is_recipe: bool


def find_run(where: str, *, runs_folder: Path, working_folder: Path) -> Path | None:
    """The folder of the run that the words name: `latest`, a run's id, or the path of its folder."""
    if where == LATEST:
        runs = run_folders(runs_folder)
        return runs[-1] if runs else None
    places = (runs_folder / where, working_folder / where)
    return next((path for path in places if (path / contract.PLAN_FILE).is_file()), None)


def run_folders(runs_folder: Path) -> list[Path]:
    """The folders of all runs in a folder, oldest first; not those that are just being removed."""
    try:
        folders = [path for path in runs_folder.iterdir() if not path.name.startswith(".")]
        return sorted(path for path in folders if (path / contract.PLAN_FILE).is_file())
    except OSError:
        return []


def matching_runs(where: str, folders: Iterable[Path]) -> list[Path]:
    """The runs whose id begins with the words, or ends with them after a dash."""
    return [path for path in folders if path.name.startswith(where) or path.name.endswith(f"-{where}")]


def facts_of(plan: LaunchPlan) -> RunFacts:
    """The same of a plan that was just made."""
    return RunFacts(plan.program.name, plan.topology, plan.ranks, isinstance(plan.program, RecipeProgram))


def read_facts(path: Path) -> RunFacts:
    """What a run's plan says of it.

    Raises:
        OSError: Its plan cannot be read.
        ValueError: Its plan is none.
    """
    return _facts(read_object(path / contract.PLAN_FILE))


def read_rows(path: Path) -> list[RankRow]:
    """The ranks of a run.

    Raises:
        OSError: Its plan cannot be read.
        ValueError: Its plan is none.
    """
    return list(read_facts(path).ranks)


def read_daemons(path: Path) -> tuple[str, ...]:
    """Names of the engine's processes of a run; none where its plan cannot be read or is of an older version."""
    try:
        engine = read_object(path / contract.PLAN_FILE).get("engine")
        return tuple(str(name) for name in engine["names"]["daemons"]) if engine else ()
    except (OSError, ValueError, KeyError, TypeError):
        return ()


def read_run(path: Path) -> Recorded:
    """Read what a run's folder holds so far.

    Raises:
        OSError: It cannot be read.
        ValueError: Its plan or its report is none.
    """
    plan = read_object(path / contract.PLAN_FILE)
    facts = _facts(plan)
    has_ended = (path / contract.REPORT_FILE).is_file()
    report = _checked_report(read_object(path / contract.REPORT_FILE)) if has_ended else None
    watch = Watch(facts, RunFolder(path.name, path))
    watch.poll()
    is_done = report is not None and report.get("status") == "done"
    return Recorded(
        path=path,
        plan=plan,
        report=report,
        is_running=not has_ended and is_running(path),
        ranks=watch.ranks,
        books=read_books(path, world_size=len(facts.ranks)),
        traffic=settle(path, plan, watch.ranks, is_done=is_done),
    )


def _checked_report(report: dict[str, Any]) -> dict[str, Any]:
    """A report with the parts that are shown; those of older versions have fewer."""
    failure, ranks = report.get("failure"), report.get("ranks", [])
    rows = ranks if isinstance(ranks, list) else [None]
    parts_are_right = isinstance(report.get("status"), str) and (failure is None or isinstance(failure, dict))
    if not parts_are_right or not all(isinstance(row, dict) and {"rank", "host"} <= row.keys() for row in rows):
        raise ValueError(f"{contract.REPORT_FILE} is not a report")
    return report


def _facts(plan: Mapping[str, Any]) -> RunFacts:
    try:
        rows = [RankRow(row["rank"], row["host"], row["slot"], row["role"]) for row in plan["ranks"]]
        name = (plan.get("recipe") or plan.get("command") or {"name": "?"})["name"]
        return RunFacts(str(name), str(plan.get("topology", "?")), tuple(rows), plan.get("recipe") is not None)
    except (KeyError, TypeError) as error:
        raise ValueError(f"{contract.PLAN_FILE} is not a plan") from error
