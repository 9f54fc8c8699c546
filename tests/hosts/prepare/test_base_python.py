"""Which Python of a host an environment is built on, and why the others are not."""

import json
import sys

import pytest

from ttlaunch.agent.base_python import ask, candidates, objection

GOOD = {
    "version": "3.11.2",
    "minor": [3, 11],
    "implementation": "CPython",
    "machine": "x86_64",
    "bits": 64,
    "libc": "glibc 2.36",
    "makes_venv": True,
    "has_gil": True,
}


@pytest.mark.parametrize(
    ("differs", "why"),
    [
        ({}, None),
        ({"minor": [3, 10]}, "too old"),
        ({"implementation": "PyPy"}, "is PyPy"),
        ({"bits": 32}, "is a 32-bit program"),
        ({"has_gil": False}, "is a build without the global lock"),
        ({"makes_venv": False}, "lacks the module venv"),
        ({"version": None}, "does not run"),
    ],
)
def test_a_python_that_no_environment_can_be_built_on_says_why(differs, why):
    assert why == objection(GOOD | differs, oldest=(3, 11))


def test_this_python_says_what_it_is():
    facts = ask(sys.executable)
    assert objection(facts, oldest=(3, 11)) is None
    assert ".".join(map(str, sys.version_info[:3])) == facts["version"]


def test_a_program_that_is_no_python_does_not_run(here):
    fake = here / "python3"
    fake.write_text("#!/bin/sh\necho hello\n")
    fake.chmod(0o755)
    assert "does not run" == objection(ask(str(fake)), oldest=(3, 11))


def test_a_named_python_comes_first_then_the_launching_machines_version(here, monkeypatch):
    for name in ("python3", "python3.11", "python3.12", "mine"):
        (here / name).write_text(f"#!/bin/sh\necho '{json.dumps(GOOD)}' # {name}\n")
        (here / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(here))
    names = candidates([str(here / "mine")], preferred_minor=12, oldest=(3, 11))
    assert [str(here / name) for name in ("mine", "python3.12", "python3", "python3.11")] == names[:4]


def test_an_environment_leads_to_the_python_below_it(here):
    assert ask(sys.executable)["path"] == sys._base_executable
