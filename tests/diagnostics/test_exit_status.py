"""The status of a command that refuses to start follows from what its diagnostics blame."""

import ast
from collections import defaultdict
from pathlib import Path

import pytest

from ttlaunch.diagnostics import Blame, Diagnostic, Severity, exit_status


def blaming(*blamed, severity=Severity.ERROR):
    return [Diagnostic("T001", "the code does not matter", severity=severity, blame=blame) for blame in blamed]


@pytest.mark.parametrize(
    ("blamed", "status"),
    [
        ((), 0),
        ((Blame.COMMAND_LINE,), 2),
        ((Blame.DESCRIPTION,), 3),
        ((Blame.COMMAND_LINE, Blame.DESCRIPTION), 3),
        ((Blame.HOSTS,), 4),
        ((Blame.HOSTS, Blame.CODE_SYNC), 4),
        ((Blame.CODE_SYNC,), 5),
        ((Blame.HOSTS, Blame.COMMAND_LINE), 3),
        ((Blame.CODE_SYNC, Blame.DESCRIPTION), 3),
    ],
)
def test_the_status_says_what_to_look_at(blamed, status):
    assert status == exit_status(blaming(*blamed))


def test_only_errors_count():
    warned = blaming(Blame.HOSTS, severity=Severity.WARNING)
    assert 0 == exit_status(warned)
    assert 2 == exit_status([*warned, *blaming(Blame.COMMAND_LINE)])


PACKAGE = Path(__file__).parents[2] / "ttlaunch"


def blamed_by_code():
    """What the calls of `Diagnostic` with each code blame, as it is written."""
    found = defaultdict(set)
    for text in filter(lambda text: "Diagnostic(" in text, map(Path.read_text, PACKAGE.rglob("*.py"))):
        for node in ast.walk(ast.parse(text)):
            match node:
                case ast.Call(func=ast.Name(id="Diagnostic"), args=[ast.Constant(value=code), *_], keywords=keywords):
                    given = {keyword.arg: ast.unparse(keyword.value) for keyword in keywords}
                    found[code].add(given.get("blame", "Blame.DESCRIPTION"))
    return found


def test_one_code_blames_one_thing():
    """Two refusals with one code do not leave with two statuses."""
    found = blamed_by_code()
    assert {} == {code: blamed for code, blamed in found.items() if len(blamed) > 1}
    assert {"Blame.HOSTS"} == set().union(*(blamed for code, blamed in found.items() if code[0] == "H"))
    assert {"Blame.CODE_SYNC"} == set().union(*(blamed for code, blamed in found.items() if code[0] == "S"))
