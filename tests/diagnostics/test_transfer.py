"""Diagnostics that travel to another process arrive as they were."""

import json

from ttlaunch.diagnostics import Blame, Diagnostic, KeyMistake, Label, Severity, Source, exit_status
from ttlaunch.diagnostics.transfer import pack_diagnostics, unpack_diagnostics


def test_what_a_diagnostic_blames_arrives_with_it():
    source = Source("hosts.txt", "metal-03 slots=1\n")
    there = (Label(source.span(1, 10, 7), "here"),)
    sent = [
        Diagnostic("H002", "host is not ready", Label(source.span(1, 1, 8)), blame=Blame.HOSTS),
        Diagnostic("T004", "unknown key", None, there, ("a note",), ("a hint",), key_mistake=KeyMistake.UNKNOWN),
        Diagnostic("S001", "a warning", severity=Severity.WARNING, blame=Blame.CODE_SYNC),
    ]
    received = unpack_diagnostics(json.loads(json.dumps(pack_diagnostics(sent))))
    assert sent == received
    assert exit_status(sent[:1]) == exit_status(received[:1]) == 4
