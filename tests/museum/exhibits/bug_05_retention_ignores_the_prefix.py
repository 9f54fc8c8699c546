"""Bug 5: checkpoints are saved as `step-N`, and retention looks for `checkpoint_*`.

Nothing is ever removed, until the disk is full.
"""

import shutil


def remove_old(run_folder, *, keep, keep_every):
    found = sorted(run_folder.glob("checkpoints/checkpoint_*"))  # the bug
    for folder in found[:-keep]:
        shutil.rmtree(folder)
