"""How to log in: with the user's keys and their agent, never with a password, and what is said when no key fits."""

import shutil
import socket
import subprocess
from contextlib import contextmanager

import pytest

from tests.cluster.accounts import make_key
from tests.cluster.keeper import wait_until
from ttlaunch.errors import HostError
from ttlaunch.hosts.transport.key_ring import KeyRing
from ttlaunch.hosts.transport.transport import run


def test_a_host_that_takes_only_passwords_says_so(start_sshd, reach, check):
    sshd = start_sshd(PasswordAuthentication="yes", PubkeyAuthentication="no")
    check(
        reach(sshd),
        sshd,
        """
        login refused: takes only passwords
        note: ttlaunch logs in with keys and never asks for a password
        hint: let its sshd accept keys (`PubkeyAuthentication yes`), then `ssh-copy-id -p PORT USER@127.0.0.1`
        """,
    )


def test_a_key_that_the_host_does_not_accept_is_named(loopback_sshd, user, reach, check):
    transport = reach(loopback_sshd)
    (user.folders.user / "id_ed25519").unlink()
    make_key(user.folders.user / "id_ed25519", comment="wrong")
    check(
        transport,
        loopback_sshd,
        """
        login refused: login as USER refused: the key was not accepted
        note: offered SSH/id_ed25519 (SHA256:PRINT)
        hint: let it accept a key of yours: `ssh-copy-id -p PORT USER@127.0.0.1`
        hint: try it by hand: `ssh -o BatchMode=yes -p PORT USER@127.0.0.1 true`
        """,
    )


def test_a_user_without_keys_is_told_to_make_one(loopback_sshd, user, reach, check):
    transport = reach(loopback_sshd)
    (user.folders.user / "id_ed25519").unlink()
    check(
        transport,
        loopback_sshd,
        """
        login refused: login as USER refused: there is no key to offer
        hint: `ssh-keygen -t ed25519`, then let it accept a key of yours: `ssh-copy-id -p PORT USER@127.0.0.1`
        hint: try it by hand: `ssh -o BatchMode=yes -p PORT USER@127.0.0.1 true`
        """,
    )


def test_a_key_file_of_the_cluster_file_that_does_not_exist_is_named(loopback_sshd, user, named, check):
    user.trust(loopback_sshd)
    path = user.folders.user / "nope"
    transport = named(loopback_sshd.address, user=loopback_sshd.user, port=loopback_sshd.port, identity_file=path)
    check(
        transport,
        loopback_sshd,
        """
        settings: the key file SSH/nope that `identity_file` of cluster.yaml names does not exist
        hint: correct `identity_file` of cluster.yaml, or make that key: `ssh-keygen -t ed25519 -f SSH/nope`
        """,
    )


def test_a_key_file_of_the_ssh_configuration_that_does_not_exist_is_named(loopback_sshd, user, reach, check):
    transport = reach(loopback_sshd)
    user.configure(f"IdentityFile {user.folders.user}/gone\n")
    check(
        transport,
        loopback_sshd,
        """
        settings: the key file SSH/gone that `IdentityFile` of the ssh configuration names does not exist
        hint: correct `IdentityFile` of the ssh configuration, or make that key: `ssh-keygen -t ed25519 -f SSH/gone`
        """,
    )


def test_a_key_that_others_can_read_is_not_used(loopback_sshd, user, reach, check):
    transport = reach(loopback_sshd)
    (user.folders.user / "id_ed25519").chmod(0o644)
    check(
        transport,
        loopback_sshd,
        """
        login refused: login as USER refused: there is no key to offer
        note: SSH/id_ed25519 has mode 0644, which lets others use it; `chmod 600 SSH/id_ed25519`
        hint: `ssh-keygen -t ed25519`, then let it accept a key of yours: `ssh-copy-id -p PORT USER@127.0.0.1`
        hint: try it by hand: `ssh -o BatchMode=yes -p PORT USER@127.0.0.1 true`
        """,
    )


@pytest.mark.parametrize(
    "kind", [["-t", "ecdsa"], ["-t", "rsa", "-b", "2048"], ["-t", "rsa", "-b", "2048", "-m", "PEM"]]
)
def test_keys_of_every_usual_kind_work(start_sshd, user, reach, kind):
    sshd = start_sshd()
    transport = reach(sshd)
    (user.folders.user / "id_ed25519").unlink()
    path = user.folders.user / f"id_{kind[1]}"
    subprocess.run(["ssh-keygen", "-q", *kind, "-N", "", "-f", path], check=True)
    shutil.copy(path.with_suffix(".pub"), sshd.folder / "authorized_keys")
    transport.connect()


def test_a_certificate_beside_the_key_is_shown(start_sshd, user, reach, named, tmp_path):
    make_key(tmp_path / "ca", comment="ca")
    sshd = start_sshd(TrustedUserCAKeys=f"{tmp_path}/ca.pub", AuthorizedKeysFile="none")
    transport = reach(sshd)
    (user.folders.user / "id_ed25519").unlink()
    path = user.folders.user / "id_ed25519"
    make_key(path, comment="me")
    with pytest.raises(HostError):
        transport.connect()
    subprocess.run(["ssh-keygen", "-q", "-s", tmp_path / "ca", "-I", "me", "-n", sshd.user, f"{path}.pub"], check=True)
    named("127.0.0.1", user=sshd.user, port=sshd.port).connect()


def test_a_locked_key_is_asked_for_once_however_many_hosts_want_it(start_sshd, user, reach, named, check):
    sshd, keys, asked = start_sshd(), KeyRing(), []
    first, second = reach(sshd, keys=keys), named("127.0.0.1", user=sshd.user, port=sshd.port, keys=keys)
    path = user.folders.user / "id_ed25519"
    subprocess.run(["ssh-keygen", "-q", "-p", "-P", "", "-N", "open sesame", "-f", path], check=True)
    check(
        first,
        sshd,
        """
        login refused: login as USER refused: SSH/id_ed25519 is locked by a passphrase
        hint: `ssh-add SSH/id_ed25519`
        hint: try it by hand: `ssh -o BatchMode=yes -p PORT USER@127.0.0.1 true`
        """,
    )
    assert keys.locked == (path,)

    def ask(wanted):
        asked.append(wanted)
        return "open sesame" if len(asked) > 1 else "wrong"

    assert keys.unlock(ask)
    first.connect()
    second.connect()
    assert asked == [path, path]  # the first answer was wrong
    assert keys.locked == ()


def test_nobody_is_asked_for_a_key_that_was_not_needed(start_sshd, user, reach):
    keys = KeyRing()
    transport = reach(start_sshd(), keys=keys)
    subprocess.run(["ssh-keygen", "-q", "-t", "rsa", "-N", "secret", "-f", user.folders.user / "id_rsa"], check=True)
    transport.connect()
    assert keys.read(user.folders.user / "id_rsa").locked
    assert keys.locked == ()


def test_a_person_who_does_not_know_the_passphrase_is_left_alone(user):
    keys = KeyRing()
    path = user.folders.user / "id_ed25519"
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "open sesame", "-f", path], check=True)
    assert keys.read(path).locked
    keys.want([path])
    assert not keys.unlock(lambda _: None)
    assert keys.locked == (path,)


@contextmanager
def agent(folder):
    """An ssh agent of the test's own; the path of its socket."""
    path = folder / "agent"
    process = subprocess.Popen(["ssh-agent", "-D", "-a", path], stdout=subprocess.DEVNULL)
    try:
        wait_until(path.exists, what="ssh-agent opens its socket")
        yield path
    finally:
        process.terminate()
        process.wait(10)


def test_keys_of_the_agent_are_offered(loopback_sshd, user, reach, tmp_path, monkeypatch):
    transport = reach(loopback_sshd)
    with agent(tmp_path) as path:
        monkeypatch.setenv("SSH_AUTH_SOCK", str(path))
        subprocess.run(["ssh-add", "-q", user.folders.user / "id_ed25519"], check=True)
        (user.folders.user / "id_ed25519").unlink()
        transport.connect()
    assert run(transport, "echo in", timeout_s=10).stdout == b"in\n"


def test_an_agent_that_gives_no_answer_keeps_nobody_waiting(loopback_sshd, reach, tmp_path, monkeypatch):
    transport = reach(loopback_sshd)
    with socket.socket(socket.AF_UNIX) as deaf:
        deaf.bind(str(tmp_path / "deaf"))
        deaf.listen()
        monkeypatch.setenv("SSH_AUTH_SOCK", str(tmp_path / "deaf"))
        transport.connect(timeout_s=10)
    assert run(transport, "echo in", timeout_s=10).stdout == b"in\n"


def test_a_host_that_hangs_up_after_too_many_keys_is_told_apart(start_sshd, user, reach, check):
    sshd = start_sshd(MaxAuthTries=2)
    transport = reach(sshd)
    (user.folders.user / "id_ed25519").unlink()
    for name in ("a", "b", "c"):
        make_key(user.folders.user / name, comment=name)
    user.configure(
        "IdentityFile SSH/a\nIdentityFile SSH/b\nIdentityFile SSH/c\n".replace("SSH", str(user.folders.user))
    )
    check(
        transport,
        sshd,
        """
        login refused: login as USER refused: the host hung up after 2 keys
        note: offered SSH/a (SHA256:PRINT)
        note: offered SSH/b (SHA256:PRINT)
        hint: name the right key with `identity_file` in cluster.yaml, or `IdentityFile` and `IdentitiesOnly yes`
        hint: try it by hand: `ssh -o BatchMode=yes -p PORT USER@127.0.0.1 true`
        """,
    )
