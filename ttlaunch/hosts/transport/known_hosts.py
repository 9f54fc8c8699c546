"""Read the host keys that the user trusts from known_hosts files, and check the key that a host presents."""

import base64
import binascii
import fnmatch
import hashlib
import shlex
from collections.abc import Sequence
from pathlib import Path

from ttlaunch.errors import HostError, Trouble
from ttlaunch.hosts.transport.quick_paramiko import paramiko
from ttlaunch.hosts.transport.ssh_config import SSH_PORT, HostSettings
from ttlaunch.quick_dataclass import dataclass
from ttlaunch.system_reason import system_reason

_FIELDS = 3
_REVOKED = "@revoked"
_AUTHORITY = "@cert-authority"
_RSA = ("rsa-sha2-512", "rsa-sha2-256")


@dataclass(frozen=True)
class KnownKey:
    """One line of a known_hosts file that speaks about the host.

    Attributes:
        exact: It names the port too, where that is not 22; a key under the bare name may vouch for any port, but a
            different one there is no sign of a change.
    """

    path: Path
    line: int
    kind: str
    blob: bytes
    revoked: bool
    exact: bool

    def __str__(self) -> str:
        return f"{self.path}:{self.line}"


def read_known_keys(settings: HostSettings) -> list[KnownKey]:
    """Read the keys that are known for a host, under the names that ssh would look for.

    Raises:
        HostError: SETTINGS if a file is there and cannot be read.
    """
    found: list[KnownKey] = []
    for path in settings.known_hosts:
        try:
            text = path.read_text(encoding="utf-8", errors="replace")
        except (FileNotFoundError, NotADirectoryError):
            continue
        except OSError as error:
            reason = system_reason(error)
            raise settings.error(Trouble.SETTINGS, f"{path} cannot be read: {reason}", by_hand=False) from error
        found += _parse(text, path, _names(settings))
    return found


def prefer_known(kinds: Sequence[str], known: Sequence[KnownKey]) -> tuple[str, ...]:
    """Host key algorithms with those first for which a key is known, as a host has several keys and shows one."""
    wanted = [name for key in known if not key.revoked for name in (_RSA if key.kind == "ssh-rsa" else (key.kind,))]
    first = [name for name in dict.fromkeys(wanted) if name in kinds]
    return (*first, *(name for name in kinds if name not in first))


def check_host_key(settings: HostSettings, shown: paramiko.PKey, known: Sequence[KnownKey]) -> None:
    """Refuse a host key that the user's known_hosts files do not list.

    Raises:
        HostError: UNKNOWN_KEY or CHANGED_KEY, with fingerprints and the command that repairs it.
    """
    blob, kind = shown.asbytes(), shown.get_name()
    described = f"{_short(kind)} {fingerprint(blob)}"
    revoked = next((key for key in known if key.revoked and key.blob == blob), None)
    if revoked is not None:
        hints = ("ask the host's administrator for its new key before you connect",)
        reason = f"its host key {described} is revoked in {revoked}"
        raise settings.error(Trouble.CHANGED_KEY, reason, hints=hints, by_hand=False)
    # A revoked key is refused above even if another line lists it, as ssh does.
    if any(key.blob == blob for key in known if not key.revoked):
        return
    old = next((key for key in known if key.exact and not key.revoked and key.kind == kind), None)
    if old is not None:
        raise _changed(settings, described, old)
    raise _unknown(settings, described, [key for key in known if not key.revoked])


def fingerprint(blob: bytes) -> str:
    """The fingerprint of a key, in the form that ssh prints."""
    return f"SHA256:{base64.b64encode(hashlib.sha256(blob).digest()).decode().rstrip('=')}"


def _changed(settings: HostSettings, described: str, old: KnownKey) -> HostError:
    name = _names(settings)[0]
    remove = shlex.join(["ssh-keygen", "-f", str(old.path), "-R", name])
    return settings.error(
        Trouble.CHANGED_KEY,
        f"its host key has changed to {described}",
        notes=(
            f"{old} has {_short(old.kind)} {fingerprint(old.blob)}",
            "the host was installed anew, or another machine answers in its place",
        ),
        hints=(f"if the new fingerprint is the host's own: `{remove}`, then `{_trust(settings)}`",),
        by_hand=False,
    )


def _unknown(settings: HostSettings, described: str, others: Sequence[KnownKey]) -> HostError:
    files = " and ".join(str(path) for path in settings.known_hosts if path.exists()) or "no known_hosts file"
    return settings.error(
        Trouble.UNKNOWN_KEY,
        f"its host key is not known: {described}",
        notes=(
            f"looked for `{_names(settings)[0]}` in {files}",
            *(f"{key} has another kind of key, {_short(key.kind)}" for key in others[:1]),
        ),
        hints=(f"compare the fingerprint, then trust the key: `{_trust(settings)}`",),
        by_hand=False,
    )


def _trust(settings: HostSettings) -> str:
    return shlex.join(["ssh", *settings.by_hand, "true"])


def _names(settings: HostSettings) -> list[str]:
    """Names to look for; a key under the bare name is also good for another port, as it is for ssh."""
    if settings.host_key_alias:
        return [settings.host_key_alias.lower()]
    name = settings.host_name.lower()
    return [name] if settings.port == SSH_PORT else [f"[{name}]:{settings.port}", name]


def _parse(text: str, path: Path, names: Sequence[str]) -> list[KnownKey]:
    found: list[KnownKey] = []
    for number, line in enumerate(text.splitlines(), 1):
        fields = line.split()
        if not fields or fields[0].startswith("#"):
            continue
        marker = fields.pop(0) if fields[0].startswith("@") else ""
        if len(fields) < _FIELDS or marker == _AUTHORITY or marker not in {"", _REVOKED}:
            continue
        patterns, kind, encoded = fields[:_FIELDS]
        name = next((name for name in names if _matches(patterns, name)), None)
        if name is None:
            continue
        try:
            blob = base64.b64decode(encoded, validate=True)
        except binascii.Error:
            continue
        found.append(KnownKey(path, number, kind, blob, revoked=marker == _REVOKED, exact=name == names[0]))
    return found


def _matches(patterns: str, name: str) -> bool:
    if patterns.startswith("|1|"):
        try:
            return paramiko.HostKeys.hash_host(name, patterns) == patterns
        except (AssertionError, binascii.Error, IndexError):
            return False
    listed = patterns.lower().split(",")
    if any(part.startswith("!") and _fits(name, part[1:]) for part in listed):
        return False
    return any(_fits(name, part) for part in listed)


def _fits(name: str, pattern: str) -> bool:
    return fnmatch.fnmatchcase(name, pattern.replace("[", "[[]"))


def _short(kind: str) -> str:
    return {"ssh-ed25519": "ED25519", "ssh-rsa": "RSA"}.get(kind, "ECDSA" if kind.startswith("ecdsa") else kind)
