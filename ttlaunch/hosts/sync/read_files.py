"""Read files into entries of a manifest, each with the SHA-256 of what was read in one piece."""

import errno
import hashlib
import os
import stat
from collections.abc import Callable, Iterable
from pathlib import Path

from ttlaunch.diagnostics import shown
from ttlaunch.errors import TtlaunchError
from ttlaunch.hosts.sync.hash_cache import FileContent, HashCache
from ttlaunch.hosts.sync.manifest import FILE, FOLDER, LINK, Entry
from ttlaunch.hosts.sync.secret_files import KeySearch
from ttlaunch.records.regular_files import open_regular
from ttlaunch.system_reason import system_reason

CHUNK = 1024 * 1024
_ATTEMPTS = 3
_OWNER_MAY = 0o700
_LONGEST_NAME = 500


class UnreadableError(TtlaunchError):
    """A file cannot be read.

    Attributes:
        path: The file's path.
        reason: The system's message.
        changes: Whether the file could not be read because it is written all the time.
    """

    def __init__(self, path: bytes, reason: str, *, changes: bool = False) -> None:
        super().__init__(f"{name_of(path)} cannot be read: {reason}")
        self.path, self.reason, self.changes = path, reason, changes


def name_of(path: bytes) -> str:
    """A path as text for messages, whatever bytes it has."""
    return shown(path.decode("utf-8", "backslashreplace"), longest=_LONGEST_NAME)


class FileReader:
    """Reads the files of one release.

    Attributes:
        bytes_read: The bytes read from all files together, known ones included.
        newest_ns: When the last of the files, links and folders changed.
        vanished: Whether a file was listed but did not exist any more when it was read.
        with_keys: The absolute paths of files that contain a private key.
    """

    def __init__(self, cache: HashCache, *, on_progress: Callable[[int, int], None] | None = None) -> None:
        self._cache, self._on_progress = cache, on_progress
        self._files = 0
        self.bytes_read = 0
        self.newest_ns, self.vanished = 0, False
        self.with_keys: set[bytes] = set()

    def read_all(
        self, root: bytes, paths: Iterable[bytes], *, folders: Iterable[bytes], into: bytes
    ) -> tuple[list[Entry], list[UnreadableError]]:
        """Entries for paths below `root`, as they are to lie below `into` in the release."""
        entries, errors = [], []
        below, above = root + b"/", into + b"/"
        for kind_paths in (folders, paths):
            for path in kind_paths:
                try:
                    entry = self._read(below + path, above + path if path else into)
                except UnreadableError as error:
                    errors.append(error)
                else:
                    entries += [entry] if entry else []
        return entries, errors

    def _read(self, source: bytes, path: bytes) -> Entry | None:
        """One entry; None if it has gone since it was listed."""
        try:
            found = os.lstat(source)
            self.newest_ns = max(self.newest_ns, found.st_ctime_ns)
            if stat.S_ISDIR(found.st_mode):
                return Entry(FOLDER, path, mode=found.st_mode & 0o777 | _OWNER_MAY)
            if stat.S_ISLNK(found.st_mode):
                return Entry(LINK, path, content=os.readlink(source))
            if not stat.S_ISREG(found.st_mode):
                return None
            content = self._cache.find(source, found)
            if content is None:
                found, content = _read_steadily(source)
                self._cache.keep(source, found, content)
        except OSError as error:
            if error.errno in {errno.ENOENT, errno.ENOTDIR}:
                self.vanished = True
                return None
            raise UnreadableError(source, system_reason(error)) from error
        self.newest_ns = max(self.newest_ns, found.st_ctime_ns)
        if content.holds_key:
            self.with_keys.add(source)
        self._files += 1
        self.bytes_read += found.st_size
        if self._on_progress is not None:
            self._on_progress(self._files, self.bytes_read)
        return Entry(FILE, path, found.st_mode & 0o777, found.st_size, content.sha256.encode(), source)


def _read_steadily(source: bytes) -> tuple[os.stat_result, FileContent]:
    """Read a file, again if it is written meanwhile; returns its status and what is to be known of its content.

    Raises:
        UnreadableError: If it is written each time that it is read.
    """
    sizes: list[int] = []
    for _ in range(_ATTEMPTS):
        with open_regular(source) as file:
            before = os.fstat(file.fileno())
            digest, size, search = hashlib.sha256(), 0, KeySearch()
            while chunk := file.read(CHUNK):
                digest.update(chunk)
                search.add(chunk)
                size += len(chunk)
            after = os.fstat(file.fileno())
        same = (before.st_mtime_ns, before.st_ctime_ns) == (after.st_mtime_ns, after.st_ctime_ns)
        if same and size == after.st_size:
            return after, FileContent(digest.hexdigest(), search.found)
        sizes.append(size)
    read = ", ".join(map(str, sizes))
    raise UnreadableError(source, f"it was read {_ATTEMPTS} times and had {read} bytes", changes=True)


def is_inside(path: Path, folder: Path) -> bool:
    """Whether a path lies in a folder, both made absolute without links."""
    return path == folder or folder in path.parents
