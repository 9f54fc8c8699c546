"""The checkpoint that a serving run has loaded, held by hard links: a training that goes on removes its old checkpoints.

A start of the same weights after a failure reads what is held here if the checkpoint itself is gone. It takes no room while the
checkpoint is there, and goes with the serving run's folder.
"""

import contextlib
import os
import shutil
from pathlib import Path

_FOLDER = "held"


def hold_weights(checkpoint: Path, run_folder: Path) -> None:
    """Link the files of a checkpoint into the folder of the run that serves it; do nothing where links cannot be made."""
    held = run_folder / _FOLDER / checkpoint.name
    if held.exists():
        return
    with contextlib.suppress(OSError):
        shutil.copytree(checkpoint, held, copy_function=os.link)
        return
    shutil.rmtree(held, ignore_errors=True)


def find_held(checkpoint: str, run_folder: Path) -> str:
    """Return the path of a checkpoint, or that of what is held of it if it is gone."""
    held = run_folder / _FOLDER / Path(checkpoint).name
    return str(held.resolve()) if held.is_dir() and not Path(checkpoint).exists() else checkpoint
