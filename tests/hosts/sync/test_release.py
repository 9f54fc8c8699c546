"""A release: what belongs to it, its tree hash, and what cannot be read."""

import errno
import os
import threading
import time
from pathlib import Path

import pytest

import ttlaunch
from ttlaunch.agent.releases import parse_manifest
from ttlaunch.hosts.sync import read_files
from ttlaunch.hosts.sync.manifest import FILE, FOLDER, LINK, Entry, make_manifest
from ttlaunch.hosts.sync.release import make_release
from ttlaunch.spec.recipe.discovery import find_recipe


def test_the_tree_hash_is_that_of_names_rights_and_contents_and_of_nothing_else(project, release_of, tmp_path):
    (project / "a.py").write_text("1")
    first = release_of(project).tree_hash
    other = tmp_path / "elsewhere"
    other.mkdir()
    (other / "a.py").write_text("1")
    assert first == release_of(other).tree_hash
    hashes = {first}
    for change in (
        lambda: (project / "a.py").write_text("2"),
        lambda: (project / "a.py").chmod(0o755),
        lambda: (project / "a.py").rename(project / "b.py"),
        (project / "empty").mkdir,
        lambda: (project / "link").symlink_to("b.py"),
    ):
        change()
        hashes.add(release_of(project).tree_hash)
    assert 6 == len(hashes)


def test_a_manifest_is_read_as_it_was_written():
    entries = [
        Entry(FOLDER, b"p", mode=0o755),
        Entry(FILE, b"p/a b\n\xff", mode=0o640, size=3, content=b"0" * 64, source=b"/x"),
        Entry(LINK, b"p/to here", content=b"../a \n b"),
    ]
    text = make_manifest(reversed(entries)).text
    expected = [
        (b"d", 0o755, 0, b"-", b"p"),
        (b"f", 0o640, 3, b"0" * 64, b"p/a b\n\xff"),
        (b"l", 0, 0, b"../a \n b", b"p/to here"),
    ]
    assert expected == parse_manifest(text)


@pytest.mark.parametrize("text", [b"", b"hello", b"ttlaunch manifest 2\0", b"ttlaunch manifest 1\0d 755 0 - p"])
def test_what_is_no_manifest_is_refused(text):
    with pytest.raises(ValueError, match="not a manifest"):
        parse_manifest(text)


def test_ttlaunch_and_its_recipes_and_configurations_belong_to_it(project, release_of):
    paths = {entry.path for entry in release_of(project).manifest.entries}
    for name in (
        b"package/ttlaunch/agent/shim.py",
        b"package/ttlaunch/_recipes/pipeline_parallel/trainer.py",
        b"package/ttlaunch/_configurations/local/hosts.txt",
    ):
        assert name in paths
    assert not [path for path in paths if b"__pycache__" in path]


def test_all_modules_of_ttlaunch_belong_to_it_and_the_pages_that_no_rank_reads_stay_here(project, release_of):
    package = Path(ttlaunch.__file__).parent
    paths = {Path(os.fsdecode(entry.path)) for entry in release_of(project).manifest.entries}
    modules = {Path("package/ttlaunch") / path.relative_to(package) for path in package.rglob("*.py")}
    assert (modules, True) == (modules & paths, (package / "diagnostics/pages/S001.md").is_file())
    assert not [path for path in paths if path.suffix == ".md" and "diagnostics" in path.parts]


def test_a_bundled_recipe_lies_in_the_package(project, release_of):
    recipe = find_recipe("pipeline_parallel", working_folder=project).folder
    assert "package/ttlaunch/_recipes/pipeline_parallel" == release_of(project, recipe=recipe).recipe


def _write_recipe(folder):
    folder.mkdir(parents=True)
    (folder / "recipe.py").write_text("")
    (folder / "trainer.py").write_text("")


def test_a_recipe_of_the_project_is_not_copied_twice(project, release_of):
    _write_recipe(project / "recipes/mine")
    assert "project/recipes/mine" == release_of(project, recipe=project / "recipes/mine").recipe


@pytest.mark.parametrize("where", ["outside", "ignored"])
def test_a_recipe_that_is_not_copied_with_the_project_is_copied_by_itself(project, release_of, tmp_path, where):
    folder = {"outside": tmp_path / "mine", "ignored": project / "mine"}[where]
    _write_recipe(folder)
    (project / ".gitignore").write_text("mine/\n")
    release = release_of(project, recipe=folder)
    assert "recipes/mine" == release.recipe
    assert b"recipes/mine/trainer.py" in {entry.path for entry in release.manifest.entries}


def test_files_with_one_content_are_one_source(project, release_of):
    for name in ("a", "b", "c"):
        (project / name).write_text("the same in all three")
    sources = [entry for entry in release_of(project).manifest.sources.values() if entry.size == 21]
    assert [b"project/a"] == [entry.path for entry in sources]


def test_two_names_that_differ_in_case_alone_are_noticed(project, release_of):
    (project / "model.py").write_text("")
    assert [] == release_of(project).same_names
    (project / "Model.py").write_text("")
    assert ["project/Model.py", "project/model.py"] == release_of(project).same_names


@pytest.fixture
def opened(monkeypatch):
    """Paths of the files that are read; those that end in `unreadable` cannot be."""
    paths = []
    real = os.open

    def note(path, *rest, **options):
        if isinstance(path, bytes):
            if path.endswith(b"unreadable"):
                raise PermissionError(errno.EACCES, "Permission denied", path)
            paths.append(path)
        return real(path, *rest, **options)

    monkeypatch.setattr(read_files.os, "open", note)
    return paths


def test_files_that_cannot_be_read_are_errors(project, problems_of, opened):
    for name in ("unreadable", "sub/unreadable"):
        (project / name).parent.mkdir(exist_ok=True)
        (project / name).write_text("")
    assert [
        ("error", "S004", "sub/unreadable cannot be read: permission denied"),
        ("error", "S004", "unreadable cannot be read: permission denied"),
    ] == sorted(problems_of(project))


def test_a_link_that_leads_out_is_mentioned_and_others_are_not(project, problems_of):
    (project / "sub").mkdir()
    (project / "a.py").write_text("")
    for name, target in (("inside", "a.py"), ("sub/up", "../a.py"), ("sub/out", "../../x"), ("far", "/mnt/data")):
        (project / name).symlink_to(target)
    texts = [
        ("warning", "S003", "the link far leads out of the project, to /mnt/data"),
        ("warning", "S003", "the link sub/out leads out of the project, to ../../x"),
    ]
    assert texts == sorted(problems_of(project))


def _switch(folder, version):
    """What `git checkout` does: some files change, one comes, one goes."""
    for name in ("a.py", "b.py", "sub/c.py"):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(version)
    for name in ("one.py", "two.py"):
        (folder / name).unlink(missing_ok=True)
    (folder / f"{version}.py").write_text(version)


@pytest.mark.parametrize("after", range(4))
def test_a_release_never_mixes_two_versions_of_the_project(project, surroundings, after):
    """The project changes when so many of its files have been read."""
    _switch(project, "one")
    hashes = {}
    for version in ("two", "one"):
        _switch(project, version)
        hashes[version] = make_release(project, environment=surroundings)[0].tree_hash
    for file in project.rglob("*.py"):
        os.utime(file, ns=(10**18, 10**18))  # long ago, so that only a change makes ttlaunch read a file again

    def count(files, size):
        if files == after + 1:
            _switch(project, "two")

    release, problems = make_release(project, environment=surroundings, on_progress=count)
    assert ([], hashes["two"]) == (problems, release.tree_hash)


def test_a_project_that_never_holds_still_is_refused(project, surroundings):
    for name in ("a.py", "b.py"):
        (project / name).write_text("")
    stop = threading.Event()

    def write():
        while not stop.is_set():
            for name in ("a.py", "b.py"):
                (project / "new").write_text(str(time.monotonic_ns()))
                (project / "new").rename(project / name)

    writer = threading.Thread(target=write)
    writer.start()
    try:
        release, [problem] = make_release(project, environment=surroundings)
    finally:
        stop.set()
        writer.join()
    message = f"the files in {project} change all the time: they were read 4 times"
    assert (None, "S005", message) == (release, problem.code, problem.message)


def test_a_file_that_somebody_writes_all_the_time_is_refused(project, problems_of, monkeypatch):
    """Every look at the file while it is read finds another time: the writer is as fast as the reader."""
    file = project / "train.log"
    file.write_text("0\n")
    real = os.fstat

    def fstat(descriptor):
        if os.readlink(f"/proc/self/fd/{descriptor}") == str(file):
            with file.open("a") as log:
                log.write("more\n")
        return real(descriptor)

    monkeypatch.setattr(read_files.os, "fstat", fstat)
    message = "train.log changes all the time: it was read 3 times and had 12, 27, 42 bytes"
    assert [("error", "S005", message)] == problems_of(project)


def test_what_has_not_changed_is_not_read_again(project, surroundings, opened):
    (project / "a.py").write_text("1")
    first, _ = make_release(project, environment=surroundings)
    assert first.files == len(set(opened))
    opened.clear()
    second, _ = make_release(project, environment=surroundings)
    assert {bytes(project / "a.py")} >= set(opened)  # it was written in the same moment as what is known of it
    assert first.tree_hash == second.tree_hash


@pytest.mark.parametrize(
    "content", [b"", b"{", b"[]", b'{"format": 1, "files": {"a": 1}}', b'{"format": 9, "files": {}}']
)
def test_what_is_known_of_files_may_be_damaged(project, surroundings, tmp_path, content):
    (project / "a.py").write_text("1")
    first, _ = make_release(project, environment=surroundings)
    for file in (tmp_path / "cache/ttlaunch").iterdir():
        file.write_bytes(content)
    second, problems = make_release(project, environment=surroundings)
    assert ([], first.tree_hash) == (problems, second.tree_hash)


def test_what_is_known_of_files_need_not_be_writable(project, surroundings, release_of, tmp_path):
    (project / "a.py").write_text("1")
    (tmp_path / "file").write_text("")
    release, problems = make_release(project, environment={**surroundings, "XDG_CACHE_HOME": str(tmp_path / "file")})
    assert ([], release_of(project).tree_hash) == (problems, release.tree_hash)


def test_a_change_that_keeps_size_and_time_is_seen(project, surroundings):
    file = project / "a.py"
    file.write_text("1")
    before = file.stat()
    first, _ = make_release(project, environment=surroundings)
    file.write_text("2")
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    second, _ = make_release(project, environment=surroundings)
    assert first.tree_hash != second.tree_hash
