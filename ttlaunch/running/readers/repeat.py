"""Find what is needed to repeat a run: program, configuration, data and start, and whether they are unchanged.

A run's folder has the resolved configuration and the hashes of code and text; the code itself is taken from its folder
at that time, if it is unchanged.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ttlaunch import contract
from ttlaunch.records.ranks import StepDone
from ttlaunch.running.bad_records import progress_of
from ttlaunch.running.runs.files import read_object
from ttlaunch.running.runs.record_inputs import installed_version, tree_hash

_SHORT = 12


@dataclass(frozen=True)
class Origin:
    """Everything that a run was started from.

    Attributes:
        working_folder: The folder in which it was started.
        target: The recipe's folder, or the program.
        arguments: The arguments of a program.
        config_file: The resolved configuration; None for a program.
        data: Path and SHA-256 of the text that was read; None if none was.
        resume: The checkpoint that the run went on from; None: it began at step 1.
        sha256: The hash of the final parameters; None if the run did not finish.
        commit: The commit of the working folder, if it was in git.
        tree: Hash of the recipe's folder.
        versions: The versions of the programs and libraries that compute.
        is_naive: Whether its ranks ran the recipe's `naive.py`.
        arrivals: For an asynchronous run, the rank whose gradient made each update; else empty.
    """

    run_id: str
    working_folder: Path
    target: str
    is_command: bool
    arguments: tuple[str, ...]
    config_file: Path | None
    data: Mapping[str, Any] | None
    resume: str | None
    world_size: int
    sha256: str | None
    commit: str | None
    tree: str | None
    versions: Mapping[str, str]
    arrivals: tuple[int, ...] = ()
    is_naive: bool = False


def read_origin(path: Path) -> Origin:
    """Read the origin of a run from its folder.

    Raises:
        OSError: A file of it cannot be read.
        ValueError: A file of it is not as it was written.
    """
    plan, code = read_object(path / contract.PLAN_FILE), read_object(path / contract.CODE_FILE)
    versions = read_object(path / contract.ENVIRONMENT_FILE)["versions"]
    report = read_object(path / contract.REPORT_FILE) if (path / contract.REPORT_FILE).is_file() else {}
    recipe, start = plan.get("recipe"), plan.get("start")
    try:
        words = () if recipe else tuple(plan["command"]["command"])
        return Origin(
            run_id=path.name,
            working_folder=Path(plan["working_folder"]),
            target=recipe["folder"] if recipe else words[0],
            is_command=recipe is None,
            arguments=words[1:],
            config_file=path / contract.TRAIN_FILE if recipe else None,
            data=plan.get("data"),
            resume=start["origin"] if start and start["step"] else None,
            world_size=plan["world_size"],
            sha256=report.get("parameters_sha256") if report.get("status") == "done" else None,
            commit=code["commit"],
            tree=code["recipe"]["tree"] if recipe else None,
            versions=versions,
            arrivals=_arrivals(path, world_size=plan["world_size"]),
            is_naive=bool(plan.get("naive")),
        )
    except (KeyError, TypeError, IndexError) as error:
        raise ValueError(f"{contract.PLAN_FILE} or {contract.CODE_FILE} lacks {error}") from error


def _arrivals(path: Path, *, world_size: int) -> tuple[int, ...]:
    """The ranks whose gradients the server of an asynchronous run has applied, in that order."""
    found: dict[int, int] = {}
    for rank in range(world_size):
        for record in progress_of(path, rank):
            if isinstance(record, StepDone) and record.arrived_from is not None:
                found[record.step] = record.arrived_from
    return tuple(found[step] for step in sorted(found))


def changed_code(origin: Origin) -> str | None:
    """Describe what of the program has changed, as a clause; None if nothing has."""
    if not origin.working_folder.is_dir():
        return f"the folder {origin.working_folder} in which it was started is no longer there"
    if origin.is_command:
        return None
    folder = Path(origin.target)
    if not folder.is_dir():
        return f"the recipe's folder {folder} is no longer there"
    now = tree_hash(folder)
    if now == origin.tree:
        return None
    return f"the recipe in {folder} has changed: its tree was {str(origin.tree)[:_SHORT]}…, now it is {now[:_SHORT]}…"


def changed_versions(origin: Origin) -> list[str]:
    """Describe each package that takes part in computing and has another version today, as a clause."""
    changes = []
    for name, before in origin.versions.items():
        now = installed_version(name)
        if now != before:
            changes.append(f"{name} was {before}, {f'now it is {now}' if now else 'it is no longer installed'}")
    return changes
