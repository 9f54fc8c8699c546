"""Import a recipe's files by path, the same way on the launching machine and in a rank.

A recipe's folder becomes a package of its own, so that `from .recipe import Config` works in `trainer.py` wherever the
folder lies, and two recipes whose folders have the same name do not mix.
"""

import contextlib
import hashlib
import importlib
import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType

_OF_RANKS = {"torch", "mpi4py"}
_STATE = "__ttlaunch_state__"
"""The attribute of a folder's package that has the result of `_state` from its import."""


def import_recipe_module(folder: Path, module: str) -> ModuleType:
    """Import `recipe` or `trainer` of a recipe's folder, again if a file of the folder has changed since the last import.

    The user of a notebook may edit a recipe between two runs; the second run must not use the old import.

    Raises:
        Exception: Whatever the module raises on import.
    """
    name = "".join(character if character.isalnum() else "_" for character in folder.name)
    package = f"ttlaunch_recipe_{name}_{hashlib.sha256(str(folder).encode()).hexdigest()[:8]}"
    state = _state(folder)
    parent = sys.modules.get(package)
    if parent is None or getattr(parent, _STATE, None) != state:
        for loaded in [one for one in sys.modules if one.startswith(f"{package}.")]:
            del sys.modules[loaded]
        importlib.invalidate_caches()
        parent = ModuleType(package)
        parent.__path__ = [str(folder)]
        setattr(parent, _STATE, state)
        sys.modules[package] = parent
    return importlib.import_module(f"{package}.{module}")


@contextlib.contextmanager
def without_packages_of_ranks() -> Iterator[None]:
    """Refuse imports of torch and mpi4py in this thread: a declaration that takes seconds to read slows every command.

    A package that the process has already loaded, as in a notebook, can be imported again at no cost.
    """
    refusal = _RefuseImports(threading.get_ident())
    sys.meta_path.insert(0, refusal)
    try:
        yield
    finally:
        sys.meta_path.remove(refusal)


class _RefuseImports:
    """A finder of modules that finds none and raises for those that only ranks may load."""

    def __init__(self, thread: int) -> None:
        self._thread = thread

    def find_spec(self, name: str, _path: Sequence[str] | None = None, _target: ModuleType | None = None) -> None:
        package = name.partition(".")[0]
        if threading.get_ident() == self._thread and package in _OF_RANKS and package not in sys.modules:
            raise ImportError(f"`recipe.py` is read without {package}; import it in `trainer.py`", name=name)


def _state(folder: Path) -> tuple[tuple[str, int, int], ...]:
    """Return name, size and time of every Python file of a folder."""
    found = []
    for path in sorted(folder.glob("*.py")):
        with contextlib.suppress(OSError):
            status = path.stat()
            found.append((path.name, status.st_size, status.st_mtime_ns))
    return tuple(found)
