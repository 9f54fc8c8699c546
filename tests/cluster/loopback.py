"""A real sshd on this machine's loopback interface, as the user who runs the tests, with keys of its own.

For tests of one connection, which need no cluster and no root. Nothing of the user's own SSH set-up is read or changed.
"""

import os
import pwd
import socket
import subprocess
import tempfile
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.cluster.accounts import make_key, public_key
from tests.cluster.keeper import wait_until
from tests.cluster.needs import find_tool, missing_tools

ALIAS = "box"
_ADDRESS = "127.0.0.1"


@dataclass(frozen=True)
class LoopbackSshd:
    """How to reach it. `config_file` is an ssh_config in which the host `box` is this sshd."""

    folder: Path
    port: int
    user: str
    identity_file: Path
    known_hosts: Path
    config_file: Path
    log: Path
    address: str = _ADDRESS
    alias: str = ALIAS


@contextmanager
def start_loopback_sshd(**settings):
    """Run an sshd until the block ends. Settings win over the usual ones: `start_loopback_sshd(MaxSessions=1)`."""
    with tempfile.TemporaryDirectory(prefix="ttl-sshd-", ignore_cleanup_errors=True) as name:
        sshd = _write_files(Path(name))
        _write_settings(sshd, settings)
        if os.geteuid() == 0:
            Path("/run/sshd").mkdir(mode=0o755, exist_ok=True)  # what the service would make before sshd starts
        process = subprocess.Popen(
            [find_tool("sshd"), "-D", "-f", sshd.folder / "sshd_config", "-E", sshd.log],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        try:
            wait_until(lambda: _answers(sshd, process), what=f"sshd listens on port {sshd.port}")
            yield sshd
        finally:
            process.terminate()
            process.wait(10)


def why_no_loopback_sshd():
    """The reason in words, or an empty text."""
    missing = missing_tools("ssh", "ssh-keygen", "sshd")
    return f"an sshd on the loopback interface needs {missing}" if missing else ""


@pytest.fixture(scope="session")
def loopback_sshd(skip_or_fail):
    """A `LoopbackSshd` that all tests share."""
    if reason := why_no_loopback_sshd():
        skip_or_fail(reason)
    with start_loopback_sshd() as sshd:
        yield sshd


def _write_files(folder):
    make_key(folder / "host_key", comment="loopback")
    make_key(folder / "id_ed25519", comment="loopback")
    (folder / "authorized_keys").write_text(public_key(folder / "id_ed25519") + "\n", encoding="utf-8")
    port = _free_port()
    key = public_key(folder / "host_key")
    (folder / "known_hosts").write_text(f"[{_ADDRESS}]:{port} {key}\n", encoding="utf-8")
    sshd = LoopbackSshd(
        folder=folder,
        port=port,
        user=pwd.getpwuid(os.getuid()).pw_name,
        identity_file=folder / "id_ed25519",
        known_hosts=folder / "known_hosts",
        config_file=folder / "ssh_config",
        log=folder / "sshd.log",
    )
    sshd.config_file.write_text(
        f"Host {ALIAS}\n"
        f"  HostName {_ADDRESS}\n"
        f"  Port {port}\n"
        f"  User {sshd.user}\n"
        f"  IdentityFile {sshd.identity_file}\n"
        "  IdentitiesOnly yes\n"
        f"  UserKnownHostsFile {sshd.known_hosts}\n",
        encoding="utf-8",
    )
    return sshd


def _write_settings(sshd, changes):
    settings = {
        "Port": sshd.port,
        "ListenAddress": _ADDRESS,
        "HostKey": sshd.folder / "host_key",
        "AuthorizedKeysFile": sshd.folder / "authorized_keys",
        "PidFile": "none",
        "StrictModes": "no",
        "UsePAM": "no",
        "UseDNS": "no",
        "PrintMotd": "no",
        "PasswordAuthentication": "no",
        "KbdInteractiveAuthentication": "no",
        "Subsystem": "sftp internal-sftp",
    } | changes
    text = "".join(f"{key} {value}\n" for key, value in settings.items())
    (sshd.folder / "sshd_config").write_text(text, encoding="utf-8")


def _free_port():
    with socket.socket() as probe:
        probe.bind((_ADDRESS, 0))
        return probe.getsockname()[1]


def _answers(sshd, process):
    if process.poll() is not None:
        raise RuntimeError(f"sshd ended: {sshd.log.read_text(encoding='utf-8')}")
    try:
        with socket.create_connection((_ADDRESS, sshd.port), timeout=1) as connection:
            return connection.recv(4) == b"SSH-"
    except OSError:
        return False
