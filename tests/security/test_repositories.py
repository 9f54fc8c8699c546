"""A stranger's repository runs nothing on the launching machine, and its private files stay out of records of runs."""

import hashlib
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import ttlaunch
from tests.hosts.sync.files import git
from tests.security.repositories import hostile_repository, lose_object
from ttlaunch.hosts.sync.release import make_release
from ttlaunch.running.runs.record_inputs import describe_commit

KEY = "-----BEGIN OPENSSH PRIVATE KEY-----\nabc\n-----END OPENSSH PRIVATE KEY-----\n"


@pytest.fixture
def trace(tmp_path):
    """The file that a program of the repository would make."""
    return tmp_path / "a program of the repository has run"


@pytest.fixture
def hostile(tmp_path, trace, monkeypatch):
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", os.devnull)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    folder = tmp_path / "project"
    folder.mkdir()
    return hostile_repository(folder, trace)


def commit(folder):
    git(folder, "-c", "user.name=n", "-c", "user.email=e", "commit", "-qm", "first")


def test_the_repository_of_these_tests_does_run_its_programs_for_git_itself(hostile, trace):
    subprocess.run(["git", "-C", hostile, "diff", "HEAD"], capture_output=True, check=False)
    assert trace.exists()


def test_a_release_runs_no_program_of_the_repository(hostile, trace):
    release, problems = make_release(hostile)
    names = {entry.path.decode() for entry in release.manifest.entries}
    assert not trace.exists()
    assert [] == problems
    assert {"project/changed.py", "project/new.py", "project/inner/code.py", "project/empty/deep"} <= names


@pytest.mark.parametrize("lost", [None, "changed.py"])
def test_the_record_of_a_commit_runs_no_program_of_the_repository(hostile, trace, lost):
    if lost:
        lose_object(hostile, lost)
        trace.unlink(missing_ok=True)  # git itself, which was just asked for the object, obeys the repository
    found, problems = describe_commit(hostile)
    assert not trace.exists()
    if lost:
        assert [("note", "S007")] == [(problem.severity, problem.code) for problem in problems]
    else:
        changed = [line for line in found["diff"].splitlines() if line.startswith("diff --git")]
        names = ("changed.py", "gone.py", "staged.py")
        assert ([f"diff --git a/{name} b/{name}" for name in names], []) == (changed, problems)


@pytest.mark.parametrize(
    "line",
    [
        "sync --on local --dry-run",
        "validate fabric_minimal",
        "plan fabric_minimal",
        "simulate fabric_minimal",
        "recipes list",
    ],
)
def test_no_command_runs_a_program_of_the_repository(hostile, trace, ttlaunch, monkeypatch, line):
    monkeypatch.chdir(hostile)
    ttlaunch(line)
    assert not trace.exists()


@pytest.mark.mpi
def test_a_run_runs_no_program_of_the_repository(hostile, trace):
    command = [sys.executable, "-m", "ttlaunch", "run", "fabric_minimal", "-n", "1"]
    answer = subprocess.run(command, cwd=hostile, capture_output=True, text=True, check=False, timeout=120)
    assert (0, False) == (answer.returncode, trace.exists()), answer.stderr
    [code] = hostile.glob("runs/*/code.json")
    assert "+x = 2" in json.loads(code.read_text())["diff"]


def test_git_is_started_in_one_place_only():
    package = Path(ttlaunch.__file__).parent
    starting = [path for path in package.rglob("*.py") if re.search(r"""["']git["']""", path.read_text())]
    assert [package / "hosts/sync/repository.py"] == starting


def test_settings_of_the_user_that_run_programs_on_files_do_not_run_on_a_repositorys_files(hostile, trace, monkeypatch):
    (hostile / ".git/config").rename(hostile.parent / "gitconfig")
    (hostile / ".git/config").write_text("[core]\n")
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", str(hostile.parent / "gitconfig"))
    describe_commit(hostile)
    assert not trace.exists()


def test_a_repository_inside_a_folder_that_hides_as_no_repository_is_not_obeyed(tmp_path, trace, monkeypatch):
    """A bare repository among the files of another one is found first by git, which would take its settings."""
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", os.devnull)
    folder = tmp_path / "project"
    folder.mkdir()
    hostile_repository(folder, trace)
    (folder / ".git").rename(tmp_path / "bare")
    git(folder, "init", "-q")
    inside = folder / "sub"
    (tmp_path / "bare").rename(inside)
    with (inside / "config").open("a") as settings:
        settings.write(f"[core]\n\tworktree = {inside}\n")
    _, problems = describe_commit(inside)
    make_release(folder, folder=inside)
    assert (["S007"], False) == ([problem.code for problem in problems], trace.exists())


def test_a_repository_that_git_does_not_trust_is_a_note_and_nothing_of_it_is_recorded(hostile, skip_or_fail):
    if os.geteuid() != 0:
        skip_or_fail("only root can give a folder to somebody else")
    for path in (hostile, hostile / ".git"):
        os.chown(path, 12345, 12345)
    found, [problem] = describe_commit(hostile)
    assert ({"commit": None, "diff": None, "withheld": []}, "note") == (found, problem.severity)
    begin = f"git cannot be asked for the commit of {hostile}: detected dubious ownership in repository"
    assert begin == problem.message[: len(begin)]


def _rewrite_index(folder, old, new):
    """Replace a path in the index by another one of equal length, as no git command would."""
    index = folder / ".git/index"
    content = index.read_bytes()[:-20].replace(old, new)
    index.write_bytes(content + hashlib.sha1(content, usedforsecurity=False).digest())


@pytest.mark.parametrize("listed", ["link/own.txt", "../out/o.txt"])
def test_an_index_that_lists_files_outside_the_folder_copies_none_of_them(tmp_path, monkeypatch, listed):
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", os.devnull)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "out").mkdir()
    for name in ("own.txt", "o.txt"):
        (tmp_path / "out" / name).write_text("private")
    folder = tmp_path / "project"
    (folder / "link").mkdir(parents=True)
    (folder / "link/own.txt").write_text("")
    git(folder, "init", "-q")
    git(folder, "add", "--all")
    (folder / "link/own.txt").unlink()
    (folder / "link").rmdir()
    (folder / "link").symlink_to("../out")
    _rewrite_index(folder, b"link/own.txt", listed.encode())
    release, _ = make_release(folder)
    assert ["project", "project/link"] == [
        entry.path.decode() for entry in release.manifest.entries if entry.path.startswith(b"project")
    ]


@pytest.mark.parametrize("name", [".gitignore", ".ttlaunchignore"])
@pytest.mark.parametrize("kind", ["pipe", "device", "huge"])
def test_a_rule_file_that_never_ends_is_refused_at_once(tmp_path, monkeypatch, name, kind):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    folder = tmp_path / "project"
    folder.mkdir()
    if kind == "pipe":
        os.mkfifo(folder / name)
    elif kind == "device":
        (folder / name).symlink_to("/dev/zero")
    else:
        with (folder / name).open("wb") as file:
            file.truncate(8 << 40)
    release, problems = make_release(folder)
    reason = "it is larger than 1048576 bytes" if kind == "huge" else "it is no regular file"
    assert release is None
    assert ("S004", True) == (problems[-1].code, problems[-1].message.endswith(f"{name} cannot be read: {reason}"))


def test_changes_of_files_that_may_hold_secrets_are_not_recorded_but_named(tmp_path, monkeypatch):
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", os.devnull)
    folder = tmp_path / "project"
    (folder / ".kube").mkdir(parents=True)
    git(folder, "init", "-q")
    for name in ("a.py", "prod.env", ".kube/config", "notes.txt", "once.txt"):
        (folder / name).write_text("nothing\n")
    (folder / "once.txt").write_text(KEY)
    git(folder, "add", "--all")
    commit(folder)
    (folder / "a.py").write_text("a = 1\n")
    (folder / "prod.env").write_text("TOKEN=hidden-1\n")
    (folder / ".kube/config").write_text("hidden-2\n")
    (folder / "notes.txt").write_text("x\n" * 100_000 + KEY.replace("abc", "hidden-3"))
    (folder / "once.txt").unlink()
    found, problems = describe_commit(folder)
    assert ([".kube/config", "notes.txt", "once.txt", "prod.env"], []) == (sorted(found["withheld"]), problems)
    assert "+a = 1" in found["diff"]
    for secret in ("hidden", "abc", "PRIVATE"):
        assert secret not in found["diff"]
