"""The lines of a file as they are added, for whoever follows what another process writes."""

from collections.abc import Iterator
from pathlib import Path

from ttlaunch.records.parser import LONGEST_RECORD

_PART = 8 * 1024 * 1024


class Tail:
    """The lines of a file as they are added.

    Attributes:
        lines: How many have been read.
    """

    def __init__(self, path: Path) -> None:
        self.lines = 0
        self._path = path
        self._read = 0
        self._rest = b""

    def read(self) -> Iterator[bytes]:
        """The whole lines that have come since.

        Of a line that is longer than any record may be only the begin is kept, which is still too long: whoever writes
        without an end fills no memory here.
        """
        try:
            with self._path.open("rb") as file:
                file.seek(self._read)
                while part := file.read(_PART):
                    self._read += len(part)
                    yield from self._lines(part)
        except OSError:
            return

    def _lines(self, part: bytes) -> Iterator[bytes]:
        *whole, rest = part.split(b"\n")
        for line in whole:
            self.lines += 1
            yield from (self._rest + line).splitlines() or [b""]
            self._rest = b""
        self._rest = (self._rest + rest)[: LONGEST_RECORD + 1]
