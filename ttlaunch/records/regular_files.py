"""Open files that somebody else named or made: only regular files, without waiting, and read no further than asked for.

A rank, a host or a stranger's folder may name a device, a named pipe, a link or a file of terabytes. Opening or reading one
of these could hang the reader, fill its memory, or show it a file that was not meant. Python 3.9 and the standard library
only.
"""

from __future__ import annotations

import errno
import os
import stat
from io import FileIO

_FLAGS = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC


def open_regular(path: str | bytes | os.PathLike[str], *, follow: bool = False) -> FileIO:
    """Open a regular file for reading, without a buffer.

    Args:
        path: Folders on the way to it may be links.
        follow: Whether the file itself may be a link, as it may where the user typed its name.

    Raises:
        OSError: There is no such file, or it is something else.
    """
    try:
        # Asked before it is opened: opening a device can already do something, such as starting a watchdog.
        look = os.stat if follow else os.lstat
        _check_regular(look(path).st_mode, path)
        descriptor = os.open(path, _FLAGS & ~os.O_NOFOLLOW if follow else _FLAGS)
    except ValueError as error:  # a NUL in the path
        raise OSError(errno.EINVAL, os.strerror(errno.EINVAL), os.fsdecode(path)) from error
    file = FileIO(descriptor)
    try:
        _check_regular(os.fstat(descriptor).st_mode, path)  # it may have been replaced since
    except OSError:
        file.close()
        raise
    return file


def read_regular(path: str | os.PathLike[str], *, most: int) -> bytes:
    """Read up to `most` bytes from the beginning of a regular file.

    Raises:
        OSError: As `open_regular`.
    """
    with open_regular(path) as file:
        return _read_up_to(file, most)


def read_tail(path: str | os.PathLike[str], *, most: int) -> bytes:
    """Read up to `most` bytes from the end of a regular file.

    Raises:
        OSError: As `open_regular`.
    """
    with open_regular(path) as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - most))
        return _read_up_to(file, most)


def next_data(file: FileIO, offset: int) -> int:
    """Return the next offset, from `offset` on, that is in no hole of a sparse file; the file's end if there is none.

    A hole costs its writer nothing, whatever its size, so readers jump over it.
    """
    size = os.fstat(file.fileno()).st_size  # first: what is appended after the search below must not be jumped over
    try:
        return os.lseek(file.fileno(), offset, os.SEEK_DATA)
    except OSError as error:
        # Any other error comes from a file system that does not know its holes.
        return max(offset, size) if error.errno == errno.ENXIO else offset


def _read_up_to(file: FileIO, most: int) -> bytes:
    parts = []
    while most > 0 and (part := file.read(most)):
        parts.append(part)
        most -= len(part)
    return b"".join(parts)


def _check_regular(mode: int, path: str | bytes | os.PathLike[str]) -> None:
    if stat.S_ISLNK(mode):
        raise OSError(errno.ELOOP, "it is a link", os.fsdecode(path))
    if not stat.S_ISREG(mode):
        raise OSError(errno.EINVAL, "it is no regular file", os.fsdecode(path))
