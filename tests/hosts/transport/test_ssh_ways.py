"""Ways to a host that is not reached directly: jump hosts, a ProxyCommand, another name for its key."""

import os
import shlex
import signal
import sys
from pathlib import Path

import pytest

from tests.cluster.accounts import make_key
from ttlaunch.errors import HostError, Trouble
from ttlaunch.hosts.transport.transport import run

# Connects standard input and output with a port, as nc does, which not every machine has.
PIPE = """
import os, socket, sys, threading
far = socket.create_connection((sys.argv[1], int(sys.argv[2])))
def there():
    while data := os.read(0, 65536):
        far.sendall(data)
    far.shutdown(socket.SHUT_WR)
threading.Thread(target=there, daemon=True).start()
while data := far.recv(65536):
    os.write(1, data)
"""


@pytest.fixture
def two(start_sshd, user):
    """An sshd to go through and one behind it, both known to the user; each lets in a key of its own."""
    gate, far = start_sshd(), start_sshd()
    user.know(gate.known_hosts.read_text() + far.known_hosts.read_text())
    user.write("gate_key", gate.identity_file.read_text())
    user.write("far_key", far.identity_file.read_text())
    folder = user.folders.user
    user.configure(
        f"Host gate\n  HostName 127.0.0.1\n  Port {gate.port}\n  User {gate.user}\n  IdentityFile {folder}/gate_key\n"
        f"Host far*\n  HostName 127.0.0.1\n  Port {far.port}\n  User {far.user}\n  IdentityFile {folder}/far_key\n"
        "Host far\n  ProxyJump gate\n"
    )
    return gate, far


def add(user, text):
    user.configure((user.folders.user / "config").read_text() + text)


def test_a_host_behind_a_jump_host_is_reached(two, named):
    transport = named("far")
    transport.connect(timeout_s=10)
    completed = run(transport, "cat; exit 4", stdin=b"through" * 100_000, timeout_s=20)
    assert (completed.status, completed.stdout) == (4, b"through" * 100_000)
    assert (transport.addresses, transport.bytes_per_s) == (None, None)


def test_a_host_behind_two_jump_hosts_is_reached(two, user, named):
    add(user, "Host far-away\n  ProxyJump gate,far\n")
    transport = named("far-away")
    transport.connect(timeout_s=15)
    assert run(transport, "echo here", timeout_s=10).stdout == b"here\n"


def test_the_key_of_a_jump_host_is_checked_too(two, user, named):
    gate, far = two
    user.know(far.known_hosts.read_text())
    with pytest.raises(HostError) as caught:
        named("far").connect(timeout_s=10)
    assert (caught.value.host, caught.value.trouble) == ("far", Trouble.UNKNOWN_KEY)
    assert caught.value.evidence.startswith("jump host gate: its host key is not known: ED25519 SHA256:")
    assert caught.value.hints[0].endswith(f"trust the key: `ssh -p {gate.port} {gate.user}@gate true`")


def test_a_jump_host_that_refuses_us_is_named(two, user, named):
    (user.folders.user / "gate_key").unlink()
    make_key(user.folders.user / "gate_key", comment="wrong")
    with pytest.raises(HostError) as caught:
        named("far").connect(timeout_s=10)
    assert (caught.value.host, caught.value.trouble) == ("far", Trouble.LOGIN)
    assert caught.value.evidence == f"jump host gate: login as {two[0].user} refused: the key was not accepted"


def test_a_host_that_its_jump_host_cannot_reach_is_told_apart(two, user, named):
    add(user, "Host nowhere\n  HostName 127.0.0.1\n  Port 1\n  ProxyJump gate\n")
    with pytest.raises(HostError) as caught:
        named("nowhere").connect(timeout_s=10)
    assert (caught.value.trouble, caught.value.evidence) == (
        Trouble.UNREACHABLE,
        "jump host gate cannot connect to 127.0.0.1 port 1: connect failed",
    )


def test_a_jump_host_that_vanishes_takes_the_host_with_it(two, named):
    gate, _ = two
    transport = named("far")
    transport.connect(timeout_s=10)
    process = transport.start("cat", timeout_s=10)
    os.kill(_session(gate), signal.SIGKILL)
    with pytest.raises(HostError) as caught:
        process.read(timeout_s=10)
    assert caught.value.trouble is Trouble.LOST


def _session(sshd):
    """The process that serves the only connection of an sshd."""
    listening = next(
        path.parent.name for path in Path("/proc").glob("[0-9]*/cmdline") if _is_listener(path, sshd.folder)
    )
    children = Path(f"/proc/{listening}/task/{listening}/children").read_text().split()
    assert len(children) == 1
    return int(children[0])


def _is_listener(path, folder):
    try:
        return str(folder / "sshd_config") in path.read_text()
    except OSError:
        return False


@pytest.fixture
def pipe(tmp_path):
    """The path of a program that does what nc does."""
    path = tmp_path / "pipe.py"
    path.write_text(PIPE)
    return f"{shlex.quote(sys.executable)} {shlex.quote(str(path))}"


def test_a_proxy_command_is_run_by_a_shell(two, user, named, pipe):
    add(user, f"Host far-proxy\n  ProxyCommand {pipe} %h %p 2>/dev/null\n")
    transport = named("far-proxy")
    transport.connect(timeout_s=10)
    data = b"x" * 1_000_000
    assert run(transport, "cat", stdin=data, timeout_s=20).stdout == data
    assert transport.addresses is None


def test_a_proxy_command_that_fails_is_quoted(two, user, named):
    add(user, "Host far-broken\n  ProxyCommand sh -c 'echo no way to %h >&2; exit 3'\n")
    with pytest.raises(HostError) as caught:
        named("far-broken").connect(timeout_s=10)
    assert caught.value.trouble is Trouble.UNREACHABLE
    assert caught.value.evidence == (
        "ProxyCommand `sh -c 'echo no way to 127.0.0.1 >&2; exit 3'` gives no connection: "
        "it exited with status 3: no way to 127.0.0.1"
    )


def test_a_proxy_command_that_hangs_is_ended(two, user, named, tmp_path):
    add(user, f"Host far-slow\n  ProxyCommand sh -c 'echo $$ >{tmp_path}/pid; exec sleep 60'\n")
    with pytest.raises(HostError) as caught:
        named("far-slow").connect(timeout_s=1)
    assert caught.value.trouble is Trouble.SILENT
    assert not Path(f"/proc/{(tmp_path / 'pid').read_text().strip()}").exists()


def test_closing_ends_the_proxy_command(two, user, named, pipe, tmp_path):
    add(user, f"Host far-proxy\n  ProxyCommand sh -c 'echo $$ >{tmp_path}/pid; exec {pipe} %h %p'\n")
    transport = named("far-proxy")
    transport.connect(timeout_s=10)
    transport.close()
    assert not Path(f"/proc/{(tmp_path / 'pid').read_text().strip()}").exists()


def test_a_frozen_host_behind_a_proxy_is_noticed(two, user, named, pipe, tmp_path):
    add(user, f"Host far-proxy\n  ProxyCommand sh -c 'echo $$ >{tmp_path}/pid; exec {pipe} %h %p'\n")
    transport = named("far-proxy")
    transport.connect(timeout_s=10)
    process = transport.start("cat", timeout_s=10)
    os.kill(int((tmp_path / "pid").read_text()), signal.SIGSTOP)
    with pytest.raises(HostError) as caught:
        process.read(timeout_s=30)
    assert (caught.value.trouble, caught.value.evidence) == (
        Trouble.LOST,
        "the connection broke: no answer for 6 s",
    )


def test_a_host_may_be_known_by_another_name(two, user, named):
    _, far = two
    key = far.known_hosts.read_text().partition(" ")[2]
    user.know(f"the-far-one {key}")
    add(user, "Host far-alias\n  HostKeyAlias the-far-one\n")
    transport = named("far-alias")
    transport.connect(timeout_s=10)
    assert run(transport, "echo in", timeout_s=10).stdout == b"in\n"


def test_known_hosts_may_lie_elsewhere(two, user, named, tmp_path):
    _, far = two
    user.know("")
    (tmp_path / "my hosts").write_text(far.known_hosts.read_text())
    add(user, f'Host far-file\n  UserKnownHostsFile /nowhere "{tmp_path}/my hosts"\n')
    transport = named("far-file")
    transport.connect(timeout_s=10)
    assert run(transport, "echo in", timeout_s=10).stdout == b"in\n"


def test_the_systems_known_hosts_count(two, user, named):
    _, far = two
    user.know("")
    user.system_know(far.known_hosts.read_text())
    transport = named("far-plain")
    transport.connect(timeout_s=10)
    assert run(transport, "echo in", timeout_s=10).stdout == b"in\n"


def test_host_key_checks_are_never_loosened(two, user, named):
    user.know("")
    add(user, "Host *\n  StrictHostKeyChecking no\n")
    with pytest.raises(HostError) as caught:
        named("far-plain").connect(timeout_s=10)
    assert caught.value.trouble is Trouble.UNKNOWN_KEY
    assert (user.folders.user / "known_hosts").read_text() == ""
