"""The code behind `ttlaunch.train` that runs a trainer in a rank.

Older trainers import their names from `ttlaunch.runtime`, so this module still offers the names of `ttlaunch.train`. It loads
`ttlaunch.train` by name, and only when such a trainer needs it, because `ttlaunch.train` imports from this package. Tools read
`__init__.pyi`.
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
