"""A release that is written to a folder has every file with its content and rights, and none that changed meanwhile."""

import os

import pytest

from ttlaunch import contract
from ttlaunch.hosts.sync.release import make_release
from ttlaunch.hosts.sync.write_release import ChangedFileError, write_release


@pytest.fixture
def project(tmp_path):
    folder = tmp_path / "project"
    (folder / "sub").mkdir(parents=True)
    (folder / "sub/a b.py").write_text("1\n")
    (folder / "run.sh").write_text("#!/bin/sh\n")
    (folder / "run.sh").chmod(0o755)
    (folder / "link").symlink_to("sub/a b.py")
    (folder / os.fsdecode(b"\xff")).write_bytes(b"x")
    (folder / ".env").write_text("SECRET=1\n")
    return folder


def test_a_release_is_written_with_contents_rights_and_links(project, tmp_path):
    release, _ = make_release(project)
    (tmp_path / "copy").mkdir()
    write_release(release, tmp_path / "copy")
    copy = tmp_path / "copy" / contract.PROJECT_DIR
    assert {"sub", "run.sh", "link", os.fsdecode(b"\xff")} == {path.name for path in copy.iterdir()}
    assert "1\n" == (copy / "link").read_text()
    assert (copy / "run.sh").stat().st_mode & 0o100
    assert (tmp_path / "copy" / contract.PACKAGE_DIR / "ttlaunch/__init__.py").is_file()


def test_a_file_that_changes_after_the_release_was_made_is_named(project, tmp_path):
    release, _ = make_release(project)
    (project / "run.sh").write_text("#!/bin/false\n")
    (tmp_path / "copy").mkdir()
    with pytest.raises(ChangedFileError, match=r"run\.sh has changed while it was copied"):
        write_release(release, tmp_path / "copy")
