"""Write a release into a folder of this machine, for a run that starts later than the project may change."""

import hashlib
import os
from pathlib import Path

from ttlaunch.errors import TtlaunchError
from ttlaunch.hosts.sync.manifest import FILE, FOLDER
from ttlaunch.hosts.sync.release import Release
from ttlaunch.records.regular_files import open_regular

_PART = 1024 * 1024


class ChangedFileError(TtlaunchError):
    """A file of the project has changed since the release was made; the message names it."""


def write_release(release: Release, folder: Path) -> None:
    """Write all files of a release below a folder, which must be empty.

    Raises:
        ChangedFileError: A file does not have the content that the release was made from.
        OSError: A file cannot be read or written.
    """
    root, modes = os.fsencode(folder), []
    for entry in sorted(release.manifest.entries, key=lambda one: one.path):  # a folder comes before what it holds
        place = os.path.join(root, entry.path)
        if entry.kind == FOLDER:
            os.mkdir(place, 0o700)
            modes.append((place, entry.mode))
        elif entry.kind == FILE:
            if _copy(entry.source, place) != entry.content.decode():
                raise ChangedFileError(f"{os.fsdecode(entry.source)} has changed while it was copied")
            os.chmod(place, entry.mode)
        else:
            os.symlink(entry.content, place)
    for place, mode in reversed(modes):  # only now: a folder may be one that its user cannot write to
        os.chmod(place, mode)


def _copy(source: bytes, place: bytes) -> str:
    """Copy a file, and return the SHA-256 of what was copied."""
    digest = hashlib.sha256()
    with open_regular(source) as read, open(place, "xb") as written:
        while part := read.read(_PART):
            digest.update(part)
            written.write(part)
    return digest.hexdigest()
