"""A cache of what was found in files, so that files which have not changed since are not read again.

A file counts as unchanged if size, both times and inode are the same, and if it was last written well before the
cache was: what is written within the same tick of the clock looks unchanged. The cache is only an aid: without it, or
with one that makes no sense, files are read.
"""

import contextlib
import hashlib
import json
import os
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

_FORMAT = 2  # another number after a change of what a private key is (`secret_files.py`)
_RACY_NS = 50_000_000


def cache_folder(environment: Mapping[str, str]) -> Path:
    """The folder for files of ttlaunch that may be deleted at any time."""
    given = environment.get("XDG_CACHE_HOME", "")
    return (Path(given) if Path(given).is_absolute() else Path.home() / ".cache") / "ttlaunch"


class FileContent(NamedTuple):
    """What a release needs to know of a file's content.

    Attributes:
        sha256: Its digest, in hexadecimal.
        holds_key: Whether the file contains a private key.
    """

    sha256: str
    holds_key: bool


class HashCache:
    """What is known of the files of one project."""

    def __init__(self, folder: Path, root: bytes) -> None:
        self._file = folder / f"hashes-{hashlib.sha256(root).hexdigest()[:32]}.json"
        self._known: dict[str, list[Any]] = {}
        self._used: dict[str, list[Any]] = {}
        self._newest, self._made_at = 0, time.time_ns() - _RACY_NS
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            self._newest = self._file.stat().st_mtime_ns - _RACY_NS
            content = json.loads(self._file.read_bytes())
            if content["format"] == _FORMAT and isinstance(content["files"], dict):
                self._known = content["files"]

    def find(self, path: bytes, found: os.stat_result) -> FileContent | None:
        """Return what is known of the content of a file that has the status `found`."""
        name = os.fsdecode(path)
        row, newest = (self._used[name], self._made_at) if name in self._used else (self._known.get(name), self._newest)
        signature = _signature(found)
        # A file written in the same moment as the cache may have changed since then without its times showing it.
        if not isinstance(row, list) or row[:-2] != signature or max(signature[1:3]) >= newest:
            return None
        sha256, holds_key = row[-2:]
        if not isinstance(sha256, str) or not isinstance(holds_key, bool):
            return None
        self._used[name] = row
        return FileContent(sha256, holds_key)

    def keep(self, path: bytes, found: os.stat_result, content: FileContent) -> None:
        """Remember the content of a file that was just read."""
        self._used[os.fsdecode(path)] = [*_signature(found), content.sha256, content.holds_key]

    def save(self) -> None:
        """Save the digests if they have changed; a cache that cannot be written is ignored."""
        if self._used == self._known:
            return
        with contextlib.suppress(OSError):
            self._file.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile("w", dir=self._file.parent, delete=False, encoding="ascii") as file:
                file.write(json.dumps({"format": _FORMAT, "files": self._used}))  # a quarter of the time of `json.dump`
            Path(file.name).replace(self._file)


def _signature(found: os.stat_result) -> list[int]:
    return [found.st_size, found.st_mtime_ns, found.st_ctime_ns, found.st_ino, found.st_dev]
