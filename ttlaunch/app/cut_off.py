"""Clean up after a run whose supervisor was killed, and report it."""

import signal
from pathlib import Path

from ttlaunch import contract
from ttlaunch.agent.run_processes import kill_run_processes
from ttlaunch.diagnostics import Diagnostic, shown
from ttlaunch.running.checkpoints.last_states import whole_steps
from ttlaunch.running.runs.facts import read_daemons, read_facts
from ttlaunch.running.runs.files import read_object, read_text_if_any
from ttlaunch.running.runs.run_folder import supervisor_file

_LONGEST = 300
_GRACE_S = 3.0
"""The time that the engine may take to end the ranks on this machine after its supervisor has ended."""


def cut_off(folder: Path, status: int | None) -> Diagnostic:
    """Kill the run's remaining processes on this machine, and describe how the run ended.

    Args:
        folder: The run's folder.
        status: The supervisor's exit status, or minus the signal that killed it; None if it is not this process's child.
    """
    grace_s = _GRACE_S + (contract.SAVE_S if _is_elastic(folder) else 0.0)
    killed = len(kill_run_processes(folder.name, grace_s=grace_s, daemons=read_daemons(folder)))
    notes = ["its ranks have ended with it"]
    how = f"was killed by {signal.Signals(-status).name}" if status is not None and status < 0 else "is gone"
    if status is not None and status > 0:
        how = f"ended with status {status}"
        notes += [f"it printed: {shown(line, longest=_LONGEST)}" for line in _last_line(folder)]
    saved = whole_steps(folder)
    notes += [f"its workers saved the state of step {max(saved)} from memory"] if saved else []
    newest = "this step" if saved else "its newest checkpoint"
    resume = (f"`ttlaunch run … --resume latest` continues from {newest}",)
    notes += [f"{killed} of its processes here had to be killed"] if killed else []
    hints = resume if _is_recipe(folder) else ()
    return Diagnostic("R050", f"the supervisor of {folder.name} {how}", notes=tuple(notes), hints=hints)


def _is_elastic(folder: Path) -> bool:
    try:
        return read_object(folder / contract.PLAN_FILE).get("elastic") is not None
    except (OSError, ValueError):
        return False


def _is_recipe(folder: Path) -> bool:
    try:
        return read_facts(folder).is_recipe
    except (OSError, ValueError):
        return True


def _last_line(folder: Path) -> list[str]:
    """Return the last line that the supervisor printed, in a list; empty if it printed nothing."""
    lines = read_text_if_any(folder / supervisor_file("stderr")).splitlines()
    return [line for line in lines if line.strip()][-1:]
