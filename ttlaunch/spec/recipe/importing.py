"""Import a recipe's files by path, the same way on the launching machine and in a rank.

A recipe's folder becomes a package of its own, so that `from .recipe import Config` works in `trainer.py` wherever the
folder lies, and two recipes whose folders have the same name do not mix.
"""

import hashlib
import importlib
import sys
from pathlib import Path
from types import ModuleType


def import_recipe_module(folder: Path, module: str) -> ModuleType:
    """Import `recipe` or `trainer` of a recipe's folder.

    Raises:
        Exception: Whatever the module raises on import.
    """
    name = "".join(character if character.isalnum() else "_" for character in folder.name)
    package = f"ttlaunch_recipe_{name}_{hashlib.sha256(str(folder).encode()).hexdigest()[:8]}"
    if package not in sys.modules:
        parent = ModuleType(package)
        parent.__path__ = [str(folder)]
        sys.modules[package] = parent
    return importlib.import_module(f"{package}.{module}")
