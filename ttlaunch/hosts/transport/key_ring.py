"""The user's private keys: each file is read once and each passphrase asked for once, however many hosts there are."""

import threading
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from ttlaunch.quick_dataclass import dataclass
from ttlaunch.system_reason import system_reason

if TYPE_CHECKING:
    from ttlaunch.hosts.transport.quick_paramiko import paramiko

AskPassphrase = Callable[[Path], str | None]
"""Asks a person for the passphrase of a key file; None if they give none."""

_OTHERS = 0o077


@dataclass(frozen=True)
class KeyFile:
    """What a key file on this machine has to offer.

    Attributes:
        key: The key to sign with; None if it cannot be used.
        public: The public half in SSH's wire format; None if even that is unknown.
        problem: Why `key` is None, as a clause with the path; empty if the file does not exist.
        locked: Whether it needs a passphrase that has not been given.
    """

    key: "paramiko.PKey | None" = None
    public: bytes | None = None
    problem: str = ""
    locked: bool = False


class KeyRing:
    """Reads private keys. Safe to use from several threads; passphrases are asked for only in `unlock`."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._files: dict[Path, KeyFile] = {}
        self._wanted: dict[Path, None] = {}

    @property
    def locked(self) -> tuple[Path, ...]:
        """Files that need a passphrase and might have opened a host that no other key did."""
        with self._lock:
            return tuple(path for path in self._wanted if self._files[path].locked)

    def read(self, path: Path) -> KeyFile:
        """The key in a file, as far as it can be used without asking."""
        with self._lock:
            if path not in self._files:
                self._files[path] = _read(path, passphrase=None)
            return self._files[path]

    def want(self, paths: Iterable[Path]) -> None:
        """Note that a host refused the login while these key files, which have been read, were locked."""
        with self._lock:
            self._wanted.update(dict.fromkeys(paths))

    def unlock(self, ask: AskPassphrase, *, attempts: int = 3) -> bool:
        """Ask for the passphrase of every locked key; returns whether any key was unlocked.

        Call it between two rounds of connecting, on the thread that owns the terminal.
        """
        unlocked = False
        for path in self.locked:
            for _ in range(attempts):
                passphrase = ask(path)
                if not passphrase:
                    break
                file = _read(path, passphrase=passphrase)
                if file.key is not None:
                    with self._lock:
                        self._files[path] = file
                    unlocked = True
                    break
        return unlocked


def _read(path: Path, *, passphrase: str | None) -> KeyFile:
    from ttlaunch.hosts.transport.quick_paramiko import paramiko  # noqa: PLC0415 - 0.2 s that commands without hosts need not pay

    try:
        mode = path.stat().st_mode
        if path.suffix == ".pub":
            return KeyFile(public=_public(path))
        if mode & _OTHERS:
            problem = f"{path} has mode {mode & 0o777:04o}, which lets others use it; `chmod 600 {path}`"
            return KeyFile(public=_public(path), problem=problem)
        key = paramiko.PKey.from_path(path, None if passphrase is None else passphrase.encode())  # type: ignore[arg-type]
    except FileNotFoundError:
        return KeyFile(public=_public(path))
    except OSError as error:
        return KeyFile(problem=f"{path} cannot be read: {system_reason(error)}")
    except (TypeError, paramiko.PasswordRequiredException):
        return KeyFile(public=_public(path), problem=f"{path} is locked by a passphrase", locked=True)
    except (ValueError, paramiko.SSHException, paramiko.pkey.UnknownKeyType) as error:
        if passphrase is not None:
            return KeyFile(public=_public(path), problem=f"{path} is locked by a passphrase", locked=True)
        return KeyFile(public=_public(path), problem=f"{path} is not a private key that can be read: {error}")
    return KeyFile(key=key, public=key.asbytes())


def _public(path: Path) -> bytes | None:
    """The public half that ssh-keygen writes beside a private key."""
    from ttlaunch.hosts.transport.quick_paramiko import paramiko  # noqa: PLC0415

    beside = path if path.suffix == ".pub" else path.with_name(f"{path.name}.pub")
    try:
        return paramiko.pkey.PublicBlob.from_file(str(beside)).key_blob
    except (OSError, ValueError):
        return None
