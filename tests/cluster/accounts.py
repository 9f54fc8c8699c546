"""Who may log in to a test host, and how: keys, known hosts, users, and the settings of its sshd.

Every key of a cluster is made anew. All machines of a cluster, the launcher among them, hold the same user key, so that
each may log in to each host, as on clusters with a shared home.
"""

import os
import subprocess
from pathlib import Path

SHELL = "/bin/dash"
KEY = "id_ed25519"
FIRST_USER_ID = 2000
SSHD_SETTINGS = {
    "Port": "22",
    "AddressFamily": "inet",
    "HostKey": "/var/ssh/host_key",
    "PidFile": "/run/sshd.pid",
    "UsePAM": "no",
    "UseDNS": "no",
    "PrintMotd": "no",
    "PermitRootLogin": "yes",
    "PubkeyAuthentication": "yes",
    "PasswordAuthentication": "no",
    "KbdInteractiveAuthentication": "no",
    "Subsystem": "sftp internal-sftp",
}
"""What differs from the defaults of sshd; above all, MaxStartups is what a real host has."""

_REAL = {name: Path("/etc", name) for name in ("passwd", "group", "hostname")}


def make_key(path, *, comment):
    for old in (path, path.with_suffix(".pub")):
        old.unlink(missing_ok=True)
    subprocess.run(
        ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", comment, "-f", str(path)],
        check=True,
        capture_output=True,
        stdin=subprocess.DEVNULL,
        timeout=30,
    )


def public_key(path):
    """The two words of a public key that identify it, without the comment."""
    return " ".join(path.with_suffix(".pub").read_text(encoding="utf-8").split()[:2])


def write_etc(folder, *, name):
    """The files of /etc that a host has for itself. Nobody has a password; root logs in to a shell that is not bash."""
    folder.mkdir()
    passwd = _REAL["passwd"].read_text(encoding="utf-8").splitlines()
    rows = [f"root:*:0:0:root:/root:{SHELL}", *(row for row in passwd if not row.startswith("root:"))]
    if not any(row.startswith("sshd:") for row in rows):
        rows.append("sshd:*:74:65534::/run/sshd:/usr/sbin/nologin")
    write(folder / "passwd", "".join(f"{row}\n" for row in rows))
    write(folder / "group", _REAL["group"].read_text(encoding="utf-8"))
    write(folder / "shadow", "".join(f"{row.split(':')[0]}:*:19000:0:99999:7:::\n" for row in rows), mode=0o640)
    write(folder / "hostname", f"{name}\n")


def add_user(etc, name):
    """Add a user to the files of one host and return its number."""
    passwd = etc / "passwd"
    number = FIRST_USER_ID + len(passwd.read_text(encoding="utf-8").splitlines())
    for file, row in (
        ("passwd", f"{name}:*:{number}:{number}::/home/{name}:{SHELL}"),
        ("group", f"{name}:x:{number}:"),
        ("shadow", f"{name}:*:19000:0:99999:7:::"),
    ):
        with (etc / file).open("a", encoding="utf-8") as table:
            table.write(row + "\n")
    return number


def write_ssh_folder(folder, *, key, known_hosts, owner=0):
    """The .ssh of a user who holds the cluster's key, may log in with it, and knows all hosts."""
    folder.mkdir(parents=True, exist_ok=True)
    folder.chmod(0o700)
    write(folder / KEY, key.read_text(encoding="utf-8"), mode=0o600)
    write(folder / f"{KEY}.pub", public_key(key) + "\n")
    write(folder / "authorized_keys", public_key(key) + "\n", mode=0o600)
    write(folder / "known_hosts", known_hosts)
    for path in (folder, *folder.iterdir()):
        os.chown(path, owner, owner)


def render_sshd_config(changes):
    """The text of sshd_config; `changes` win over what test hosts have otherwise."""
    settings = SSHD_SETTINGS | {key: str(value) for key, value in changes.items()}
    return "".join(f"{key} {value}\n" for key, value in settings.items())


def render_hosts(addresses):
    """The text of /etc/hosts for a cluster in which every machine knows every other."""
    known = "".join(f"{address} {name}\n" for name, address in addresses.items())
    return f"127.0.0.1 localhost\n::1 localhost ip6-localhost ip6-loopback\n{known}"


def write(path, text, *, mode=0o644):
    """Write in place: the file may be mounted somewhere, and a mount follows the file and not its name."""
    path.write_text(text, encoding="utf-8")
    path.chmod(mode)
