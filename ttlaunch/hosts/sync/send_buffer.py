"""Contents on their way to hosts: read and compressed once, sent to any number of hosts at each one's own speed.

Frames are kept in a temporary file, not in memory, so that a slow host neither delays the others nor makes this process
grow. Over a fast network nothing is compressed, because compressing would take longer than sending.
"""

import hashlib
import os
import tempfile
import threading
import zlib
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import field

from ttlaunch import contract
from ttlaunch.errors import TtlaunchError
from ttlaunch.hosts.sync.data import DataItem
from ttlaunch.hosts.sync.manifest import Entry, Manifest
from ttlaunch.hosts.sync.read_files import CHUNK, name_of
from ttlaunch.quick_dataclass import dataclass
from ttlaunch.records.regular_files import open_regular

_LEVEL = 1  # a faster network than 30 MB/s gains nothing from a higher one
_FAST = 200e6
"""A network of so many bytes per second carries contents in less time than it takes to compress and unpack them."""

_SMALLEST_PIECE = 64 * 1024
_SAMPLE = 4 * 1024
_WORTH_IT = 0.95
_WORKERS = 2
_PATIENCE_S = 1.0


class SourceChangedError(TtlaunchError):
    """A file on the launching machine is not as it was when the release was made.

    Attributes:
        name: The file's name.
    """

    exit_status = contract.STATUS_SYNC

    def __init__(self, name: str) -> None:
        super().__init__(f"{name} changed while it was being copied")
        self.name = name


@dataclass(frozen=True)
class Content:
    """Something to send, known by its SHA-256.

    Attributes:
        open: Returns an iterator over the pieces of the content.
    """

    sha256: str
    size: int
    name: str
    open: Callable[[], Iterator[bytes]] = field(repr=False)

    def read(self) -> Iterator[bytes]:
        """Yield the content, checked on the way.

        Raises:
            SourceChangedError: If its SHA-256 is another; raised after the last piece, or instead of it.
        """
        digest, size = hashlib.sha256(), 0
        try:
            for part in self.open():
                digest.update(part)
                size += len(part)
                if size > self.size:
                    break
                yield part
        except OSError as error:
            raise SourceChangedError(self.name) from error
        if digest.hexdigest() != self.sha256:
            raise SourceChangedError(self.name)


class SendBuffer:
    """The frames that carry some contents, made by a thread of its own and read by any number of others."""

    def __init__(self, contents: Sequence[Content], *, packed: bool) -> None:
        self._contents, self._packed = contents, packed
        self._file = tempfile.TemporaryFile(prefix="ttlaunch-")  # noqa: SIM115 - closed when the last reader is done
        self._ready = threading.Condition()
        self._frames: list[tuple[int, int, int]] = []  # offset, length, bytes of content up to its end
        self._ended = False
        self._error: BaseException | None = None
        self._given_up = threading.Event()
        self._filler = threading.Thread(target=self._fill, daemon=True)
        self._filler.start()

    def frames(self) -> Iterator[tuple[bytes, int]]:
        """Yield each frame, and how many bytes of content have been carried with it; waits for frames not yet made.

        Raises:
            SourceChangedError: If a file is not as it was.
        """
        number = 0
        while True:
            with self._ready:
                while number >= len(self._frames) and not self._ended:
                    self._ready.wait()
                if number >= len(self._frames):
                    if self._error is not None:
                        raise self._error
                    return
                offset, length, carried = self._frames[number]
            number += 1
            yield os.pread(self._file.fileno(), length, offset), carried

    def close(self) -> None:
        """Make no more frames and remove the file; who still reads gets an error."""
        self._given_up.set()
        self._filler.join(_PATIENCE_S)
        if not self._filler.is_alive():
            self._file.close()

    def _fill(self) -> None:
        try:
            with ThreadPoolExecutor(_WORKERS) as workers:
                self._compress(workers)
        except BaseException as error:  # noqa: BLE001 - handed to those who read
            self._error = error
        with self._ready:
            self._ended = True
            self._ready.notify_all()

    def _compress(self, workers: ThreadPoolExecutor) -> None:
        waiting: deque[tuple[Future[bytes], int]] = deque()
        carried = 0
        for piece, packable in _pieces(self._contents, packed=self._packed):
            if self._given_up.is_set():
                return
            carried += len(piece)
            waiting.append((workers.submit(_pack, piece, packable=packable), carried))
            if len(waiting) > 2 * _WORKERS:
                self._append(*waiting.popleft())
        while waiting:
            self._append(*waiting.popleft())

    def _append(self, frame: Future[bytes], carried: int) -> None:
        packed = frame.result()
        offset = self._frames[-1][0] + self._frames[-1][1] if self._frames else 0
        view = memoryview(packed)
        while view:
            view = view[os.pwrite(self._file.fileno(), view, offset + len(packed) - len(view)) :]
        with self._ready:
            self._frames.append((offset, len(packed), carried))
            self._ready.notify_all()


class Contents:
    """What hosts may ask for; those that ask for the same over similar networks read one buffer.

    Attributes:
        all: All blocks, in the order in which both sides count them.
    """

    def __init__(self, manifest: Manifest, texts: Sequence[DataItem]) -> None:
        self.all = [
            Content(sha256, entry.size, name_of(entry.source), _opener(entry))
            for sha256, entry in manifest.sources.items()
        ]
        known = manifest.sources
        self.all += [
            Content(item.sha256, item.size, item.name, item.chunks) for item in texts if item.sha256 not in known
        ]
        self._lock = threading.Lock()
        self._buffers: dict[tuple[bytes, bool], SendBuffer] = {}

    def buffer(self, wanted: bytes, *, bytes_per_s: float | None) -> SendBuffer:
        """The frames for the contents whose bits are set, compressed unless the network is known to be fast."""
        packed = bytes_per_s is None or bytes_per_s < _FAST
        with self._lock:
            if (wanted, packed) not in self._buffers:
                chosen = [content for place, content in enumerate(self.all) if wanted[place // 8] >> place % 8 & 1]
                self._buffers[wanted, packed] = SendBuffer(chosen, packed=packed)
            return self._buffers[wanted, packed]

    def close(self) -> None:
        """Close all buffers; no host reads any more."""
        with self._lock:
            for buffer in self._buffers.values():
                buffer.close()


def _opener(entry: Entry) -> Callable[[], Iterator[bytes]]:
    def read() -> Iterator[bytes]:
        with open_regular(entry.source) as file:
            while chunk := file.read(CHUNK):
                yield chunk

    return read


def _pieces(contents: Sequence[Content], *, packed: bool) -> Iterator[tuple[bytes, bool]]:
    """Yield all contents one after another, cut into pieces, and whether compressing the piece is worth the time."""
    buffer, packable = bytearray(), packed
    for content in contents:
        judged = not packed
        for part in content.read():
            if not judged:
                judged, other = True, _is_packable(part)
                if other is not packable and len(buffer) >= _SMALLEST_PIECE:
                    yield bytes(buffer), packable
                    buffer.clear()
                packable = packable if buffer else other
            buffer += part
            while len(buffer) >= CHUNK:
                yield bytes(buffer[:CHUNK]), packable
                del buffer[:CHUNK]
    if buffer:
        yield bytes(buffer), packable


def _is_packable(part: bytes) -> bool:
    sample = part[:_SAMPLE]
    return len(zlib.compress(sample, _LEVEL)) < _WORTH_IT * len(sample)


def _pack(piece: bytes, *, packable: bool) -> bytes:
    """The frame of a piece."""
    packed = zlib.compress(piece, _LEVEL) if packable else piece
    if len(packed) < len(piece):
        return contract.pack_frame({"kind": "blobs", "packed": True}, packed)
    return contract.pack_frame({"kind": "blobs"}, piece)
