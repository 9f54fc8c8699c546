"""Releases on a host: which files belong to one, whether they are complete, who uses it, and which old ones to remove.

A release is `<remote folder>/releases/<tree hash>/`. Beside the code it holds its manifest, whose SHA-256 is the tree
hash, and for each boot of the machine a file of signatures: size, times and inode of every file when its content was
last compared with the manifest. A file whose signature is the same has not been written since, so it is not read again.

Paths are bytes, as the system has them. Python 3.9 and the standard library only.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import re
import stat
import struct

from ttlaunch import contract
from ttlaunch.agent.claims import hold

TYPE_CHECKING = False  # what typing.TYPE_CHECKING is, without the time to import it
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from typing import Any

    Entry = tuple[bytes, int, int, bytes, bytes]  # kind, mode, size, SHA-256 or target of a link, path
    Signature = tuple[int, int, int, int]  # size, time of content, time of anything, inode

FOLDER, FILE, LINK = b"d", b"f", b"l"
CHUNK = 1024 * 1024
INCOMING = b".incoming-"

_FIRST_LINE = b"ttlaunch manifest 1"
_SIGNATURE = struct.Struct("<qqqQ")
_NO_SIGNATURE = (-1, 0, 0, 0)
RACY_NS = 20_000_000  # a clock tick of a file system: what was written in the last one may be written again unseen
_MOST_BOOTS = 64
_TREE_HASH = re.compile(rb"[0-9a-f]{64}\Z")


def parse_manifest(text: bytes) -> list[Entry]:
    """Parse a manifest into its entries, in the order of their paths; a folder comes before what is in it.

    Raises:
        ValueError: If the text is no manifest.
    """
    first, *records = text.split(b"\0")
    if first != _FIRST_LINE or not records or records.pop() != b"":
        raise ValueError("not a manifest")
    entries = []
    for record in records:
        kind, mode, size, content, path = record.split(b" ", 4)
        value = bytes.fromhex(content.decode()) if kind == LINK else content
        entries.append((kind, int(mode, 8), int(size), value, path))
    return entries


def read_manifest_text(release: bytes) -> bytes | None:
    """Return the manifest of a release on this host; None if it is missing or damaged."""
    try:
        with open(os.path.join(release, contract.MANIFEST_FILE.encode()), "rb") as file:
            text = file.read()
    except OSError:
        return None
    return text if hashlib.sha256(text).hexdigest().encode() == os.path.basename(release) else None


def read_manifest(release: bytes) -> list[Entry] | None:
    """Return the entries of the manifest of a release on this host; None if it is missing or damaged."""
    text = read_manifest_text(release)
    return None if text is None else parse_manifest(text)


def renew_manifest(releases: bytes, news: Mapping[str, Any] | None, *, tree_hash: str) -> bytes | None:
    """Build the manifest of a new release from the one that was sent last and `news`; None if that does not work.

    Args:
        releases: The folder of all releases.
        news: Tree hash of the last one, and what to remove and to add; see `ttlaunch.hosts.sync.last_release`.
        tree_hash: The tree hash of the new release.
    """
    text = None if news is None else read_manifest_text(os.path.join(releases, news["tree"].encode()))
    if news is None or text is None:
        return None
    first, *records = text.split(b"\0")[:-1]
    by_path = {record.split(b" ", 4)[4]: record for record in records}
    for path in news["removed"]:
        by_path.pop(path.encode("latin-1"), None)
    added = [record.encode("latin-1") for record in news["added"]]
    by_path.update((record.split(b" ", 4)[4], record) for record in added)
    manifest = b"\0".join([first, *(by_path[path] for path in sorted(by_path))]) + b"\0"
    return manifest if hashlib.sha256(manifest).hexdigest() == tree_hash else None


def digest_of(path: bytes, *, alive: Callable[[], None]) -> bytes:
    """SHA-256 of a file's content, in hexadecimal."""
    digest = hashlib.sha256()
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        while chunk := os.read(descriptor, CHUNK):
            digest.update(chunk)
            alive()
    finally:
        os.close(descriptor)
    return digest.hexdigest().encode()


def signature_of(found: os.stat_result) -> Signature:
    """The signature of a file: values that change whenever it is written, replaced or given other rights."""
    return found.st_size, found.st_mtime_ns, found.st_ctime_ns, found.st_ino


def check_tree(
    release: bytes, entries: Sequence[Entry], *, alive: Callable[[], None]
) -> tuple[list[int], dict[int, Signature], bool]:
    """Compare a release with its manifest.

    Returns:
        The indices of entries that are missing or wrong, the signatures of the files that are right, and whether files
        had to be read because their signatures were not known.
    """
    known = read_signatures(release, len(entries))
    wrong, signatures, read_any = [], {}, False
    for index, (kind, mode, size, content, path) in enumerate(entries):
        full = release + b"/" + path
        try:
            found = os.lstat(full)
            if kind == FILE:
                right = stat.S_ISREG(found.st_mode) and found.st_mode & 0o777 == mode and found.st_size == size
                signature = signature_of(found)
                if right and known.get(index) != signature:
                    right, read_any = digest_of(full, alive=alive) == content, True
                if right:
                    signatures[index] = signature
            elif kind == FOLDER:
                right = stat.S_ISDIR(found.st_mode) and found.st_mode & 0o777 == mode
            else:
                right = stat.S_ISLNK(found.st_mode) and os.readlink(full) == content
        except OSError:
            right = False
        if not right:
            wrong.append(index)
    return wrong, signatures, read_any


def _signatures_file(release: bytes) -> bytes:
    """The path of the signatures: one file for each boot, because a power cut may lose content that was not yet on the disk."""
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            boot = file.read().strip()
    except OSError:
        boot = "unknown"
    return os.path.join(release, f"signatures-{boot}".encode())


def read_signatures(release: bytes, count: int) -> dict[int, Signature]:
    """Return the reliable signatures by index; a file written just before may have changed since with the same signature."""
    try:
        with open(_signatures_file(release), "rb") as file:
            packed, newest = file.read(), os.fstat(file.fileno()).st_mtime_ns - RACY_NS
    except OSError:
        return {}
    if len(packed) != count * _SIGNATURE.size:
        return {}
    unpacked: Iterator[Any] = _SIGNATURE.iter_unpack(packed)
    return {index: signature for index, signature in enumerate(unpacked) if signature[2] < newest}


def write_signatures(release: bytes, signatures: Mapping[int, Signature], *, count: int, temporary: bytes) -> None:
    """Record the signatures of files that `check_tree` need not read again; if the release is read-only it reads them each time."""
    packed = b"".join(_SIGNATURE.pack(*signatures.get(index, _NO_SIGNATURE)) for index in range(count))
    with contextlib.suppress(OSError):
        write_file(temporary, packed)
        os.replace(temporary, _signatures_file(release))
        boots = [name for name in os.listdir(release) if name.startswith(b"signatures-")]
        for name in boots[_MOST_BOOTS:]:
            os.unlink(os.path.join(release, name))


def write_file(path: bytes, content: bytes) -> None:
    """Write a file that only its owner may change; replaces an existing one."""
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644), "wb") as file:
        file.write(content)


def hold_release(folder: bytes, tree_hash: str) -> int:
    """Keep a release from being removed for as long as the descriptor, or a copy of it in a child, is open."""
    descriptor = hold(os.path.join(folder, contract.release_lock(tree_hash).encode()), fcntl.LOCK_SH)
    assert descriptor is not None  # noqa: S101 - it was waited for
    return descriptor


def old_releases(folder: bytes, *, keep: int, own: bytes) -> Iterator[tuple[bytes, int]]:
    """Yield the releases beyond the newest `keep` that no run uses, each with its exclusive lock, which the caller closes."""
    releases = os.path.join(folder, contract.RELEASES_DIR.encode())
    try:
        current = os.path.basename(os.readlink(os.path.join(folder, contract.CURRENT_LINK.encode())))
        names = [name for name in os.listdir(releases) if _TREE_HASH.match(name) and name != own]
    except OSError:
        return

    def last_synced(name: bytes) -> int:
        try:
            return os.stat(os.path.join(releases, name + b".lock")).st_mtime_ns
        except OSError:
            return 0

    for name in sorted(names, key=last_synced, reverse=True)[max(0, keep - 1) :]:
        if name == current:
            continue
        descriptor = hold(os.path.join(releases, name + b".lock"), fcntl.LOCK_EX | fcntl.LOCK_NB)
        if descriptor is not None:
            yield name, descriptor


def clear_leftovers(folder: bytes) -> None:
    """Remove the files of syncs that were killed: those that carry the id of a sync whose lock is free."""
    names = (contract.RELEASES_DIR, contract.DATA_DIR, contract.SPARE_DIR)
    places = [os.path.join(folder, name.encode()) for name in names]
    found = [os.path.join(place, name) for place in places for name in os.listdir(place) if name.startswith(INCOMING)]
    for owner in {_owner_of(path) for path in found}:
        lock = os.path.join(places[0], INCOMING + owner + b".lock")
        descriptor = hold(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if descriptor is not None:
            for path in found:
                if _owner_of(path) == owner and path != lock:
                    remove(path)
            with contextlib.suppress(OSError):
                os.unlink(lock)
            os.close(descriptor)
    _clear_locks(places[0])


def _clear_locks(releases: bytes) -> None:
    """Remove lock files without a release, as a failed sync leaves them, unless a process holds them."""
    for name in os.listdir(releases):
        release, lock = os.path.join(releases, name[: -len(b".lock")]), os.path.join(releases, name)
        if not name.endswith(b".lock") or not _TREE_HASH.match(os.path.basename(release)) or os.path.lexists(release):
            continue
        descriptor = hold(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if descriptor is not None:
            with contextlib.suppress(OSError):
                if not os.path.lexists(release):  # another sync may have finished it while nobody held the lock
                    os.unlink(lock)
            os.close(descriptor)


def _owner_of(path: bytes) -> bytes:
    return os.path.basename(path)[len(INCOMING) :].partition(b".")[0]


def remove(path: bytes) -> None:
    """Remove a file, a link or a folder with its content, as far as the system permits; never raises `OSError`."""
    with contextlib.suppress(OSError):
        if not stat.S_ISDIR(os.lstat(path).st_mode):
            os.unlink(path)
            return
        for folder, folders, files in os.walk(path, topdown=False):
            for name in files:
                with contextlib.suppress(OSError):
                    os.unlink(os.path.join(folder, name))
            for name in folders:
                inner = os.path.join(folder, name)
                with contextlib.suppress(OSError):
                    (os.unlink if os.path.islink(inner) else os.rmdir)(inner)
        os.rmdir(path)
