"""Find the run that a user names, in the same way for every command."""

import os
from pathlib import Path
from typing import TYPE_CHECKING

from ttlaunch import contract
from ttlaunch.diagnostics import Diagnostic, LaunchError, did_you_mean, listed, shown, usage_mistake
from ttlaunch.planning.slurm_script import LOG_FILE
from ttlaunch.system_reason import system_reason

if TYPE_CHECKING:
    from ttlaunch.app.slurm_job import Job
    from ttlaunch.running.runs.launcher import Launcher

_LONGEST = 300


def find_named_run(where: str, *, runs_dir: Path, working_folder: Path | None = None) -> Path:
    """Find the folder of the run that a user names.

    Args:
        where: `latest`; a run's id; the number of a Slurm job submitted with this folder of runs, for its newest run; the beginning of an id, or what follows its last dash, if only one run matches; or a
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
    from ttlaunch.app.slurm_job import find_job
    from ttlaunch.running.runs.facts import find_run, matching_runs, run_folders

    path = find_run(where, runs_folder=working_folder / runs_dir, working_folder=working_folder)
    if path is not None:
        return path.resolve()
    if where.isdecimal() and (job := find_job(where, working_folder / runs_dir)):
        return job.starts[-1].run.resolve() if job.starts else no_run_of(job)
    here, elsewhere = run_folders(working_folder / runs_dir), _registered()
    matching = matching_runs(where, here) or matching_runs(where, elsewhere)
    if len(matching) != 1:
        known = [path.name for path in (*here, *elsewhere)]
        if matching:
            return _several(where, matching)
        places = (working_folder / runs_dir / where, working_folder / where)
        folder = next((one for one in places if os.path.isdir(one)), None) if where else None  # noqa: PTH112 - never raises
        return _no_run(where, runs_dir, known) if folder is None else _no_plan(folder)
    return matching[0].resolve()


def _registered() -> list[Path]:
    from ttlaunch.running.runs.registry import RegistryError, find_registry

    try:
        folders = [entry.folder for entry in find_registry(os.environ).entries()]
    except RegistryError:
        return []
    return [folder for folder in folders if (folder / contract.PLAN_FILE).is_file()]


def no_run_of(job: "Job") -> Diagnostic:
    """Say why a job has begun no run, from what Slurm says about it."""
    from ttlaunch.app.slurm_job import ask_queue, has_ended

    queue = ask_queue([job])
    state = queue.of(job)
    message = f"Slurm job {job.number} has begun no run"
    if queue.problem:
        return Diagnostic("R072", message, notes=(f"Slurm does not say why: {queue.problem}",))
    log = f"`cat {shown(job.folder / LOG_FILE, longest=_LONGEST)}` shows what it printed"
    if not has_ended(state):
        return Diagnostic("R072", f"{message} yet: it is {state.text}", hints=("`ttlaunch ps` shows when it has",))
    unseen = f"a job without this file ran on a host that does not see {shown(job.folder, longest=_LONGEST)}"
    return Diagnostic("R072", f"{message}, and has ended: {state.text}", hints=(log,), notes=(unseen,))


def _several(where: str, matching: list[Path]) -> Diagnostic:
    names = listed([path.name for path in matching], last="and")
    message = f"`{shown(where)}` may mean {len(matching)} runs"
    return usage_mistake(message, "type more of its name", code="P030", notes=(f"these are {names}",))


def _no_plan(folder: Path) -> Diagnostic:
    message = f"{shown(folder, longest=_LONGEST)} is the folder of no run: it has no {contract.PLAN_FILE}"
    hints = ("`ttlaunch ps` lists runs; a copied folder may have to be copied again",)
    return usage_mistake(message, *hints, code="P030")


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
    reason = system_reason(error)
    if isinstance(error, OSError) and error.filename:
        reason = f"{shown(Path(os.fsdecode(error.filename)).name)}: {reason}"
    hints = ("`ttlaunch ps` lists runs; a copied folder may have to be copied again",)
    return LaunchError([Diagnostic("P031", f"the run {path.name} cannot be read: {reason}", hints=hints)])
