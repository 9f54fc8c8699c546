"""Which files of a project are copied: git's, those without git, and what never is."""

import os
import socket
import warnings
from pathlib import Path

import pytest

from tests.hosts.sync.files import git
from ttlaunch.diagnostics import render, shown
from ttlaunch.hosts.sync.release import make_release


def write(folder, *names, text="x\n"):
    for name in names:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def test_in_a_repository_tracked_and_new_files_are_copied_and_ignored_ones_are_not(repository, copied):
    write(repository, "tracked.py", "new.py", "sub/trace.log", "logs/a")
    write(repository, ".gitignore", text="*.log\nlogs/\n")
    git(repository, "add", "tracked.py")
    assert [".gitignore", "new.py", "tracked.py"] == copied(repository)


def test_a_tracked_file_is_copied_though_a_rule_ignores_it(repository, copied):
    write(repository, "kept.log")
    git(repository, "add", "kept.log")
    write(repository, ".gitignore", text="*.log\n")
    assert [".gitignore", "kept.log"] == copied(repository)


def test_a_tracked_file_that_was_deleted_is_not_missed(repository, copied):
    write(repository, "here.py", "gone.py")
    git(repository, "add", ".")
    (repository / "gone.py").unlink()
    assert ["here.py"] == copied(repository)


def test_rules_that_only_git_knows_are_obeyed(repository, copied):
    write(repository, "a.py", "private.txt")
    (repository / ".git/info/exclude").write_text("private.txt\n")
    assert ["a.py"] == copied(repository)


def test_files_of_a_submodule_and_of_a_repository_inside_are_copied(repository, copied, tmp_path):
    library = tmp_path / "library"
    library.mkdir()
    git(library, "init", "-q")
    write(library, "code.py")
    git(library, "add", ".")
    git(library, "-c", "user.name=n", "-c", "user.email=e", "commit", "-qm", "first")
    git(repository, "-c", "protocol.file.allow=always", "submodule", "--quiet", "add", str(library), "lib")
    nested = repository / "nested"
    nested.mkdir()
    git(nested, "init", "-q")
    write(nested, "own.py", "own.log")
    write(nested, ".gitignore", text="*.log\n")
    expected = [".gitmodules", "lib/", "lib/code.py", "nested/", "nested/.gitignore", "nested/own.py"]
    assert expected == copied(repository)


def test_from_a_folder_of_a_repository_the_whole_repository_is_copied(repository, release_of, copied):
    write(repository, "top.py", "sub/inner.py")
    assert ["sub/", "sub/inner.py", "top.py"] == copied(repository / "sub")
    assert "project/sub" == release_of(repository / "sub").working_folder


def test_a_folder_can_be_chosen(repository, copied):
    write(repository, "top.py", "sub/inner.py", "sub/out.log")
    write(repository, ".gitignore", text="*.log\n")
    assert ["inner.py"] == copied(repository, folder=repository / "sub")


def test_a_working_folder_that_the_repository_ignores_is_a_project_of_its_own(repository, copied, release_of):
    write(repository, "top.py", "scratch/inner.py")
    write(repository, ".gitignore", text="scratch/\n")
    assert ["inner.py"] == copied(repository / "scratch")
    assert "project" == release_of(repository / "scratch").working_folder


def test_without_a_repository_the_same_rules_are_read(project, copied):
    write(project, "a.py", "trace.log", "sub/b.py", "sub/keep.log", "build/out", "deep/build/out")
    write(project, ".gitignore", text="*.log\n/build\n")
    write(project, "sub/.gitignore", text="!keep.log\n")
    expected = [".gitignore", "a.py", "deep/", "deep/build/", "deep/build/out"]
    assert [*expected, "sub/", "sub/.gitignore", "sub/b.py", "sub/keep.log"] == copied(project)


@pytest.mark.parametrize("kind", ["project", "repository"])
def test_rules_of_ours_hold_everywhere_and_at_any_depth(kind, request, copied):
    folder = request.getfixturevalue(kind)
    write(folder, "a.py", "a.bin", "sub/b.bin", "sub/keep.bin", "sub/c.txt", "big/x")
    write(folder, ".ttlaunchignore", text="*.bin\nbig/\n")
    write(folder, "sub/.ttlaunchignore", text="!keep.bin\nc.txt\n")
    assert [".ttlaunchignore", "a.py", "sub/", "sub/.ttlaunchignore", "sub/keep.bin"] == copied(folder)


@pytest.mark.parametrize("kind", ["project", "repository"])
def test_an_exception_of_ours_brings_back_what_git_ignores(kind, request, copied):
    folder = request.getfixturevalue(kind)
    write(folder, "a.py", "data/wanted.bin", "data/other.bin")
    write(folder, ".gitignore", text="data/\n")
    write(folder, ".ttlaunchignore", text="!data/wanted.bin\n")
    assert [".gitignore", ".ttlaunchignore", "a.py", "data/", "data/wanted.bin"] == copied(folder)


@pytest.mark.parametrize("kind", ["project", "repository"])
def test_caches_environments_and_run_folders_are_never_copied(kind, request, copied):
    folder = request.getfixturevalue(kind)
    write(
        folder, "a.py", "__pycache__/a.pyc", "env/pyvenv.cfg", "env/bin/python", "runs/1/log", "sub/__pycache__/b.pyc"
    )
    write(folder, "runs/.gitignore", text="*\n")
    assert {"a.py"} == set(copied(folder)) - {"sub/"}


@pytest.mark.parametrize("kind", ["project", "repository"])
def test_empty_folders_are_copied_unless_they_are_ignored(kind, request, copied):
    folder = request.getfixturevalue(kind)
    write(folder, "a/file")
    write(folder, ".gitignore", text="ignored/\n")
    for name in ("empty", "a/deep/er", "ignored", "a/ignored"):
        (folder / name).mkdir(parents=True)
    assert [".gitignore", "a/", "a/deep/", "a/deep/er/", "a/file", "empty/"] == copied(folder)


@pytest.mark.parametrize("kind", ["project", "repository"])
def test_names_of_every_kind_are_copied(kind, request, copied, surroundings):
    folder = request.getfixturevalue(kind)
    names = ["-rf", "a b", "new\nline", "quo'te\"", "tab\t", "übung", "$(id)", "*", "back\\slash", "semi;colon", " "]
    for name in names:
        (folder / name).write_text(name)
    Path(os.fsdecode(os.path.join(os.fsencode(folder), b"\xff\xfe"))).write_text("no text")
    assert sorted([*names, r"\xff\xfe"]) == sorted(copied(folder))


@pytest.mark.parametrize("kind", ["project", "repository"])
def test_pipes_and_sockets_stay_with_a_warning(kind, request, problems_of, monkeypatch):
    folder = request.getfixturevalue(kind)
    write(folder, "a.py")
    os.mkfifo(folder / "queue")
    monkeypatch.chdir(folder)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind("door")
        found = problems_of(folder)
    assert [("warning", "S002", "a named pipe, socket or device cannot be copied: `door` and `queue`")] == found


def test_git_that_is_not_there_is_replaced_by_reading_its_rules(repository, surroundings):
    write(repository, "a.py", "trace.log")
    write(repository, ".gitignore", text="*.log\n")
    release, problems = make_release(repository, environment={**surroundings, "PATH": "/nowhere"})
    message = f"git cannot be asked what belongs to the project in {repository}: there is no git"
    assert [("S007", message)] == [(problem.code, problem.message) for problem in problems]
    assert b"project/trace.log" not in {entry.path for entry in release.manifest.entries}
    assert b"project/a.py" in {entry.path for entry in release.manifest.entries}


def test_a_repository_that_git_does_not_trust_says_so(repository, problems_of, skip_or_fail):
    write(repository, "a.py")
    if os.geteuid() != 0:
        skip_or_fail("only root can give a folder to somebody else")
    os.chown(repository, 12345, 12345)
    os.chown(repository / ".git", 12345, 12345)
    begin = f"git cannot be asked what belongs to the project in {repository}: detected dubious ownership in repository"
    assert [("warning", "S007", begin)] == [(*kind, text[: len(begin)]) for *kind, text in problems_of(repository)]


def test_variables_of_git_that_mean_another_repository_change_nothing(repository, surroundings, tmp_path):
    write(repository, "a.py")
    elsewhere = {**surroundings, "GIT_DIR": str(tmp_path / "other"), "GIT_INDEX_FILE": str(tmp_path / "index")}
    release, problems = make_release(repository, environment=elsewhere)
    assert [] == problems
    assert b"project/a.py" in {entry.path for entry in release.manifest.entries}


@pytest.mark.parametrize("line", ["!", "! ", "\\", "!***\\", "***\\", "\\/!", "a[", "[[:no:]]"])
@pytest.mark.parametrize("kind", ["project", "repository"])
def test_a_line_of_ours_that_is_no_pattern_is_an_error_at_its_place(kind, line, request, surroundings):
    folder = request.getfixturevalue(kind)
    write(folder, "a.py", "sub/b.py")
    write(folder, "sub/.ttlaunchignore", text=f"*.bin\n{line}\n")
    release, problems = make_release(folder, environment=surroundings)
    assert release is None
    assert (
        f"error[S017]: line 2 of sub/.ttlaunchignore is no pattern: `{shown(line)}`\n"
        " --> sub/.ttlaunchignore:2:1\n"
        "  |\n"
        f"2 | {line}".rstrip()
        + "\n"
        f"  | {'^' * len(line)} matches nothing\n"
        "\n"
        "hint: a `\\` stands before the character that it takes literally, a `!` before a pattern"
    ) == render(problems)


def test_a_line_of_gitignore_that_is_no_pattern_is_skipped_as_git_does(project, surroundings):
    write(project, "a.py", "a.log")
    write(project, ".gitignore", text="!\n*.log\n")
    release, problems = make_release(project, environment=surroundings)
    assert (
        "warning[S017]: line 1 of .gitignore is no pattern: `!`\n"
        " --> .gitignore:1:1\n"
        "  |\n"
        "1 | !\n"
        "  | ^ matches nothing\n"
        "  = note: it is skipped, as git does\n"
        "\n"
        "hint: a `\\` stands before the character that it takes literally, a `!` before a pattern"
    ) == render(problems)
    names = {entry.path for entry in release.manifest.entries}
    assert (True, False) == (b"project/a.py" in names, b"project/a.log" in names)


def test_a_character_class_that_regular_expressions_may_read_otherwise_one_day_is_read_in_silence(project, copied):
    write(project, "a", "[", "b")
    write(project, ".ttlaunchignore", text="[[a]\n")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert [".ttlaunchignore", "b"] == copied(project)


@pytest.mark.parametrize("kind", ["project", "repository"])
def test_a_folder_in_place_of_the_ignore_file_is_not_told_to_be_put_into_itself(kind, request, surroundings):
    folder = request.getfixturevalue(kind)
    write(folder, "a.py", ".ttlaunchignore/b")
    release, problems = make_release(folder, environment=surroundings)
    assert release is None
    assert (
        f"error[S004]: {folder}/.ttlaunchignore cannot be read: it is no regular file\n"
        "\n"
        "hint: `.ttlaunchignore` is to be a file with a pattern on each line"
    ) == render(problems)
