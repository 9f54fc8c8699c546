"""A plugin of pytest that gives the functions of mutmut the names and files of those that they stand for.

The records of messages name each operation after the function that sends, and the line outside of the runtime that asked
for it; both are read from frames, in which mutmut's own functions would show.
"""

import sys
from collections.abc import Callable
from types import FunctionType, ModuleType
from typing import Any

from mutmut.mutation import trampoline

_seen: set[str] = set()
_wrap = trampoline.wrap_in_trampoline


def _wrap_unseen(mutants: dict[str, Any], **options: Any) -> Callable[[Any], Any]:
    make = _wrap(mutants, **options)

    def decorate(function: FunctionType) -> Any:
        wrapper: Any = make(function)
        code = function.__code__
        inner = [cell.cell_contents for cell in wrapper.__closure__ if cell.cell_contents.__class__ is FunctionType]
        for one in [wrapper, *(one for one in inner if one.__name__ == "trampoline")]:
            one.__code__ = one.__code__.replace(co_name=function.__name__, co_filename=code.co_filename)
        return wrapper

    return decorate


trampoline.wrap_in_trampoline = _wrap_unseen


def pytest_runtest_setup() -> None:
    """Rename what has been imported since the last test."""
    for name in [name for name in sys.modules if name.startswith("ttlaunch.") and name not in _seen]:
        _seen.add(name)
        _rename(sys.modules[name])


def _rename(module: ModuleType) -> None:
    classes = [one for one in vars(module).values() if isinstance(one, type) and one.__module__ == module.__name__]
    for holder in (module, *classes):
        for value in vars(holder).values():
            function = getattr(value, "__func__", value)
            if isinstance(function, FunctionType) and "__mutmut_" in function.__name__:
                plain = function.__name__.partition("__mutmut_")[0].rpartition("ǁ")[2]
                plain = plain.removeprefix("x_") if "ǁ" not in function.__name__ else plain
                function.__code__ = function.__code__.replace(co_name=plain)
