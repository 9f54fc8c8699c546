"""A release on its way to a host that is this machine: what arrives, what is sent, what is put right, what goes."""

import hashlib
import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from tests.hosts.sync.files import tree
from ttlaunch import contract
from ttlaunch.agent import releases
from ttlaunch.errors import SyncError
from ttlaunch.hosts.sync import release as make
from ttlaunch.hosts.sync import send_buffer
from ttlaunch.hosts.sync.data import DataItem
from ttlaunch.hosts.sync.report import check_size, check_synced
from ttlaunch.hosts.sync.results import Planned
from ttlaunch.hosts.sync.send import sync_release
from ttlaunch.hosts.sync.send_buffer import SourceChangedError
from ttlaunch.hosts.transport.local import LocalTransport
from ttlaunch.hosts.transport.pushed import start_script
from ttlaunch.spec.recipe.corpus import read_corpus


@pytest.fixture
def whole_package():
    """Ask for it to copy all of ttlaunch."""


@pytest.fixture(autouse=True)
def few_modules(monkeypatch, request):
    """Copy a few of ttlaunch's thousand modules with a project, which says as much of what is on its way in a tenth of the time."""
    if "whole_package" not in request.fixturenames:
        monkeypatch.setattr(make, "_package_parts", lambda: [(Path(releases.__file__).parent, "ttlaunch/agent")])


def fill(folder):
    """Something of every kind."""
    for name, text in (("a.py", "a"), ("sub/b.py", "b" * 5000), ("sub/same.py", "a"), ("empty.py", "")):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)
    (folder / "run.sh").write_text("#!/bin/sh\n")
    (folder / "run.sh").chmod(0o755)
    (folder / "private.py").write_text("p")
    (folder / "private.py").chmod(0o600)
    (folder / "no/thing").mkdir(parents=True)
    (folder / "open").mkdir()
    (folder / "open").chmod(0o777)
    (folder / "link").symlink_to("sub/b.py")
    (folder / "nowhere").symlink_to("gone")
    (folder / "a b\n'\"$x;").write_text("hostile")
    Path(os.fsdecode(bytes(folder) + b"/\xff")).write_text("not text")
    (folder / "noise.bin").write_bytes(os.urandom(3_000_000))
    return folder


def test_everything_arrives_as_it_is(project, release_of, host, whole_package):
    fill(project)
    os.umask(os.umask(0o077))
    answer = host.take(release_of(project))
    assert tree(project) == tree(host.current)
    assert [answer.tree_hash] == host.releases
    assert answer.release == str(host.folder / "releases" / answer.tree_hash)
    assert answer.remote_folder == str(host.folder)
    assert (False, (), ()) == (answer.already_there, answer.pruned, answer.repaired)


def test_setuid_setgid_and_sticky_bits_do_not_arrive(project, release_of, host):
    (project / "tool").write_text("")
    (project / "tool").chmod(0o6755)
    (project / "shared").mkdir()
    (project / "shared").chmod(0o3777)
    host.take(release_of(project))
    modes = {name: oct(stat.S_IMODE((host.current / name).stat().st_mode)) for name in ("tool", "shared")}
    assert {"tool": "0o755", "shared": "0o777"} == modes


@pytest.mark.parametrize("umask", [0o000, 0o077])
def test_the_rights_do_not_depend_on_the_umask_of_the_host(project, release_of, host, umask):
    fill(project)
    release = release_of(project)
    before = os.umask(umask)
    try:
        host.take(release)
    finally:
        os.umask(before)
    assert tree(project) == tree(host.current)
    own = [host.folder / "current/manifest", host.folder / ".gitignore", host.folder / ".id"]
    assert [0] * 3 == [path.stat().st_mode & 0o022 for path in own]


def test_a_second_time_nothing_is_sent(project, release_of, host):
    fill(project)
    host.take(release_of(project))
    answer = host.take(release_of(project))
    assert (True, 0, 0) == (answer.already_there, answer.sent_bytes, answer.files)


def test_only_what_is_new_is_sent(project, release_of, host):
    fill(project)
    first = host.take(release_of(project))
    (project / "new.py").write_text("new")
    (project / "sub/b.py").unlink()
    (project / "sub/moved.py").write_text("b" * 5000)
    second = host.take(release_of(project))
    assert tree(project) == tree(host.current)
    assert 1 == second.files
    assert second.sent_bytes < 5000 < first.sent_bytes
    assert sorted([first.tree_hash, second.tree_hash]) == host.releases


@pytest.mark.parametrize(
    ("bytes_per_s", "compressed"), [(None, True), (1.2e8, True), (1e9, False)], ids=["unknown", "1 Gbit/s", "fast"]
)
def test_contents_are_compressed_unless_the_network_is_fast(project, release_of, host, bytes_per_s, compressed):
    (project / "text.py").write_text("the same again\n" * 100_000)
    release = release_of(project)
    answer = host.take(release, bytes_per_s=bytes_per_s)
    assert tree(project) == tree(host.current)
    assert compressed == (answer.sent_bytes < release.bytes)


def test_without_a_memory_of_the_last_sync_the_host_asks(project, release_of, host, tmp_path):
    fill(project)
    host.take(release_of(project))
    for file in (tmp_path / "cache/ttlaunch").glob("manifest-*"):
        file.write_bytes(b"no manifest")
    (project / "new.py").write_text("new")
    answer = host.take(release_of(project))
    assert tree(project) == tree(host.current)
    assert 1 == answer.files


def test_a_host_that_never_had_the_last_release_asks_for_everything(project, release_of, host, tmp_path):
    fill(project)
    host.take(release_of(project))
    (project / "new.py").write_text("new")
    other = type(host)(tmp_path / "another")
    other.take(release_of(project))
    assert tree(project) == tree(other.current)


def test_going_back_to_an_old_release_sends_nothing(project, release_of, host):
    (project / "a.py").write_text("1")
    old = host.take(release_of(project))
    (project / "a.py").write_text("2")
    host.take(release_of(project))
    (project / "a.py").write_text("1")
    answer = host.take(release_of(project))
    assert (True, old.tree_hash) == (answer.already_there, answer.tree_hash)
    assert "1" == (host.current / "a.py").read_text()


def damage_content(release):
    (release / "project/a.py").write_text("z")


def damage_quietly(release):
    file = release / "project/a.py"
    times = file.stat()
    file.write_text("z")
    os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns))


def damage_rights(release):
    (release / "project/a.py").chmod(0o777)


def remove_file(release):
    (release / "project/a.py").unlink()


def folder_for_file(release):
    (release / "project/a.py").unlink()
    (release / "project/a.py/deep").mkdir(parents=True)


def file_for_folder(release):
    subprocess.run(["rm", "-r", release / "project/sub"], check=True)
    (release / "project/sub").write_text("")


def other_link(release):
    (release / "project/link").unlink()
    (release / "project/link").symlink_to("a.py")


def no_manifest(release):
    (release / "manifest").unlink()
    damage_content(release)


def wrong_manifest(release):
    (release / "manifest").write_bytes((release / "manifest").read_bytes() + b"x")


def wrong_signatures(release):
    for file in release.glob("signatures-*"):
        file.write_bytes(os.urandom(100))
    damage_quietly(release)


def file_for_release(release):
    subprocess.run(["rm", "-r", release], check=True)
    release.write_text("")


DAMAGES = {
    damage_content: ["project/a.py"],
    damage_quietly: ["project/a.py"],
    damage_rights: ["project/a.py"],
    remove_file: ["project/a.py"],
    folder_for_file: ["project/a.py"],
    file_for_folder: ["project/sub", "project/sub/b.py", "project/sub/same.py"],
    other_link: ["project/link"],
    no_manifest: ["project/a.py"],
    wrong_manifest: [],
    wrong_signatures: ["project/a.py"],
    file_for_release: [],
}


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: damage.__name__)
def test_a_release_that_was_changed_on_the_host_is_put_right(project, release_of, host, damage):
    fill(project)
    release = release_of(project)
    first = host.take(release)
    damage(host.folder / "releases" / first.tree_hash)
    answer = host.take(release)
    assert tree(project) == tree(host.current)
    assert (False, DAMAGES[damage]) == (answer.already_there, list(answer.repaired))
    assert host.take(release).already_there
    assert [first.tree_hash] == host.releases


def test_what_was_put_right_is_said(project, release_of, host):
    fill(project)
    release = release_of(project)
    host.take(release)
    (host.current / "a.py").write_text("z")
    (found,) = check_synced(host.ask(release))
    message = "code on localhost had been changed there and was put right: `project/a.py`"
    assert ("warning", "S014", message) == (str(found.severity), found.code, found.message)


def test_a_damaged_old_release_is_no_source_for_a_new_one(project, release_of, host):
    fill(project)
    first = host.take(release_of(project))
    for path in (host.folder / "releases" / first.tree_hash / "project").rglob("*.py"):
        path.write_text("x" * path.stat().st_size)
    (project / "new.py").write_text("new")
    host.take(release_of(project))
    assert tree(project) == tree(host.current)


def test_only_the_newest_releases_stay(project, release_of, host):
    made = []
    for number in range(5):
        (project / "a.py").write_text(str(number))
        made.append(host.take(release_of(project), keep=2))
    assert sorted(answer.tree_hash for answer in made[-2:]) == host.releases
    assert [(), (), *((old.tree_hash,) for old in made[:3])] == [answer.pruned for answer in made]


def test_a_release_in_use_stays(project, release_of, host):
    (project / "a.py").write_text("1")
    used = host.take(release_of(project)).tree_hash
    lock = releases.hold_release(bytes(host.folder), used)
    for number in range(2, 4):
        (project / "a.py").write_text(str(number))
        newest = host.take(release_of(project), keep=1).tree_hash
    assert sorted([used, newest]) == host.releases
    os.close(lock)
    assert (used,) == host.take(release_of(project), keep=1).pruned
    assert [newest] == host.releases


def locks(host):
    return sorted(path.name for path in (host.folder / "releases").glob("*.lock"))


def test_a_lock_goes_with_its_release_and_stays_while_somebody_holds_it(project, release_of, host):
    for number in range(3):
        (project / "a.py").write_text(str(number))
        newest = host.take(release_of(project), keep=1).tree_hash
    assert [f"{newest}.lock"] == locks(host)
    abandoned, used = "a" * 64, "b" * 64
    os.close(releases.hold_release(bytes(host.folder), abandoned))
    lock = releases.hold_release(bytes(host.folder), used)
    host.take(release_of(project))
    assert sorted([f"{newest}.lock", f"{used}.lock"]) == locks(host)
    os.close(lock)
    host.take(release_of(project))
    assert [f"{newest}.lock"] == locks(host)


def start_receiving(host, release):
    """A sync that has said hello and is not answered."""
    arguments = {
        "remote_folder": str(host.folder),
        "tree": release.tree_hash,
        "keep": 3,
        "dry_run": False,
        "same_names": [],
        "data": [],
        "news": None,
        "owner": "0123456789abcdef",
    }
    transport = LocalTransport("localhost")
    beside = ("claims", "releases", "unpack", "host_data", "spare")
    stream = start_script(transport, "receive", beside=beside, arguments=arguments, timeout_s=10)
    return transport, stream


def test_what_a_killed_sync_left_is_removed_by_the_next(project, release_of, host):
    fill(project)
    release = release_of(project)
    transport, stream = start_receiving(host, release)
    assert "manifest" == stream.expect(timeout_s=10)[0]["kind"]
    stream.send({"kind": "manifest"}, release.manifest.text, timeout_s=10)
    assert "want" == stream.expect(timeout_s=10)[0]["kind"]
    transport.close()
    assert [".incoming-0123456789abcdef"] == [name for name in host.releases if not name.endswith(".lock")]
    assert not os.path.lexists(host.folder / "current")
    answer = host.take(release)
    assert [answer.tree_hash] == host.releases
    assert [f"{answer.tree_hash}.lock"] == [name for name in os.listdir(host.folder / "releases") if "lock" in name]


def test_a_sync_that_goes_on_is_left_alone_by_another(project, release_of, host):
    fill(project)
    release = release_of(project)
    transport, stream = start_receiving(host, release)
    stream.expect(timeout_s=10)
    stream.send({"kind": "manifest"}, release.manifest.text, timeout_s=10)
    header, bits = stream.expect(timeout_s=10)
    host.take(release)  # the same tree arrives meanwhile
    for content in release.manifest.sources.values():
        with open(content.source, "rb") as file:
            stream.send({"kind": "blobs"}, file.read(), timeout_s=10)
    done, _ = stream.expect(timeout_s=10)
    while done["kind"] == "busy":
        done, _ = stream.expect(timeout_s=10)
    assert ("want", "done") == (header["kind"], done["kind"])
    stream.process.close_stdin()
    stream.process.wait(timeout_s=10)
    assert tree(project) == tree(host.current)
    assert [release.tree_hash] == host.releases
    assert bits
    transport.close()


def test_the_host_side_ends_and_tidies_up_when_the_launching_machine_has_gone(project, release_of, host):
    fill(project)
    release = release_of(project)
    transport, stream = start_receiving(host, release)
    stream.expect(timeout_s=10)
    stream.send({"kind": "manifest"}, release.manifest.text, timeout_s=10)
    stream.expect(timeout_s=10)
    stream.process.close_stdin()
    assert 1 == stream.process.wait(timeout_s=10)
    assert [] == host.releases
    transport.close()


def test_other_content_than_was_announced_is_refused(project, release_of, host):
    (project / "a.py").write_text("right")
    release = release_of(project)
    transport, stream = start_receiving(host, release)
    stream.expect(timeout_s=10)
    stream.send({"kind": "manifest"}, release.manifest.text, timeout_s=10)
    header, _ = stream.expect(timeout_s=10)
    stream.send({"kind": "blobs"}, b"?" * header["bytes"], timeout_s=10)
    answer, _ = stream.expect(timeout_s=10)
    assert ("error", "damaged") == (answer["kind"], answer["why"])
    transport.close()


def test_a_file_that_changes_on_its_way_is_read_again(project, release_of, host, monkeypatch):
    (project / "a.py").write_text("1")
    release = release_of(project)
    (project / "a.py").write_text("2")
    outcome = host.ask(release)
    assert outcome.release.tree_hash != release.tree_hash
    assert outcome.release.tree_hash == outcome.hosts["localhost"].tree_hash
    assert "2" == (host.current / "a.py").read_text()
    message = f"files changed while they were copied, so hosts were given what they held afterwards: `{project}/a.py`"
    assert [("warning", "S018", message)] == [
        (str(one.severity), one.code, one.message) for one in check_synced(outcome)
    ]


def test_what_a_release_that_is_made_again_leaves_out_is_named(project, release_of, host):
    (project / "a.py").write_text("1")
    release = release_of(project)
    (project / "a.py").write_text("2")
    (project / "prod.env").write_text("TOKEN=1")
    found = [(one.code, one.message) for one in check_synced(host.ask(release))]
    assert ("S001", "1 file that may hold secrets stays here: `prod.env`") in found
    assert not (host.current / "prod.env").exists()


def test_a_file_that_changes_each_time_is_given_up(project, release_of, host, monkeypatch):
    file = project / "a.py"
    file.write_text("1")
    release = release_of(project)
    real = send_buffer.Content.read

    def read(content):
        if content.name == str(file):
            file.write_text(file.read_text() + "1")
        yield from real(content)

    monkeypatch.setattr(send_buffer.Content, "read", read)
    with pytest.raises(SourceChangedError, match=r"a\.py changed while it was being copied"):
        host.ask(release)
    assert not os.path.lexists(host.folder / "current")


def test_a_dry_run_says_what_is_missing_and_changes_nothing(project, release_of, host):
    fill(project)
    release = release_of(project)
    planned = host.ask(release, dry_run=True).hosts["localhost"]
    assert isinstance(planned, Planned)
    assert len(release.manifest.sources) == planned.files
    assert sum(entry.size for entry in release.manifest.sources.values()) == planned.bytes
    assert not host.folder.exists()
    host.take(release)
    before = tree(host.folder)
    assert host.ask(release, dry_run=True).hosts["localhost"].already_there
    (project / "a.py").write_text("changed")
    planned = host.ask(release_of(project), dry_run=True, keep=1).hosts["localhost"]
    assert (1, 7, False) == (planned.files, planned.bytes, planned.already_there)
    assert before == tree(host.folder)


def test_more_than_is_sent_unasked_is_noticed_before(project, release_of, host):
    fill(project)
    release = release_of(project)
    planned = host.ask(release, dry_run=True)
    total = planned.hosts["localhost"].bytes
    assert check_size(planned, allowed=total) is None
    found = check_size(planned, allowed=2_000_000)
    assert "S006" == found.code
    assert f"{total / 1e6:.1f} MB would be sent to 1 host, more than 2.0 MB" == found.message
    assert ("the largest file is noise.bin: 3.0 MB",) == found.notes


def text_of(path, content):
    path.write_bytes(content)
    return DataItem(hashlib.sha256(content).hexdigest(), len(content), path)


def test_a_text_outside_the_project_is_sent_once(project, release_of, host, tmp_path, monkeypatch):
    (project / "a.py").write_text("")
    item = text_of(tmp_path / "book.txt", b"once upon a time" * 1000)
    moved = DataItem(item.sha256, item.size, tmp_path / "elsewhere.txt")
    item.path.rename(moved.path)
    release = release_of(project)
    monkeypatch.setattr(DataItem, "file", "/not/on/the/host")
    answer = host.take(release, data=[moved])
    there = str(host.folder / "data" / item.sha256)
    assert {item.sha256: there} == answer.data
    assert moved.path.read_bytes() == Path(there).read_bytes()
    again = host.take(release, data=[moved])
    assert (True, 0, {item.sha256: there}) == (again.already_there, again.sent_bytes, again.data)


def test_a_text_that_the_host_has_at_the_same_place_is_used_there(project, release_of, host, tmp_path):
    item = text_of(tmp_path / "book.txt", b"once upon a time")
    answer = host.take(release_of(project), data=[item])
    assert {item.sha256: str(item.path)} == answer.data
    assert [] == sorted(path.name for path in (host.folder / "data").iterdir() if len(path.name) == 64)


def test_a_text_of_the_project_is_used_in_the_release(project, release_of, host):
    item = text_of(project / "book.txt", b"once upon a time")
    answer = host.take(release_of(project), data=[item])
    assert {item.sha256: f"{answer.release}/project/book.txt"} == answer.data


def test_a_host_with_another_text_at_that_place_is_sent_ours_and_that_is_said(
    project, release_of, host, tmp_path, monkeypatch
):
    item = text_of(tmp_path / "book.txt", b"ours")
    (tmp_path / "theirs.txt").write_bytes(b"another")
    monkeypatch.setattr(DataItem, "file", str(tmp_path / "theirs.txt"))
    outcome = host.ask(release_of(project), data=[item])
    answer = outcome.hosts["localhost"]
    assert b"ours" == Path(answer.data[item.sha256]).read_bytes()
    (found,) = check_synced(outcome)
    path = tmp_path / "theirs.txt"
    message = f"localhost has another text at {path} than the launching machine; the launching machine's is used"
    assert ("warning", "S012", message) == (str(found.severity), found.code, found.message)


def test_a_damaged_text_is_sent_again(project, release_of, host, tmp_path, monkeypatch):
    item = text_of(tmp_path / "book.txt", b"once upon a time")
    monkeypatch.setattr(DataItem, "file", None)
    there = Path(host.take(release_of(project), data=[item]).data[item.sha256])
    there.write_bytes(b"ONCE UPON A TIME")
    host.take(release_of(project), data=[item])
    assert b"once upon a time" == there.read_bytes()


def test_the_default_text_is_sent(project, release_of, host):
    corpus = read_corpus(None)
    item = DataItem(corpus.sha256, len(corpus.text), None)
    answer = host.take(release_of(project), data=[item])
    assert corpus.text == Path(answer.data[corpus.sha256]).read_bytes()


@pytest.mark.parametrize(
    ("what", "code", "message"),
    [
        ("file", "S010", "{folder}/releases on localhost cannot be written: not a directory"),
        ("current", "S010", "{folder}/current on localhost cannot be written: is a directory"),
    ],
)
def test_something_in_the_way_is_named(project, release_of, host, what, code, message):
    (project / "a.py").write_text("")
    if what == "file":
        host.folder.write_text("")
    else:
        (host.folder / "current").mkdir(parents=True)
    with pytest.raises(SyncError) as raised:
        host.take(release_of(project))
    assert (code, message.format(folder=host.folder)) == (raised.value.code, raised.value.evidence)


def test_a_run_finds_its_release_by_the_names_of_the_contract(project, release_of, host, whole_package):
    (project / "a.py").write_text("")
    answer = host.take(release_of(project))
    here = Path(answer.release)
    assert here == host.folder / contract.RELEASES_DIR / answer.tree_hash
    assert (here / contract.PROJECT_DIR / "a.py").is_file()
    assert (here / contract.PACKAGE_DIR / "ttlaunch/contract.py").is_file()
    code = f"import sys; sys.path.insert(0, {str(here / contract.PACKAGE_DIR)!r}); import ttlaunch; print(ttlaunch.__file__)"
    python = subprocess.run([sys.executable, "-I", "-c", code], capture_output=True, text=True, check=True)
    assert str(here / contract.PACKAGE_DIR / "ttlaunch/__init__.py") == python.stdout.strip()


def test_two_names_of_one_folder_are_sent_one_copy(project, release_of, host):
    """Two hosts that are the same machine, or see the same file system."""
    fill(project)
    release = release_of(project)
    transports = [LocalTransport("one"), LocalTransport("two")]
    outcome = sync_release(transports, release=release, remote_folder=str(host.folder))
    for transport in transports:
        transport.close()
    assert [None, None] == [getattr(answer, "evidence", None) for answer in outcome.hosts.values()]
    sent = sorted(answer.files for answer in outcome.hosts.values())
    assert [0, len(release.manifest.sources)] == sent
    assert tree(project) == tree(host.current)
    assert ["one", "two"] == list(outcome.hosts)
