"""The JSON objects that lie in a run's folder, for whoever needs them whole and for whoever can do without."""

import json
from pathlib import Path
from typing import Any

from ttlaunch.records.parser import LONGEST_RECORD


def read_object(path: Path) -> dict[str, Any]:
    """The object in a file.

    Raises:
        OSError: It cannot be read.
        ValueError: It holds no JSON, or no object, or is no file: reading a named pipe would never end.
    """
    if path.exists() and not path.is_file():
        raise ValueError(f"{path.name} is no file")
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except RecursionError as error:
        raise ValueError(f"{path.name} is nested too deeply") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path.name} is not an object")  # noqa: TRY004 - the file is wrong, not the caller
    return content


def read_file(path: Path) -> bytes | None:
    """What a file holds, for a parser that says what is wrong with it; None if there is none to read.

    No more is read than a record may be long, and a byte; a named pipe is no file, and reading it would never end.
    """
    try:
        if not path.is_file():
            return None
        with path.open("rb") as file:
            return file.read(LONGEST_RECORD + 1)
    except OSError:
        return None


def read_object_if_any(path: Path) -> dict[str, Any]:
    """The same; empty if there is none."""
    try:
        return read_object(path)
    except (OSError, ValueError):
        return {}
