"""Keep a copy of the newest release ready on a host, so that the next sync writes only the files that differ.

The copy lies in `<remote folder>/spare/<tree hash>/`, with a manifest and signatures of its own, and nothing runs from it.
The sync that makes the next release takes it by one rename, so no two syncs take the same. It keeps a file of the copy only
if the new release has the same file and the file's signature is the one noted when the copy was made.

Paths are bytes, as the system has them. Python 3.9 and the standard library only.
"""

from __future__ import annotations

import contextlib
import os
import stat
import time

from ttlaunch import contract
from ttlaunch.agent import releases
from ttlaunch.agent.releases import FILE, FOLDER, LINK
from ttlaunch.agent.unpack import Building

TYPE_CHECKING = False  # what typing.TYPE_CHECKING is, without the time to import it
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from ttlaunch.agent.releases import Entry, Signature

_SHARE_OF_FREE = 4  # a copy takes at most one part in so many of the free space
_NICENESS = 10  # ranks may be starting while the copy is made


def take_spare(
    folder: bytes, entries: Sequence[Entry], *, into: bytes
) -> tuple[list[int], dict[int, Signature]] | None:
    """Begin a new release with those files of the spare copy that it has too; None if no copy is of use.

    Args:
        folder: The remote folder.
        entries: The entries of the new release.
        into: The folder to build in, which does not exist yet.

    Returns:
        The indices of the entries that are missing, and the signatures of the files that are there.
    """
    place = os.path.join(folder, contract.SPARE_DIR.encode())
    for name in _names(place):
        spare = os.path.join(place, name)
        had = releases.read_manifest(spare)
        if had is None or len(set(had).intersection(entries)) < len(entries) / 2:
            continue
        known = releases.read_signatures(spare, len(had))
        with contextlib.suppress(FileNotFoundError):  # another sync was faster
            found = os.lstat(spare)
            # A group may share the remote folder: another user who made the copy could change its files later.
            if found.st_uid != os.geteuid() or found.st_mode & 0o077:
                continue
            os.rename(spare, into)
            if os.path.samestat(found, os.lstat(into)):
                return _keep_unchanged(into, entries, {had[index]: known[index] for index in known})
            releases.remove(into)
    return None


def _keep_unchanged(
    root: bytes, entries: Sequence[Entry], known: Mapping[Entry, Signature]
) -> tuple[list[int], dict[int, Signature]]:
    """Remove what does not belong to the release or may have changed; returns as `take_spare`."""
    places = {entry[4]: index for index, entry in enumerate(entries)}
    missing, signatures = set(range(len(entries))), {}
    folders = [b""]
    while folders:
        inside = folders.pop()
        with os.scandir(os.path.join(root, inside)) as listed:
            found = list(listed)
        for one in found:
            path = inside + b"/" + one.name if inside else one.name
            index = places.get(path)
            if index is None or not _is_unchanged(one, entries[index], known.get(entries[index])):
                releases.remove(one.path)
                continue
            missing.discard(index)
            if entries[index][0] == FOLDER:
                folders.append(path)
            elif entries[index][0] == FILE:
                signatures[index] = known[entries[index]]
    return sorted(missing), signatures


def _is_unchanged(found: os.DirEntry[bytes], entry: Entry, known: Signature | None) -> bool:
    kind, mode, _, content, _ = entry
    status = found.stat(follow_symlinks=False)
    if kind == LINK:
        return stat.S_ISLNK(status.st_mode) and os.readlink(found.path) == content
    if kind == FOLDER:
        return status.st_mode == stat.S_IFDIR | mode
    # A file with a second name is not taken: it could be written by that name when it is part of the release.
    return status.st_mode == stat.S_IFREG | mode and releases.signature_of(status) == known and status.st_nlink == 1


def prepare_spare(folder: bytes, tree_hash: str, *, owner: str) -> None:
    """Copy a release for the next sync, unless the copy is there already or would take too much of the free space.

    Ignores every `OSError`: the next sync does without the copy.

    Args:
        folder: The remote folder.
        tree_hash: The release, which this process keeps from being removed.
        owner: The id of this sync, by which the next one recognises a copy that was not finished.
    """
    place = os.path.join(folder, contract.SPARE_DIR.encode())
    release = os.path.join(folder, contract.RELEASES_DIR.encode(), tree_hash.encode())
    incoming = os.path.join(place, releases.INCOMING + owner.encode())
    manifest = releases.read_manifest_text(release)
    if manifest is None or tree_hash.encode() in _names(place):
        return
    entries = releases.parse_manifest(manifest)
    os.nice(_NICENESS)
    with contextlib.suppress(OSError):
        drop_spares(folder)
        disk = os.statvfs(place)
        too_large = _SHARE_OF_FREE * sum(entry[2] for entry in entries) > disk.f_bavail * disk.f_frsize
        if too_large or (disk.f_files and _SHARE_OF_FREE * len(entries) > disk.f_favail):
            return
        building = Building(os.path.join(place, tree_hash.encode()), entries, range(len(entries)), incoming=incoming)
        building.prepare(names=())
        known = releases.read_signatures(release, len(entries))
        for target in building.targets:
            source = release + b"/" + entries[target.index][4]
            signature = target.copy_from(source, known.get(target.index), alive=lambda: None)
            if signature is None:  # the release was changed meanwhile
                break
            building.signatures[target.index] = signature
        else:
            time.sleep(releases.RACY_NS / 1e9)  # so that each signature is older than their file, and is relied on
            building.finish(manifest=manifest)
    releases.remove(incoming)


def drop_spares(folder: bytes) -> None:
    """Remove all copies, to make room."""
    place = os.path.join(folder, contract.SPARE_DIR.encode())
    for name in _names(place):
        releases.remove(os.path.join(place, name))


def _names(place: bytes) -> list[bytes]:
    """The names of the complete copies."""
    try:
        return [name for name in os.listdir(place) if not name.startswith(releases.INCOMING)]
    except OSError:
        return []
