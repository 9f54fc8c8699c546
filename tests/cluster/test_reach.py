"""Reaching hosts that are ill: what is said, how soon, and that a connection notices when its host is gone."""

import json
import subprocess
import sys
from textwrap import dedent

import pytest

pytestmark = pytest.mark.cluster

DRIVER = """
import json, sys, time
from ttlaunch.errors import HostError
from ttlaunch.hosts.transport.fleet import on_each
from ttlaunch.hosts.transport.address import HostAddress
from ttlaunch.hosts.transport.ssh import SshTransport
from ttlaunch.hosts.transport.transport import run

def say(**words):
    print(json.dumps(words), flush=True)

def listen():
    sys.stdin.readline()

def attempt(call):
    began = time.monotonic()
    try:
        value, trouble, evidence = call(), None, None
    except HostError as error:
        value, trouble, evidence = None, error.trouble, error.evidence
    say(value=value, trouble=trouble, evidence=evidence, seconds=time.monotonic() - began)

def host(name, **address):
    return SshTransport(HostAddress(name, **address))
"""


class Driver:
    """A Python program on the launcher that uses our transport; it speaks in lines of JSON."""

    def __init__(self, cluster, text):
        code = DRIVER + dedent(text)
        streams = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        self._process = cluster.popen("launcher", [sys.executable, "-c", code], **streams)

    def hear(self):
        line = self._process.stdout.readline()
        assert line, self._process.stderr.read()
        return json.loads(line)

    def go_on(self):
        self._process.stdin.write("\n")
        self._process.stdin.flush()

    def close(self):
        _, errors = self._process.communicate(timeout=60)
        assert errors == ""
        assert self._process.returncode == 0


@pytest.fixture
def drive():
    """`drive(cluster, text)`: start a driver; its end is waited for and must be a good one."""
    drivers = []

    def start(cluster, text):
        drivers.append(Driver(cluster, text))
        return drivers[-1]

    yield start
    for driver in drivers:
        driver.close()


@pytest.fixture
def cluster(make_cluster):
    return make_cluster(hosts=2)


def connect(drive, cluster, name="node0", *, timeout_s=3, address=""):
    answer = drive(cluster, f"attempt(lambda: host({name!r}, {address}).connect(timeout_s={timeout_s}))").hear()
    return answer["trouble"], answer["evidence"], answer["seconds"]


def test_a_healthy_host_is_reached_as_another_user_too(cluster, drive):
    cluster.add_user("node0", "ttuser")
    driver = drive(
        cluster, "attempt(lambda: run(host('node0', user='ttuser'), 'id -un', timeout_s=10).stdout.decode())"
    )
    assert driver.hear()["value"] == "ttuser\n"


def test_addresses_are_those_on_the_network(cluster, drive):
    driver = drive(cluster, "one = host('node0'); attempt(one.connect); attempt(lambda: one.addresses)")
    assert driver.hear()["trouble"] is None
    assert driver.hear()["value"] == [cluster.ip("launcher"), cluster.ip("node0")]


def test_a_name_that_nobody_can_look_up_is_told(cluster, drive):
    trouble, evidence, seconds = connect(drive, cluster, "node7")
    assert (trouble, evidence) == ("unknown name", "no address for `node7`: the name server does not answer")
    assert seconds < 3


def test_a_closed_port_is_told_at_once(cluster, drive):
    cluster.stop_sshd("node0")
    trouble, evidence, seconds = connect(drive, cluster)
    assert (trouble, evidence) == ("unreachable", "connection refused on port 22")
    assert seconds < 2


def test_a_host_without_power_is_given_up_at_the_deadline(cluster, drive):
    cluster.kill("node0")
    trouble, evidence, seconds = connect(drive, cluster)
    assert trouble == "unreachable"
    assert evidence in {"no answer on port 22 within 3 s", "no route to host"}
    assert seconds < 4


def test_a_port_that_says_nothing_is_given_up_at_the_deadline(cluster, drive):
    cluster.silent_port("node0")
    trouble, evidence, seconds = connect(drive, cluster)
    assert (trouble, evidence) == ("silent", "accepts connections on port 22 and sends nothing within 3 s")
    assert seconds < 4


def test_a_frozen_host_is_given_up_at_the_deadline(cluster, drive):
    cluster.pause("node0")
    trouble, evidence, seconds = connect(drive, cluster)
    cluster.resume("node0")
    assert (trouble, evidence) == ("silent", "accepts connections on port 22 and sends nothing within 3 s")
    assert seconds < 4


def test_a_changed_host_key_is_refused(cluster, drive):
    cluster.new_host_key("node0")
    trouble, evidence, _ = connect(drive, cluster)
    assert trouble == "changed host key"
    assert evidence.startswith("its host key has changed to ED25519 SHA256:")


def test_a_host_that_takes_only_passwords_is_told(cluster, drive):
    cluster.password_only("node0")
    trouble, evidence, _ = connect(drive, cluster)
    assert (trouble, evidence) == ("login refused", "takes only passwords")


def test_a_power_cut_is_noticed_while_nothing_is_said(cluster, drive):
    driver = drive(
        cluster,
        """
        one = host("node0")
        process = one.start("cat")
        say(ready=True)
        listen()
        attempt(lambda: process.read(timeout_s=60))
        attempt(lambda: one.start("true", timeout_s=60))
        """,
    )
    assert driver.hear() == {"ready": True}
    cluster.kill("node0")
    driver.go_on()
    answer = driver.hear()
    assert answer["trouble"] == "connection lost"
    assert answer["evidence"] == "the connection broke: no answer for 6 s"
    assert answer["seconds"] < 9
    assert driver.hear()["trouble"] == "connection lost"


def test_a_pulled_cable_is_noticed_in_the_middle_of_data(cluster, drive):
    driver = drive(
        cluster,
        """
        one = host("node0")
        process = one.start("cat >/dev/null")
        process.write(bytes(1_000_000), timeout_s=10)
        say(ready=True)
        listen()
        def pour():
            while True:
                process.write(bytes(1_000_000), timeout_s=60)
        attempt(pour)
        """,
    )
    assert driver.hear() == {"ready": True}
    cluster.link("node0", up=False)
    driver.go_on()
    answer = driver.hear()
    assert (answer["trouble"], answer["evidence"]) == ("connection lost", "the connection broke: no answer for 6 s")
    assert answer["seconds"] < 12


def test_every_call_to_a_frozen_host_keeps_its_deadline_and_works_again_afterwards(cluster, drive):
    driver = drive(
        cluster,
        """
        one = host("node0")
        process = one.start("cat")
        say(ready=True)
        listen()
        attempt(lambda: process.read(timeout_s=1))
        attempt(lambda: process.wait(timeout_s=1))
        attempt(lambda: one.start("true", timeout_s=1))
        listen()
        process.write(b"awake", timeout_s=10)
        attempt(lambda: process.read(timeout_s=10).decode())
        attempt(lambda: run(one, "echo new", timeout_s=10).stdout.decode())
        """,
    )
    assert driver.hear() == {"ready": True}
    cluster.pause("node0")
    driver.go_on()
    answers = [driver.hear() for _ in range(3)]
    assert [answer["evidence"] for answer in answers] == [
        "no answer from a command within 1 s",
        "a command is still running after 1 s",
        "it has not started a command within 1 s",
    ]
    assert max(answer["seconds"] for answer in answers) < 2
    cluster.resume("node0")
    driver.go_on()
    assert [driver.hear()["value"] for _ in range(2)] == ["awake", "new\n"]


def test_a_flood_to_a_frozen_host_ends_at_the_deadline(cluster, drive):
    driver = drive(
        cluster,
        """
        process = host("node0").start("cat >/dev/null")
        say(ready=True)
        listen()
        attempt(lambda: process.write(bytes(200_000_000), timeout_s=2))
        """,
    )
    assert driver.hear() == {"ready": True}
    cluster.pause("node0")
    driver.go_on()
    answer = driver.hear()
    cluster.resume("node0")
    assert (answer["trouble"], answer["evidence"]) == ("timed out", "a command has not read its input within 2 s")
    assert answer["seconds"] < 4


def test_one_dead_host_does_not_delay_the_answer_of_another(cluster, drive):
    cluster.kill("node0")
    driver = drive(
        cluster,
        """
        began = time.monotonic()
        for one, answer in on_each([host("node0"), host("node1")], lambda one: one.connect(timeout_s=3), timeout_s=4):
            say(host=one.host, well=not isinstance(answer, HostError), seconds=time.monotonic() - began)
        """,
    )
    first, second = driver.hear(), driver.hear()
    assert (first["host"], first["well"]) == ("node1", True)
    assert first["seconds"] < 2
    assert (second["host"], second["well"]) == ("node0", False)
