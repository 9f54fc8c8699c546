"""`ttlaunch prepare` on real hosts: bare ones become ready, and bad days in the middle leave nothing half-made."""

import hashlib
import json
import os
import re
import signal
import sys
from textwrap import dedent

import pytest

from tests.cluster.keeper import wait_until
from tests.hosts.prepare.wheels import PINS, WheelFolder
from ttlaunch import contract

pytestmark = pytest.mark.cluster

READY, NOT_READY = contract.STATUS_DONE, contract.STATUS_HOST
IMPORTS = "import torch, mpi4py.MPI, numpy, pydantic, yaml, sys; print(sys.prefix)"


class Lab:
    """Hosts with nothing but a base Python, and `prepare` with small wheels instead of torch."""

    def __init__(self, cluster, ttlaunch, folder):
        self.cluster, self.ttlaunch, self.folder = cluster, ttlaunch, folder
        self.wheels = WheelFolder(folder / "wheels").add_everything()
        self.environment = self.wheels.environment | {"XDG_CACHE_HOME": str(folder / "cache")}
        (folder / "constraints.txt").write_text(PINS)
        (folder / "lab").mkdir()
        (folder / "lab/hosts.txt").write_text("".join(f"{host}\n" for host in cluster.hosts))

    def settings(self, **settings):
        (self.folder / "lab/cluster.yaml").write_text(json.dumps(settings) + "\n")

    def prepare(self, options=""):
        return self.ttlaunch(f"prepare --on lab {options}", environment=self.environment, timeout_s=120)

    def json(self, options=""):
        return json.loads(self.prepare(f"{options} --format json").stdout)

    def start(self):
        return self.ttlaunch.start("prepare --on lab", environment=self.environment)

    def large_torch(self):
        """A wheel that is on its way for a while."""
        return self.wheels.add("torch", "2.13.0", {"torch/__init__.py": "", "torch/data.bin": os.urandom(64 << 20)})

    def part_of(self, wheel, host):
        """Where a host keeps a wheel that has not arrived whole."""
        name = hashlib.sha256(wheel.read_bytes()).hexdigest()
        return self.cluster.path(host, f"/root/.ttlaunch/wheels/{name}.part")

    def imports(self, host):
        """Whether ranks could run there."""
        return self.cluster.run(host, ["/root/.ttlaunch/env/bin/python", "-c", IMPORTS]).stdout

    def entries(self, host, folder):
        """The names in a folder of a host's remote folder."""
        return sorted(self.cluster.run(host, ["ls", f"/root/.ttlaunch/{folder}"]).stdout.split())

    def says(self, text, *, status=NOT_READY):
        answer = self.prepare()
        shown = answer.stderr[answer.stderr.find("error[") :]
        shown = re.sub(r"[\d.]+ \w+ are (free|needed)", r"… are \1", shown)
        assert dedent(text).strip("\n") == shown.strip("\n")
        assert status == answer.status


@pytest.fixture
def lab(make_cluster, ttlaunch_on, tmp_path):
    """`lab(hosts=2, …)`: a new cluster whose hosts have no window to this machine's Python environment."""

    def make(**options):
        cluster = make_cluster(**{"hosts": 2, "share": (sys.base_prefix,)} | options)
        return Lab(cluster, ttlaunch_on(cluster), tmp_path)

    return make


def test_bare_hosts_without_pip_or_ensurepip_become_ready_with_one_command(lab):
    lab = lab()
    for host in lab.cluster.hosts:
        lab.cluster.run(
            host,
            ["sh", "-c", "mount -t tmpfs none $(dirname $(python3 -c 'import ensurepip as e; print(e.__file__)'))"],
        )
        assert 0 != lab.cluster.run(host, ["python3", "-m", "venv", "/var/tmp/x"]).returncode
    answer = lab.prepare()
    assert READY == answer.status, answer.stderr
    assert "2 hosts ready: 9 packages" == answer.stdout.splitlines()[-1]
    for host in lab.cluster.hosts:
        assert "/root/.ttlaunch/env\n" == lab.imports(host)


def test_hosts_that_share_their_disk_are_prepared_once(lab, tmp_path_factory):
    shared = str(tmp_path_factory.mktemp("shared"))
    lab = lab(hosts=3, shared_folder=shared)
    lab.settings(remote_folder=f"{shared}/ttlaunch")
    said = lab.json()
    assert ["made", "ready", "ready"] == sorted(host["state"] for host in said["hosts"])
    assert 1 == len({host["environment"] for host in said["hosts"]})
    assert 1 == sum(host["sent_bytes"] > 0 for host in said["hosts"])


def test_what_was_received_before_the_command_was_killed_is_not_sent_again(lab):
    lab = lab(hosts=1)
    wheel = lab.large_torch()
    lab.cluster.delay("node0", 30)  # so that the large wheel is on its way for a while
    process = lab.start()
    part = lab.part_of(wheel, "node0")
    wait_until(lambda: part.exists() and part.stat().st_size > 1 << 20, what="a part of torch")
    process.kill()
    process.communicate()
    received = part.stat().st_size
    assert received < wheel.stat().st_size
    assert "" == lab.imports("node0")
    lab.cluster.delay("node0", 0)
    said = lab.json()["hosts"][0]
    assert "made" == said["state"]
    assert said["sent_bytes"] <= wheel.stat().st_size - received
    assert "/root/.ttlaunch/env\n" == lab.imports("node0")


def test_a_command_killed_while_it_installs_leaves_the_old_environment_and_the_next_makes_the_new_one(lab):
    lab = lab(hosts=1)
    lab.prepare()
    old = lab.cluster.run("node0", ["readlink", "/root/.ttlaunch/env"]).stdout
    lab.wheels.add("numpy", "2.4.7", {"numpy/__init__.py": "import time\ntime.sleep(600)\n"})
    (lab.folder / "constraints.txt").write_text(PINS.replace("2.4.6", "2.4.7"))
    process = lab.start()
    wait_until(lambda: len(lab.entries("node0", "envs")) > 1, what="a second environment")
    process.send_signal(signal.SIGKILL)
    process.communicate()
    wait_until(lambda: not any("envs" in words for words in lab.cluster.pids("node0").values()), what="no pip left")
    assert old == lab.cluster.run("node0", ["readlink", "/root/.ttlaunch/env"]).stdout
    assert "/root/.ttlaunch/env\n" == lab.imports("node0")
    lab.wheels.add("numpy", "2.4.8", {"numpy/__init__.py": ""})
    (lab.folder / "constraints.txt").write_text(PINS.replace("2.4.6", "2.4.8"))
    assert READY == lab.prepare().status
    assert 1 == len(lab.entries("node0", "envs"))
    assert [] == [name for name in lab.entries("node0", "wheels") if name.endswith(".part")]


def test_a_host_that_dies_meanwhile_is_named_and_the_others_are_prepared(lab):
    lab = lab()
    part = lab.part_of(lab.large_torch(), "node1")
    lab.cluster.delay("node1", 30)
    process = lab.start()
    wait_until(part.exists, what="a part of torch")
    lab.cluster.kill("node1")
    stdout, stderr = process.communicate(timeout=100)
    assert NOT_READY == process.returncode
    assert ["H037"] == re.findall(r"error\[(\w+)\]: host `node1` was lost while being prepared", stderr)
    assert "1 host of 2 ready: 9 packages" == stdout.splitlines()[-1]
    lab.cluster.revive("node1")
    lab.cluster.delay("node1", 0)
    assert READY == lab.prepare().status
    assert "/root/.ttlaunch/env\n" == lab.imports("node1")


def test_a_host_whose_python_is_too_old_is_named_and_nothing_is_made_anywhere(lab):
    lab = lab(share=())
    real = lab.cluster.run("node1", ["readlink", "-f", "/usr/bin/python3"]).stdout.strip()
    lab.cluster.run("node1", ["cp", real, "/var/tmp/python"])
    facts = {"path": real, "version": "3.9.2", "minor": [3, 9]}
    lab.cluster.replace(
        "node1", real, f"#!/bin/sh\n[ $1 = -I ] || exec /var/tmp/python \"$@\"\necho '{json.dumps(facts)}'\n"
    )
    lab.says(f"""
        error[H030]: host `node1` has no Python 3.11 or newer: {real} too old (3.9.2)
         --> lab/hosts.txt:2:1
          |
        2 | node1
          | ^^^^^

        hint: `apt install python3` where that is 3.11 or newer; `python:` in cluster.yaml names one that lies elsewhere
    """)
    assert [] == lab.entries("node0", "envs")


def test_a_host_without_any_python_is_named(lab):
    lab = lab(share=())
    lab.cluster.hide("node1", lab.cluster.run("node1", ["readlink", "-f", "/usr/bin/python3"]).stdout.strip())
    lab.says("""
        error[H030]: host `node1` has no Python 3.11 or newer: no Python 3.9 or newer: looked for python3, /usr/bin/python3, /usr/local/bin/python3 and others
         --> lab/hosts.txt:2:1
          |
        2 | node1
          | ^^^^^

        hint: `apt install python3` where that is 3.11 or newer; `python:` in cluster.yaml names one that lies elsewhere
    """)


def test_a_disk_that_is_too_small_is_refused_before_anything_is_sent(lab):
    lab = lab()
    lab.cluster.small_disk("node0", "/root", size_mb=48)
    lab.says("""
        error[H031]: host `node0` has too little disk space for the environment in ~/.ttlaunch: … are needed, … are free
         --> lab/hosts.txt:1:1
          |
        1 | node0
          | ^^^^^

        hint: make room there, or choose another place with `remote_folder:` in cluster.yaml instead of `~/.ttlaunch`
    """)
    assert [] == lab.entries("node0", "wheels")
    assert "/root/.ttlaunch/env\n" == lab.imports("node1")


def test_a_disk_that_becomes_full_meanwhile_is_named_and_room_is_all_it_takes(lab):
    lab = lab()
    part = lab.part_of(lab.large_torch(), "node1")
    lab.cluster.small_disk("node1", "/root", size_mb=256)
    lab.cluster.delay("node1", 30)
    process = lab.start()
    wait_until(part.exists, what="a part of torch")
    lab.cluster.run("node1", ["dd", "if=/dev/zero", "of=/root/filler", "bs=1M"])
    _, stderr = process.communicate(timeout=100)
    expected = "host `node1` has too little disk space for the environment in ~/.ttlaunch: it became full, "
    found = next(line for line in stderr.splitlines() if line.startswith(f"error[H031]: {expected}"))
    assert re.fullmatch(r"[\d.]+ (bytes?|kB) are free", found.partition("it became full, ")[2])
    assert NOT_READY == process.returncode
    lab.cluster.run("node1", ["rm", "/root/filler"])
    assert READY == lab.prepare().status


def test_a_read_only_home_is_named(lab):
    lab = lab()
    lab.cluster.make_read_only("node1", "/root")
    lab.says("""
        error[H039]: host `node1` does not allow writing in ~/.ttlaunch: read-only file system: /root/.ttlaunch
         --> lab/hosts.txt:2:1
          |
        2 | node1
          | ^^^^^

        hint: `remote_folder:` in cluster.yaml names a folder that your user may write
    """)


def test_a_library_that_one_host_lacks_keeps_its_old_environment(lab):
    lab = lab()
    lab.prepare()
    old = lab.cluster.run("node1", ["readlink", "/root/.ttlaunch/env"]).stdout
    words = "libgomp.so.1: cannot open shared object file"
    lab.wheels.add(
        "torch", "2.13.1", {"torch/__init__.py": f"import os\nif os.uname()[1] == 'node1': raise OSError('{words}')"}
    )
    (lab.folder / "constraints.txt").write_text(PINS.replace("2.13.0", "2.13.1"))
    lab.says(f"""
        error[H036]: host `node1` has a new environment that does not work: torch cannot be imported: OSError: {words}
         --> lab/hosts.txt:2:1
          |
        2 | node1
          | ^^^^^
          = note: its `env` is what it was before
    """)
    assert old == lab.cluster.run("node1", ["readlink", "/root/.ttlaunch/env"]).stdout
    assert 1 == len(lab.entries("node1", "envs"))


def test_hosts_that_reach_no_index_are_sent_their_wheels_after_all(lab):
    lab = lab(hosts=1)
    said = lab.json("--from-index")["hosts"][0]
    assert ("made", False) == (said["state"], said["from_index"])
    assert said["sent_bytes"] == sum(path.stat().st_size for path in lab.wheels.folder.iterdir())
