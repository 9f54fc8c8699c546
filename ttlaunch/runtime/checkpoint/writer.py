"""Write a shard to the disk in the background; if its record exists, the shard is complete.

The order ensures this: the writer writes the shard's bytes under another name, flushes them to the disk, renames the file, and only
then records its size and SHA-256.
"""

import errno
import hashlib
import json
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ttlaunch import contract
from ttlaunch.errors import TtlaunchError
from ttlaunch.runtime.checkpoint.image import PAGE, ShardImage
from ttlaunch.runtime.world import Rank
from ttlaunch.system_reason import system_reason

_PIECE = 16 * 1024 * 1024
_LEFT_FOR_RECORDS = 1024 * 1024


class CheckpointWriteError(TtlaunchError):
    """A shard could not be written.

    Attributes:
        step: The checkpoint's step.
        reason: File and what is wrong with it.
    """

    message_is_complete = True

    def __init__(self, step: int, reason: str) -> None:
        super().__init__(f"step {step}: {reason}")
        self.step, self.reason = step, reason


@dataclass(frozen=True)
class Shard:
    """What one rank adds to a checkpoint.

    Attributes:
        owners: All ranks whose shards the checkpoint needs.
        state: What else training goes on from, as JSON; equal on all owners.
    """

    step: int
    rank: Rank
    owners: Sequence[Rank]
    state: Mapping[str, Any]


class ShardWriter:
    """Writes one shard at a time, in a thread of its own."""

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir
        self._thread: threading.Thread | None = None
        self._error: CheckpointWriteError | None = None

    def start(self, shard: Shard, image: ShardImage) -> Callable[[], object]:
        """Begin to copy and write; call `wait` first.

        Returns:
            A function that returns once the tensors have been copied, so that they may change.
        """
        copied = threading.Event()
        self._thread = threading.Thread(target=self._save, args=(shard, image, copied), name="checkpoint")
        self._thread.start()
        return copied.wait

    def wait(self) -> None:
        """Return when nothing is being written any more."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def take_error(self) -> CheckpointWriteError | None:
        """Return why a shard could not be written, once; None if all could be."""
        error, self._error = self._error, None
        return error

    def _save(self, shard: Shard, image: ShardImage, copied: threading.Event) -> None:
        folder = self._run_dir / (contract.checkpoint_dir(shard.step) + contract.UNFINISHED_SUFFIX)
        path = folder / contract.shard_file(shard.rank)
        try:
            contract.make_private_folder(folder.parent)
            contract.make_private_folder(folder)
            write_shard(path, image, shard=shard, copied=copied)
        except OSError as error:
            self._error = CheckpointWriteError(shard.step, f"{path}: {system_reason(error)}")
        except BaseException as error:  # noqa: BLE001 - a thread that dies in silence would lose the reason
            self._error = CheckpointWriteError(shard.step, f"{path}: {error!r}")
        finally:
            # Also if nothing was copied, because the optimizer waits for this before its next update.
            copied.set()


def write_shard(path: Path, image: ShardImage, *, shard: Shard, copied: threading.Event) -> None:
    """Write a shard and then its record; a half-written shard is removed, so that it takes no room on a full disk.

    A shard that has no room is not begun: until it was removed, nobody else could write to the disk, neither the
    launcher nor this rank, whose records go on meanwhile.

    Copying, writing and hashing go on at the same time, each as far as the copy has come. The SHA-256 is of the bytes
    in memory, not of what the disk makes of them.

    Raises:
        OSError: The disk is full, or the like.
    """
    unfinished = path.with_name(path.name + contract.UNFINISHED_SUFFIX)
    _check_room(path, image.size)
    # Before the threads start: the writer would take the end of the last copy for that of this one.
    image.begin()
    with ThreadPoolExecutor(2) as pool:
        copying, hashing = pool.submit(image.copy), pool.submit(_sha256, image)
        # Training goes on as soon as everything is copied, while the file is still being written.
        copying.add_done_callback(lambda _: copied.set())
        try:
            write_durably(unfinished, image)
            copying.result()
            unfinished.replace(path)
        except BaseException:
            unfinished.unlink(missing_ok=True)
            raise
    record = {
        "format": contract.CHECKPOINT_FORMAT,
        "step": shard.step,
        "owners": list(shard.owners),
        "state": shard.state,
        "size": image.size,
        "sha256": hashing.result(),
        "tensors": list(image.names),
    }
    own = path.with_name(contract.shard_record(shard.rank))
    unfinished = own.with_name(own.name + contract.UNFINISHED_SUFFIX)
    with open(unfinished, "w", encoding="utf-8", opener=contract.open_private) as file:
        file.write(json.dumps(record, allow_nan=False))
    unfinished.replace(own)


def _check_room(path: Path, size: int) -> None:
    """Check that a file of this size leaves room for a run's records; files that other ranks write now are not counted.

    Raises:
        OSError: It does not.
    """
    disk = os.statvfs(path.parent)
    # Only root may use the blocks that the file system keeps in reserve.
    free = disk.f_bfree if os.geteuid() == 0 else disk.f_bavail
    if disk.f_blocks and free * disk.f_frsize < size + _LEFT_FOR_RECORDS:  # no blocks at all: the size is not known
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))


def write_durably(path: Path, image: ShardImage) -> None:
    """Write and flush a file, past the system's page cache where the file system can.

    The cache would only cost the ranks: a copy of every byte by a core they need, and memory for a file that nobody is
    about to read.

    Raises:
        OSError: The disk is full, or the like.
    """
    try:
        _write(path, image, flag=os.O_DIRECT)
    except OSError as error:
        if error.errno not in {errno.EINVAL, errno.EOPNOTSUPP}:
            raise
        _write(path, image, flag=0)


def _write(path: Path, image: ShardImage, *, flag: int) -> None:
    descriptor = contract.open_private(str(path), os.O_WRONLY | os.O_CREAT | os.O_TRUNC | flag)
    try:
        pages, at = image.pages, 0
        while at < len(pages):
            # O_DIRECT takes whole pages: what is copied is rounded down, and the file is cut to its size at the end.
            final = image.final_after(min(at + PAGE, image.size) - 1)
            end = len(pages) if final == image.size else final // PAGE * PAGE
            at += os.write(descriptor, pages[at : min(end, at + _PIECE)])
        os.ftruncate(descriptor, image.size)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _sha256(image: ShardImage) -> str:
    digest, at = hashlib.sha256(), 0
    while at < image.size:
        end = image.final_after(at)
        digest.update(image.data[at:end])
        at = end
    return digest.hexdigest()
