"""Find the checkpoint from which a run begins, which `--resume` names, or the weights, which the configuration names.

The files are read and verified here, before anything starts; ranks verify the same SHA-256 again.
"""

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ttlaunch import contract
from ttlaunch.app.initial_weights import find_initial_weights
from ttlaunch.diagnostics import Diagnostic, Label, Severity, Source, counted, shown, usage_mistake

if TYPE_CHECKING:
    from ttlaunch.planning.recipe_plan import RecipeChoice
    from ttlaunch.running.checkpoints.resume import Checkpoint, Search

_LONGEST = 300


def find_start(
    choice: "RecipeChoice", *, resume: str | None, runs_dir: Path, working_folder: Path
) -> tuple[dict[str, Any] | None, list[Diagnostic]]:
    """Find the start of a run for its plan: origin, step, files with their SHA-256, and the state besides the tensors.

    Args:
        choice: The recipe with its checked configuration.
        resume: The value of `--resume`; None if the run begins at step 1.
        runs_dir: The folder that contains the run folders.
        working_folder: The folder to which relative paths are relative.

    Returns:
        The start, or None if weights are drawn from the seed; and every mistake.
    """
    from ttlaunch.spec.recipe.sections import TrainingFile

    config = choice.loaded.config
    if not isinstance(config, TrainingFile):
        return None, [refuse_resume(choice.name)] if resume is not None else []
    weights = config.checkpoint_config.initial_weights
    if resume is None and weights is None and choice.recipe.only_weights:
        hint = (
            f"`ttlaunch {choice.name} RUN` finds them, with `--dry-run` to see the plan; RUN is a run or a checkpoint"
        )
        return None, [usage_mistake(f"{choice.name} trains nothing and needs the weights of a checkpoint", hint)]
    if resume is not None and choice.is_naive:
        place = Label(Source("--resume", resume).span(1, 1, max(1, len(resume))), "no checkpoint to resume from here")
        hints = ("leave `--resume` out to train from step 1, or leave `--naive` out to resume from a checkpoint",)
        message = f"`--resume` was given, but the naive form of {choice.name} reads and makes no checkpoints"
        return None, [Diagnostic("P023", message, place, hints=hints)]
    if resume is not None:
        return _resumed(choice, resume, runs_dir=working_folder / runs_dir, working_folder=working_folder)
    if weights is None:
        return None, []
    return find_initial_weights(choice, weights, working_folder)


def refuse_resume(name: str) -> Diagnostic:
    """Refuse `--resume` for a recipe that makes no checkpoints."""
    return Diagnostic("P023", f"`--resume` was given, but {shown(name)} makes no checkpoints")


def refuse_resume_of_program(name: str, *, is_command: bool) -> Diagnostic:
    """Refuse `--resume` for a program: ttlaunch does not know its checkpoints, if it makes any."""
    behind = f"-- {shown(name)}" if is_command else f"{shown(name)} --"
    return Diagnostic(
        "P023",
        f"`--resume` was given, but {shown(name)} is no recipe; ttlaunch does not know its checkpoints",
        hints=(f"leave it out, or write it behind the program if it is its own option: `{behind} --resume …`",),
    )


def search_checkpoint(
    where: str, *, runs_dir: Path, working_folder: Path
) -> tuple["Checkpoint | None", list[Diagnostic]]:
    """Find the newest complete checkpoint of a run, a path or `latest`; report newer ones that cannot be used, and why."""
    from ttlaunch.running.checkpoints.resume import find_checkpoint

    if not where.strip():
        hints = ("`latest` is the newest checkpoint of all runs",)
        return None, [usage_mistake("an empty text names no run and no checkpoint", *hints, code="P020")]
    named = _named(where, runs_dir=runs_dir, working_folder=working_folder)
    if isinstance(named, Diagnostic):
        return None, [named]
    search = find_checkpoint(named, runs_folder=runs_dir, working_folder=working_folder)
    reasons = tuple(f"{_short(one.path, working_folder)}: {one.reason}" for one in search.passed_over)
    if search.checkpoint is None:
        return None, [_no_checkpoint(where, search, reasons, runs_dir=runs_dir, working_folder=working_folder)]
    if not reasons:
        return search.checkpoint, []
    path = _short(search.checkpoint.path, working_folder)
    message = f"{counted(len(reasons), 'newer checkpoint')} passed over; {path} is the newest that is whole"
    return search.checkpoint, [Diagnostic("P022", message, notes=reasons, severity=Severity.WARNING)]


def _named(where: str, *, runs_dir: Path, working_folder: Path) -> str | Diagnostic:
    """Return `where` if it is `latest` or an existing folder, or else the folder of the run that has this name."""
    from ttlaunch.app.named_run import name_run
    from ttlaunch.running.runs.facts import LATEST

    if where == LATEST or any(os.path.lexists(folder / where) for folder in (runs_dir, working_folder)):
        return where
    found = name_run(where, runs_dir=Path(_short(runs_dir, working_folder)), working_folder=working_folder)
    return found if isinstance(found, Diagnostic) else str(found)


def _no_checkpoint(
    where: str, search: "Search", reasons: tuple[str, ...], *, runs_dir: Path, working_folder: Path
) -> Diagnostic:
    if reasons:
        broken = counted(len(reasons), "checkpoint")
        message = f"`{shown(where)}` finds {broken}, but none that is whole"
        hints = ("name another run or checkpoint, or copy this one again from where it came",)
        return Diagnostic("P021", message, notes=reasons, hints=hints)
    looked = _short(runs_dir, working_folder)
    if not search.runs:
        message = f"`{shown(where)}` names no run in {looked} and no path to one"
        if where == "latest":
            message = f"`latest` finds no run in {looked}"
        file = working_folder / where
        if os.path.isfile(file):  # noqa: PTH113 - never raises
            folder = shown(_short(file.parent, working_folder), longest=_LONGEST)
            message = f"`{shown(where, longest=_LONGEST)}` is a file; a run or a checkpoint is a folder"
            hint = f"give the folder of the checkpoint, if this is one: `{folder}`"
            return usage_mistake(message, hint, code="P020")
        return usage_mistake(message, "`--runs-dir DIR` names the folder of runs", code="P020")
    what = counted(len(search.runs), "run")
    message = f"`{shown(where)}` finds {what}, none of which has a checkpoint"
    if len(search.runs) == 1:
        message = f"{_short(search.runs[0], working_folder)} has no checkpoint"
    hints = ("name a run that has saved one: `checkpoint_config.interval` says after how many steps it does",)
    return usage_mistake(message, *hints, code="P020")


def _resumed(
    choice: "RecipeChoice", where: str, *, runs_dir: Path, working_folder: Path
) -> tuple[dict[str, Any] | None, list[Diagnostic]]:
    from ttlaunch.planning.resume import check_same_model, check_same_training

    checkpoint, found = search_checkpoint(where, runs_dir=runs_dir, working_folder=working_folder)
    if checkpoint is None:
        return None, found
    passed_over = [reason for warning in found for reason in warning.notes]
    found += _after_a_difference(checkpoint, working_folder) + _from_memory(checkpoint)
    if choice.recipe.only_weights:
        found += check_same_model(checkpoint.manifest, choice.loaded)
    else:
        text_sha256 = choice.data["sha256"] if choice.data else None
        found += check_same_training(
            checkpoint.manifest, choice.loaded, text_sha256=text_sha256, fixed=choice.recipe.same_on_resume
        )
    folder, manifest = checkpoint.path.resolve(), checkpoint.manifest
    files = [
        {"path": str(folder / name), "sha256": entry["sha256"], "bytes": entry["size"]}
        for name, entry in manifest["files"].items()
    ]
    start = {"origin": str(folder), "step": checkpoint.step, "passed_over": passed_over}
    if "saved_by" in manifest:
        start["saved_by"] = manifest["saved_by"]
    return start | {"state": manifest["state"], "files": files}, found


def _after_a_difference(checkpoint: "Checkpoint", working_folder: Path) -> list[Diagnostic]:
    """Warn if the checkpoint's run ended because its replicas differed, and say which step is the last in which they agreed."""
    from ttlaunch.running.failures.causes import Cause
    from ttlaunch.running.runs.files import read_object_if_any

    run = checkpoint.path.resolve().parent.parent
    failure = read_object_if_any(run / contract.REPORT_FILE).get("failure")
    if not isinstance(failure, dict) or failure.get("class") != Cause.DIFFERS:
        return []
    path = _short(run, working_folder.resolve())
    message = (
        f"{shown(path, longest=_LONGEST)} ended because its replicas differed; training goes on from step {checkpoint.step}, "
        "in which all digests agreed"
    )
    text = failure.get("cause")
    rank, host = failure.get("rank"), failure.get("host")
    where = f"rank {rank} on {host} " if isinstance(rank, int) and isinstance(host, str) else ""
    notes = (shown(f"{where}{text}", longest=_LONGEST),) if isinstance(text, str) else ()
    hints = ("if the same rank or host is named again, test its memory and its device",)
    return [Diagnostic("P052", message, notes=notes, hints=hints, severity=Severity.WARNING)]


def _from_memory(checkpoint: "Checkpoint") -> list[Diagnostic]:
    """Say that a checkpoint was saved from a worker's memory, by whom and where."""
    saved_by = checkpoint.manifest.get("saved_by")
    if saved_by is None:
        return []
    message = (
        f"training goes on from step {checkpoint.step}, whose state {shown(saved_by, longest=_LONGEST)} saved from memory "
        "when the run ended"
    )
    return [Diagnostic("P084", message, severity=Severity.WARNING)]


def _short(path: Path, working_folder: Path) -> str:
    try:
        return str(path.relative_to(working_folder))
    except ValueError:
        return str(path)
