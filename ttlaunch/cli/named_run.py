"""The run that a command's words name, one way for all commands."""

from pathlib import Path
from typing import NoReturn

from ttlaunch.cli.console import refuse
from ttlaunch.diagnostics import Diagnostic, Format, shown


def find_named_run(where: str, *, runs_dir: Path, form: Format) -> Path:
    """The folder of the run, by `latest`, its id or a path; leaves if there is none."""
    from ttlaunch.launch.recorded import find_run

    path = find_run(where, runs_folder=Path.cwd() / runs_dir, working_folder=Path.cwd())
    if path is None:
        refuse([_no_run(where, runs_dir)], form=form)
    return path


def _no_run(where: str, runs_dir: Path) -> Diagnostic:
    from ttlaunch.launch.recorded import LATEST

    message = f"there is no run in {shown(str(runs_dir))}"
    if where != LATEST:
        message = f"`{shown(where)}` names no run in {shown(str(runs_dir))} and no path to one"
    return Diagnostic("P030", message, hints=("`--runs-dir DIR` says where runs are",))


def refuse_run(path: Path, error: OSError | ValueError, *, form: Format) -> NoReturn:
    """Say why the folder of a run cannot be read, and leave."""
    reason = (error.strerror or str(error)).lower() if isinstance(error, OSError) else str(error)
    refuse([Diagnostic("P031", f"the run {path.name} cannot be read: {reason}")], form=form)
