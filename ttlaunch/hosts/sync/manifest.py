"""What a release consists of, and the tree hash that is its name: the same content has the same name everywhere."""

import hashlib
import zlib
from collections.abc import Iterable
from functools import cached_property

from ttlaunch.quick_dataclass import dataclass

FOLDER, FILE, LINK = "d", "f", "l"
_FIRST_LINE = b"ttlaunch manifest 1"


@dataclass(frozen=True)
class Entry:
    """A file, a folder or a symbolic link of a release.

    Attributes:
        path: Relative to the release; bytes, because the name of a file need not be valid UTF-8.
        mode: The nine permission bits; 0 for a link.
        size: The size in bytes; 0 for anything but a file.
        content: SHA-256 of a file in hexadecimal, the target of a link, nothing for a folder.
        source: Where a file lies on the launching machine.
    """

    kind: str
    path: bytes
    mode: int = 0
    size: int = 0
    content: bytes = b""
    source: bytes = b""


@dataclass(frozen=True)
class Manifest:
    """All entries of a release, in the order of their paths."""

    entries: tuple[Entry, ...]

    @cached_property
    def text(self) -> bytes:
        r"""The manifest as it is hashed, sent and kept: records that end with `\0`, as `agent/releases.py` reads them."""
        records = [_FIRST_LINE]
        for entry in self.entries:
            content = entry.content.hex().encode() if entry.kind == LINK else entry.content or b"-"
            records.append(b"%s %o %d %s %s" % (entry.kind.encode(), entry.mode, entry.size, content, entry.path))
        return b"\0".join(records) + b"\0"

    @cached_property
    def packed(self) -> bytes:
        """The compressed text, as it is sent and stored for the next sync."""
        return zlib.compress(self.text, 1)

    @cached_property
    def tree_hash(self) -> str:
        """SHA-256 of the text."""
        return hashlib.sha256(self.text).hexdigest()

    @cached_property
    def sources(self) -> dict[str, Entry]:
        """One file for each different content, by SHA-256; launching machine and hosts number the contents in this order."""
        found: dict[str, Entry] = {}
        for entry in self.entries:
            if entry.kind == FILE:
                found.setdefault(entry.content.decode(), entry)
        return found


def make_manifest(entries: Iterable[Entry]) -> Manifest:
    """Put entries in order; a path given twice counts once."""
    by_path = {entry.path: entry for entry in entries}
    return Manifest(tuple(by_path[path] for path in sorted(by_path)))
