"""Begin no test after a time, so that a slow machine ends, too; what is left then is another part for each commit, and is printed.

As a pytest plugin (`-p in_turn`, this folder on PYTHONPATH) with two variables:

    IN_TURN_UNTIL   seconds since the epoch, after which no test begins
    IN_TURN_COMMIT  how many commits there are: files that are no longest ones begin at another place for each

A test that is left counts as skipped, for want of time and of nothing else; `tests/conftest.py` fails one that lacks a program.
The longest files come first, as in any run of the tests: begun last, each of them would keep one process busy alone.
"""

import os
import time

import pytest

_GOLDEN = 0.6180339887498949
"""Multiples of the golden ratio, without their whole part, lie evenly between 0 and 1 however many there are."""
_REASON = "no time is left: another commit begins with it"


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Let the files begin where it is this commit's turn; each process of xdist comes to the same order."""
    from tests.matrices import LONGEST  # noqa: PLC0415 - the root of the project is on the path when tests are collected

    longest = {str(config.rootpath / "tests" / name) for name in LONGEST}
    files = [path for path in dict.fromkeys(map(_file, items)) if path not in longest]
    first = int(len(files) * (int(os.environ["IN_TURN_COMMIT"]) * _GOLDEN % 1.0))
    places = {path: place for place, path in enumerate([*files[first:], *files[:first]])}
    items.sort(key=lambda item: places.get(_file(item), -1))


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    """Leave a test to another commit if the time is over."""
    if time.time() >= float(os.environ["IN_TURN_UNTIL"]):
        pytest.skip(_REASON)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print how many tests were left, and of which files."""
    skipped = terminalreporter.stats.get("skipped", [])
    left = [report.nodeid.partition("::")[0] for report in skipped if _REASON in str(report.longrepr)]
    count = sum(len(reports) for name, reports in terminalreporter.stats.items() if name) - len(left)
    names = [f"  {name}: {left.count(name)}" for name in dict.fromkeys(left)]
    terminalreporter.write_line(f"in turn: {len(left)} tests were left to other commits, {count} had their time")
    for name in names:
        terminalreporter.write_line(name)


def _file(item: pytest.Item) -> str:
    return str(item.path)
