"""Make folders that only this user may enter, and claim them for as long as a process uses them.

Other users of a machine share its /dev/shm, and so do containers, which do not see each other's processes. A folder is
therefore trusted only after a look at its owner and its mode, and counts as abandoned only when nobody holds a lock on the
claims in it: a lock ends with its process and is visible in every container. Python 3.9 and the standard library only.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import glob
import os
import shutil
import socket
import stat
import struct

_PREFIX = "ttl-"
_CLAIM = ".claim"
_CREDENTIALS = struct.Struct("3i")  # process, user, group


def make_private(path: str) -> None:
    """Make a folder that only we may enter, or check that a folder of this name is one.

    Raises:
        OSError: It cannot be made; or what has its name is no folder, belongs to another user, or is open to others.
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
    """Take a folder of ours away from other users, and from the group unless the group may write to the folder around it.

    A folder that belongs to somebody else stays as it is: a group that shares the folder around it shares this one too.
    """
    around, found = os.stat(os.path.dirname(path)), os.stat(path)
    forbidden = 0o007 if around.st_mode & stat.S_IWGRP else 0o077
    if found.st_uid == os.geteuid() and found.st_mode & forbidden:
        os.chmod(path, stat.S_IMODE(found.st_mode) & ~forbidden)


def claim(folder: str, name: str) -> int:
    """Make a private folder, or check it, and claim it until the returned descriptor is closed.

    Args:
        folder: Where to; its parent exists.
        name: Of the claim, the same for all processes of one kind, which may claim the folder together.

    Raises:
        OSError: As `make_private`, or the file system has no locks.
    """
    while True:
        make_private(folder)
        # Between the two calls somebody may have removed the folder, because it still looked abandoned.
        with contextlib.suppress(FileNotFoundError):
            return claim_existing(folder, name)


def claim_existing(folder: str, name: str) -> int:
    """Claim a folder, whoever may enter it; see `claim`."""
    descriptor = hold(os.path.join(folder, name + _CLAIM), fcntl.LOCK_SH)
    assert descriptor is not None  # noqa: S101 - it was waited for
    return descriptor


def take_claims(folder: str) -> list[int] | None:
    """Lock every claim on a folder of ours, so that no process uses it; the caller closes the descriptors.

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
                # A FIFO in place of a claim must not make us wait, nor a link lead us elsewhere.
                flags = os.O_RDWR | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC
                taken.append(os.open(os.path.join(folder, name), flags))
                fcntl.flock(taken[-1], fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        release(taken)
        return None
    return taken


def release(descriptors: list[int]) -> None:
    """Give claims back."""
    for descriptor in descriptors:
        os.close(descriptor)


def remove_if_abandoned(folder: str) -> None:
    """Remove a folder of ours that was claimed and is not any more; one without any claim stays."""
    taken = take_claims(folder)
    if taken:
        shutil.rmtree(folder, ignore_errors=True)
    release(taken or [])


def remove_abandoned(base: str) -> None:
    """Remove the folders for sockets and shared memory of runs whose launchers and agents were killed."""
    for folder in glob.glob(os.path.join(glob.escape(base), f"{_PREFIX}*")):
        remove_if_abandoned(folder)


def is_same_user(connection: socket.socket) -> bool:
    """Whether the process at the other end of a Unix socket belongs to our user, as the kernel says."""
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return bool(_CREDENTIALS.unpack(credentials)[1] == os.geteuid())


def connect(path: str) -> socket.socket:
    """Connect to a Unix socket on which a process of ours listens.

    Raises:
        OSError: Nobody listens there, or another user does.
    """
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
        how: For `flock`: LOCK_SH or LOCK_EX, which are waited for, or LOCK_EX | LOCK_NB.

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
        # Whoever held the lock before may have removed the file between our opening and locking it. Then our lock excludes
        # nobody, because the next one makes and locks a new file.
        with contextlib.suppress(OSError):
            if os.path.samestat(os.fstat(descriptor), os.stat(path)):
                return descriptor
        os.close(descriptor)
