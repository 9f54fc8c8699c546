"""paramiko, imported without a third of what it would import.

It imports invoke, which it uses only for `Match exec` in ssh configurations; `ssh_config.py` runs these commands itself. Runs over hosts wait for this
import before they can connect. paramiko imports invoke when somebody else has it run such a command.
"""

import sys
from importlib import import_module
from types import ModuleType
from typing import Any


class _Invoke:
    """Stands for the module in paramiko until something is taken from it."""

    def __getattr__(self, name: str) -> Any:
        return getattr(import_module("invoke"), name)


def _imported() -> ModuleType:
    if "paramiko" in sys.modules or "invoke" in sys.modules:
        return import_module("paramiko")
    sys.modules["invoke"] = None  # type: ignore[assignment] # so Python refuses to import it, for which paramiko is prepared
    try:
        found = import_module("paramiko")
    finally:
        del sys.modules["invoke"]
    found.config.invoke = _Invoke()
    return found


_imported()
import paramiko as paramiko  # noqa: E402, PLC0414 - other modules take it from here
