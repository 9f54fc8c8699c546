"""Log in with keys: those of the SSH agent first, then the user's files. A password is never asked for."""

import shlex
import socket
import stat
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import field
from pathlib import Path
from typing import Self

from ttlaunch.errors import HostError, Trouble
from ttlaunch.hosts.transport.deadline import time_left
from ttlaunch.hosts.transport.key_ring import KeyRing
from ttlaunch.hosts.transport.known_hosts import fingerprint
from ttlaunch.hosts.transport.quick_paramiko import paramiko
from ttlaunch.hosts.transport.ssh_config import HostSettings
from ttlaunch.quick_dataclass import dataclass

_AGENT_S = 1.5
"""A working agent lists its keys in a millisecond."""
_WITH_PASSWORD = {"password", "keyboard-interactive"}


@dataclass
class _Tried:
    """What has been offered to a host so far."""

    keys: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    locked: list[Path] = field(default_factory=list)


def log_in(transport: paramiko.Transport, settings: HostSettings, *, keys: KeyRing, end: float) -> None:
    """Offer keys in the order in which ssh does until the host accepts one.

    Raises:
        HostError: LOGIN, with what was tried.
        paramiko.SSHException: If the connection broke.
    """
    transport.auth_timeout = max(0.1, time_left(end))
    tried = _Tried()
    with _Agent(settings.agent, tried, end=end) as agent:
        for name, key in _candidates(settings, keys, agent=agent, tried=tried):
            tried.keys.append(f"{name} ({fingerprint(key.asbytes())})")
            try:
                more = transport.auth_publickey(settings.user, key)
            except paramiko.AuthenticationException as error:
                if isinstance(error, paramiko.BadAuthenticationType):
                    raise _takes_no_keys(settings, error.allowed_types) from error
                if not transport.is_active():
                    raise _refused(settings, tried, cut_off=True) from error
            except paramiko.SSHException as error:
                if not transport.is_active():
                    raise
                tried.problems.append(f"{name} cannot sign: {str(error).lower()}")
            else:
                if more:
                    wants = f"wants more than a key: {', '.join(more)}"
                    raise settings.error(Trouble.LOGIN, wants, notes=_notes(tried), by_hand=False)
                return
    if not tried.keys and _needs_nothing(transport, settings):
        return
    keys.want(tried.locked)
    raise _refused(settings, tried, cut_off=False)


def _needs_nothing(transport: paramiko.Transport, settings: HostSettings) -> bool:
    """Try to log in without a key; returns whether the host accepted that.

    Raises:
        HostError: If no key would help.
    """
    try:
        transport.auth_none(settings.user)
    except paramiko.BadAuthenticationType as error:
        if "publickey" not in error.allowed_types:
            raise _takes_no_keys(settings, error.allowed_types) from error
    except paramiko.AuthenticationException as error:
        if transport.is_active():
            return False
        reason = f"login as {settings.user} refused before any key was offered"
        raise settings.error(Trouble.LOGIN, reason) from error
    else:
        return True
    return False


def _candidates(
    settings: HostSettings, keys: KeyRing, *, agent: "_Agent", tried: _Tried
) -> Iterator[tuple[str, paramiko.PKey]]:
    """Yield the keys to offer, each with a name for messages.

    The order is ssh's: keys of the SSH agent that are also named as files, the agent's other keys, then the other files.
    A host counts refused keys and hangs up after a few, so the order decides whether the right key gets its turn.
    """
    files = {path: keys.read(path) for path in settings.identity_files}
    tried.problems += [file.problem for file in files.values() if file.problem]
    public = {file.public: path for path, file in files.items() if file.public is not None}
    in_agent = {key.asbytes(): key for key in agent.get_keys()}
    tried.locked += [path for path, file in files.items() if file.locked and file.public not in in_agent]
    for blob, path in public.items():
        if blob in in_agent:
            yield f"{path} through the ssh agent", in_agent[blob]
    if not settings.identities_only:
        for blob, key in in_agent.items():
            if blob not in public:
                yield f"{key.comment or key.get_name()} of the ssh agent", key
    for path, file in files.items():
        if file.key is not None and file.public not in in_agent:
            yield str(path), file.key


def _takes_no_keys(settings: HostSettings, methods: list[str]) -> HostError:
    only = "passwords" if set(methods) <= _WITH_PASSWORD else ", ".join(methods) or "nothing"
    notes = ("ttlaunch logs in with keys and never asks for a password",)
    hints = (f"let its sshd accept keys (`PubkeyAuthentication yes`), then {_copy(settings)}",)
    return settings.error(Trouble.LOGIN, f"takes only {only}", notes=notes, hints=hints, by_hand=False)


def _refused(settings: HostSettings, tried: _Tried, *, cut_off: bool) -> HostError:
    login = f"login as {settings.user} refused"
    copy = f"let it accept a key of yours: {_copy(settings)}"
    missing = _missing(settings, tried)
    if missing and not tried.keys and not tried.locked:
        return missing
    if missing:
        tried.problems.append(missing.evidence)
    if cut_off and len(tried.keys) > 1:
        reason = f"{login}: the host hung up after {len(tried.keys)} keys"
        hints = ("name the right key with `identity_file` in cluster.yaml, or `IdentityFile` and `IdentitiesOnly yes`",)
    elif tried.locked and not tried.keys:
        locked = f"{tried.locked[0]} is locked by a passphrase"
        reason = f"{login}: {locked}"
        tried.problems.remove(locked)
        hints = (f"`ssh-add {tried.locked[0]}`",)
    elif not tried.keys:
        reason, hints = f"{login}: there is no key to offer", (f"`ssh-keygen -t ed25519`, then {copy}",)
    else:
        offered = "the key was" if len(tried.keys) == 1 else f"{len(tried.keys)} keys were"
        reason, hints = f"{login}: {offered} not accepted", (copy,)
    return settings.error(Trouble.LOGIN, reason, notes=_notes(tried), hints=hints)


def _missing(settings: HostSettings, tried: _Tried) -> HostError | None:
    """The error for a key file that was named and does not exist; the usual files, named by nobody, need not exist."""
    where = settings.identity_named_in
    path = next((path for path in settings.identity_files if where and _is_missing(path)), None)
    if path is None:
        return None
    hint = f"correct {where}, or make that key: `{shlex.join(['ssh-keygen', '-t', 'ed25519', '-f', str(path)])}`"
    reason = f"the key file {path} that {where} names does not exist"
    return settings.error(Trouble.SETTINGS, reason, notes=_notes(tried), hints=(hint,), by_hand=False)


def _is_missing(path: Path) -> bool:
    try:
        path.stat()
    except OSError as error:
        return isinstance(error, FileNotFoundError)  # a file that may not be looked at does exist
    return False


def _copy(settings: HostSettings) -> str:
    return f"`{shlex.join(['ssh-copy-id', *settings.by_hand])}`"


def _notes(tried: _Tried) -> tuple[str, ...]:
    return (*(f"offered {key}" for key in tried.keys), *tried.problems)


class _Agent(paramiko.agent.AgentSSH):
    """The user's SSH agent at a given socket; its answers are waited for only up to a timeout."""

    def __init__(self, path: Path | None, tried: _Tried, *, end: float) -> None:
        super().__init__()
        self._path = path
        self._tried = tried
        self._end = end
        self._socket: socket.socket | None = None

    def __enter__(self) -> Self:
        if self._path is not None:
            with suppress(FileNotFoundError):
                self._open(self._path)
        return self

    def __exit__(self, *_: object) -> None:
        if self._socket is not None:
            self._socket.close()

    def _open(self, path: Path) -> None:
        if not stat.S_ISSOCK(path.stat().st_mode):
            self._tried.problems.append(f"{path} is not the socket of an ssh agent")
            return
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.settimeout(min(_AGENT_S, max(0.01, time_left(self._end))))
        try:
            self._socket.connect(str(path))
            self._connect(self._socket)  # type: ignore[attr-defined]
            self._socket.settimeout(max(0.01, time_left(self._end)))  # signing may wait for a touch
        except TimeoutError:
            self._tried.problems.append(f"the ssh agent at {path} gives no answer")
        except ConnectionRefusedError:
            self._tried.problems.append(f"no ssh agent listens at {path}")
        except (OSError, paramiko.SSHException, ValueError) as error:
            self._tried.problems.append(f"the ssh agent at {path} cannot be used: {str(error).lower()}")
