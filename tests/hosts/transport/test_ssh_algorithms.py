"""Which algorithms a connection may use: a real sshd that offers nothing but a weak one is refused."""

import subprocess

import paramiko
import pytest

from tests.cluster.accounts import public_key
from ttlaunch.errors import HostError, Trouble
from ttlaunch.hosts.transport.transport import run

WEAK = {
    "3des": {"Ciphers": "3des-cbc"},
    "cbc": {"Ciphers": "aes256-cbc"},
    "hmac-sha1": {"Ciphers": "aes256-ctr", "MACs": "hmac-sha1"},
    "hmac-sha1-etm": {"Ciphers": "aes256-ctr", "MACs": "hmac-sha1-etm@openssh.com"},
    "hmac-md5": {"Ciphers": "aes256-ctr", "MACs": "hmac-md5"},
    "hmac-md5-96": {"Ciphers": "aes256-ctr", "MACs": "hmac-md5-96"},
    "group1": {"KexAlgorithms": "diffie-hellman-group1-sha1"},
    "group14 with SHA-1": {"KexAlgorithms": "diffie-hellman-group14-sha1"},
    "group exchange with SHA-1": {"KexAlgorithms": "diffie-hellman-group-exchange-sha1"},
}


@pytest.mark.parametrize("settings", WEAK.values(), ids=WEAK)
def test_a_host_that_offers_only_a_weak_algorithm_is_refused(start_sshd, reach, settings):
    with pytest.raises(HostError) as caught:
        reach(start_sshd(**settings)).connect(timeout_s=10)
    assert Trouble.SILENT is caught.value.trouble
    assert "no common way to encrypt" in caught.value.evidence


@pytest.mark.parametrize(("kind", "signature"), [("rsa", "ssh-rsa"), ("dsa", "ssh-dss")])
def test_a_host_that_signs_with_sha1_is_refused(start_sshd, user, named, tmp_path, kind, signature):
    key = tmp_path / kind
    subprocess.run(["ssh-keygen", "-q", "-t", kind, "-N", "", "-f", key], check=True)
    sshd = start_sshd(HostKey=key, HostKeyAlgorithms=signature)
    user.trust(sshd).know(f"[127.0.0.1]:{sshd.port} {public_key(key)}\n")
    with pytest.raises(HostError) as caught:
        named("127.0.0.1", user=sshd.user, port=sshd.port).connect(timeout_s=10)
    assert "no common way to encrypt" in caught.value.evidence


def test_the_user_signs_nothing_with_sha1(start_sshd, user, reach):
    sshd = start_sshd(PubkeyAcceptedAlgorithms="ssh-rsa")
    transport = reach(sshd)
    path = user.folders.user / "id_rsa"
    (user.folders.user / "id_ed25519").unlink()
    subprocess.run(["ssh-keygen", "-q", "-t", "rsa", "-b", "2048", "-N", "", "-f", path], check=True)
    (sshd.folder / "authorized_keys").write_text(public_key(path) + "\n")
    with pytest.raises(HostError) as caught:
        transport.connect(timeout_s=10)
    assert Trouble.LOGIN is caught.value.trouble


def test_what_an_older_paramiko_would_still_offer_is_not_offered(loopback_sshd, reach, monkeypatch):
    """paramiko offers less with each version; what ttlaunch offers does not depend on it."""
    monkeypatch.setattr(
        paramiko.Transport, "_preferred_keys", ("ssh-rsa", "ssh-dss", *paramiko.Transport._preferred_keys)
    )
    transport = reach(loopback_sshd)
    transport.connect()
    offered = transport._connections[0].transport
    options = offered.get_security_options()
    names = {*options.ciphers, *options.digests, *options.kex, *options.key_types, *offered.preferred_pubkeys}
    assert [] == [name for name in names if "cbc" in name or "md5" in name or name.endswith(("sha1", "-96"))]
    assert not {"ssh-rsa", "ssh-dss"} & names


def test_the_agent_of_the_user_is_not_forwarded_whatever_the_configuration_says(
    start_sshd, user, reach, named, monkeypatch
):
    sshd = start_sshd(AllowAgentForwarding="yes", X11Forwarding="yes")
    reach(sshd)
    user.configure("Host *\n  ForwardAgent yes\n  ForwardX11 yes\n  RemoteForward 0 127.0.0.1:22\n")
    transport = named("127.0.0.1", user=sshd.user, port=sshd.port)
    monkeypatch.setenv("DISPLAY", ":0")
    assert b"[]" == run(transport, 'echo "[$SSH_AUTH_SOCK$DISPLAY]"', timeout_s=10).stdout.strip()
