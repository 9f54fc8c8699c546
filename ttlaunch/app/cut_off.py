"""A run whose supervisor was killed: end what is left of it here, and say so."""

import signal
from pathlib import Path

from ttlaunch.agent.run_processes import kill_run_processes
from ttlaunch.diagnostics import Diagnostic
from ttlaunch.running.runs.facts import read_daemons

_MOMENT_S = 3.0
"""What the engine may take to end the ranks here once its supervisor is gone."""


def cut_off(folder: Path, status: int | None) -> Diagnostic:
    """Make sure that nothing of the run is left on this machine, and describe its end.

    Args:
        folder: The run's.
        status: The supervisor's: minus the signal that killed it; None if it is not our child.
    """
    killed = len(kill_run_processes(folder.name, moment_s=_MOMENT_S, daemons=read_daemons(folder)))
    how = f"was killed by {signal.Signals(-status).name}" if status is not None and status < 0 else "is gone"
    notes = ["its ranks have ended with it"]
    notes += [f"{killed} of its processes here had to be killed"] if killed else []
    hints = ("`ttlaunch run … --resume latest` goes on from its newest checkpoint",)
    return Diagnostic("R050", f"the supervisor of {folder.name} {how}", notes=tuple(notes), hints=hints)
