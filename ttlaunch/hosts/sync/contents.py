"""All contents of a sync in the order that both sides count in, and a buffer for each selection that hosts ask for."""

import os
import threading
from collections.abc import Callable, Iterator, Sequence

from ttlaunch.hosts.sync.data import DataItem
from ttlaunch.hosts.sync.manifest import Entry, Manifest
from ttlaunch.hosts.sync.read_files import CHUNK, name_of
from ttlaunch.hosts.sync.send_buffer import Content, SendBuffer


class Contents:
    """What hosts may ask for; those that ask for the same read one buffer.

    Attributes:
        all: In the order that both sides count in.
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
        self._buffers: dict[bytes, SendBuffer] = {}

    def buffer(self, wanted: bytes) -> SendBuffer:
        """The frames for the contents whose bits are set."""
        with self._lock:
            if wanted not in self._buffers:
                chosen = [content for place, content in enumerate(self.all) if wanted[place // 8] >> place % 8 & 1]
                self._buffers[wanted] = SendBuffer(chosen)
            return self._buffers[wanted]

    def close(self) -> None:
        """Nobody will read any more."""
        with self._lock:
            for buffer in self._buffers.values():
                buffer.close()


def _opener(entry: Entry) -> Callable[[], Iterator[bytes]]:
    def read() -> Iterator[bytes]:
        descriptor = os.open(entry.source, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            while chunk := os.read(descriptor, CHUNK):
                yield chunk
        finally:
            os.close(descriptor)

    return read
