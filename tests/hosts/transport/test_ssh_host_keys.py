"""Whom to trust: a host's key is compared with known_hosts as ssh does it, and never trusted by itself."""

import subprocess

import pytest

from tests.cluster.accounts import make_key, public_key
from ttlaunch.errors import HostError, Trouble
from ttlaunch.hosts.transport.transport import run


def test_an_unknown_host_is_refused_with_its_fingerprint(loopback_sshd, user, named, check):
    user.trust(loopback_sshd).know("")
    check(
        named("127.0.0.1", user=loopback_sshd.user, port=loopback_sshd.port),
        loopback_sshd,
        """
        unknown host key: its host key is not known: ED25519 SHA256:PRINT
        note: looked for `[127.0.0.1]:PORT` in SSH/known_hosts
        hint: compare the fingerprint, then trust the key: `ssh -p PORT USER@127.0.0.1 true`
        """,
    )


def test_the_fingerprint_is_the_one_that_ssh_keygen_prints(loopback_sshd, named):
    printed = subprocess.run(
        ["ssh-keygen", "-lf", loopback_sshd.folder / "host_key.pub"], capture_output=True, text=True, check=True
    ).stdout.split()[1]
    with pytest.raises(HostError) as caught:
        named("127.0.0.1", user=loopback_sshd.user, port=loopback_sshd.port).connect()
    assert caught.value.evidence.endswith(f"ED25519 {printed}")


def test_a_changed_host_key_is_refused_with_both_fingerprints(loopback_sshd, user, named, check, tmp_path):
    make_key(tmp_path / "old", comment="old")
    user.trust(loopback_sshd).know(f"\n# my hosts\n[127.0.0.1]:{loopback_sshd.port} {public_key(tmp_path / 'old')}\n")
    check(
        named("127.0.0.1", user=loopback_sshd.user, port=loopback_sshd.port),
        loopback_sshd,
        """
        changed host key: its host key has changed to ED25519 SHA256:PRINT
        note: SSH/known_hosts:3 has ED25519 SHA256:PRINT
        note: the host was installed anew, or another machine answers in its place
        hint: if the new fingerprint is the host's own: `ssh-keygen -f SSH/known_hosts -R '[127.0.0.1]:PORT'`, then `ssh -p PORT USER@127.0.0.1 true`
        """,
    )


def test_the_command_that_removes_a_changed_key_does(loopback_sshd, user, named, tmp_path):
    make_key(tmp_path / "old", comment="old")
    user.trust(loopback_sshd).know(f"[127.0.0.1]:{loopback_sshd.port} {public_key(tmp_path / 'old')}\n")
    transport = named("127.0.0.1", user=loopback_sshd.user, port=loopback_sshd.port)
    with pytest.raises(HostError) as caught:
        transport.connect()
    subprocess.run(["sh", "-c", caught.value.hints[0].split("`")[1]], check=True, capture_output=True)
    with pytest.raises(HostError) as caught:
        transport.connect()
    assert caught.value.trouble is Trouble.UNKNOWN_KEY


def test_a_revoked_host_key_is_refused(loopback_sshd, user, named, check):
    known = loopback_sshd.known_hosts.read_text()
    user.trust(loopback_sshd).know(f"{known}@revoked * {known.partition(' ')[2]}")
    check(
        named("127.0.0.1", user=loopback_sshd.user, port=loopback_sshd.port),
        loopback_sshd,
        """
        changed host key: its host key ED25519 SHA256:PRINT is revoked in SSH/known_hosts:2
        hint: ask the host's administrator for its new key before you connect
        """,
    )


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(lambda text, path: path.write_text(text.replace("127.0.0.1", "127.0.0.*")), id="pattern"),
        pytest.param(
            lambda text, _: subprocess.run(["ssh-keygen", "-q", "-H", "-f", _], check=True, capture_output=True),
            id="hashed",
        ),
        pytest.param(lambda text, path: path.write_text("127.0.0.1 " + text.partition(" ")[2]), id="without port"),
        pytest.param(
            lambda text, path: path.write_text(
                f"@cert-authority * {text.partition(' ')[2]}rubbish\n|1|a|b x y\n{text}"
            ),
            id="beside lines of other kinds",
        ),
        pytest.param(lambda text, path: path.write_text(text.replace("[127", "other,[127")), id="several names"),
    ],
)
def test_a_host_is_known_in_every_way_that_known_hosts_can_say_it(loopback_sshd, user, reach, change):
    transport = reach(loopback_sshd)
    change(loopback_sshd.known_hosts.read_text(), user.folders.user / "known_hosts")
    transport.connect()
    assert run(transport, "echo in", timeout_s=10).stdout == b"in\n"


def test_a_name_that_is_ruled_out_is_not_known(loopback_sshd, user, reach):
    transport = reach(loopback_sshd)
    key = loopback_sshd.known_hosts.read_text().partition(" ")[2]
    user.know(f"*,![127.0.0.1]:{loopback_sshd.port},!127.0.0.1 {key}")
    with pytest.raises(HostError) as caught:
        transport.connect()
    assert caught.value.trouble is Trouble.UNKNOWN_KEY


def test_a_host_with_several_keys_shows_the_one_that_is_known(start_sshd, user, named, tmp_path):
    sshd = start_sshd()
    folder = sshd.folder
    subprocess.run(["ssh-keygen", "-q", "-t", "rsa", "-b", "2048", "-N", "", "-f", folder / "rsa_key"], check=True)
    sshd = start_sshd(HostKey=f"{folder}/host_key\nHostKey {folder}/rsa_key")
    user.trust(sshd).know(f"[127.0.0.1]:{sshd.port} {public_key(folder / 'rsa_key')}\n")
    named("127.0.0.1", user=sshd.user, port=sshd.port).connect()


def test_a_host_that_shows_another_kind_of_key_is_unknown(loopback_sshd, user, named, check, tmp_path):
    subprocess.run(["ssh-keygen", "-q", "-t", "rsa", "-b", "2048", "-N", "", "-f", tmp_path / "rsa"], check=True)
    user.trust(loopback_sshd).know(f"[127.0.0.1]:{loopback_sshd.port} {public_key(tmp_path / 'rsa')}\n")
    check(
        named("127.0.0.1", user=loopback_sshd.user, port=loopback_sshd.port),
        loopback_sshd,
        """
        unknown host key: its host key is not known: ED25519 SHA256:PRINT
        note: looked for `[127.0.0.1]:PORT` in SSH/known_hosts
        note: SSH/known_hosts:1 has another kind of key, RSA
        hint: compare the fingerprint, then trust the key: `ssh -p PORT USER@127.0.0.1 true`
        """,
    )
