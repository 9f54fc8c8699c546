"""The probe on this machine: what it says is what this machine has."""

import hashlib
import os
import platform
import shutil
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from importlib.metadata import version
from ipaddress import IPv4Address
from pathlib import Path

import psutil
import pytest

from ttlaunch import contract
from ttlaunch.agent import claims
from ttlaunch.engines.openmpi import SIGNATURE
from ttlaunch.errors import HostError, Trouble
from ttlaunch.hosts.doctor.facts import Clock, parse_facts
from ttlaunch.hosts.doctor.pairs import measure_pairs
from ttlaunch.hosts.doctor.probe_hosts import Question, probe, probe_all, question_for
from ttlaunch.hosts.transport.local import LocalTransport
from ttlaunch.hosts.transport.pushed import start_script


@pytest.fixture
def ask(tmp_path):
    """`ask(pythons=…)`: the facts of this machine."""

    def make(**question):
        asked = {"pythons": (sys.executable,), "remote_folder": str(tmp_path / "ttlaunch"), "engine": SIGNATURE}
        asked |= question
        return probe(LocalTransport("localhost"), Question(**asked))

    return make


def program(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return str(path)


def test_a_machine_says_who_it_is_and_what_it_has(ask, tmp_path):
    facts = ask(names=("localhost", "no-such-host.invalid"))

    assert (socket.gethostname(), os.getuid(), str(Path.home())) == (facts.hostname, facts.uid, facts.home)
    assert platform.machine() == facts.cpu.architecture
    assert (os.cpu_count(), True) == (facts.cpu.count, 0 < facts.cpu.usable <= facts.cpu.count)
    assert psutil.disk_usage(str(tmp_path)).total == facts.disk.total_bytes
    assert (str(tmp_path / "ttlaunch"), str(tmp_path), None) == (
        facts.disk.path,
        facts.disk.nearest,
        facts.disk.problem,
    )
    assert (("127.0.0.1",), ()) == (facts.names["localhost"], facts.names["no-such-host.invalid"])
    assert () == facts.unanswered
    assert facts.clock.least_s <= 0.01
    assert facts.clock.most_s >= -0.01


def test_interfaces_are_those_that_the_system_lists(ask):
    facts = ask()

    expected = {
        (name, address.address, IPv4Address(address.netmask))
        for name, addresses in psutil.net_if_addrs().items()
        for address in addresses
        if address.family is socket.AF_INET
    }
    assert expected == {(i.name, str(i.address.ip), i.address.netmask) for i in facts.interfaces}
    assert {i.name: psutil.net_if_stats()[i.name].mtu for i in facts.interfaces} == {
        i.name: i.mtu for i in facts.interfaces
    }


def test_the_packages_are_those_that_an_import_would_find(ask):
    found = ask().python

    assert sys.version_info[:3] == found.version
    names = ("torch", "mpi4py", "numpy", "pydantic", "crc32c", "grpcio")
    assert {name: version(name) for name in names} == dict(found.packages)


def test_the_library_is_the_one_that_mpi4py_loads(ask):
    script = (
        "import mpi4py; mpi4py.rc.initialize = False; from mpi4py import MPI; print(open('/proc/self/maps').read())"
    )
    maps = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout
    loaded = {os.path.realpath(line.split()[-1]) for line in maps.splitlines() if "/libmpi.so" in line}

    mpi = ask().mpi

    assert loaded == {os.path.realpath(mpi.library)}
    assert "openmpi" == mpi.abi


def test_the_first_interpreter_that_starts_counts(ask, tmp_path):
    broken = program(tmp_path / "broken", "exit 3")

    facts = ask(pythons=("/no/such/python", broken, sys.executable))

    assert sys.executable == facts.python.executable
    assert ("/no/such/python", broken, sys.executable) == facts.python.tried


def test_without_an_interpreter_the_others_are_still_said(ask):
    facts = ask(pythons=("/no/such/python",))

    assert (None, ("/no/such/python",)) == (facts.python, facts.tried)
    assert facts.memory is not None


def test_an_interpreter_that_hangs_costs_its_section_and_not_the_answer(ask, tmp_path):
    hanging = program(tmp_path / "python", "exec sleep 60")
    began = time.monotonic()

    facts = ask(pythons=(hanging, hanging + "2", sys.executable))

    assert time.monotonic() - began < 5.0
    assert facts.memory is not None
    assert facts.python is None or sys.executable == facts.python.executable


def test_the_mpirun_beside_the_interpreter_wins_over_the_one_in_path(ask, tmp_path):
    folder = tmp_path / "env/bin"
    folder.mkdir(parents=True)
    (folder / "python").symlink_to(sys.executable)
    mpirun = program(folder / "mpirun", "echo 'mpirun (Open MPI) 9.9.1'")

    mpi = ask(pythons=(str(folder / "python"),)).mpi

    assert (mpirun, str(tmp_path / "env"), "mpirun (Open MPI) 9.9.1") == (mpi.mpirun, mpi.prefix, mpi.says)


def test_an_mpi_prefix_is_the_only_place(ask, tmp_path):
    assert None is ask(mpi_prefix=str(tmp_path / "nowhere")).mpi.mpirun


def test_a_folder_that_cannot_be_written_says_why(ask, tmp_path):
    (tmp_path / "file").write_text("")

    disk = ask(remote_folder=str(tmp_path / "file")).disk

    assert "it exists and is no folder" == disk.problem
    assert ["file"] == [path.name for path in tmp_path.iterdir()]


@pytest.fixture
def orphan():
    """A process with a run's id whose parent has ended, so that whoever adopts orphans has it now; its number."""
    environment = {**os.environ, contract.ENV_RUN_ID: "run-of-a-test"}
    script = "sleep 300 >/dev/null 2>&1 & echo $!"
    answer = subprocess.run(["/bin/sh", "-c", script], env=environment, capture_output=True, text=True, check=True)
    process = psutil.Process(int(answer.stdout))
    yield process
    process.kill()


def test_a_process_whose_launcher_is_gone_is_left_and_its_descendants_too(ask, orphan):
    left = [one for one in ask().leftovers if one.run_id == "run-of-a-test"]

    assert [(orphan.pid, "sleep")] == [(one.pid, one.command) for one in left]
    assert 0 <= left[0].age_s < 60


def test_a_process_of_a_run_that_goes_on_is_not_left(ask):
    environment = {**os.environ, contract.ENV_RUN_ID: "run-that-goes-on"}
    with subprocess.Popen(["sleep", "300"], env=environment) as running:
        try:
            assert [] == [one for one in ask().leftovers if one.run_id == "run-that-goes-on"]
        finally:
            running.kill()


def test_a_folder_of_a_run_that_nobody_uses_is_left(ask):
    shared = Path("/dev/shm")  # noqa: S108 - where runs keep their sockets
    unused, used, claimed = (shared / f"ttl-test-{what}-{os.getpid()}" for what in ("unused", "used", "claimed"))
    for folder in (unused, used):
        folder.mkdir()
    claim = claims.claim(str(claimed), "agent")  # as by an agent in another container, whose processes nobody sees here
    try:
        with subprocess.Popen(["sleep", "300"], env={**os.environ, "TMPDIR": str(used)}) as user:
            try:
                folders = ask().folders
            finally:
                user.kill()
        assert str(unused) in folders
        assert str(used) not in folders
        assert str(claimed) not in folders
    finally:
        os.close(claim)
        for folder in (unused, used, claimed):
            shutil.rmtree(folder)


def test_ranks_take_the_python_that_is_named_else_the_prepared_one_else_ours(topology):
    assert ("/opt/python",) == question_for(
        topology(1, python="/opt/python"), launcher_python="/mine", engine=SIGNATURE
    ).pythons
    assert ("~/.ttlaunch/env/bin/python", "/mine", "python3") == question_for(
        topology(1), launcher_python="/mine", engine=SIGNATURE
    ).pythons
    elsewhere = question_for(topology(2, remote_folder="/scratch/tt"), launcher_python="/mine", engine=SIGNATURE)
    assert ("/scratch/tt/env/bin/python", "/mine", "python3") == elsewhere.pythons
    assert ("metal-01", "metal-02") == elsewhere.names


class _Deaf(LocalTransport):
    """A host that lets us in and then starts nothing that answers."""

    def start(self, command, *, timeout_s=5.0):
        return super().start("exec sleep 60", timeout_s=timeout_s)


class _Chatty(LocalTransport):
    """A host whose shell greets everybody."""

    def start(self, command, *, timeout_s=5.0):
        return super().start(f"echo 'Welcome to the machine'; {command}", timeout_s=timeout_s)


def test_a_host_that_never_answers_does_not_hold_up_the_others():
    question = Question(("python3",), "~/.ttlaunch", SIGNATURE)
    hosts = [_Deaf("deaf"), LocalTransport("fine"), _Chatty("chatty")]

    answers = probe_all(hosts, question, timeout_s=2.0)

    assert ["fine"] == list(answers.facts)
    assert {"deaf": Trouble.TIMED_OUT, "chatty": Trouble.SCRIPT} == {
        host: error.trouble for host, error in answers.errors.items()
    }
    assert "something prints into our connection: not a frame: b'Welcome '" in answers.errors["chatty"].evidence
    assert answers.seconds["fine"] < 2.0
    for host in hosts:
        host.close()


class _Breaking(LocalTransport):
    """A host whose connection breaks as soon as something is asked, `times` times; it is `back` or gone afterwards."""

    def __init__(self, host, *, times, back):
        super().__init__(host)
        self.times, self.back, self.connected = times, back, 0

    def connect(self, *, timeout_s=5.0):
        if not self.back:
            raise HostError(self.host, Trouble.UNREACHABLE, "no answer on port 22")
        self.connected += 1

    def start(self, command, *, timeout_s=5.0):
        if self.times:
            self.times -= 1
            raise HostError(self.host, Trouble.LOST, "the connection broke: the host hung up")
        return super().start(command, timeout_s=timeout_s)


def test_a_connection_that_breaks_is_made_again_once_for_the_question():
    question = Question((sys.executable,), "~/.ttlaunch", SIGNATURE)
    once = _Breaking("once", times=1, back=True)
    hosts = [once, _Breaking("twice", times=2, back=True), _Breaking("gone", times=1, back=False)]

    answers = probe_all(hosts, question, timeout_s=20.0)

    assert (["once"], 1) == (list(answers.facts), once.connected)
    lost = (Trouble.LOST, "the connection broke: the host hung up")
    assert {"twice": lost, "gone": lost} == {
        host: (error.trouble, error.evidence) for host, error in answers.errors.items()
    }


def test_an_answer_that_is_no_answer_names_its_first_wrong_value():
    identity = {"hostname": "", "user": "", "uid": 0, "home": "", "machine": "", "kernel": ""}
    cpu = {"model": "", "architecture": "", "count": "many", "usable": 1, "flags": []}

    with pytest.raises(ValueError, match=r"^its answer is wrong: `cpu\.count` is 'many', expected a whole number"):
        parse_facts({**identity, "cpu": cpu}, clock=Clock(0.0, 0.0))


def test_every_pair_of_addresses_of_this_machine_gets_through():
    hosts = [LocalTransport(f"127.0.0.{number}") for number in range(1, 6)]

    found = measure_pairs(hosts, {host.host: host.host for host in hosts})

    ways = [(a.host, b.host) for a in hosts for b in hosts if a is not b]
    assert [(a, b, None) for a, b in ways] == [(pair.source, pair.target, pair.problem) for pair in found.pairs]
    assert {} == found.errors


def test_an_address_that_the_host_does_not_have_is_told():
    hosts = [LocalTransport("one"), LocalTransport("other")]

    found = measure_pairs(hosts, {"one": "127.0.0.1", "other": "192.0.2.77"})

    assert [] == found.pairs
    assert "no port can be opened at 192.0.2.77: cannot assign requested address" == found.errors["other"].evidence


def test_a_stranger_who_answers_in_a_host_s_place_is_not_taken_for_it():
    """As when two machines have one address: whoever answers knows the token, but is somebody else."""
    transport = LocalTransport("one")
    arguments = {"name": "other", "address": "127.0.0.1", "token": "ab" * 32, "timeout_s": 3.0, "longest_s": 9.0}
    listening = start_script(transport, "pairs", arguments=arguments, timeout_s=5.0)
    asking = start_script(transport, "pairs", arguments=arguments | {"name": "one"}, timeout_s=5.0)
    port = listening.expect(timeout_s=5.0)[0]["port"]
    asking.expect(timeout_s=5.0)

    asking.send({"kind": "reach", "peers": [["third", "127.0.0.1", port]]}, timeout_s=5.0)
    results = asking.expect(timeout_s=5.0)[0]["results"]

    transport.close()
    assert [("third", "another machine answers at its address")] == [(name, said) for name, _, said in results]


@pytest.mark.parametrize(
    ("passes", "pause_s", "problem"),
    [(2**20, 0.1, None), (9_000, 0.1, "large packets are lost"), (2**20, 0.8, "large packets are lost")],
    ids=["slow", "lossy", "too slow"],
)
def test_a_slow_way_is_no_way_that_loses_large_packets(passes, pause_s, problem):
    """What counts is whether anything arrives: on a slow cable that other traffic shares, the whole load takes longer."""
    with closing(LocalTransport("one")) as transport, ThreadPoolExecutor(1) as threads:
        arguments = {"name": "other", "address": "127.0.0.1", "token": "ab" * 32, "timeout_s": 0.4, "longest_s": 2.0}
        listening = start_script(transport, "pairs", arguments=arguments, timeout_s=5.0)
        asking = start_script(transport, "pairs", arguments=arguments | {"name": "one"}, timeout_s=5.0)
        port = listening.expect(timeout_s=5.0)[0]["port"]
        asking.expect(timeout_s=5.0)
        with socket.create_server(("127.0.0.1", 0)) as way:
            carrying = threads.submit(carry, way, port, passes=passes, pause_s=pause_s)
            asking.send({"kind": "reach", "peers": [["other", *way.getsockname()]]}, timeout_s=5.0)
            [[_, _, found]] = asking.expect(timeout_s=5.0)[0]["results"]
            carrying.result()
    assert problem == found


def carry(way, port, *, passes, pause_s):
    """Carry 8 kB towards a port at a time, with pauses, until so many bytes have passed, and every answer; until the caller has gone."""
    with way.accept()[0] as caller, socket.create_connection(("127.0.0.1", port)) as server, suppress(OSError):
        server.settimeout(5.0)
        passes -= 33
        server.sendall(caller.recv(33))
        caller.sendall(server.recv(32))
        while data := caller.recv(min(8_192, passes) or 1):
            if passes:
                server.sendall(data)
                passes -= len(data)
                time.sleep(pause_s)
                caller.sendall(server.recv(100))


def test_a_stranger_who_knows_no_token_is_sent_away():
    transport = LocalTransport("one")
    arguments = {"name": "one", "address": "127.0.0.1", "token": "ab" * 32, "timeout_s": 3.0, "longest_s": 9.0}
    script = start_script(transport, "pairs", arguments=arguments, timeout_s=5.0)
    port = script.expect(timeout_s=5.0)[0]["port"]

    with socket.create_connection(("127.0.0.1", port), timeout=5.0) as connection:
        connection.sendall(b"x" * 33)
        answer = connection.recv(100)

    transport.close()
    assert b"" == answer


def test_a_stranger_who_says_nothing_is_sent_away():
    with closing(LocalTransport("one")) as transport:
        arguments = {"name": "one", "address": "127.0.0.1", "token": "ab" * 32, "timeout_s": 3.0, "longest_s": 9.0}
        script = start_script(transport, "pairs", arguments=arguments, timeout_s=5.0)
        port = script.expect(timeout_s=5.0)[0]["port"]
        with socket.create_connection(("127.0.0.1", port), timeout=10.0) as connection:
            assert b"" == connection.recv(1)


def test_whoever_is_asked_learns_nothing_with_which_to_pass_for_a_host():
    with closing(LocalTransport("one")) as transport, socket.create_server(("127.0.0.1", 0)) as impostor:
        arguments = {"name": "one", "address": "127.0.0.1", "token": "ab" * 32, "timeout_s": 3.0, "longest_s": 9.0}
        script = start_script(transport, "pairs", arguments=arguments, timeout_s=5.0)
        script.expect(timeout_s=5.0)
        script.send({"kind": "reach", "peers": [["other", *impostor.getsockname()]]}, timeout_s=5.0)
        with impostor.accept()[0] as connection:
            shown = connection.recv(33)
            assert bytes.fromhex(arguments["token"]) not in shown
            connection.sendall(hashlib.sha256(shown[:32] + b"other").digest())
            [[_, _, problem]] = script.expect(timeout_s=5.0)[0]["results"]
    assert "another machine answers at its address" == problem


def test_a_machine_names_the_device_files_of_gpus(ask):
    there = {str(path) for path in Path("/dev").iterdir()}
    found = set(ask().devices.gpu_files)
    assert found <= there
    assert {path for path in there if path.removeprefix("/dev/nvidia").isdigit()} <= found
