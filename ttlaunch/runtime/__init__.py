"""What carries out a trainer in a rank, behind `ttlaunch.train`; the names that trainers import can be had from here, too.

That is for trainers written when `ttlaunch.runtime` was where they imported from. Tools read `__init__.pyi`.
`ttlaunch.train` is loaded by name and only when such a trainer asks, since it stands above this package and imports
from it.
"""

from importlib import import_module
from typing import Any


def __getattr__(name: str) -> Any:
    train = import_module("ttlaunch.train")
    # Python asks here for this package's own modules first: they must be absent, not imported through `train`.
    if name not in {*train.__all__, *train.OLD_NAMES}:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(train, name)


def __dir__() -> list[str]:
    return list(import_module("ttlaunch.train").__all__)
