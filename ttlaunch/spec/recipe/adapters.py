"""Read texts of `datasets`, an optional library, of which files are made that a training reads.

The result is a text, or token ids as text. Like any other text, it has a digest, is checked before anything starts, and is
copied to hosts. Hosts and ranks therefore do not need the library.
"""

from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from ttlaunch.errors import TtlaunchError
from ttlaunch.spec.recipe.corpus import CorpusError, CorpusReason


class AdapterError(TtlaunchError):
    """A folder that the user named is not a dataset."""


def read_dataset(folder: Path, *, column: str, split: str) -> Iterator[str]:
    """Yield the texts of a folder that `datasets` saved with `save_to_disk`, in order, without using the network.

    Args:
        folder: The folder of a dataset, or of several splits.
        column: The column with the texts.
        split: The split to read; required if there are several.

    Raises:
        CorpusError: `datasets` is not installed.
        AdapterError: There is no such dataset, split or column, or a value is no text.
    """
    need_package("datasets")
    from datasets import DatasetDict, load_from_disk  # noqa: PLC0415 - an extra, which takes seconds to import

    try:
        found: Any = load_from_disk(str(folder))
    except (OSError, ValueError) as error:
        raise AdapterError(f"{folder} is no dataset: {str(error).splitlines()[0]}") from error
    if isinstance(found, DatasetDict):
        if split not in found:
            raise AdapterError(f"{folder} has no split {split!r}; it has {', '.join(map(str, found))}")
        found = found[split]
    if column not in found.column_names:
        raise AdapterError(f"{folder} has no column {column!r}; it has {', '.join(found.column_names)}")
    for number, text in enumerate(found[column]):
        if not isinstance(text, str):
            raise AdapterError(f"row {number} of column {column!r} of {folder} is no text")
        yield text


def need_package(package: str) -> None:
    """Look for a package without importing it.

    Raises:
        CorpusError: It is not installed.
    """
    if find_spec(package) is None:
        message = f"the package {package} is not installed"
        raise CorpusError(CorpusReason.NO_PACKAGE, message, package=package)
