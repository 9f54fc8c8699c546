"""How contents come to a host: it says which it lacks, and they arrive one after another in one compressed stream.

Frames on standard input and output; what they say stands in `receive.py`. Python 3.9 and the standard library only.
"""

from __future__ import annotations

import sys
import time
import zlib

from ttlaunch import contract
from ttlaunch.agent.releases import CHUNK
from ttlaunch.agent.unpack import Refused

TYPE_CHECKING = False  # what typing.TYPE_CHECKING is, without the time to import it
if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence
    from typing import Any

    from ttlaunch.agent.releases import Signature
    from ttlaunch.agent.unpack import Target

_BUSY_EVERY_S = 1.0


class LookAgain(Exception):  # noqa: N818 - not an error
    """Another sync has changed what is in the folder."""


class Connection:
    """Frames to and from the launching machine."""

    def __init__(self) -> None:
        self._last = time.monotonic()
        self._gift: bytes | None = None

    def send(self, header: Mapping[str, Any], body: bytes = b"") -> None:
        self._last = time.monotonic()
        sys.stdout.buffer.write(contract.pack_frame(header, body))
        sys.stdout.buffer.flush()

    def answer(self) -> bytes:
        """What the launching machine sends next.

        Raises:
            LookAgain: If it says so instead.
            EOFError: If it is not there any more.
        """
        header, body = self._receive()
        while header["kind"] == "gift":
            self._gift = body
            header, body = self._receive()
        if header["kind"] == "again":
            raise LookAgain
        return body

    def gift(self) -> bytes:
        """The contents that came unasked, which stand before any answer.

        Raises:
            EOFError: If the launching machine is not there any more.
        """
        if self._gift is None:
            self._gift = self._receive()[1]
        return self._gift

    def wait_for_end(self) -> None:
        """Return when the launching machine has nothing more to say, to any host."""
        while sys.stdin.buffer.read(1):
            pass

    def _receive(self) -> tuple[dict[str, Any], bytes]:
        frame = contract.read_frame(sys.stdin.buffer.read)
        if frame is None:
            raise EOFError
        header, body = frame
        return header, zlib.decompress(body, bufsize=CHUNK) if header.get("packed") else body

    def alive(self) -> None:
        """Say from time to time that this host is at work; called often."""
        if time.monotonic() - self._last > _BUSY_EVERY_S:
            self.send({"kind": "busy"})


class Contents:
    """Writes files whose contents are on this host or on the launching machine.

    Args:
        order: SHA-256 of all contents that belong to the sync, in the order that both sides know.
        about: What every request has besides.
        given: SHA-256 and size of contents that come unasked, in the order in which they come.
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
        self._want(wanted, lacking)  # first, so that they are on their way while we copy
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
        """Make the files whose contents came unasked."""
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
