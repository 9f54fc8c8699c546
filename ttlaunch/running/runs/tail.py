"""The lines of a file as they are added, for whoever follows what another process writes."""

from collections.abc import Iterator
from pathlib import Path


class Tail:
    """The lines of a file as they are added."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._read = 0

    def read(self) -> Iterator[bytes]:
        """The whole lines that have come since."""
        try:
            with self._path.open("rb") as file:
                file.seek(self._read)
                data = file.read()
        except OSError:
            return
        whole = data[: data.rfind(b"\n") + 1]
        self._read += len(whole)
        yield from whole.splitlines()
