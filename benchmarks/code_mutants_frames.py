"""A plugin of pytest for tests under mutmut.

It gives the functions of mutmut the names and files of those that they stand for. The records of messages name each
operation after the function that sends, and the line outside of the runtime that asked for it; both are read from frames,
in which mutmut's own functions would show.

It leaves out tests that fail without a mutant: they would kill every one. Their names are in `FAILED`.

In the first run, where mutmut learns which test calls what, it makes this complete. Recipes are imported anew for each test.
What a fixture of several tests calls counts for each of these tests, what runs on import counts for the tests of
`ON_IMPORT`, and what no test calls in its own process counts for the tests of `STARTING_PROCESSES`.

If `AFRESH` is set, a mutant's process forgets the modules that it has inherited, so that the mutant is active while they
are imported, and runs all tests that call the function. Else it runs only the quickest.
"""

import os
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator
from itertools import accumulate
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

import pytest
from code_mutants import AFRESH
from mutmut.mutation import trampoline
from mutmut.state import state

STARTING_PROCESSES = ("tests/cli/",)
QUICK_S = 12
"""The time that tests of a mutant take at first; those of the ones that survive have all that they need."""

ON_IMPORT = ("tests/spec/recipe/", "tests/recipes/", "tests/cli/test_schema.py", "tests/cli/test_recipes.py")
FAILED = Path("failed-without-a-mutant.txt").absolute()
"""In the folder where mutmut runs the tests."""

_called: set[str] = state()._stats  # noqa: SLF001 - mutmut has no other way to add to what it has noticed
_seen: set[str] = set()
_by_fixture: dict[Any, set[str]] = defaultdict(set)
"""What each fixture of several tests called while it was set up."""

_on_import: set[str] = set()
_failed: set[str] = set()
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
    """Rename what has been imported since the last test; let the first run see each test import its recipes."""
    if _is_first_run():
        _forget_modules("ttlaunch_recipe_")
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
    return trampoline.get_mutant_under_test() == "stats"


def _is_mutant() -> bool:
    return "__mutmut_" in os.environ.get("MUTANT_UNDER_TEST", "")


def _forget_modules(*prefixes: str) -> None:
    for name in [name for name in sys.modules if name.startswith(prefixes)]:
        del sys.modules[name]


def pytest_configure(config: pytest.Config) -> None:
    """Go on after a failure in the first run, whatever mutmut asks for; begin with a mutant's quick tests."""
    if _is_first_run():
        config.option.maxfail = 0
        os.environ.pop("MUTANT_UNDER_TEST", None)  # processes that tests start have nobody to tell what they call
    elif _is_mutant() and not os.environ.get(AFRESH):
        known = state().duration_by_test
        tests = sorted(config.args, key=lambda test: known.get(test, 0))
        ends = accumulate(known.get(test, 0) for test in tests)
        config.args = [test for test, end in zip(tests, ends, strict=True) if end < QUICK_S] or tests[:1]


@pytest.hookimpl(tryfirst=True)
def pytest_load_initial_conftests() -> None:
    """Import everything again where a mutant may change what is done on import."""
    if os.environ.get(AFRESH) and _is_mutant():
        _forget_modules("ttlaunch", "tests")
        _seen.clear()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what has failed in the first run, and begin with the files whose tests take least."""
    _failed.update(FAILED.read_text(encoding="utf-8").splitlines() if FAILED.exists() else ())
    if not _is_first_run():
        config.hook.pytest_deselected(items=[item for item in items if item.nodeid in _failed])
        items[:] = [item for item in items if item.nodeid not in _failed]
    if os.environ.get("MUTANT_UNDER_TEST") == "":  # mutmut's second run without a mutant: the first one has told
        del items[1:]
    seconds: dict[str, float] = defaultdict(float)
    for item in items:
        seconds[_file(item.nodeid)] += state().duration_by_test.get(item.nodeid, 0)
    items.sort(key=lambda item: seconds[_file(item.nodeid)])


def _file(test: str) -> str:
    return test.partition("::")[0]


def pytest_collection_finish() -> None:
    """Keep what was called while modules were imported, which would else count for the first test alone."""
    if _is_first_run():
        _on_import.update(_called)
        _called.clear()


@pytest.hookimpl(wrapper=True)
def pytest_fixture_setup(fixturedef: Any) -> Iterator[None]:
    """Keep what a fixture of several tests calls, since only the first of them sets it up."""
    before = set(_called)
    _called.clear()
    try:
        return (yield)
    finally:
        if _is_first_run() and fixturedef.scope != "function":
            _by_fixture[fixturedef] |= _called
        _called.update(before)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_teardown(item: Any) -> None:
    """Count what its fixtures called for this test too, before mutmut takes note."""
    if _is_first_run():
        for definitions in item._fixtureinfo.name2fixturedefs.values():  # noqa: SLF001 - nor has pytest
            for definition in definitions:
                _called.update(_by_fixture[definition])


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Keep the name of a test that fails in the first run, and count the time of fixtures."""
    if not _is_first_run():
        return
    if report.when == "setup":
        state().duration_by_test[report.nodeid] += report.duration
    if report.failed:
        _failed.add(report.nodeid)
    elif report.when == "call":
        _failed.discard(report.nodeid)


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """Let mutmut go on after a first run with failures."""
    if _is_first_run():
        tests_by_function = state().tests_by_mangled_function_name
        uncalled = {name for name in state().current_function_hashes if not tests_by_function.get(name)}
        for functions, places in ((_on_import, ON_IMPORT), (uncalled - _on_import, STARTING_PROCESSES)):
            chosen = {item.nodeid for item in session.items if item.nodeid.startswith(places)}
            for function in functions:
                tests_by_function[function] |= chosen
        FAILED.write_text("\n".join(sorted(_failed)), encoding="utf-8")
        session.exitstatus = pytest.ExitCode.OK
