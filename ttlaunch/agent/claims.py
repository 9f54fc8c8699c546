"""Make folders that only this user may enter, and claim them for as long as a process uses them.

All users and containers of a machine share its /dev/shm, and containers do not see each other's processes. A folder is
therefore trusted only if its owner and its mode are right. It counts as abandoned only if no process holds a lock on a
claim file in it: a lock ends with its process and is visible in every container. Python 3.9 and the standard library only.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import stat
import struct

TYPE_CHECKING = False  # what typing.TYPE_CHECKING is, without the time to import it
if TYPE_CHECKING:
    import socket

SHARED = "/dev/shm"  # noqa: S108 - what is there is checked, or chosen by others
SEGMENTS = "segments"
"""The folder in a run's folder in shared memory that has the names of the run's files outside of it."""

_PREFIX = "ttl-"
_CLAIM = ".claim"
_CREDENTIALS = struct.Struct("3i")  # process, user, group


def make_private(path: str) -> None:
    """Make a folder that only this user may enter; if the path exists, check that it is such a folder.

    Raises:
        OSError: The folder cannot be made; or the path is no folder, belongs to another user, or is open to other users.
    """
    with contextlib.suppress(FileExistsError):
        os.mkdir(path, 0o700)
    found = os.lstat(path)
    if not stat.S_ISDIR(found.st_mode):
        raise NotADirectoryError(errno.ENOTDIR, "what has this name is not a folder", path)
    if found.st_uid != os.geteuid():
        raise PermissionError(errno.EPERM, f"it belongs to user {found.st_uid}, and we are {os.geteuid()}", path)
    if found.st_mode & 0o077:
        mode = stat.S_IMODE(found.st_mode)
        raise PermissionError(errno.EPERM, f"its mode {mode:04o} admits other users, and 0700 was expected", path)


def close_to_others(path: str | bytes) -> None:
    """Deny other users access to a folder of ours, and the group too unless the group may write to the parent folder.

    A folder that belongs to somebody else stays as it is: a group that shares the parent folder shares this one too.
    """
    around, found = os.stat(os.path.dirname(path)), os.stat(path)
    forbidden = 0o007 if around.st_mode & stat.S_IWGRP else 0o077
    if found.st_uid == os.geteuid() and found.st_mode & forbidden:
        os.chmod(path, stat.S_IMODE(found.st_mode) & ~forbidden)


def claim(folder: str, name: str) -> int:
    """Make a private folder, or check it, and claim it until the returned descriptor is closed.

    Args:
        folder: The path of the folder; its parent exists.
        name: The name of the claim. Processes that use the same name share its file and may claim the folder together.

    Raises:
        OSError: For the reasons of `make_private`, or because the file system has no locks.
    """
    while True:
        make_private(folder)
        # Another process may remove the folder before we claim it, because until then it looks abandoned.
        with contextlib.suppress(FileNotFoundError):
            return claim_existing(folder, name)


def claim_existing(folder: str, name: str) -> int:
    """Claim a folder without checking who may enter it; see `claim`."""
    descriptor = hold(os.path.join(folder, name + _CLAIM), fcntl.LOCK_SH)
    assert descriptor is not None  # noqa: S101 - it was waited for
    return descriptor


def take_claims(folder: str) -> list[int] | None:
    """Lock every claim on a folder of ours exclusively, so that no process can claim it; the caller closes the descriptors.

    Returns:
        One descriptor for each claim; None if a process uses the folder, or if it is not ours.
    """
    taken: list[int] = []
    try:
        found = os.lstat(folder)
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid():
            return None
        for name in os.listdir(folder):
            if name.endswith(_CLAIM):
                # Whatever stands in place of a claim: do not wait for a FIFO's writer, and do not follow a link.
                flags = os.O_RDWR | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC
                taken.append(os.open(os.path.join(folder, name), flags))
                fcntl.flock(taken[-1], fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        release(taken)
        return None
    return taken


def release(descriptors: list[int]) -> None:
    """Release claims by closing their descriptors."""
    for descriptor in descriptors:
        os.close(descriptor)


def remove_if_abandoned(folder: str) -> None:
    """Remove a folder of ours if it has claims and no process holds one; a folder without claims stays."""
    taken = take_claims(folder)
    if taken:
        remove_scratch(folder)
    release(taken or [])


def remove_scratch(folder: str) -> None:
    """Remove a run's folder in shared memory, and before it the run's files in shared memory that lie outside of it."""
    with contextlib.suppress(OSError):
        for name in os.listdir(os.path.join(folder, SEGMENTS)):
            with contextlib.suppress(OSError):
                os.unlink(os.path.join(SHARED, name))
    import shutil  # noqa: PLC0415 - takes 1 ms, and few of the scripts that are sent to hosts remove a folder

    shutil.rmtree(folder, ignore_errors=True)


def remove_abandoned(base: str) -> None:
    """Remove the folders for sockets and shared memory of runs whose launchers and agents were killed."""
    try:
        names = os.listdir(base)
    except OSError:
        return
    for name in names:
        if name.startswith(_PREFIX):
            remove_if_abandoned(os.path.join(base, name))


def is_same_user(connection: socket.socket) -> bool:
    """Ask the kernel whether the process at the other end of a Unix socket belongs to our user."""
    import socket  # noqa: PLC0415 - takes 4 ms, and few of the scripts that are sent to hosts connect

    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return bool(_CREDENTIALS.unpack(credentials)[1] == os.geteuid())


def connect(path: str) -> socket.socket:
    """Connect to a Unix socket on which a process of ours listens.

    Raises:
        OSError: Nobody listens there, or another user does.
    """
    import socket  # noqa: PLC0415 - as in `is_same_user`

    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connection.connect(path)
        if not is_same_user(connection):
            raise PermissionError(errno.EPERM, "another user listens in its place", path)
    except OSError:
        connection.close()
        raise
    return connection


def hold(path: str | bytes, how: int) -> int | None:
    """Lock a file that stays locked until the descriptor is closed.

    Args:
        path: The file; made if it is not there.
        how: The operation of `flock`: LOCK_SH or LOCK_EX, which wait for the lock, or LOCK_EX | LOCK_NB.

    Returns:
        The descriptor; None if another process holds the lock and `how` forbids waiting.
    """
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(descriptor, how)
        except OSError as error:
            os.close(descriptor)
            if how & fcntl.LOCK_NB and error.errno in {errno.EWOULDBLOCK, errno.EACCES, errno.ENOLCK}:
                return None
            raise
        # The earlier holder of the lock may have removed the file after we opened and before we locked it. Then our lock
        # excludes nobody, because the next process makes and locks a new file. So check that the path is still our file.
        with contextlib.suppress(OSError):
            if os.path.samestat(os.fstat(descriptor), os.stat(path)):
                return descriptor
        os.close(descriptor)
