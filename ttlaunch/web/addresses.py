"""Where a server listens, by which names it may be called, and the key that clients need: decided before anything starts.

Standard library only, so that the command line can check all of it before it starts a server.
"""

import ipaddress
import os
import re
import secrets
import socket
from pathlib import Path

from ttlaunch.records.regular_files import open_regular
from ttlaunch.system_reason import system_reason

LOOPBACK = frozenset({"127.0.0.1", "localhost", "[::1]"})
"""What a browser or client calls a server on its own machine."""

SEND_BUFFER_BYTES = 32 << 10
"""What the kernel keeps of an answer that its reader does not take; without a limit it would grow to megabytes."""

_KEY = re.compile(r"[!-~]{16,512}")


class KeyRefusedError(Exception):
    """A text or a file that cannot serve as a key, and why."""


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach what listens there."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def allowed_names(host: str, others: list[str]) -> frozenset[str]:
    """The names that a request's `Host` may have: the loopback ones, the address listened on, and those that the user adds.

    A page of another site can be given this machine's address by its name server (DNS rebinding), but it cannot change
    the name that the browser sends.
    """
    own = f"[{host}]" if ":" in host else host
    return LOOPBACK | {own.lower()} | {name.lower() for name in others}


def listen(host: str, port: int) -> socket.socket:
    """Listen for TCP connections; port 0 is any free one.

    Raises:
        OSError: If the port is taken or the address is not one of this machine.
    """
    family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    listening = socket.socket(family, kind, protocol)
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)  # connections inherit it
        listening.bind(address)
        listening.listen(128)
    except OSError:
        listening.close()
        raise
    return listening


def read_key(path: Path) -> str:
    """Read the key that clients have to send from a file that only this user can read.

    Raises:
        KeyRefusedError: If the file cannot be read, others can read it, or its text cannot be a key.
    """
    try:
        with open_regular(path, follow=True) as file:  # a named pipe would never end
            status = os.fstat(file.fileno())
            text = file.read(1024).decode("ascii", "replace").strip()
    except OSError as error:
        reason = system_reason(error)
        raise KeyRefusedError(f"{path}: {reason}; a file with mode 0600 has one line, such as `{draw_key()}`") from None
    if status.st_mode & 0o077:
        raise KeyRefusedError(f"{path}: others can read it; `chmod 600` it and choose a new key")
    return check_key(text, str(path))


def check_key(text: str, where: str) -> str:
    """Return a key that can be sent and is long enough; `where` says whose it is.

    Raises:
        KeyRefusedError: It is not.
    """
    if not _KEY.fullmatch(text):
        raise KeyRefusedError(
            f"{where}: expected one line of 16 to 512 visible ASCII characters, such as `{draw_key()}`"
        )
    return text


def draw_key() -> str:
    """Draw a key of 256 random bits."""
    return secrets.token_urlsafe(32)
