"""Write the files of a release on a host: copy contents that the host has already, and receive the others.

A missing release is built in a separate folder and gets its name by one rename; in a damaged release, each wrong file is
replaced by one rename. Every file is compared with its SHA-256 while it is written.

Paths are bytes, as the system has them. Python 3.9 and the standard library only.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import os
import stat
import sys
import time
import zlib

from ttlaunch import contract
from ttlaunch.agent import releases
from ttlaunch.agent.releases import FILE, FOLDER, LINK

TYPE_CHECKING = False  # what typing.TYPE_CHECKING is, without the time to import it
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
    from typing import Any

    from ttlaunch.agent.releases import Entry, Signature

_BLOCK = 4096
_BUSY_EVERY_S = 1.0
_NEW_FILE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_OLD_FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


class Refused(Exception):  # noqa: N818 - an answer, not a bug
    """This host cannot take the code: `why`, and the facts that the launching machine renders with it."""

    def __init__(self, why: str, **facts: object) -> None:
        super().__init__(why)
        self.facts = {"why": why, **facts}


class Target:
    """A file to be made: where it is written, with which rights, and what it must hold."""

    def __init__(self, path: bytes, *, mode: int, size: int, digest: bytes, index: int) -> None:
        self.path, self.mode, self.size, self.digest, self.index = path, mode, size, digest, index

    def write(self, chunks: Iterable[bytes | memoryview], *, alive: Callable[[], None]) -> Signature | None:
        """Write the file; returns None, and leaves no file, if its SHA-256 is not the expected one."""
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
        """Make the file from another one on this host; None if the other one's content is not the expected one.

        Args:
            source: The other file.
            known: Its signature when it was last compared with its SHA-256; None to compare it now.
            alive: Called repeatedly, to report that this host is at work.
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
        """Let the kernel copy a file whose signature is still `known`; None if that is not possible.

        Python does not read the content. The signature is compared after the copy, so that a write to the source during
        the copy is noticed.
        """
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
        signatures: The signatures of the files that are correct.
    """

    def __init__(
        self, release: bytes, entries: Sequence[Entry], wrong: Sequence[int], *, incoming: bytes, begun: bool = False
    ) -> None:
        """Plan the files of a release.

        Args:
            release: The release's folder, which may not exist yet.
            entries: All entries of the release.
            wrong: The indices of those that are missing or wrong.
            incoming: The folder to build in.
            begun: Whether that folder exists, with all entries that are not wrong.
        """
        self._release, self._incoming, self._entries, self._wrong = release, incoming, entries, wrong
        self._whole, self._begun = begun or not os.path.lexists(release), begun
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
            names: Two names of the release that differ only in upper and lower case, if there are such.

        Raises:
            Refused: If there are such names and the file system does not distinguish case.
        """
        if not self._begun:
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
        """Put everything in place; returns False if another sync has made the same release first.

        Args:
            manifest: The manifest to write; None if the release already has one.
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
            # The folder gets its name only now that it is complete, so that a run may use it as soon as it finds it.
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
        """Replace a wrong entry; a file in place of a folder, or the reverse, goes to the building folder, removed later."""
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
    """Raise `Refused`, before anything is sent, if the disk has not enough room or not enough inodes.

    Args:
        folder: A folder on the file system that is to hold them.
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
    """Find contents elsewhere on this host: in other releases, and among the data.

    Args:
        folder: The remote folder.
        wanted: The SHA-256 of each content.
        likely: Names of releases to look in first.

    Returns:
        By SHA-256, the path of a file with this content, and its signature when it was last compared, if that is known.
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


class LookAgain(Exception):  # noqa: N818 - not an error
    """Another sync has changed the folder, so what is missing has to be found again."""


class Connection:
    """Frames to and from the launching machine."""

    def __init__(self) -> None:
        self._last = time.monotonic()
        self._gift: bytes | None = None

    def send(self, header: Mapping[str, Any], body: bytes = b"") -> None:
        self._last = time.monotonic()
        contract.send_frame(header, body)

    def answer(self) -> bytes:
        """Receive the next answer of the launching machine.

        Raises:
            LookAgain: If the launching machine answers that another sync has changed the folder.
            EOFError: If the launching machine has closed the connection.
        """
        header, body = self._receive()
        while header["kind"] == "gift":
            self._gift = body
            header, body = self._receive()
        if header["kind"] == "again":
            raise LookAgain
        return body

    def gift(self) -> bytes:
        """Return the contents that the launching machine sends without a request, before any answer.

        Raises:
            EOFError: If the launching machine has closed the connection.
        """
        if self._gift is None:
            self._gift = self._receive()[1]
        return self._gift

    def wait_for_end(self) -> None:
        """Wait until the launching machine closes the connection, which it does once all hosts are done."""
        while sys.stdin.buffer.read(1):
            pass

    def _receive(self) -> tuple[dict[str, Any], bytes]:
        frame = contract.read_frame(sys.stdin.buffer.read)
        if frame is None:
            raise EOFError
        header, body = frame
        return header, zlib.decompress(body, bufsize=releases.CHUNK) if header.get("packed") else body

    def alive(self) -> None:
        """Report that this host is at work, if it has sent nothing for a second; called often."""
        if time.monotonic() - self._last > _BUSY_EVERY_S:
            self.send({"kind": "busy"})


class Contents:
    """Writes files whose contents are on this host or on the launching machine.

    Args:
        order: SHA-256 of all contents that belong to the sync, in the order that both sides know.
        about: Further fields of every request.
        given: SHA-256 and size of the contents that arrive without a request, in the order in which they arrive.
    """

    def __init__(
        self,
        connection: Connection,
        *,
        order: Sequence[bytes],
        about: Mapping[str, Any],
        given: Sequence[tuple[bytes, int]],
    ) -> None:
        self._connection, self._order, self._about, self._given = connection, order, about, given
        self._left = memoryview(b"")
        self._signatures: dict[int, Signature] = {}

    def bring(
        self, targets: Sequence[Target], *, copies: Mapping[bytes, tuple[bytes, Signature | None]]
    ) -> dict[int, Signature]:
        """Make all files; contents that are not in `copies`, or turn out to be wrong there, are asked for.

        Returns:
            Signatures by the index of the target.
        """
        lacking: dict[bytes, list[Target]] = {}
        for target in targets:
            lacking.setdefault(target.digest, []).append(target)
        given = {digest for digest, _ in self._given}
        order = [digest for digest in self._order if digest in lacking and digest not in given]
        wanted = [digest for digest in order if digest not in copies]
        self._want(wanted, lacking)  # first, so that they are on their way while this host copies
        wrong = []
        for digest in [digest for digest in order if digest in copies]:
            first, *others = lacking[digest]
            signature = first.copy_from(*copies[digest], alive=self._connection.alive)
            if signature is None:
                wrong.append(digest)
            else:
                self._keep(first, signature, others)
        self._unpack(lacking)
        self._read(wanted, lacking)
        self._want(wrong, lacking)
        self._read(wrong, lacking)
        return self._signatures

    def _read(self, digests: Sequence[bytes], lacking: Mapping[bytes, Sequence[Target]]) -> None:
        """Make the files whose contents were asked for."""
        for digest in digests:
            first, *others = lacking[digest]
            self._keep(first, first.write(self._take(first.size), alive=self._connection.alive), others)

    def _unpack(self, lacking: Mapping[bytes, Sequence[Target]]) -> None:
        """Make the files whose contents arrived without a request."""
        start = 0
        for digest, size in self._given:
            if digest in lacking:
                first, *others = lacking[digest]
                part = memoryview(self._connection.gift())[start : start + size]
                self._keep(first, first.write((part,), alive=self._connection.alive), others)
            start += size

    def _want(self, digests: Sequence[bytes], lacking: Mapping[bytes, Sequence[Target]]) -> None:
        if not digests:
            return
        wanted = set(digests)
        bits = bytearray(-(-len(self._order) // 8))
        for place, digest in enumerate(self._order):
            if digest in wanted:
                bits[place // 8] |= 1 << place % 8
        size = sum(lacking[digest][0].size for digest in wanted)
        self._connection.send({"kind": "want", "files": len(wanted), "bytes": size, **self._about}, bytes(bits))

    def _keep(self, first: Target, signature: Signature | None, others: Iterable[Target]) -> None:
        if signature is None:
            raise Refused("damaged", path=first.path.decode("utf-8", "replace"))
        self._signatures[first.index] = signature
        for other in others:
            copied = other.copy_from(first.path, None, alive=self._connection.alive)
            if copied is None:
                raise Refused("damaged", path=other.path.decode("utf-8", "replace"))
            self._signatures[other.index] = copied

    def _take(self, size: int) -> Iterator[memoryview]:
        while size:
            if not self._left:
                self._left = memoryview(self._connection.answer())
            part, self._left = self._left[:size], self._left[size:]
            size -= len(part)
            yield part
