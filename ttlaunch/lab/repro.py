"""Repeat a recorded run on this machine, and compare the bits."""

from collections.abc import Sequence
from pathlib import Path

from ttlaunch import contract
from ttlaunch.app.dialogue import Dialogue
from ttlaunch.app.named_run import unreadable_run
from ttlaunch.app.prepare_run import PreparedRun, prepare
from ttlaunch.app.run_spec import RunSpec
from ttlaunch.diagnostics import Diagnostic, LaunchError, Severity, has_errors, listed, shown
from ttlaunch.running.membership.journal import read_journal
from ttlaunch.running.readers.repeat import (
    Origin,
    changed_code,
    changed_versions,
    missing_folder,
    read_origin,
    restore_package,
    restore_program,
)
from ttlaunch.running.report import Report
from ttlaunch.running.runs.files import read_object
from ttlaunch.running.runs.kept_code import KeptCodeError
from ttlaunch.spec.recipe.recorded_epochs import RecordedEpoch, epochs_of
from ttlaunch.spec.recipe.recorded_updates import RecordedUpdate, in_order
from ttlaunch.spec.recipe.sections import TrainingConfig
from ttlaunch.spec.topology.variables import variables_named

_SHORT = 12
_LONGEST = 300


def prepare_again(
    origin: "Origin", dialogue: Dialogue, *, runs_dir: Path, with_changes: bool, env: Sequence[str]
) -> "PreparedRun":
    """Check and plan a recorded run again, in the folder where it was started and with the code that it ran.

    Args:
        with_changes: Whether to start the present code and text if they have changed.
        env: Variables for the ranks, as `--env` has them.

    Raises:
        LaunchError: The training text has changed, the code has changed and was not kept, or the run cannot be planned any
            more.
    """
    found = [*_secret_arguments(origin), *other_versions(origin), *other_variables(origin, env)]
    origin, changes = with_its_code(origin, with_changes=with_changes)
    _stop_if_wrong(found := [*found, *changes])
    folder = origin.working_folder if origin.working_folder.is_dir() else None
    updates, (ranks, epochs) = updates_in_order(origin), ranks_and_epochs(origin)
    request = RunSpec(
        target=origin.target,
        config_file=str(origin.config_file) if origin.config_file else None,
        ranks=1 if updates else ranks,
        arguments=origin.arguments,
        is_command=origin.is_command,
        engine=origin.engine,
        resume=origin.resume,
        replay=() if updates else origin.arrivals,
        updates=updates,
        epochs=epochs,
        naive=origin.is_naive,
        independent=origin.is_independent,
        warm=origin.warm,
        env=env,
        runs_dir=runs_dir,
    )
    prepared = prepare(request, dialogue, working_folder=folder)
    choice = prepared.description.choice
    found += other_text(origin, (choice.data or {}).get("sha256") if choice else None, with_changes=with_changes)
    _stop_if_wrong(found)
    dialogue.warn(found)
    return prepared


def _stop_if_wrong(found: list[Diagnostic]) -> None:
    if has_errors(found):
        raise LaunchError(found)


def updates_in_order(origin: "Origin") -> tuple[RecordedUpdate, ...]:
    """Return what a run's updates were made of, with which one process repeats it; empty if its ranks have not recorded this.

    Raises:
        LaunchError: The records do not fit together.
    """
    if not origin.updates or origin.config_file is None:
        return ()
    try:
        done, training = _begun_from(origin)
        return in_order(origin.updates, done=done, micro_batches=training.micro_batches)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise _not_again(origin, error) from error


def ranks_and_epochs(origin: "Origin") -> tuple[int, tuple[RecordedEpoch, ...]]:
    """Return with how many ranks a run is repeated, and who took part in it if its workers took steps of their own and could come and go.

    An elastic run is repeated in one process, whose bits are those of any members.

    Raises:
        LaunchError: The journal of the run does not say who took part.
    """
    try:
        elastic = read_object(origin.folder / contract.PLAN_FILE).get("elastic")
        if not isinstance(elastic, dict):
            return origin.world_size, ()
        if elastic.get("has_local_steps") is not True:
            return 1, ()
        done, training = _begun_from(origin)
        return 1, epochs_of(read_journal(origin.folder), done=done, total=training.steps)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise _not_again(origin, error) from error


def _begun_from(origin: "Origin") -> tuple[int, TrainingConfig]:
    """Return the steps that were done before a run began, and what its training file says about training."""
    plan = read_object(origin.folder / contract.PLAN_FILE)
    done = int(plan["start"]["step"]) if plan.get("start") else 0
    return done, TrainingConfig.model_validate(plan["config"]["training_config"])


def _not_again(origin: "Origin", error: Exception) -> LaunchError:
    return LaunchError([Diagnostic("P033", f"{origin.run_id} cannot be repeated: {shown(error, longest=_LONGEST)}")])


def read_origin_of(path: Path) -> "Origin":
    """Read from a run's folder how it was started.

    Raises:
        LaunchError: The folder cannot be read.
    """
    try:
        return read_origin(path.resolve())
    except (OSError, ValueError) as error:
        raise unreadable_run(path, error) from error


def _secret_arguments(origin: "Origin") -> list[Diagnostic]:
    """Refuse to repeat a command with secret arguments, whose values no folder of a run keeps."""
    lost = [argument for argument in origin.arguments if f"{contract.REFERENCE}{contract.SECRET_PREFIX}" in argument]
    if not lost:
        return []
    message = f"{origin.run_id} cannot be repeated: no run keeps the value of its secret argument `{shown(lost[0])}`"
    return [Diagnostic("P033", message, hints=("start the program again with `ttlaunch run -- PROGRAM …`",))]


def with_its_code(origin: "Origin", *, with_changes: bool) -> tuple["Origin", list[Diagnostic]]:
    """Return the origin, with the code that the run kept if the present code differs from it, and what is reported of this."""
    gone, change = missing_folder(origin), changed_code(origin)
    if gone or not change:
        return origin, [_changed(origin, gone, with_changes=with_changes)] if gone else []
    if with_changes:
        return origin, [_changed(origin, change, with_changes=True)]
    try:
        restored = restore_program(origin)
    except KeptCodeError as error:
        return origin, [_changed(origin, change, with_changes=False, more=(shown(error, longest=_LONGEST),))]
    withheld = (origin.kept or {})["program"]["withheld"]
    notes = (
        (f"without {listed(withheld, last='and')}: files that look like secrets are never kept",) if withheld else ()
    )
    message = f"{origin.run_id} is repeated with the code that it ran: {change}"
    hints = (f"`{_with_changes(origin)}` runs the present code",)
    return restored, [Diagnostic("P033", message, notes=notes, hints=hints, severity=Severity.WARNING)]


def _with_changes(origin: "Origin") -> str:
    """Return the command that runs the present code: of those that repeat a run, only `repro` has this option."""
    return f"ttlaunch repro {origin.run_id} --with-changes"


def older_package(origin: "Origin", dialogue: Dialogue) -> Path | None:
    """Return a folder with ttlaunch as it was in the run, if it has changed since and was kept.

    If it has changed and cannot be used, a warning says so.
    """
    try:
        package = restore_package(origin)
    except KeptCodeError as error:
        message = (
            f"{origin.run_id} may end with other bits now: ttlaunch has changed, and {shown(error, longest=_LONGEST)}"
        )
        dialogue.warn([Diagnostic("P034", message, severity=Severity.WARNING)])
        return None
    if package is not None:
        message = f"{origin.run_id} is repeated with ttlaunch as it was then; it has changed since"
        hints = (f"`{_with_changes(origin)}` uses the present ttlaunch",)
        dialogue.warn([Diagnostic("P034", message, hints=hints, severity=Severity.WARNING)])
    return package


def other_versions(origin: "Origin") -> list[Diagnostic]:
    versions = changed_versions(origin)
    if not versions:
        return []
    message = f"{origin.run_id} may end with other bits now: {versions[0]}"
    return [Diagnostic("P034", message, notes=tuple(versions[1:]), severity=Severity.WARNING)]


def other_variables(origin: "Origin", env: Sequence[str]) -> list[Diagnostic]:
    """Warn of variables that `--env` set for the run, and that are not given again."""
    missing = [name for name in origin.variables if name not in variables_named(env)]
    if not missing:
        return []
    message = f"{origin.run_id} may end with other bits now: it ran with `--env {shown(missing[0])}`"
    hints = tuple(f"`--env {shown(name)}=VALUE` sets it again" for name in missing)
    return [Diagnostic("P034", message, hints=hints, severity=Severity.WARNING)]


def other_text(origin: "Origin", sha256: str | None, *, with_changes: bool) -> list[Diagnostic]:
    before = (origin.data or {}).get("sha256")
    if before == sha256:
        return []
    path = (origin.data or {}).get("path") or "the built-in text"
    change = f"the text {path} has changed: its SHA-256 was {str(before)[:_SHORT]}…, now it is {str(sha256)[:_SHORT]}…"
    return [_changed(origin, change, with_changes=with_changes)]


def _changed(origin: "Origin", change: str, *, with_changes: bool, more: tuple[str, ...] = ()) -> Diagnostic:
    commit = (*more, *([f"it ran at commit {origin.commit}"] if origin.commit else []))
    if with_changes:
        message = f"this is not {origin.run_id} again: {change}"
        return Diagnostic("P033", message, notes=commit, severity=Severity.WARNING)
    hints = (f"`{_with_changes(origin)}` starts it as it is now",)
    return Diagnostic("P033", f"{origin.run_id} cannot be repeated: {change}", notes=commit, hints=hints)


def compare_bits(origin: "Origin", report: "Report") -> list[Diagnostic]:
    """Compare the parameters of both runs, if both completed."""
    if report.status != "done" or report.parameters_sha256 is None:
        return []
    if origin.sha256 is None:
        message = f"{origin.run_id} did not come to its end, so there is nothing to compare with"
        return [Diagnostic("R053", message, severity=Severity.WARNING)]
    if origin.sha256 == report.parameters_sha256:
        return []
    message = f"other bits than {origin.run_id}: its parameters had sha256 {origin.sha256[:_SHORT]}…"
    return [Diagnostic("R053", message)]
