"""Two files in a run's folder on a host: the launcher's order to end the run, and the agent's reason for leaving.

Python 3.9 and the standard library only.
"""

from __future__ import annotations

import contextlib
import json
import os
import time

from ttlaunch import contract

TYPE_CHECKING = False  # what typing.TYPE_CHECKING is, without the time to import it
if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any


_FAREWELL = "agent.json"


def leave_stop_marker(run_folder: str, marker: Mapping[str, Any]) -> None:
    """Write `contract.ENDING_FILE` by one rename; on a full disk nothing is written, and ranks end after their grace period."""
    path = os.path.join(run_folder, contract.ENDING_FILE)
    try:
        with open(path + ".tmp", "w", encoding="utf-8", opener=contract.open_private) as file:
            json.dump(marker, file)
        os.replace(path + ".tmp", path)
    except OSError:
        return


def stop_marker_was_left(run_folder: str, *, since: float) -> bool:
    """Whether the launcher has ordered the end after `since` (seconds since the epoch); an older order is of an earlier run."""
    try:
        return os.stat(os.path.join(run_folder, contract.ENDING_FILE)).st_mtime >= since
    except OSError:
        return False


def leave_farewell(run_folder: str, reason: str) -> None:
    """Record why the agent has left by itself; on a full disk nothing is written."""
    try:
        with open(os.path.join(run_folder, _FAREWELL), "w", encoding="utf-8", opener=contract.open_private) as file:
            json.dump({"reason": reason, "time": time.time()}, file)
    except OSError:
        return


def forget_farewell(run_folder: str) -> None:
    """Remove the reason of an earlier agent, if there is one."""
    with contextlib.suppress(OSError):
        os.unlink(os.path.join(run_folder, _FAREWELL))


def read_farewell(run_folder: str) -> str | None:
    """Return the reason why the run's agent has left by itself, as a clause; None if it has not."""
    try:
        with open(os.path.join(run_folder, _FAREWELL), encoding="utf-8") as file:
            return str(json.load(file)["reason"])
    except (OSError, ValueError, KeyError, TypeError):
        return None
