"""Texts to train on: what is sent besides the code, so that every host reads the same."""

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_CHUNK = 1024 * 1024


@dataclass(frozen=True)
class DataItem:
    """A text by its content.

    Attributes:
        sha256: The hash of the text, in hexadecimal.
        size: The size in bytes.
        path: A file, or a folder whose files make the text, absolute; None for the default text, which differs between
            versions of Python and so has to be sent as well.
    """

    sha256: str
    size: int
    path: Path | None

    @property
    def name(self) -> str:
        return "the default text" if self.path is None else str(self.path)

    @property
    def file(self) -> str | None:
        """The path, if it is one file."""
        return os.fspath(self.path) if self.path is not None and self.path.is_file() else None

    def chunks(self) -> Iterator[bytes]:
        """The text, piece by piece."""
        if self.path is not None and self.path.is_file():
            with self.path.open("rb") as file:
                while chunk := file.read(_CHUNK):
                    yield chunk
        else:
            from ttlaunch.spec.recipe.data import read_data  # noqa: PLC0415 - 20 ms that few syncs need

            yield read_data(self.path).text


def data_item(data: Mapping[str, Any]) -> DataItem:
    """The text that a recipe's configuration names: `RecipeChoice.data`."""
    path = data["path"]
    return DataItem(data["sha256"], data["bytes"], None if path is None else Path(path))
