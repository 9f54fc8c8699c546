"""A rank or a host names the file and line of its failure: only files that it was given are opened, and none can hang us."""

import json
import os
import socket

import pytest

from ttlaunch import contract
from ttlaunch.app.run_diagnostics import failure_diagnostic, line_label
from ttlaunch.diagnostics.render import render
from ttlaunch.planning.launch_plan import RankRow
from ttlaunch.records.endings import RankError
from ttlaunch.records.parser import read
from ttlaunch.running.failures.attribution import Witnesses, first_failure
from ttlaunch.running.failures.stderr_tail import parse_stderr_tail
from ttlaunch.running.hang.stacks import parse_main_stack
from ttlaunch.running.report import Report
from ttlaunch.running.runs.run_folder import RunFolder
from ttlaunch.running.watch import RankState

PRIVATE = "root:$6$salt$hash"
RELEASE = f"/home/me/.ttlaunch/releases/{'a1' * 32}/project"


@pytest.fixture
def project(tmp_path, monkeypatch):
    """The current folder; the files beside it belong to the user and are not part of the run."""
    folder = tmp_path / "project"
    folder.mkdir()
    monkeypatch.chdir(folder)
    for name in ("shadow", "secret.py"):
        (tmp_path / name).write_text(f"{PRIVATE}\n")
    (folder / "key").write_text(f"{PRIVATE}\n")
    (folder / "link.py").symlink_to(tmp_path / "secret.py")
    (folder / "to-outside").symlink_to(tmp_path)
    (folder / "trainer.py").write_text("def worker():\n    raise ValueError\n")
    return folder


def reported(project, record):
    """What the report of a run says whose rank left this record."""
    error = read(RankError, json.dumps(record).encode())
    state = RankState(RankRow(0, "box", 0, "worker"), error=error)
    witnesses = Witnesses(stderr_tail=lambda _: parse_stderr_tail(""))
    failure = first_failure([state], lost_shims={}, stopped=False, witnesses=witnesses)
    known = dict.fromkeys(Report.__dataclass_fields__)
    report = Report(**{**known, "failure": failure, "ranks": ({"rank": 0},)})
    return render([failure_diagnostic(report, RunFolder("tonight", project / "runs/tonight"))])


def record_of(file, line=1):
    return {"type": "ValueError", "message": "no", "file": str(file), "line": line, "time": 1.0}


@pytest.mark.parametrize(
    "name",
    [
        "../shadow",
        "../secret.py",
        "key",
        "link.py",
        "to-outside/secret.py",
        "to-outside/shadow",
        f"{RELEASE}/../secret.py",
        f"{RELEASE}/x/../../secret.py",
        f"{RELEASE}/key",
        "{absolute}/secret.py",
        "{absolute}/shadow",
        "/etc/passwd",
        "/proc/self/environ",
    ],
)
def test_a_record_that_names_any_other_file_quotes_nothing_of_it(project, name):
    name = name.replace("{absolute}", str(project.parent))
    text = reported(project, record_of(name))
    assert "rank 0 (worker, box) raised ValueError" in text
    assert PRIVATE not in text
    assert " | " not in text, "no line of any file is shown"


@pytest.mark.timeout(20)
@pytest.mark.parametrize("kind", ["fifo", "socket", "device", "folder", "endless", "missing"])
def test_a_record_that_names_no_regular_file_neither_hangs_nor_breaks_the_report(project, kind):
    path = project / "pipe.py"
    if kind == "fifo":
        os.mkfifo(path)
    elif kind == "socket":
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(path.name)  # the whole path is too long for a socket
    elif kind == "folder":
        path.mkdir()
    elif kind == "device":
        path.symlink_to("/dev/zero")
    elif kind == "endless":
        with path.open("wb") as file:
            file.truncate(2**43)
    text = reported(project, record_of(path))
    assert "rank 0 (worker, box) raised ValueError" in text


@pytest.mark.parametrize(
    "changed",
    [
        {"file": "trainer.py\0"},
        {"file": "\0"},
        {"file": "tr\ud800ainer.py"},
        {"file": "x" * 4000 + ".py"},
        {"line": None},
        {"line": 2**53},
        {"line": 0},
        {"file": "trainer.py:x"},
        {"file": "~root/.profile.py"},
    ],
)
def test_a_place_that_is_none_costs_the_quotation_and_not_the_report(project, changed):
    text = reported(project, {**record_of(project / "trainer.py"), **changed})
    assert "rank 0 (worker, box) raised ValueError" in text


def test_a_line_number_of_thousands_of_digits_in_a_traceback_or_a_stack_is_passed_over():
    digits = "9" * 5000
    log = f'Traceback (most recent call last):\n  File "/a.py", line {digits}, in f\nValueError: no\n'
    assert (None, "ValueError") == (parse_stderr_tail(log).raised.file, parse_stderr_tail(log).raised.type)
    assert () == parse_main_stack(f'Thread 0x1 (most recent call first):\n  File "/a.py", line {digits} in f\n')


def test_lines_of_the_project_the_recipe_and_the_package_are_still_quoted(project, tmp_path):
    assert " --> trainer.py:2:5\n  |\n2 |     raise ValueError\n" in reported(project, record_of("trainer.py", 2))
    recipe = tmp_path / "elsewhere"
    recipe.mkdir()
    (recipe / "trainer.py").write_text("raise KeyError\n")
    (project / "runs/tonight").mkdir(parents=True)
    plan = project / "runs/tonight" / contract.PLAN_FILE
    plan.write_text(json.dumps({"recipe": {"name": "mine", "folder": str(recipe)}}))
    assert "raise KeyError" not in reported(project, record_of(recipe / "trainer.py")), "it is no recipe"
    (recipe / "recipe.py").write_text("")
    assert "1 | raise KeyError" in reported(project, record_of(recipe / "trainer.py"))
    assert line_label(contract.__file__, 1, "") is not None
    assert line_label(str(project / "trainer.py"), 2, "") is not None


def test_a_file_that_is_far_too_long_is_quoted_from_its_beginning_only(project):
    with (project / "long.py").open("wb") as file:
        file.write(b"raise ValueError\n")
        file.truncate(2**43)
    assert "1 | raise ValueError" in reported(project, record_of("long.py"))
