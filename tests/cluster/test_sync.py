"""`ttlaunch sync` on real hosts: all have the same code or what they had before, and a bad day is named."""

import hashlib
import json
import os
import signal
import subprocess
from contextlib import contextmanager
from itertools import count
from pathlib import Path

import pytest

from tests.cluster.hosts import Cluster
from tests.cluster.keeper import wait_until
from tests.hosts.sync.files import git, tree
from ttlaunch import contract

pytestmark = pytest.mark.cluster

DONE, NOT_READY, NOT_SYNCED = contract.STATUS_DONE, contract.STATUS_HOST, contract.STATUS_SYNC
NUMBERS = count()


class Lab:
    """A project and a configuration on the launcher, and what of them the hosts have.

    Attributes:
        remote: The remote folder, another for each test.
    """

    def __init__(self, cluster, ttlaunch_on, folder, *, settings="", listed=None, remote=None):
        self.cluster, self.remote = cluster, remote or f"/root/syncs/{next(NUMBERS)}"
        self.project = folder / "project"
        self.project.mkdir()
        (folder / "lab").mkdir()
        self.listed = listed or cluster.hosts
        (folder / "lab/hosts.txt").write_text("".join(f"{host} slots=1\n" for host in self.listed))
        (folder / "lab/cluster.yaml").write_text(f"remote_folder: {self.remote}\n{settings}")
        self.ttlaunch = ttlaunch_on(cluster, cwd=self.project)

    def write(self, **files):
        for name, text in files.items():
            (self.project / f"{name}.py").write_text(text)

    def sync(self, words="", *, status=DONE):
        """Sync, wait until the hosts have made their copies for the next one, and return what the command says in JSON."""
        answer = self.ttlaunch(f"sync --on ../lab --format json {words}")
        assert status == answer.status, answer.stdout + answer.stderr
        for host in self.cluster.hosts if status == DONE else ():
            wait_until(lambda host=host: not self.left(host), what=f"{host} has made its copy")
        return json.loads(answer.stdout)

    def refused(self, words="", *, status=NOT_SYNCED):
        """Sync in vain: code and message of each mistake."""
        said = self.sync(words, status=status)["diagnostics"]
        return [(one["code"], one["message"]) for one in said if one["severity"] == "error"]

    def path(self, host, name=""):
        return self.cluster.path(host, f"{self.remote}/{name}")

    def code(self, host):
        """The project as the host has it; None if it has none."""
        current = self.path(host, "current/project")
        return tree(current) if current.is_dir() else None

    def left(self, host):
        """Names of what lies beside the releases and their locks, and beside the spare copy once it is complete."""
        names = [path.name for folder in ("releases", "spare") for path in self.path(host, folder).glob("*")]
        return [name for name in names if len(name.removesuffix(".lock")) != 64]


@pytest.fixture(scope="module")
def hosts(_hosts_can_start):
    """Three hosts for tests that do them no harm."""
    with Cluster(hosts=3) as cluster:
        yield cluster


@pytest.fixture
def lab(hosts, ttlaunch_on, tmp_path):
    return Lab(hosts, ttlaunch_on, tmp_path)


@pytest.fixture
def own_lab(make_cluster, ttlaunch_on, tmp_path):
    """`own_lab(hosts=2, settings=…, listed=…, remote=…)`: hosts that this test alone has, to harm them."""

    def make(*, settings="", listed=None, remote=None, **options):
        cluster = make_cluster(**{"hosts": 2} | options)
        hosts = listed(cluster) if listed else None
        return Lab(cluster, ttlaunch_on, tmp_path, settings=settings, listed=hosts, remote=remote)

    return make


def fill(folder):
    """Something of every kind."""
    (folder / "sub/deep").mkdir(parents=True)
    (folder / "empty/in").mkdir(parents=True)
    for name in ("-rf", "a b", "new\nline", "quo'te\"", "übung", "$(reboot)", "*", "back\\slash", "sub/deep/file.py"):
        (folder / name).write_text(f"text of {name}\n")
    Path(os.fsdecode(bytes(folder) + b"/\xff\xfe")).write_text("the name is no text")
    (folder / "run.sh").write_text("#!/bin/sh\n")
    (folder / "run.sh").chmod(0o755)
    (folder / "read-only").write_text("")
    (folder / "read-only").chmod(0o444)
    (folder / "link").symlink_to("sub/deep")
    (folder / "dangling").symlink_to("nowhere")
    (folder / "noise").write_bytes(os.urandom(300_000))


def test_every_host_has_the_same_whatever_the_files_are(lab):
    fill(lab.project)
    said = lab.sync()
    assert [[tree(lab.project)] * 3, []] == [[lab.code(host) for host in lab.listed], said["diagnostics"]]
    for host, row in zip(lab.listed, said["hosts"], strict=True):
        assert (host, None, False) == (row["host"], row["error"], row["already_there"])
        assert f"{lab.remote}/releases/{said['tree_hash']}" == row["release"]
        assert [] == lab.left(host)


def test_only_changes_travel_and_without_a_change_nothing_does(lab):
    fill(lab.project)
    cold = lab.sync()
    same = lab.sync()
    assert [(True, 0)] * 3 == [(row["already_there"], row["sent_bytes"]) for row in same["hosts"]]
    lab.write(new="new = 1\n")
    (lab.project / "noise").unlink()
    changed = lab.sync()
    assert [1] * 3 == [row["files"] for row in changed["hosts"]]
    assert all(row["sent_bytes"] < 2000 for row in changed["hosts"])
    assert 3 == len({cold["tree_hash"], changed["tree_hash"], "another"})
    assert [tree(lab.project)] * 3 == [lab.code(host) for host in lab.listed]


def test_a_repository_is_copied_without_what_git_ignores_and_without_secrets(lab):
    git(lab.project, "init", "-q")
    for name in ("train.py", "run.log", ".env", "id_rsa"):
        (lab.project / name).write_text("1")
    (lab.project / ".gitignore").write_text("*.log\n")
    answer = lab.ttlaunch("sync --on ../lab --format concise")
    assert "warning[S001]: 2 files that may hold secrets stay here: `.env` and `id_rsa`" in answer.stderr
    assert [{b".gitignore", b"train.py"}] * 3 == [set(lab.code(host)) for host in lab.listed]


def test_a_dry_run_makes_nothing_on_any_host(lab):
    lab.write(a="1")
    said = lab.sync("--dry-run")
    assert [False] * 3 == [lab.path(host).exists() for host in lab.listed]
    assert [said["hosts"][0]["files"]] * 3 == [row["files"] for row in said["hosts"]]
    answer = lab.ttlaunch("sync --on ../lab --dry-run")
    assert f"would be sent to {lab.remote}" in answer.stdout


def test_code_that_was_changed_on_a_host_is_put_right_with_a_warning(lab):
    lab.write(a="1", b="2")
    lab.sync()
    (lab.path("node1", "current/project") / "a.py").write_text("3")
    answer = lab.ttlaunch("sync --on ../lab")
    message = "warning[S014]: code on node1 had been changed there and was put right: `project/a.py`"
    assert (DONE, message) == (answer.status, answer.stderr.strip())
    assert [tree(lab.project)] * 3 == [lab.code(host) for host in lab.listed]


def test_a_recipe_and_its_text_come_along(lab, tmp_path):
    text = b"once upon a time there was a host\n" * 400
    (tmp_path / "book.txt").write_bytes(text)
    for host, content in (("node1", text), ("node2", text[::-1])):
        there = lab.cluster.path(host, str(tmp_path / "book.txt"))
        there.parent.mkdir(parents=True, exist_ok=True)
        there.write_bytes(content)
    path = tmp_path / "book.txt"
    words = f"hierarchical_parallel --set training_config.data_path={path} --set multihost_config.enabled=false"
    said = lab.sync(words, status=DONE)
    sha256 = hashlib.sha256(text).hexdigest()
    sent = f"{lab.remote}/data/{sha256}"
    assert [sent, str(path), sent] == [row["data"][sha256] for row in said["hosts"]]
    assert text == lab.path("node0", f"data/{sha256}").read_bytes()
    message = f"node2 has another text at {path} than the launching machine; the launching machine's is used"
    assert [("S012", message)] == [(one["code"], one["message"]) for one in said["diagnostics"]]
    assert lab.path("node0", "current/package/ttlaunch/_recipes/hierarchical_parallel/trainer.py").is_file()


def test_gigabytes_are_not_sent_unasked(lab):
    with (lab.project / "checkpoint.bin").open("wb") as file:
        file.truncate(400_000_000)
    ((code, message),) = lab.refused()
    assert ("S006", "1.2 GB would be sent to 3 hosts, more than 1.1 GB") == (code, message)
    assert [False] * 3 == [lab.path(host).exists() for host in lab.listed]


def test_a_release_in_use_is_not_removed(lab):
    lab.write(a="1")
    used = lab.sync()["tree_hash"]
    lock = f"{lab.remote}/{contract.release_lock(used)}"
    run = lab.cluster.popen("node0", ["flock", "--shared", lock, "sleep", "600"])
    try:
        locked = ["flock", "--exclusive", "--nonblock", lock, "true"]
        wait_until(lambda: lab.cluster.run("node0", locked).returncode, what="the release in use")
        for number in (2, 3):
            lab.write(a=str(number))
            said = lab.sync("--keep 1")
        there = [lab.path(host, f"releases/{used}").exists() for host in lab.listed]
        assert ([True, False, False], []) == (there, said["diagnostics"])
    finally:
        run.kill()
        run.wait()


def test_two_names_of_one_machine_are_sent_one_copy(hosts, ttlaunch_on, tmp_path):
    lab = Lab(hosts, ttlaunch_on, tmp_path, listed=["node0", hosts.ip("node0")])
    fill(lab.project)
    said = lab.sync()
    files = sorted(row["files"] for row in said["hosts"])
    assert files[0] == 0 < files[1]
    assert tree(lab.project) == lab.code("node0")


def test_hosts_that_share_a_file_system_are_sent_one_copy(own_lab):
    lab = own_lab(shared_folder="/srv/shared", remote="/srv/shared/code")
    fill(lab.project)
    said = lab.sync()
    files = sorted(row["files"] for row in said["hosts"])
    assert files[0] == 0 < files[1]
    assert [tree(lab.project)] * 2 == [lab.code(host) for host in lab.listed]
    assert [True, True] == [row["already_there"] for row in lab.sync()["hosts"]]


def test_hosts_need_neither_git_nor_rsync_and_another_user_will_do(own_lab):
    lab = own_lab(settings="user: trainer\n", remote="~/code")
    for host in lab.listed:
        lab.cluster.add_user(host, "trainer")
        for program in ("/usr/bin/git", "/usr/bin/rsync"):
            lab.cluster.hide(host, program)
    fill(lab.project)
    said = lab.sync()
    assert ["/home/trainer/code"] * 2 == [row["remote_folder"] for row in said["hosts"]]
    current = [lab.cluster.path(host, "/home/trainer/code/current/project") for host in lab.listed]
    assert [tree(lab.project)] * 2 == [tree(path) for path in current]


def test_a_full_disk_is_named_and_the_other_host_is_ready(own_lab):
    lab = own_lab(remote="/root/code")
    lab.write(a="1")
    lab.cluster.small_disk("node1", "/root/code", size_mb=1)
    ((code, message),) = lab.refused()
    assert "S009" == code
    assert message.startswith("the disk of node1 is too full: 1.0 MB free in /root/code/releases, ")
    assert ([], None) == (lab.left("node1"), lab.code("node1"))
    assert tree(lab.project) == lab.code("node0")


def test_a_disk_that_fills_up_meanwhile_is_named_and_nothing_is_left_half_made(own_lab):
    """There is room when the host looks, and none when the file comes."""
    lab = own_lab(hosts=1, remote="/root/code")
    lab.write(a="1")
    lab.cluster.small_disk("node0", "/root/code", size_mb=60)  # room for two releases with the package
    old = (lab.sync()["tree_hash"], lab.code("node0"))
    (lab.project / "noise").write_bytes(os.urandom(9_000_000))
    lab.cluster.delay("node0", 40)
    process = lab.ttlaunch.start("sync --on ../lab --format json")
    wait_until(lambda: lab.left("node0") or process.poll() is not None, what="the beginning of a new release")
    lab.cluster.run("node0", ["dd", "if=/dev/zero", "of=/root/code/filler", "bs=1M"])
    stdout, _ = process.communicate(timeout=60)
    (said,) = json.loads(stdout)["diagnostics"]
    assert (NOT_SYNCED, "S009") == (process.returncode, said["code"])
    # On a slow machine the host may look only after the disk has begun to fill up.
    assert said["message"].startswith(
        ("the disk of node0 is full: no space left on device at", "the disk of node0 is too full:")
    )
    assert (old[1], []) == (lab.code("node0"), lab.left("node0"))
    assert [old[0]] == [path.name for path in lab.path("node0", "releases").iterdir() if path.is_dir()]


def test_the_copy_for_the_next_sync_gives_way_to_code_that_needs_its_room(own_lab):
    lab = own_lab(hosts=1, remote="/root/code")
    lab.write(a="1")
    lab.cluster.small_disk("node0", "/root/code", size_mb=60)
    copy = lab.path("node0", f"spare/{lab.sync()['tree_hash']}")
    wait_until(copy.exists, what="the copy for the next sync")
    disk, size = os.statvfs(copy), sum(path.lstat().st_blocks * 512 for path in copy.rglob("*"))
    for number in range(3000):  # most of the next release is not in the copy, so the copy is of no use
        (lab.project / f"{number}.txt").write_text(str(number))
    (lab.project / "noise").write_bytes(os.urandom(disk.f_bavail * disk.f_frsize - 3000 * 4096 - size // 2))
    lab.sync()
    assert [tree(lab.project), False] == [lab.code("node0"), copy.exists()]


def test_a_target_that_is_read_only_is_named(own_lab):
    lab = own_lab(remote="/srv/code")
    lab.write(a="1")
    lab.cluster.make_read_only("node0", "/srv")
    assert [("S010", "/srv/code on node0 cannot be written: read-only file system")] == lab.refused()
    assert tree(lab.project) == lab.code("node1")


def test_a_host_without_python_is_named(own_lab):
    lab = own_lab()
    lab.write(a="1")
    for name in ("/usr/bin/python3", "/usr/local/bin/python3", "/usr/bin/python3.11"):
        if lab.cluster.path("node1", name).exists():
            lab.cluster.hide("node1", name)
    ((code, message),) = lab.refused(status=NOT_READY)
    assert "H014" == code
    assert "node1" in message or "1 of 2 hosts" in message


def test_a_host_that_cannot_be_reached_keeps_all_from_being_changed(own_lab):
    lab = own_lab()
    lab.write(a="1")
    lab.cluster.stop_sshd("node1")
    ((code, _),) = lab.refused(status=NOT_READY)
    assert ("H002", False) == (code, lab.path("node0").exists())


@contextmanager
def _on_its_way(lab):
    """A sync of a large file that node1 is in the middle of receiving; all have an old release."""
    lab.write(a="old")
    lab.sync()
    old = tree(lab.project)
    lab.write(a="new")
    (lab.project / "noise").write_bytes(os.urandom(40_000_000))
    lab.cluster.delay("node1", 20)
    process = lab.ttlaunch.start("sync --on ../lab --format json")
    try:
        wait_until(lambda: lab.left("node1"), what="the beginning of the new release")
        yield process, old
    finally:
        process.kill()
        process.communicate()


def _said(process):
    stdout, stderr = process.communicate(timeout=60)
    assert NOT_SYNCED == process.returncode, stderr
    return [(one["code"], one["message"], one["notes"]) for one in json.loads(stdout)["diagnostics"]]


def test_a_host_that_dies_meanwhile_is_named_and_comes_back_with_its_old_code(own_lab):
    lab = own_lab()
    with _on_its_way(lab) as (process, old):
        lab.cluster.kill("node1")
        ((code, message, notes),) = _said(process)
    assert "S011" == code
    assert message.startswith("node1 was lost while code was copied to it: ")
    assert "the code that it had before is untouched" == notes[0]
    assert tree(lab.project) == lab.code("node0")
    lab.cluster.revive("node1")
    lab.cluster.delay("node1", 0)
    assert old == lab.code("node1")
    lab.sync()
    assert (tree(lab.project), []) == (lab.code("node1"), lab.left("node1"))


def test_a_connection_that_breaks_meanwhile_is_named(own_lab):
    lab = own_lab()
    with _on_its_way(lab) as (process, old):
        for pid, words in lab.cluster.pids("node1").items():
            if "sshd: root" in words:
                os.kill(pid, signal.SIGKILL)
        ((code, message, _),) = _said(process)
    assert ("S011", True) == (code, message.startswith("node1 was lost while code was copied to it: "))
    wait_until(lambda: not lab.left("node1"), what="the host has tidied up by itself")
    assert old == lab.code("node1")


def test_a_sync_that_is_killed_leaves_the_old_code_and_the_next_one_brings_the_new(own_lab):
    lab = own_lab()
    with _on_its_way(lab) as (process, old):
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
    wait_until(lambda: not lab.left("node1"), what="the host has tidied up by itself")
    assert old == lab.code("node1")
    lab.cluster.delay("node1", 0)
    lab.sync()
    assert [tree(lab.project)] * 2 == [lab.code(host) for host in lab.listed]


def test_a_host_that_falls_silent_does_not_delay_the_others_and_is_named(own_lab):
    lab = own_lab()
    with _on_its_way(lab) as (process, _):
        lab.cluster.pause("node1")
        wait_until(lambda: lab.code("node0") == tree(lab.project), what="the new code on the other host")
        assert process.poll() is None
        ((code, message, _),) = _said(process)
    assert ("S011", True) == (code, message.startswith("node1 was lost while code was copied to it: "))


def test_a_file_that_changes_while_it_is_sent_is_sent_as_it_is_then(own_lab):
    lab = own_lab()
    with _on_its_way(lab) as (process, _):
        lab.write(a="changed meanwhile")
        stdout, stderr = process.communicate(timeout=60)
    assert DONE == process.returncode, stderr
    ours = {lab.code(host)[b"a.py"][1] for host in lab.listed}
    current = {lab.path(host, "current").readlink().name for host in lab.listed}
    said = json.loads(stdout)
    assert {said["tree_hash"]} == current
    assert 1 == len(ours)
    assert ours <= {b"new", b"changed meanwhile"}
    assert (ours == {b"changed meanwhile"}) == ("S018" in [one["code"] for one in said["diagnostics"]])


def test_two_syncs_at_once_both_succeed(lab):
    fill(lab.project)
    processes = [lab.ttlaunch.start("sync --on ../lab", stderr=subprocess.STDOUT) for _ in range(3)]
    said = [process.communicate(timeout=60)[0] for process in processes]
    assert [DONE] * 3 == [process.returncode for process in processes], said
    assert [tree(lab.project)] * 3 == [lab.code(host) for host in lab.listed]
    for host in lab.listed:
        wait_until(lambda host=host: not lab.left(host), what=f"{host} has tidied up")


def test_two_launchers_that_sync_different_code_at_once_mix_nothing(lab, tmp_path):
    projects = [lab.project, tmp_path / "other"]
    projects[1].mkdir()
    for project in projects:
        (project / "same.bin").write_bytes(b"the same in both" * 10_000)
        for number in range(30):
            (project / f"part_{number}.py").write_text(f"of {project.name} {number}\n" * 500)
        (project / "noise").write_bytes(os.urandom(2_000_000))
    lines = [f"sync --on ../lab --format json --folder {project}" for project in projects * 2]
    processes = [lab.ttlaunch.start(line) for line in lines]
    said = [process.communicate(timeout=120) for process in processes]
    assert [DONE] * 4 == [process.returncode for process in processes], said
    hashes = [json.loads(stdout)["tree_hash"] for stdout, _ in said]
    for host in lab.listed:
        for project, tree_hash in zip(projects, hashes, strict=False):
            assert tree(project) == tree(lab.path(host, f"releases/{tree_hash}/project"))
        assert lab.path(host, "current").readlink().name in hashes
        wait_until(lambda host=host: not lab.left(host), what=f"{host} has tidied up")
