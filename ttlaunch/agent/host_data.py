"""Find training texts on a host: those that an earlier sync sent, and those at the same path as on the launching machine.

A text is compared by its SHA-256. Reading gigabytes for that takes time, so digests are remembered together with size,
times and inode. Paths are bytes, as the system has them. Python 3.9 and the standard library only.
"""

from __future__ import annotations

import contextlib
import json
import os
import stat
import time

from ttlaunch import contract
from ttlaunch.agent import releases

TYPE_CHECKING = False  # what typing.TYPE_CHECKING is, without the time to import it
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from typing import Any

_KNOWN = b".digests.json"
_SETTLED_NS = 2_000_000_000  # a file written in the last two seconds may be written again with the same times


class HostData:
    """Finds the training texts that are on this host already.

    Attributes:
        places: The absolute path of each text found, by its SHA-256.
        differing: Paths at which this host has another text than the launching machine.
        missing: SHA-256 and size of each text that has to be sent.
    """

    def __init__(self, folder: bytes, *, alive: Callable[[], None]) -> None:
        self._folder = os.path.join(folder, contract.DATA_DIR.encode())
        self._alive = alive
        self._known: dict[str, Any] = {}
        self._learnt = False
        self.places: dict[str, bytes] = {}
        self.differing: list[bytes] = []
        self.missing: list[tuple[str, int]] = []

    def look(self, items: list[Mapping[str, Any]]) -> None:
        """Look for the launching machine's texts: each has `sha256`, `size` and, if it is a single file there, its `path`."""
        self._known = self._load() if items else {}
        for item in items:
            sha256, size = item["sha256"], item["size"]
            sent = os.path.join(self._folder, sha256.encode())
            there = None if item["path"] is None else os.fsencode(item["path"])
            holds = there is not None and self._digest(there, size) == sha256
            if there is not None and not holds and os.path.isfile(there):
                self.differing.append(there)
            if holds and there is not None:
                self.places[sha256] = there
            elif self._digest(sent, size) == sha256:
                self.places[sha256] = sent
            else:
                self.missing.append((sha256, size))

    def target(self, sha256: str) -> bytes:
        """Return the path at which a text is kept once it was sent."""
        return os.path.join(self._folder, sha256.encode())

    def incoming(self, sha256: str, owner: str) -> bytes:
        """Return the path at which a text is written until it is complete."""
        return os.path.join(self._folder, releases.INCOMING + owner.encode() + b"." + sha256.encode())

    def remember(self, *, owner: str) -> None:
        """Write the digests to a file; without it the texts are read again at the next sync."""
        if not self._learnt:
            return
        temporary = os.path.join(self._folder, releases.INCOMING + owner.encode() + b".digests")
        with contextlib.suppress(OSError):
            releases.write_file(temporary, json.dumps(self._known).encode())
            os.replace(temporary, os.path.join(self._folder, _KNOWN))

    def _load(self) -> dict[str, Any]:
        try:
            with open(os.path.join(self._folder, _KNOWN), encoding="ascii") as file:
                known = json.load(file)
        except (OSError, ValueError):
            return {}
        return known if isinstance(known, dict) else {}

    def _digest(self, path: bytes, size: int) -> str | None:
        """Return the SHA-256 of a file; None if it does not have this size or cannot be read."""
        try:
            found = os.stat(path)
            if not stat.S_ISREG(found.st_mode) or found.st_size != size:
                return None
            signature = list(releases.signature_of(found))
            name = os.fsdecode(path)
            known = self._known.get(name)
            if isinstance(known, list) and known[:4] == signature and isinstance(known[-1], str):
                return known[-1]
            sha256 = releases.digest_of(os.path.realpath(path), alive=self._alive).decode()
        except OSError:
            return None
        if max(found.st_mtime_ns, found.st_ctime_ns) < time.time_ns() - _SETTLED_NS:
            self._known[name] = [*signature, sha256]
            self._learnt = True
        return sha256
