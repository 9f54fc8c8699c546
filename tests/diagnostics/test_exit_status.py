"""The status of a command that refuses to start follows from what its diagnostics blame."""

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
