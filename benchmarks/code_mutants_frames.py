"""A plugin of pytest for tests under mutmut.

It gives the functions of mutmut the names and files of those that they stand for. The records of messages name each operation after the function that sends, and the line outside of the runtime that asked
for it; both are read from frames, in which mutmut's own functions would show.

It also leaves out tests that fail without a mutant: they would kill every one. Their names are in `FAILED`.
"""

import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

import pytest
from mutmut.mutation import trampoline

FAILED = Path("failed-without-a-mutant.txt").absolute()
"""In the folder where mutmut runs the tests."""


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


def _is_first_run() -> bool:
    """Whether mutmut learns which test calls what; no mutant is active then."""
    return os.environ.get("MUTANT_UNDER_TEST") == "stats"


def pytest_configure(config: pytest.Config) -> None:
    """Go on after a failure in the first run, whatever mutmut asks for."""
    if _is_first_run():
        config.option.maxfail = 0
        FAILED.unlink(missing_ok=True)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what has failed in the first run."""
    failed = set(FAILED.read_text(encoding="utf-8").splitlines()) if FAILED.exists() and not _is_first_run() else set()
    left_out = [item for item in items if item.nodeid in failed]
    config.hook.pytest_deselected(items=left_out)
    items[:] = [item for item in items if item.nodeid not in failed]
    if os.environ.get("MUTANT_UNDER_TEST") == "":  # mutmut's second run without a mutant: the first one has told
        del items[1:]


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Keep the name of a test that fails in the first run."""
    if report.failed and _is_first_run():
        with FAILED.open("a", encoding="utf-8") as file:
            file.write(f"{report.nodeid}\n")


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """Let mutmut go on after a first run with failures."""
    if _is_first_run():
        session.exitstatus = pytest.ExitCode.OK
