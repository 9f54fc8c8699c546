"""Find runs in a folder, and read a run's plan: its name, its ranks, the engine's processes."""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from stat import S_ISREG
from typing import Any

from ttlaunch import contract
from ttlaunch.planning.launch_plan import LaunchPlan, RankRow, RecipeProgram
from ttlaunch.quick_dataclass import dataclass
from ttlaunch.records.parser import checked
from ttlaunch.running.runs.files import Tail, read_object

LATEST = "latest"
MEMBERS_FILE = "members.jsonl"
"""The journal of an elastic run: every change of its workers, an entry a line."""
DOOR_FILE = "door.json"
"""The file with the addresses of a serving run's chat page and API, without its key."""
CLUSTER_FILE = "cluster.json"
"""The picture of the cluster with the ranks on it, where it has more than one host or mesh."""
JOINED = "joined"
"""What the journal of an elastic run says of a worker that has joined from another machine."""
_JOURNAL_BYTES = 64 * 1024 * 1024
_STAMP = len("2026-08-23T10-14-07")


@dataclass(frozen=True)
class RunFacts:
    """The facts about a run that views need.

    Attributes:
        name: The name of the recipe or program.
        topology: Name of the cluster's description.
        ranks: One row per rank, in their order.
        is_recipe: Whether it runs a recipe. Only ranks of recipes record their steps and operations.
        is_serving: Whether it serves a model and trains nothing.
    """

    name: str
    topology: str
    ranks: tuple[RankRow, ...]
    is_recipe: bool
    is_serving: bool = False

    @property
    def is_elastic(self) -> bool:
        """Whether workers come and go: then the plan has rows for those that replace others."""
        return any(row.later for row in self.ranks)


def find_run(where: str, *, runs_folder: Path, working_folder: Path) -> Path | None:
    """Find a run's folder from `latest`, the run's id or the path of its folder; None if there is none."""
    if where == LATEST:
        runs = run_folders(runs_folder)
        return runs[-1] if runs else None
    places = (runs_folder / where, working_folder / where)
    return next((path for path in places if (path / contract.PLAN_FILE).is_file()), None)


def run_folders(runs_folder: Path) -> list[Path]:
    """List the folders of all runs in a folder, oldest first, without those that are being removed."""
    try:
        folders = [path for path in runs_folder.iterdir() if not path.name.startswith(".")]
    except OSError:
        return []
    ages = {path: age for path in folders if (age := _age(path))}
    return sorted(ages, key=lambda path: (ages[path], path.name))


def _age(path: Path) -> tuple[str, int] | None:
    """Return what sorts runs by age: the time in the id, then when the plan was written; None for a folder that is no run."""
    try:
        plan = (path / contract.PLAN_FILE).stat()
    except (OSError, ValueError):
        return None
    return (path.name[:_STAMP], plan.st_mtime_ns) if S_ISREG(plan.st_mode) else None


def matching_runs(where: str, folders: Iterable[Path]) -> list[Path]:
    """Select the runs whose id begins with a text, or ends with it after a dash."""
    return [path for path in folders if path.name.startswith(where) or path.name.endswith(f"-{where}")]


def facts_of(plan: LaunchPlan) -> RunFacts:
    """Return the facts of a plan that was just made."""
    is_recipe = isinstance(plan.program, RecipeProgram)
    return RunFacts(plan.program.name, plan.topology, plan.ranks, is_recipe, is_serving=_is_serving(plan.as_json()))


def read_facts(path: Path) -> RunFacts:
    """Read the facts of a run from its plan.

    Raises:
        OSError: Its plan cannot be read.
        ValueError: The file is not a plan.
    """
    return facts_in(read_object(path / contract.PLAN_FILE))


def joined_row(entry: object, number: int, *, role: str) -> RankRow | None:
    """Return the row of the worker with the next number, if an entry of the journal says that it joined; else None."""
    if not isinstance(entry, Mapping) or entry.get("what") != JOINED or entry.get("worker") != number:
        return None
    try:
        return RankRow(number, checked("Word", entry.get("host")), 0, role, later=True)
    except ValueError:
        return None


def with_joined(facts: RunFacts, path: Path) -> RunFacts:
    """Return the facts with rows for the workers that have joined an elastic run from other machines; those of any other run."""
    rows = list(facts.ranks)
    if facts.is_elastic:
        for line in Tail(path / MEMBERS_FILE).read(most=_JOURNAL_BYTES):
            row = joined_row(contract.read_record(line), len(rows), role=rows[0].role)
            rows += [row] if row is not None else []
    return replace(facts, ranks=tuple(rows))


def read_ranks(path: Path) -> list[RankRow]:
    """Read the ranks of a run from its plan, and those of the workers that have joined it from other machines.

    Raises:
        OSError: Its plan cannot be read.
        ValueError: The file is not a plan.
    """
    return list(with_joined(read_facts(path), path).ranks)


def read_daemons(path: Path) -> tuple[str, ...]:
    """Read the names of the engine's processes from a run's plan; empty if it has none or cannot be read."""
    try:
        engine = read_object(path / contract.PLAN_FILE).get("engine")
        return tuple(str(name) for name in engine["names"]["daemons"]) if engine else ()
    except (OSError, ValueError, KeyError, TypeError):
        return ()


def facts_in(plan: Mapping[str, Any]) -> RunFacts:
    """Return the facts in the content of a `plan.json`.

    Raises:
        ValueError: It is not a plan.
    """
    try:
        rows = tuple(_row(number, row) for number, row in enumerate(plan["ranks"]))
        name = checked("Word", (plan.get("recipe") or plan.get("command") or {"name": "?"})["name"])
        topology, is_recipe = checked("Word", plan.get("topology", "?")), plan.get("recipe") is not None
        return RunFacts(name, topology, rows, is_recipe, is_serving=_is_serving(plan))
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{contract.PLAN_FILE} is not a plan") from error


def _row(number: int, row: Mapping[str, Any]) -> RankRow:
    """Check a row of a plan, which may be a stranger's: names of files are made from its rank."""
    if type(row["rank"]) is not int or row["rank"] != number:
        raise ValueError(f"rank {number} is not the next one")
    place = checked("Word", row["host"]), checked("Count", row["slot"]), checked("Word", row["role"])
    return RankRow(number, *place, later=row.get("later") is True)


def _is_serving(plan: Mapping[str, Any]) -> bool:
    config = plan.get("config")
    return isinstance(config, Mapping) and "serve_config" in config
