"""Find what is needed to repeat a run: program, configuration, data and start, and what of these has changed.

A run's folder has the resolved configuration and the hashes of code and text. The code itself is in the folder from which the
run was started, where it may have changed, and as it was then in `running/runs/kept_code.py`.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ttlaunch import contract
from ttlaunch.planning.launch_plan import CommandProgram, RecipeProgram
from ttlaunch.records.ranks import StepDone
from ttlaunch.records.updates import Update
from ttlaunch.running.bad_records import progress_of
from ttlaunch.running.runs.files import read_object
from ttlaunch.running.runs.kept_code import KeptCodeError, open_store, package_tree, program_tree, tree_id
from ttlaunch.running.runs.record_inputs import installed_version, tree_hash
from ttlaunch.running.runs.registry import was_started_here
from ttlaunch.spec.recipe.recorded_updates import RecordedUpdate

_SHORT = 12


@dataclass(frozen=True)
class Origin:
    """Everything from which a run was started.

    Attributes:
        working_folder: The folder in which the run was started.
        target: The recipe's folder, or the program.
        arguments: The arguments of a program; empty for a recipe.
        config_file: The resolved configuration; None for a program.
        data: Path and SHA-256 of the training text; None if the run read none.
        resume: The checkpoint from which the run continued; None if it began at step 1.
        sha256: The hash of the final parameters; None if the run did not finish.
        commit: The commit of the working folder; None if it was not in a git repository.
        tree: The hash of the recipe's folder; None for a program.
        versions: The versions of the programs and libraries that compute.
        is_naive: Whether the ranks ran the recipe's `naive.py`.
        is_independent: Whether each rank of a script was meant to train by itself.
        warm: Whether the ranks were forked from a process that had imported torch.
        folder: The run's folder.
        plan_hash: The hash of the run's plan.
        kept: The trees that hold the code, see `running/runs/kept_code.py`; None if the code was not kept.
        variables: The variables that `--env` set, whose values are not taken from the run's folder.
        engine: The name of the engine that started a program; None for a recipe, whose bits do not depend on it.
        arrivals: For an asynchronous run, the rank whose gradient made each update; else empty.
        updates: For a run whose gradients may be old, what each update was made of, if ranks have recorded it; then one
            process repeats the run. Else empty.
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
    updates: Mapping[int, RecordedUpdate] = field(default_factory=dict)
    is_naive: bool = False
    is_independent: bool = False
    warm: bool = False
    variables: tuple[str, ...] = ()
    folder: Path = Path()
    plan_hash: str | None = None
    kept: Mapping[str, Any] | None = None
    engine: str | None = None

    @property
    def program(self) -> RecipeProgram | CommandProgram:
        """The program that the ranks ran, without what only a recipe's ranks need."""
        if self.is_command:
            return CommandProgram(self.run_id, (self.target, *self.arguments))
        return RecipeProgram(self.run_id, self.target, "", {}, None)


def read_origin(path: Path) -> Origin:
    """Read the origin of a run from its folder.

    Raises:
        OSError: A file in the folder cannot be read.
        ValueError: A file in the folder is damaged.
    """
    plan, code = read_object(path / contract.PLAN_FILE), read_object(path / contract.CODE_FILE)
    environment = read_object(path / contract.ENVIRONMENT_FILE)
    report = read_object(path / contract.REPORT_FILE) if (path / contract.REPORT_FILE).is_file() else {}
    recipe, start = plan.get("recipe"), plan.get("start")
    try:
        argv = () if recipe else tuple(plan["command"]["command"])
        arrivals, updates = _recorded_order(path, ranks=[row["rank"] for row in plan["ranks"]])
        return Origin(
            run_id=path.name,
            working_folder=Path(plan["working_folder"]),
            target=recipe["folder"] if recipe else argv[0],
            is_command=recipe is None,
            arguments=argv[1:],
            config_file=path / contract.TRAIN_FILE if recipe else None,
            data=plan.get("data"),
            resume=start["origin"] if start and start["step"] else None,
            world_size=plan["world_size"],
            sha256=report.get("parameters_sha256") if report.get("status") == "done" else None,
            commit=code["commit"],
            tree=code["recipe"]["tree"] if recipe else None,
            versions=environment["versions"],
            variables=_own_variables(environment),
            arrivals=arrivals,
            updates=updates,
            is_naive=bool(plan.get("naive")),
            is_independent=bool(plan.get("independent")),
            warm=plan.get("warm") is True,
            folder=path,
            plan_hash=plan.get("hash"),
            kept=code.get("kept"),
            engine=None if recipe else _engine_of(plan),
        )
    except (KeyError, TypeError, IndexError, AttributeError) as error:
        raise ValueError(f"{contract.PLAN_FILE} or {contract.CODE_FILE} lacks {error}") from error


def _own_variables(environment: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the names of the variables that `--env` set."""
    variables = environment.get("variables") or {}
    return tuple(name for name, origin in variables.items() if origin == contract.ENV_OPTION)


def _engine_of(plan: Mapping[str, Any]) -> str | None:
    """Return the name of a plan's engine; None if the plan does not have it, as those of older versions."""
    key = (plan.get("engine") or {}).get("names", {}).get("key")
    return key if isinstance(key, str) and key else None


def _recorded_order(path: Path, *, ranks: Iterable[int]) -> tuple[tuple[int, ...], dict[int, RecordedUpdate]]:
    """Return the ranks whose gradients the server of an asynchronous run has applied, in this order, and what updates were made of.

    Any rank may have recorded an update; those that record the same one in the same epoch agree, and a later epoch made it anew.
    """
    sources: dict[int, int] = {}
    updates: dict[int, Update] = {}
    for rank in ranks:
        for record in progress_of(path, rank):
            if isinstance(record, StepDone) and record.arrived_from is not None:
                sources[record.step] = record.arrived_from
            elif isinstance(record, Update):
                updates[record.step] = max(updates.get(record.step, record), record, key=lambda one: one.epoch)
    made_of = {step: RecordedUpdate(update.task, update.parts) for step, update in updates.items()}
    return tuple(sources[step] for step in sorted(sources)), made_of


def changed_code(origin: Origin) -> str | None:
    """Describe how the program has changed, as a clause; None if it has not."""
    if origin.is_command:
        return _changed_script(origin)
    folder = Path(origin.target)
    if not folder.is_dir():
        return f"the recipe's folder {folder} is no longer there"
    now = tree_hash(folder)
    if now == origin.tree:
        return None
    return f"the recipe in {folder} has changed: its tree was {str(origin.tree)[:_SHORT]}…, now it is {now[:_SHORT]}…"


def missing_folder(origin: Origin) -> str | None:
    """Return a clause if the folder in which the run was started is gone: its relative paths name nothing any more."""
    if origin.working_folder.is_dir():
        return None
    return f"the folder {origin.working_folder} in which it was started is no longer there"


def _changed_script(origin: Origin) -> str | None:
    kept = (origin.kept or {}).get("program")
    if kept is None:
        return None
    tree = program_tree(origin.program, origin.working_folder)
    if tree is not None and tree_id(tree) == kept["tree"]:
        return None
    state = "is no longer there" if tree is None else "or a file that it imports has changed"
    return f"the script {origin.working_folder / kept['script']} {state}"


def restore_program(origin: Origin) -> Origin:
    """Return the origin with the kept code in place of the present one.

    Raises:
        KeptCodeError: The code was not kept, is damaged, or is that of a run that this user has not started here.
    """
    kept = (origin.kept or {}).get("program")
    if kept is None:
        raise KeptCodeError("its code was not kept")
    place = _restore(origin, kept["tree"])
    if not origin.is_command:
        return replace(origin, target=str(place / Path(origin.target).name))
    script = str(place / Path(kept["script"]).name)
    target, *arguments = [script if word == kept["script"] else word for word in (origin.target, *origin.arguments)]
    return replace(origin, target=target, arguments=tuple(arguments))


def restore_package(origin: Origin) -> Path | None:
    """Return a folder with ttlaunch as it was in the run; None if it has not changed.

    Raises:
        KeptCodeError: It was not kept, is damaged, or is that of a run that this user has not started here.
    """
    kept = (origin.kept or {}).get("package")
    if kept is None or kept == tree_id(package_tree()):
        return None
    return _restore(origin, kept)


def _restore(origin: Origin, tree: str) -> Path:
    # What a stranger's folder names is never run: it may name any tree, and the stranger has written what the tree holds.
    if not was_started_here(origin.folder, origin.plan_hash):
        raise KeptCodeError("this user has not started it here, so the code beside it is not trusted")
    with open_store(origin.folder.parent) as store:
        return store.restore(tree)


def changed_versions(origin: Origin) -> list[str]:
    """Describe each package whose version has changed since the run, as a clause."""
    changes = []
    for name, before in origin.versions.items():
        now = installed_version(name)
        if now != before:
            changes.append(f"{name} was {before}, {f'now it is {now}' if now else 'it is no longer installed'}")
    return changes
