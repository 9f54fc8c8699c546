"""The copy of the newest release that a host keeps ready: the next release is made of it, if nobody has changed it."""

import os
import shutil
from pathlib import Path

import pytest

from tests.hosts.sync.files import tree
from ttlaunch import contract
from ttlaunch.agent.releases import INCOMING, check_tree, read_manifest

TOP = {contract.MANIFEST_FILE}


def fill(folder):
    for name in ("a.py", "b.py", "sub/c.py", "sub/deep/d.py"):
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"text of {name}\n" * 10)
    (folder / "run.sh").write_text("#!/bin/sh\n")
    (folder / "run.sh").chmod(0o755)
    (folder / "link").symlink_to("sub/c.py")
    (folder / "empty").mkdir()


def spare_of(host):
    """The folder of the only copy."""
    (found,) = (host.folder / contract.SPARE_DIR).iterdir()
    return found


def files_in(folder):
    return [path for path in folder.rglob("*") if path.is_file() and not path.is_symlink()]


def inodes(folder):
    return {path.relative_to(folder): path.stat().st_ino for path in files_in(folder)}


def release_folder(host, answer):
    return host.folder / contract.RELEASES_DIR / answer.tree_hash


def check_exact(host, answer, project):
    """The release is complete, holds nothing else, and shares no file with another place."""
    release = release_folder(host, answer)
    entries = read_manifest(bytes(release))
    assert ([], tree(project)) == (check_tree(bytes(release), entries, alive=lambda: None)[0], tree(host.current))
    found = {path for path in tree(release) if path.decode() not in TOP and not path.startswith(b"signatures-")}
    assert {entry[4] for entry in entries} == found
    assert {1} == {path.stat().st_nlink for path in files_in(release)}


def test_the_next_release_is_made_of_the_copy_and_shares_no_file_with_another(project, release_of, host):
    fill(project)
    first = host.take(release_of(project))
    spare = spare_of(host)
    copied = inodes(spare / "project")
    assert (first.tree_hash, tree(project)) == (spare.name, tree(spare / "project"))
    (project / "a.py").write_text("changed")
    (project / "sub/new.py").write_text("new")
    (project / "b.py").unlink()
    second = host.take(release_of(project))
    check_exact(host, second, project)
    made = inodes(release_folder(host, second) / "project")
    reused = {name for name in made if made[name] == copied.get(name)}
    assert {Path("run.sh"), Path("sub/c.py"), Path("sub/deep/d.py")} <= reused
    assert second.tree_hash == spare_of(host).name
    everything = [inodes(folder) for folder in (host.folder / "releases", spare_of(host))]
    numbers = [number for one in everything for number in one.values()]
    assert len(set(numbers)) == len(numbers)


def rewrite(copy):
    """Other content of the same size and the same times, as only its inode's own times show."""
    path, found = copy / "project/b.py", (copy / "project/b.py").stat()
    path.write_bytes(b"x" * found.st_size)
    os.utime(path, ns=(found.st_atime_ns, found.st_mtime_ns))


def link_outside(copy):
    os.link(copy / "project/b.py", copy.parent.parent / "outside")


def link_inside(copy):
    os.link(copy / "project/b.py", copy / "project/sub/b.py")


def put_folder_for_file(copy):
    (copy / "project/b.py").unlink()
    (copy / "project/b.py/inner").mkdir(parents=True)


def put_link_for_folder(copy):
    shutil.rmtree(copy / "project/sub")
    (copy / "project/sub").symlink_to(copy.parent.parent)


def put_more_files(copy):
    (copy / "extra").write_text("extra")
    (copy / "project/sub/extra/deep").mkdir(parents=True)
    (copy / "project/sub/extra/deep/file").write_text("extra")


def forget_signatures(copy):
    for path in copy.glob("signatures-*"):
        path.unlink()


def point_link_elsewhere(copy):
    (copy / "project/link").unlink()
    (copy / "project/link").symlink_to("/etc/passwd")


def make_manifest_worse(copy):
    path = copy / contract.MANIFEST_FILE
    path.write_bytes(path.read_bytes().replace(b"b.py", b"z.py"))


DAMAGES = [
    rewrite,
    link_outside,
    link_inside,
    put_folder_for_file,
    put_link_for_folder,
    put_more_files,
    forget_signatures,
    point_link_elsewhere,
    make_manifest_worse,
    lambda copy: (copy / "project/run.sh").chmod(0o644),
    lambda copy: (copy / "project/sub").chmod(0o777),
    lambda copy: (copy / "project/b.py").unlink(),
    lambda copy: shutil.rmtree(copy / "project"),
    shutil.rmtree,
    lambda copy: copy.chmod(0o777),
]


@pytest.mark.slow
def test_nothing_that_was_changed_in_the_copy_gets_into_a_release(project, release_of, host):
    fill(project)
    host.take(release_of(project))
    for number, damage in enumerate(DAMAGES):
        damage(spare_of(host))
        (project / "a.py").write_text(f"changed {number}")
        check_exact(host, host.take(release_of(project)), project)


def test_a_copy_that_another_user_made_is_not_used(project, release_of, host, skip_or_fail):
    if os.geteuid() != 0:
        skip_or_fail("only root can give a file to another user")
    fill(project)
    host.take(release_of(project))
    for path in [spare_of(host), *spare_of(host).rglob("*")]:
        os.chown(path, 65534, 65534, follow_symlinks=False)
    (project / "a.py").write_text("changed")
    second = host.take(release_of(project))
    check_exact(host, second, project)
    assert {os.geteuid()} == {path.lstat().st_uid for path in release_folder(host, second).rglob("*")}


def test_a_sync_that_brings_nothing_new_leaves_the_copy_as_it_is(project, release_of, host):
    fill(project)
    host.take(release_of(project))
    before = inodes(spare_of(host))
    host.take(release_of(project))
    assert before == inodes(spare_of(host))


def test_a_copy_that_was_not_finished_is_removed_by_the_next_sync(project, release_of, host):
    fill(project)
    host.take(release_of(project))
    left = host.folder / contract.SPARE_DIR / os.fsdecode(INCOMING + b"0123456789abcdef")
    (left / "project").mkdir(parents=True)
    host.take(release_of(project))
    assert not left.exists()


def test_a_project_that_has_little_in_common_with_the_copy_makes_no_use_of_it(project, release_of, host, tmp_path):
    other = tmp_path / "other"
    other.mkdir()
    for number in range(3000):
        (other / f"{number}.txt").write_text("")
    fill(project)
    host.take(release_of(project))
    copied = set(inodes(spare_of(host)).values())
    second = host.take(release_of(other))
    check_exact(host, second, other)
    assert not copied & set(inodes(release_folder(host, second)).values())
    assert second.tree_hash == spare_of(host).name
