"""What a rank reports to the launcher: lines of progress, and how it failed. Standard library only."""

import errno
import json
import os
import sys
import time
import traceback
from pathlib import Path

from ttlaunch import contract
from ttlaunch.rank_exceptions.describe import describe

_PATIENCE_S = 10.0
_LOOK_AGAIN_S = 0.05


class ProgressWriter:
    """Appends records to the rank's progress file, each in one write, so that a reader sees whole lines only.

    A full disk is waited for: one that checkpoints have filled has room again once they are given up.
    """

    def __init__(self, run_dir: Path, rank: int) -> None:
        path = run_dir / contract.progress_file(rank)
        contract.make_private_folder(path.parent)
        self._descriptor = contract.open_private(str(path), os.O_WRONLY | os.O_APPEND | os.O_CREAT)

    def write(self, kind: str, **values: object) -> None:
        """Append a record of `kind` (a `KIND_` of the contract) with the present time.

        Raises:
            OSError: It cannot be written, or the disk stays full.
        """
        rest = contract.record_line({"kind": kind, "time": time.time(), **values}).encode()
        deadline = time.monotonic() + _PATIENCE_S
        while rest:
            try:
                # A disk that becomes full takes part of a line; the rest follows as soon as there is room.
                rest = rest[os.write(self._descriptor, rest) :]
            except OSError as error:
                if error.errno != errno.ENOSPC or time.monotonic() >= deadline:
                    raise
                time.sleep(_LOOK_AGAIN_S)

    def close(self) -> None:
        os.close(self._descriptor)


def print_error(error: BaseException) -> None:
    """Print on standard error why this rank ends, with the traceback where it helps.

    An error whose `message_is_complete` is true is about a file; its message names it, and no line of a program is at fault.
    """
    if getattr(error, "message_is_complete", False):
        print(f"error: {error}", file=sys.stderr)
    else:
        traceback.print_exception(error)


def write_error(
    run_dir: Path,
    rank: int,
    error: BaseException,
    *,
    role: str,
    step: int,
    recipe_folder: Path | None,
    seen: float | None = None,
) -> None:
    """Record why a rank failed, atomically: a reader finds the whole record or none.

    Args:
        run_dir: The run's folder.
        rank: The rank.
        error: The exception that ended it.
        role, step: What an exception does not know.
        recipe_folder: The place of the failure is the innermost line of a file in this folder, if there is one.
        seen: When the exception was first seen in flight; None if it was not.
    """
    fields = describe(error, folder=str(recipe_folder) if recipe_folder else None)
    record = {**fields, "seen": seen, "step": step, "role": role}
    path = run_dir / contract.error_file(rank)
    contract.make_private_folder(path.parent)
    unfinished = path.with_suffix(".unfinished")
    with open(unfinished, "w", encoding="utf-8", opener=contract.open_private) as written:
        written.write(json.dumps(record))
    unfinished.replace(path)
