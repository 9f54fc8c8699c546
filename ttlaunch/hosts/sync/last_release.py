"""Remember what was last brought to the hosts of a project, so that the next sync can send at once what is new.

A host that has the former release then needs to ask nothing: a sync of a few changed files takes no more round trips
than one without a change. It is only an aid. A host that has something else asks as usual, and whatever a host puts
together is compared with the tree hash.
"""

import contextlib
import hashlib
import os
import tempfile
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ttlaunch import contract
from ttlaunch.hosts.sync.hash_cache import cache_folder
from ttlaunch.hosts.sync.release import Release
from ttlaunch.hosts.sync.send_buffer import Content
from ttlaunch.quick_dataclass import dataclass

_MOST_RECORDS = 500
_MOST_BYTES = 512 * 1024
_LEVEL = 1


@dataclass(frozen=True)
class News:
    """What is new since the last sync.

    Attributes:
        arguments: The arguments for `agent/receive.py`: the former tree hash, what to remove from and add to its
            manifest, and which contents come along; each record and path with one character for each of its bytes.
        frame: The packed frame with these contents; empty if there are none.
    """

    arguments: dict[str, Any]
    frame: bytes = b""


def find_news(release: Release, contents: Sequence[Content]) -> News | None:
    """Compare a release with the last one; None if there is none, or if too much is new to be sent unasked.

    Raises:
        SourceChangedError: If a file is not as it was when the release was made.
    """
    try:
        text = zlib.decompress(_file(release).read_bytes())
    except (OSError, zlib.error):
        return None
    old, new = text.split(b"\0")[1:-1], release.manifest.text.split(b"\0")[1:-1]
    added, removed = set(new) - set(old), set(old) - set(new)
    if (not added and not removed) or len(added) + len(removed) > _MOST_RECORDS:
        return None
    known = {record.split(b" ", 4)[3].decode() for record in old}
    fresh = {record.split(b" ", 4)[3].decode() for record in added} - known
    gifts = [content for content in contents if content.sha256 in fresh]
    if sum(content.size for content in gifts) > _MOST_BYTES:
        gifts = []
    arguments = {
        "tree": hashlib.sha256(text).hexdigest(),
        "removed": [record.split(b" ", 4)[4].decode("latin-1") for record in removed],
        "added": [record.decode("latin-1") for record in added],
        "contents": [content.sha256 for content in gifts],
    }
    if not gifts:
        return News(arguments)
    body = zlib.compress(b"".join(part for content in gifts for part in content.read()), _LEVEL)
    return News(arguments, contract.pack_frame({"kind": "gift", "packed": True}, body))


def remember(release: Release) -> None:
    """Remember that a host has this release; a cache that cannot be written is ignored."""
    file = _file(release)
    with contextlib.suppress(OSError):
        if file.is_file() and file.read_bytes() == release.manifest.packed:
            return
        file.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=file.parent, delete=False) as written:
            written.write(release.manifest.packed)
        Path(written.name).replace(file)


def _file(release: Release) -> Path:
    name = hashlib.sha256(os.fsencode(release.project)).hexdigest()[:32]
    return cache_folder(release.origin.environment) / f"manifest-{name}"
