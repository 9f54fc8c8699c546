"""The JSON objects that lie in a run's folder, for whoever needs them whole and for whoever can do without."""

import json
from pathlib import Path
from typing import Any


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


def read_object_if_any(path: Path) -> dict[str, Any]:
    """The same; empty if there is none."""
    try:
        return read_object(path)
    except (OSError, ValueError):
        return {}
