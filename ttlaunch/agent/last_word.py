"""What the launcher leaves for ranks and shims when a run is to end before its time, in the run's folder where they run.

Python 3.9 and the standard library only.
"""

from __future__ import annotations

import json
import os

from ttlaunch import contract

TYPE_CHECKING = False  # what typing.TYPE_CHECKING is, without the time to import it
if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any


def leave_word(run_folder: str, word: Mapping[str, Any]) -> None:
    """Write `contract.ENDING_FILE`, whole at once; on a disk that is full, ranks are left to the end of their grace."""
    path = os.path.join(run_folder, contract.ENDING_FILE)
    try:
        with open(path + ".tmp", "w", encoding="utf-8") as file:
            json.dump(word, file)
        os.replace(path + ".tmp", path)
    except OSError:
        return


def word_was_left(run_folder: str, *, since: float) -> bool:
    """Whether the launcher has ordered the end after a time, in seconds since the epoch, and not of an earlier run here."""
    try:
        return os.stat(os.path.join(run_folder, contract.ENDING_FILE)).st_mtime >= since
    except OSError:
        return False
