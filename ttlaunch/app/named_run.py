"""Find the run that a user names, in the same way for every command."""

import os
from pathlib import Path
from typing import TYPE_CHECKING

from ttlaunch import contract
from ttlaunch.diagnostics import Diagnostic, LaunchError, did_you_mean, listed, shown, usage_mistake

if TYPE_CHECKING:
    from ttlaunch.running.runs.launcher import Launcher


def find_named_run(where: str, *, runs_dir: Path, working_folder: Path | None = None) -> Path:
    """Find the folder of the run that a user names.

    Args:
        where: `latest`; a run's id; the beginning of an id, or what follows its last dash, if only one run matches; or a
            path. The id may also be that of a registered run whose folder is not in `runs_dir`.
        runs_dir: The folder that contains the run folders.
        working_folder: The folder to which relative paths are relative; None for the current folder.

    Raises:
        LaunchError: No run matches, or several do.
    """
    found = name_run(where, runs_dir=runs_dir, working_folder=working_folder or Path.cwd())
    if isinstance(found, Diagnostic):
        raise LaunchError([found])
    return found


def name_run(where: str, *, runs_dir: Path, working_folder: Path) -> Path | Diagnostic:
    """Return the folder of the run that a user names, or a diagnostic if no run or several match; see `find_named_run`."""
    from ttlaunch.running.runs.facts import find_run, matching_runs, run_folders

    path = find_run(where, runs_folder=working_folder / runs_dir, working_folder=working_folder)
    if path is not None:
        return path.resolve()
    here, elsewhere = run_folders(working_folder / runs_dir), _registered()
    matching = matching_runs(where, here) or matching_runs(where, elsewhere)
    if len(matching) != 1:
        known = [path.name for path in (*here, *elsewhere)]
        return _several(where, matching) if matching else _no_run(where, runs_dir, known)
    return matching[0].resolve()


def _registered() -> list[Path]:
    from ttlaunch.running.runs.registry import RegistryError, find_registry

    try:
        folders = [entry.folder for entry in find_registry(os.environ).entries()]
    except RegistryError:
        return []
    return [folder for folder in folders if (folder / contract.PLAN_FILE).is_file()]


def _several(where: str, matching: list[Path]) -> Diagnostic:
    names = listed([path.name for path in matching], last="and")
    return usage_mistake(f"`{shown(where)}` may mean {len(matching)} runs", code="P030", notes=(f"these are {names}",))


def _no_run(where: str, runs_dir: Path, known: list[str]) -> Diagnostic:
    from ttlaunch.running.runs.facts import LATEST

    where_runs_are = "`--runs-dir DIR` names the folder of runs"
    if where == LATEST:
        return usage_mistake(f"there is no run in {shown(str(runs_dir))}", where_runs_are, code="P030")
    message = f"`{shown(where)}` names no run in {shown(str(runs_dir))} and no path to one"
    hints = (*did_you_mean(where, dict.fromkeys([LATEST, *known])), where_runs_are)
    return usage_mistake(message, *hints, code="P030")


def read_launcher_here(path: Path, command: str) -> "Launcher | None":
    """Read which process launched a run; None if the run's folder does not have this record.

    Args:
        path: The run's folder.
        command: The ttlaunch command that needs the launcher, for the hint.

    Raises:
        LaunchError: The run is active on another machine or in another container.
    """
    from ttlaunch.running.runs.launcher import read_launcher

    launcher = read_launcher(path)
    if launcher is not None and not launcher.is_here and not (path / contract.REPORT_FILE).is_file():
        hint, place = f"`ssh {launcher.machine} ttlaunch {command} {path}`", launcher.machine
        if launcher.is_in_container:
            place, hint = "this machine in another container", f"`ttlaunch {command} {path}` in that container"
        message = f"the run {path.name} was started on {place}"
        raise LaunchError([Diagnostic("R049", message, hints=(hint,))])
    return launcher


def unreadable_run(path: Path, error: OSError | ValueError) -> LaunchError:
    """Make the error that reports why the folder of a run cannot be read."""
    reason = (error.strerror or str(error)).lower() if isinstance(error, OSError) else str(error)
    return LaunchError([Diagnostic("P031", f"the run {path.name} cannot be read: {reason}")])
