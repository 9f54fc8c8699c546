"""Put the files of a release where they belong on a host: those it has already by copying, the others as they arrive.

A release that is not there is built in a folder of its own and gets its name by one rename; in one that is there but
damaged, each wrong file is replaced by one rename. Everything is compared with its SHA-256 while it is written.

Paths are bytes, as the system has them. Python 3.9 and the standard library only.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import os
import stat

from ttlaunch import contract
from ttlaunch.agent import releases
from ttlaunch.agent.releases import FILE, FOLDER, LINK

TYPE_CHECKING = False  # what typing.TYPE_CHECKING is, without the time to import it
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from ttlaunch.agent.releases import Entry, Signature

_BLOCK = 4096
_NEW_FILE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_OLD_FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


class Refused(Exception):  # noqa: N818 - an answer, not a bug
    """Why this host cannot take the code: `why` and what goes with it, for the launching machine to put in words."""

    def __init__(self, why: str, **facts: object) -> None:
        super().__init__(why)
        self.facts = {"why": why, **facts}


class Target:
    """A file to be made: where it is written, with which rights, and what it must hold."""

    def __init__(self, path: bytes, *, mode: int, size: int, digest: bytes, index: int) -> None:
        self.path, self.mode, self.size, self.digest, self.index = path, mode, size, digest, index

    def write(self, chunks: Iterable[bytes | memoryview], *, alive: Callable[[], None]) -> Signature | None:
        """Make the file; None, and no file, if what came is something else than expected."""
        digest = hashlib.sha256()
        descriptor = os.open(self.path, _NEW_FILE, self.mode)  # the script's umask is 0
        try:
            for chunk in chunks:
                digest.update(chunk)
                written = os.write(descriptor, chunk)
                while written < len(chunk):
                    written += os.write(descriptor, memoryview(chunk)[written:])
                alive()
            signature = releases.signature_of(os.fstat(descriptor))
        finally:
            os.close(descriptor)
        if digest.hexdigest().encode() == self.digest:
            return signature
        os.unlink(self.path)
        return None

    def copy_from(self, source: bytes, known: Signature | None, *, alive: Callable[[], None]) -> Signature | None:
        """Make the file from another of this host; None if that is not what it was thought to be.

        Args:
            source: The other file.
            known: Its signature when it was last compared with its SHA-256; None: compare now.
            alive: Called now and then.
        """
        try:
            descriptor = os.open(source, _OLD_FILE)
        except OSError:
            return None
        try:
            if known is not None and self.size and (copied := self._clone(descriptor, known)):
                return copied
            first = os.read(descriptor, min(self.size + 1, releases.CHUNK))
            if len(first) == self.size:
                return self.write((first,), alive=alive)
            rest = iter(lambda: os.read(descriptor, releases.CHUNK), b"")
            return self.write(itertools.chain((first,), rest), alive=alive)
        except IsADirectoryError:
            return None
        finally:
            os.close(descriptor)

    def _clone(self, source: int, known: Signature) -> Signature | None:
        """Let the system copy a file that nobody has written since it was compared; None where that is not possible."""
        descriptor, size = os.open(self.path, _NEW_FILE, self.mode), self.size
        try:
            copied = os.sendfile(descriptor, source, 0, size)
            while copied < size and (more := os.sendfile(descriptor, source, copied, size - copied)):
                copied += more
            if copied == size and releases.signature_of(os.fstat(source)) == known:
                return releases.signature_of(os.fstat(descriptor))
        except OSError:
            pass
        finally:
            os.close(descriptor)
        os.unlink(self.path)
        os.lseek(source, 0, os.SEEK_SET)
        return None


class Building:
    """The wrong or missing entries of one release, until they are in place.

    Attributes:
        targets: Files to be made.
        signatures: Of the files that are right.
    """

    def __init__(self, release: bytes, incoming: bytes, entries: Sequence[Entry], wrong: Sequence[int]) -> None:
        self._release, self._incoming, self._entries, self._wrong = release, incoming, entries, wrong
        self._whole = not os.path.lexists(release)
        self.signatures: dict[int, Signature] = {}
        self.targets = [
            Target(self._place(index), mode=mode, size=size, digest=content, index=index)
            for index in wrong
            for kind, mode, size, content, _ in (entries[index],)
            if kind == FILE
        ]

    def prepare(self, *, names: Sequence[bytes]) -> None:
        """Make the folder to build in, and in it folders and links.

        Args:
            names: Two names that differ in nothing but upper and lower case, if there are such.

        Raises:
            Refused: If the file system takes the two for one.
        """
        os.mkdir(self._incoming, 0o700)
        if names:
            self._check_case(names)
        for index in self._wrong:
            kind, mode, _, content, _ = self._entries[index]
            if kind == FOLDER and self._whole:
                os.mkdir(self._place(index), mode)
            elif kind == LINK:
                os.symlink(content, self._place(index))

    def finish(self, *, manifest: bytes | None) -> bool:
        """Put everything in place; False if somebody else was faster with the same release.

        Args:
            manifest: Of the release, where there is none yet.
        """
        if not self._whole:
            for index in self._wrong:
                self._replace(index)
        if manifest is not None:
            written = os.path.join(self._incoming, contract.MANIFEST_FILE.encode())
            releases.write_file(written, manifest)
            if not self._whole:
                os.replace(written, os.path.join(self._release, contract.MANIFEST_FILE.encode()))
        into = self._incoming if self._whole else self._release
        temporary = os.path.join(self._incoming, b"signatures")
        releases.write_signatures(into, self.signatures, count=len(self._entries), temporary=temporary)
        if self._whole:
            try:
                os.rename(self._incoming, self._release)
            except OSError:
                if not os.path.isdir(self._release):
                    raise
                return False
        return True

    def _place(self, index: int) -> bytes:
        name = self._entries[index][4] if self._whole else b"%d" % index
        return self._incoming + b"/" + name

    def _replace(self, index: int) -> None:
        """Put one right entry where a wrong one is; what stands in the way goes with the folder that we build in."""
        kind, mode, _, _, path = self._entries[index]
        final = os.path.join(self._release, path)
        with contextlib.suppress(FileNotFoundError):
            is_folder = stat.S_ISDIR(os.lstat(final).st_mode)
            if is_folder != (kind == FOLDER):
                os.rename(final, os.path.join(self._incoming, b"old-%d" % index))
        if kind == FOLDER:
            with contextlib.suppress(FileExistsError):
                os.mkdir(final, mode)
            os.chmod(final, mode)
        else:
            os.replace(self._place(index), final)

    def _check_case(self, names: Sequence[bytes]) -> None:
        probe = os.path.join(self._incoming, b"Probe")
        releases.write_file(probe, b"")
        same = os.path.lexists(os.path.join(self._incoming, b"pROBE"))
        os.unlink(probe)
        if same:
            raise Refused("case", names=[os.fsdecode(name) for name in names], path=os.fsdecode(self._release))


def check_space(folder: bytes, targets: Sequence[Target], *, others: int) -> None:
    """Refuse before anything is sent if the disk has not enough room or not enough inodes.

    Args:
        folder: On the file system that is to hold them.
        targets: Files to be made.
        others: Number of folders and links to be made.
    """
    disk = os.statvfs(folder)
    needed = sum(-(-target.size // _BLOCK) * _BLOCK for target in targets) + others * _BLOCK
    free = disk.f_bavail * disk.f_frsize
    if needed > free:
        raise Refused("space", needed=needed, free=free, path=os.fsdecode(folder))
    if disk.f_files and len(targets) + others > disk.f_favail:
        raise Refused("inodes", needed=len(targets) + others, free=disk.f_favail, path=os.fsdecode(folder))


def find_copies(
    folder: bytes, wanted: set[bytes], *, likely: Sequence[bytes]
) -> dict[bytes, tuple[bytes, Signature | None]]:
    """Where else on this host contents lie: in releases, and among the data.

    Args:
        folder: The remote folder.
        wanted: SHA-256 of the contents.
        likely: Names of releases to look in first.

    Returns:
        Path, and the signature with which it was last compared, by SHA-256.
    """
    parent = os.path.join(folder, contract.RELEASES_DIR.encode())
    data = os.path.join(folder, contract.DATA_DIR.encode())
    there = os.listdir(data) if os.path.isdir(data) else []
    found: dict[bytes, tuple[bytes, Signature | None]] = {
        name: (os.path.join(data, name), None) for name in there if name in wanted
    }
    names = os.listdir(parent) if os.path.isdir(parent) else []
    for name in sorted(names, key=lambda name: name not in likely):
        if len(found) == len(wanted):
            break
        release = os.path.join(parent, name)
        entries = releases.read_manifest(release) or ()
        known = releases.read_signatures(release, len(entries)) if entries else {}
        for index, (kind, _, _, content, path) in enumerate(entries):
            if kind == FILE and content in wanted and content not in found:
                found[content] = (release + b"/" + path, known.get(index))
    return found
