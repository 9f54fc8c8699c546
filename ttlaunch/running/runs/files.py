"""Read the files of a run's folder, as a whole or as they grow, and replace them as a whole."""

import os
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from ttlaunch import contract
from ttlaunch.records.parser import LONGEST_RECORD, BadRecord, load
from ttlaunch.records.regular_files import next_data, open_regular, read_regular, read_tail

_PART = 256 * 1024  # bytes to read at a time: as a list of short lines, they take 15 times as much memory
_LONGEST_TEXT = 4 * 1024 * 1024


def read_object(path: Path) -> dict[str, Any]:
    """Read the JSON object in a file.

    Raises:
        OSError: The file cannot be read, or is no regular file.
        ValueError: The content is no JSON, or no object.
    """
    content = load(read_regular(path, most=LONGEST_RECORD + 1))
    if isinstance(content, BadRecord):
        raise ValueError(f"{path.name} is not usable: {content.reason}")  # noqa: TRY004 - the file is wrong, not the caller
    if not isinstance(content, dict):
        raise ValueError(f"{path.name} is not an object")  # noqa: TRY004 - as above
    return content


def read_file(path: Path) -> bytes | None:
    """Read a file for a parser that checks its content; None if there is no file that can be read.

    At most one byte more than the longest record is read, so that the parser notices a file that is too long.
    """
    try:
        return read_regular(path, most=LONGEST_RECORD + 1)
    except OSError:
        return None


def read_object_if_any(path: Path) -> dict[str, Any]:
    """Read the JSON object in a file; return an empty one if the file cannot be read."""
    try:
        return read_object(path)
    except (OSError, ValueError):
        return {}


def read_text_if_any(path: Path) -> str:
    """Read a text file, or its last 4 MiB, with replacements for bytes that are no UTF-8; empty if it cannot be read."""
    try:
        return read_tail(path, most=_LONGEST_TEXT).decode("utf-8", "replace")
    except OSError:
        return ""


def size_of(path: Path) -> int:
    """Return the size of a file in bytes; 0 if there is none."""
    try:
        return path.stat().st_size
    except OSError:
        return 0


def open_unlinked(path: str, flags: int) -> int:
    """Open a file for writing in a folder that may be a stranger's, as `opener` of `open`.

    A link is refused, because it could lead to any file of the user's, and a named pipe is not waited for.
    """
    return contract.open_private(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK)


def write_whole(path: Path, content: str | bytes | Iterable[str]) -> None:
    """Write a file so that readers see all of it or nothing, even if this process is killed meanwhile.

    Raises:
        OSError: The file cannot be written; its former content is then unchanged.
    """
    unfinished = path.with_name(f"{path.name}.tmp")
    with open(unfinished, "wb", opener=open_unlinked) as file:
        parts: Iterable[str | bytes] = [content] if isinstance(content, str | bytes) else content
        file.writelines(part.encode() if isinstance(part, str) else part for part in parts)
    unfinished.replace(path)


class Tail:
    """Reads a file that another process writes, line by line as it grows.

    Attributes:
        lines: How many lines have been read.
        bad_lines: How many of them the reader could not use, as it counts them.
        is_given_up: Set by the reader: no more of the file is read.
    """

    def __init__(self, path: Path, *, begin: int = 0) -> None:
        """Begin with the first line, or at the byte where a line begins."""
        self.lines = self.bad_lines = 0
        self.is_given_up = False
        self._path = path
        self._read = begin
        self._rest = bytearray()

    @property
    def place(self) -> int:
        """Where the next line begins, in bytes."""
        return self._read - len(self._rest)

    def read(self, *, most: int | None = None) -> Iterator[bytes]:
        """Read the whole lines that were added since the last call; given `most`, only as many bytes, and the others later.

        If a line is longer than the longest record, only its beginning is kept, which the parser still refuses as too long.
        So a writer that never ends its line cannot fill this process's memory. A hole in a sparse file is read as one NUL.
        """
        left = sys.maxsize if most is None else most
        try:
            # The usual answer, which costs a tenth of opening the file.
            if self.is_given_up or self._path.lstat().st_size <= self._read:
                return
            while left > 0:
                with open_regular(self._path) as file:  # closed before lines are used: readers of many ranks take turns
                    data = next_data(file, self._read)
                    is_hole, self._read = data > self._read, data
                    file.seek(data)
                    part = file.read(min(_PART, left))
                self._read += len(part)
                left -= len(part)
                if is_hole:
                    yield from self._lines(b"\0")
                if not part:
                    return
                yield from self._lines(part)
        except OSError:
            return

    def _lines(self, part: bytes) -> Iterator[bytes]:
        *whole, rest = part.split(b"\n")
        for line in whole:
            self.lines += 1
            joined = bytes(self._rest) + line if self._rest else line
            self._rest.clear()
            # One that is longer than a part may hold millions of `\r`, more than a reader should get at a time.
            yield from (joined.splitlines() or [b""]) if len(joined) <= _PART else [joined]
        self._rest += rest[: LONGEST_RECORD + 1 - len(self._rest)]
