"""Save the state of a worker whose run has lost its coordinator: one copy on each host, of whoever has the newest.

    last_states/step-37/rank-2.safetensors, rank-2.json      a shard of all weights and their state, and its record

The folder has this name only when both are complete, so a worker that is killed while it writes leaves `step-37.tmp`.

Where no worker has all of the state, each one saves its slots; then `rank-2` is the slot that worker 2 owns, whoever saved it, and the
record names all owners. The folder is whole when it has the slot of each of them, which may lie on several hosts.
"""

import fcntl
import os
import re
import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ttlaunch import contract
from ttlaunch.runtime.checkpoint.image import ShardImage
from ttlaunch.runtime.checkpoint.writer import CheckpointWriteError, Shard, write_shard
from ttlaunch.system_reason import system_reason

_STEP = re.compile(r"step-([0-9]{1,18})")


def save_last_state(run_dir: Path, image: ShardImage, *, shard: Shard) -> bool:
    """Write the state, unless another worker of this host has saved the same step or a newer one, and remove older ones.

    Args:
        run_dir: The run's folder on this host.
        image: The tensors, which do not change meanwhile.
        shard: The step, the worker and the rest of the state.

    Returns:
        Whether it was written.

    Raises:
        CheckpointWriteError: The disk is full, or the like.

    Cost: waits while another worker of this host writes; needs the room of two states where that one had an older step.
    """
    folder = run_dir / contract.last_state_dir(shard.step)
    try:
        contract.make_private_folder(folder.parent)
        with _alone_in(folder.parent):
            if max(_saved(folder.parent), default=-1) >= shard.step:
                return False
            unfinished = folder.with_name(folder.name + contract.UNFINISHED_SUFFIX)
            shutil.rmtree(unfinished, ignore_errors=True)  # of a worker that was killed
            contract.make_private_folder(unfinished)
            try:
                path = unfinished / contract.shard_file(shard.rank)
                write_shard(path, image, shard=shard, copied=threading.Event())
            except OSError:
                shutil.rmtree(unfinished, ignore_errors=True)
                raise
            unfinished.rename(folder)
            for step in _saved(folder.parent):
                if step < shard.step:
                    shutil.rmtree(run_dir / contract.last_state_dir(step), ignore_errors=True)
    except OSError as error:
        raise CheckpointWriteError(shard.step, f"{error.filename or folder}: {system_reason(error)}") from error
    return True


def save_last_slot(run_dir: Path, image: ShardImage, *, shard: Shard) -> bool:
    """Write a slot of a state that no worker has as a whole, unless another worker of this host has saved the same slot.

    Slots of older steps stay: together with those of other hosts they may be whole where those of the newest step are not.

    Args:
        run_dir: The run's folder on this host.
        image: The tensors of the slot, which do not change meanwhile.
        shard: The step, the number of the slot's owner, all owners, and the rest of the state.

    Returns:
        Whether it was written.

    Raises:
        CheckpointWriteError: The disk is full, or the like.

    Cost: waits while another worker of this host writes.
    """
    folder = run_dir / contract.last_state_dir(shard.step)
    try:
        contract.make_private_folder(folder.parent)
        with _alone_in(folder.parent):
            contract.make_private_folder(folder)
            if (folder / contract.shard_record(shard.rank)).exists():
                return False
            write_shard(folder / contract.shard_file(shard.rank), image, shard=shard, copied=threading.Event())
    except OSError as error:
        raise CheckpointWriteError(shard.step, f"{error.filename or folder}: {system_reason(error)}") from error
    return True


def _saved(folder: Path) -> list[int]:
    return [int(found[1]) for found in (_STEP.fullmatch(path.name) for path in folder.iterdir()) if found]


@contextmanager
def _alone_in(folder: Path) -> Iterator[None]:
    """Keep other workers of this host out; on a file system without locks two may write, each its own file."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)
