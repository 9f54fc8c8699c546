"""A daemon is started and kept on the chosen network, and whoever started it learns how it ended."""

import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.security.listeners import addresses_of, places_of
from ttlaunch import agent, contract

STARTER = [sys.executable, "-I", "-S", str(Path(agent.__file__).with_name("start_daemon.py"))]
DETACHES = """\
import os, socket, sys, time
if os.fork():
    sys.exit(0)
os.setsid()
listener = socket.create_server(("", 0))
print(os.getpid(), flush=True)
time.sleep(600)
"""


def start(networks, *command, **options):
    return subprocess.run(
        [*STARTER, "", "", networks, *command], capture_output=True, text=True, timeout=60, check=False, **options
    )


@pytest.mark.parametrize("networks", ["127.0.0.0/8", "198.51.100.0/24"])
@pytest.mark.parametrize(("script", "status"), [("exit 7", 7), ("kill -9 $$", 137), ("cat", 0)])
def test_a_daemons_status_output_and_input_are_its_own(networks, script, status):
    ended = start(networks, "/bin/sh", "-c", f"echo out; echo err >&2; {script}", input="in\n")
    assert (ended.returncode, ended.stderr) == (status, "err\n")
    assert ended.stdout == ("out\nin\n" if script == "cat" else "out\n")


def test_a_daemon_that_is_not_there_is_named():
    ended = start("127.0.0.0/8", "/nowhere/prted")
    assert (ended.returncode, ended.stderr) == (127, "/nowhere/prted: No such file or directory\n")


@pytest.fixture
def detaches(tmp_path):
    """A daemon that leaves its parent, listens, prints its process id, and goes on."""
    (program := tmp_path / "prted").write_text(f"#!{sys.executable} -I\n{DETACHES}")
    program.chmod(0o755)
    return program


def test_a_daemon_takes_connections_until_all_ranks_of_its_host_have_found_the_others(tmp_path, detaches):
    (tmp_path / contract.RECORDS_DIR).mkdir()

    def report(rank, kind):
        with (tmp_path / contract.progress_file(rank)).open("a") as file:
            file.write(contract.record_line({"kind": kind, "time": 1.0}))

    words = [*STARTER, tmp_path, "0,7", "198.51.100.0/24", detaches]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as starter:
        pid = int(starter.stdout.readline())
        try:
            [(_, port)] = places_of([pid])
            report(0, contract.KIND_STARTED)
            report(0, contract.KIND_READY)
            report(7, contract.KIND_STARTED)
            time.sleep(0.5)
            socket.create_connection(("127.0.0.1", port), timeout=20).close()
            report(7, contract.KIND_READY)
            deadline = time.monotonic() + 20
            while is_open(port):
                assert time.monotonic() < deadline
        finally:
            subprocess.run(["kill", str(pid)], check=True)


def is_open(port):
    try:
        socket.create_connection(("127.0.0.1", port), timeout=0.5).close()
    except TimeoutError:
        return False
    return True


def test_a_daemon_that_leaves_its_parent_is_kept_on_the_network_too(detaches):
    with subprocess.Popen([*STARTER, "", "", "127.0.0.0/8", detaches], stdout=subprocess.PIPE, text=True) as starter:
        pid = int(starter.stdout.readline())
        try:
            deadline = time.monotonic() + 20
            while [str(address) for address in addresses_of([pid])] != ["127.0.0.1"]:
                assert time.monotonic() < deadline, addresses_of([pid])
            assert starter.wait(20) == 0, "it does not wait for a daemon that has detached itself"
        finally:
            subprocess.run(["kill", str(pid)], check=True)
