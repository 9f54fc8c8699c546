"""Training texts: they are sent together with the code, so that every host reads the same text."""

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from ttlaunch.quick_dataclass import dataclass

_CHUNK = 1024 * 1024


@dataclass(frozen=True)
class DataItem:
    """A training text that hosts need, identified by its content.

    Attributes:
        sha256: The hash of the text, in hexadecimal.
        size: The size in bytes.
        path: The absolute path of a file, or of a folder whose files together are the text. None for the default text, which is
            sent too, because it differs between versions of Python.
    """

    sha256: str
    size: int
    path: Path | None

    @property
    def name(self) -> str:
        return "the default text" if self.path is None else str(self.path)

    @property
    def file(self) -> str | None:
        """The path if the text is one file, else None."""
        return os.fspath(self.path) if self.path is not None and self.path.is_file() else None

    def chunks(self) -> Iterator[bytes]:
        """Yield the text in pieces."""
        if self.path is not None and self.path.is_file():
            with self.path.open("rb") as file:
                while chunk := file.read(_CHUNK):
                    yield chunk
        else:
            from ttlaunch.spec.recipe.data import read_data  # noqa: PLC0415 - takes 20 ms, and few syncs need it

            yield read_data(self.path).text


def data_item(data: Mapping[str, Any]) -> DataItem:
    """Return the training text as an item; `data` is `RecipeChoice.data`: its path, SHA-256 and size."""
    path = data["path"]
    return DataItem(data["sha256"], data["bytes"], None if path is None else Path(path))
