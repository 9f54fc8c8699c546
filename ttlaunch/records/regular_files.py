"""Open files that somebody else named or made: only regular files, without blocking, and read only up to a limit.

A rank, a host or somebody else's folder may name a device, a named pipe, a link or a file of terabytes. Opening or reading
one of these could block the reader, fill its memory, or show another file than intended. Python 3.9 and the standard library
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
        path: The path; its folders may be links.
        follow: Whether the file itself may be a link; allow this only if the user typed the path.

    Raises:
        OSError: The file does not exist, cannot be read, or is not a regular file.
    """
    try:
        # Check before opening: opening a device can already have an effect, such as starting a watchdog.
        look = os.stat if follow else os.lstat
        _check_regular(look(path).st_mode, path)
        descriptor = os.open(path, _FLAGS & ~os.O_NOFOLLOW if follow else _FLAGS)
    except ValueError as error:  # a NUL in the path
        raise OSError(errno.EINVAL, os.strerror(errno.EINVAL), os.fsdecode(path)) from error
    file = FileIO(descriptor)
    try:
        _check_regular(os.fstat(descriptor).st_mode, path)  # the file may have been replaced after the first check
    except OSError:
        file.close()
        raise
    return file


def read_regular(path: str | os.PathLike[str], *, most: int) -> bytes:
    """Read up to `most` bytes from the beginning of a regular file.

    Raises:
        OSError: The file does not exist, cannot be read, or is not a regular file.
    """
    with open_regular(path) as file:
        return _read_up_to(file, most)


def read_tail(path: str | os.PathLike[str], *, most: int) -> bytes:
    """Read up to `most` bytes from the end of a regular file.

    Raises:
        OSError: The file does not exist, cannot be read, or is not a regular file.
    """
    with open_regular(path) as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - most))
        return _read_up_to(file, most)


def next_data(file: FileIO, offset: int) -> int:
    """Return the first offset from `offset` on that is not in a hole of a sparse file; the file's end if there is none.

    A writer can make a hole of any size at no cost, so readers skip holes.
    """
    size = os.fstat(file.fileno()).st_size  # asked first, so that data appended after the search below is not skipped
    try:
        return os.lseek(file.fileno(), offset, os.SEEK_DATA)
    except OSError as error:
        # ENXIO: only a hole follows. Any other error comes from a file system that does not report holes.
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
