"""paramiko, imported without half of what it would import. Runs over hosts wait for this import before they can connect.

It imports invoke, which it uses only for `Match exec` in ssh configurations; `ssh_config.py` runs these commands itself, and
paramiko imports invoke when somebody else has it run such a command. It also imports `importlib.metadata`, which imports
the parser of e-mails, only to read its own version; the name of the folder with its metadata says the same.
"""

import importlib
import sys
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any


class _Invoke:
    """Stands for the module in paramiko until something is taken from it."""

    def __getattr__(self, name: str) -> Any:
        return getattr(import_module("invoke"), name)


class _Metadata:
    """Stands for `importlib.metadata` until something else than the version of an installed package is taken from it."""

    def version(self, package: str) -> str:
        for folder in sys.path:
            try:
                names = [path.name for path in Path(folder or ".").iterdir()]
            except OSError:  # such as the standard library as an archive
                continue
            for name in names:
                if name.startswith(f"{package}-") and name.endswith(".dist-info"):
                    return name.removesuffix(".dist-info").partition("-")[2]
        return str(import_module("importlib.metadata").version(package))

    def __getattr__(self, name: str) -> Any:
        return getattr(import_module("importlib.metadata"), name)


def _imported() -> ModuleType:
    if "paramiko" in sys.modules or "invoke" in sys.modules:
        return import_module("paramiko")
    sys.modules["invoke"] = None  # type: ignore[assignment] # so Python refuses to import it, for which paramiko is prepared
    stand_in = None
    if not hasattr(importlib, "metadata"):
        importlib.metadata = stand_in = _Metadata()  # type: ignore[assignment]
    try:
        found = import_module("paramiko")
    finally:
        del sys.modules["invoke"]
        if stand_in is not None and vars(importlib)["metadata"] is stand_in:  # else somebody has imported it meanwhile
            del importlib.metadata
    found.config.invoke = _Invoke()
    return found


_imported()
import paramiko as paramiko  # noqa: E402, PLC0414 - other modules take it from here
