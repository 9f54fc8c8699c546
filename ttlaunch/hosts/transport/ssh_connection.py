"""Open one SSH connection to a host: through its jump hosts, with its key checked, logged in, within a deadline."""

import contextlib
import logging
import socket
import struct
import threading
import time
from typing import Any

from ttlaunch.errors import HostError, Trouble
from ttlaunch.hosts.transport.address import HostAddress
from ttlaunch.hosts.transport.attempt import Attempt, Closable, close_all
from ttlaunch.hosts.transport.deadline import call_within, render_seconds, time_left
from ttlaunch.hosts.transport.dial import UNANSWERED_MS, dial, through_jump
from ttlaunch.hosts.transport.key_ring import KeyRing
from ttlaunch.hosts.transport.known_hosts import check_host_key, prefer_known, read_known_keys
from ttlaunch.hosts.transport.login import log_in
from ttlaunch.hosts.transport.quick_paramiko import paramiko
from ttlaunch.hosts.transport.ssh_config import SSH_PORT, HostSettings, SshFolders, resolve_settings
from ttlaunch.system_reason import system_reason

WINDOW_BYTES = 4 * 1024 * 1024
_CIPHERS = ("aes128-gcm@openssh.com", "aes256-gcm@openssh.com", "aes128-ctr", "aes192-ctr", "aes256-ctr")
_MACS = (
    "hmac-sha2-256-etm@openssh.com",
    "hmac-sha2-512-etm@openssh.com",
    "hmac-sha2-256",
    "hmac-sha2-512",
)
_WEAK_SIGNATURES = ("ssh-rsa", "ssh-dss")
"""Signatures over SHA-1. An RSA key itself is not weak: it also signs as `rsa-sha2-512`."""

_WEAK_HASH = "sha1"
_KEEPALIVE_S = 15
_FULL_S = 0.5
_BROKEN = (paramiko.SSHException, OSError, EOFError, ValueError, IndexError, struct.error, paramiko.pkey.UnknownKeyType)
"""What the library raises where a host breaks the protocol."""

_TCP_DELIVERY_RATE = struct.Struct("=160xQ")
"""Where `struct tcp_info` of Linux has the rate at which the connection's data has arrived lately, in bytes per second."""

_PULSE_S = 2.0
_NO_PULSE_S = 6.0


class Connection:
    """A logged-in connection, with the connections to the jump hosts that it goes through.

    Attributes:
        settings: How the host was reached.
        transport: Opens channels.
        addresses: The addresses of its two ends; None if there is something in between.
    """

    def __init__(
        self,
        settings: HostSettings,
        transport: paramiko.Transport,
        *,
        addresses: tuple[str, str] | None,
        held: list[Closable],
    ) -> None:
        self.settings = settings
        self.transport = transport
        self.addresses = addresses
        self._held = held
        self._closed = threading.Event()
        self._lock = threading.Lock()
        self._reason = ""
        self._full_until = 0.0
        if addresses is None:
            threading.Thread(target=self._feel_pulse, daemon=True).start()

    @property
    def alive(self) -> bool:
        return not self._closed.is_set() and self.transport.is_active()

    @property
    def bytes_per_s(self) -> float | None:
        """The kernel's estimate of how fast the network is; None if something is in between, or if it has no estimate."""
        stream = self.transport.sock
        if self.addresses is None or isinstance(stream, paramiko.Channel):
            return None
        try:
            found = stream.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_DELIVERY_RATE.size)
        except OSError:
            return None
        if len(found) < _TCP_DELIVERY_RATE.size:  # Linux before 4.9
            return None
        rate: int = _TCP_DELIVERY_RATE.unpack(found)[0]
        return rate or None

    def open_channel(self, *, timeout_s: float) -> paramiko.Channel | None:
        """A new channel, None if the host allows no more of them on this connection or the connection is gone."""
        if not self.alive or time.monotonic() < self._full_until:
            return None
        try:
            return self.transport.open_session(timeout=timeout_s)
        except paramiko.ChannelException:  # the host's own answer
            self._full_until = time.monotonic() + _FULL_S
        except (OSError, EOFError) as error:  # paramiko's reading thread may notice the loss only later
            with self._lock:
                self._reason = self._reason or _reason_of_loss(error)
            close_all(self._held)
        except paramiko.SSHException:  # no answer in time, or the reading thread has ended the connection
            pass
        return None

    def why_lost(self) -> str:
        """The reason for the loss of the connection, as a clause for `HostError.evidence`."""
        if getattr(self.transport.sock, "unanswered", False):
            return f"the connection broke: no answer for {render_seconds(UNANSWERED_MS / 1000)}"
        error = self.transport.get_exception()
        with self._lock:
            if error is not None and not self._reason:
                self._reason = _reason_of_loss(error)
        if self._closed.is_set():
            return "the connection has been closed"
        return f"the connection broke: {self._reason or 'the host hung up'}"

    def close(self) -> None:
        self._closed.set()
        close_all(self._held)

    def _feel_pulse(self) -> None:
        """Ask the host for an answer every 2 s; behind a proxy or a jump host the kernel does not see that it vanished."""
        while not self._closed.wait(_PULSE_S):
            try:
                call_within(
                    lambda: self.transport.global_request("keepalive@openssh.com", wait=True), timeout_s=_NO_PULSE_S
                )
            except TimeoutError:
                self._reason = f"no answer for {render_seconds(_NO_PULSE_S)}"
                close_all(self._held)
                return
            except (OSError, EOFError, paramiko.SSHException):
                return
            if not self.transport.is_active():
                return


def open_connection(address: HostAddress, *, keys: KeyRing, folders: SshFolders, timeout_s: float) -> Connection:
    """Connect and log in.

    Raises:
        HostError: If the host cannot be used, for any reason; raised within `timeout_s`.
    """
    attempt = Attempt(timeout_s=timeout_s)
    found: list[HostSettings] = []
    try:
        return call_within(
            lambda: _open(resolve_settings(address, folders=folders), keys, attempt=attempt, found=found),
            timeout_s=timeout_s,
            on_late_result=Connection.close,
        )
    except TimeoutError as error:
        raise _too_slow(address.name, attempt, found[0] if found else None) from error
    finally:
        if not attempt.kept:
            attempt.give_up()


def _open(settings: HostSettings, keys: KeyRing, *, attempt: Attempt, found: list[HostSettings]) -> Connection:
    """Connect through every jump host to the host itself.

    The settings go into `found` first, so that the caller, which may stop waiting at any moment, can name them.
    """
    _silence()
    found.append(settings)
    attempt.limit(settings.connect_timeout_s)
    transport: paramiko.Transport | None = None
    way = (*settings.jumps, settings)
    for number, hop in enumerate(way):
        attempt.via = "" if hop is settings else hop.name
        try:
            if transport is None:
                stream: socket.socket | paramiko.Channel = dial(hop, attempt)
            else:
                stream = through_jump(hop, attempt, jump=transport, via=way[number - 1].name)
            transport = _start(hop, stream, attempt)
            attempt.phase = "login"
            log_in(transport, hop, keys=keys, end=attempt.end)
        except HostError as error:
            raise _of_host(error, settings, hop) from error
        except _BROKEN as error:
            if not time_left(attempt.end):
                raise _too_slow(settings.name, attempt, settings) from error
            raise _broke(error, settings, attempt) from error
    assert transport is not None  # noqa: S101 - the way ends at the host itself
    transport.set_keepalive(_KEEPALIVE_S)
    direct = stream if isinstance(stream, socket.socket) and settings.proxy_command is None else None
    addresses = (direct.getsockname()[0], direct.getpeername()[0]) if direct else None
    return Connection(settings, transport, addresses=addresses, held=attempt.keep())


def _start(settings: HostSettings, stream: socket.socket | paramiko.Channel, attempt: Attempt) -> paramiko.Transport:
    """Negotiate encryption with the host and check its key against the known hosts."""
    attempt.phase = "keys"
    known = read_known_keys(settings)
    transport = _Transport(stream)
    attempt.hold(transport)
    options = transport.get_security_options()
    options.ciphers = [name for name in _CIPHERS if name in options.ciphers]
    options.digests = [name for name in _MACS if name in options.digests]
    options.kex = [name for name in options.kex if not name.endswith(_WEAK_HASH)]
    options.key_types = prefer_known([name for name in options.key_types if name not in _WEAK_SIGNATURES], known)
    left = time_left(attempt.end)
    transport.banner_timeout = transport.handshake_timeout = left
    transport.start_client(timeout=left)
    check_host_key(settings, transport.get_remote_server_key(), known)
    return transport


class _Transport(paramiko.Transport):
    """A paramiko transport that prints no traceback and notes how the host ended a channel.

    paramiko keeps neither the signal that ended a command nor whether the host or a broken connection closed a channel.
    """

    def run(self) -> None:
        with contextlib.suppress(Exception):
            super().run()

    def __init__(self, stream: "socket.socket | paramiko.Channel") -> None:
        weak = {"pubkeys": _WEAK_SIGNATURES}
        super().__init__(stream, default_window_size=WINDOW_BYTES, disabled_algorithms=weak)
        self._channel_handler_table: dict[int, Any] = {
            **paramiko.Transport._channel_handler_table,  # type: ignore[attr-defined]  # noqa: SLF001
            paramiko.common.MSG_CHANNEL_REQUEST: _note_request,
            paramiko.common.MSG_CHANNEL_CLOSE: _note_close,
        }


def _note_request(channel: paramiko.Channel, message: paramiko.Message) -> None:
    """Handle a request on a channel as paramiko does, and also note the signal that ended a command."""
    start = message.packet.tell()
    if message.get_text() == "exit-signal":
        message.get_boolean()
        channel.exit_signal = message.get_text()  # type: ignore[attr-defined]
        channel.status_event.set()
        return
    message.packet.seek(start)
    channel._handle_request(message)  # type: ignore[attr-defined]  # noqa: SLF001


def _silence() -> None:
    """Give paramiko's logger a handler: without one Python prints its warnings to the user's terminal."""
    logger = logging.getLogger("paramiko")
    if not logger.handlers:
        logger.addHandler(logging.NullHandler())


def _of_host(error: HostError, settings: HostSettings, hop: HostSettings) -> HostError:
    """Turn an error at a jump host into one of the host behind it."""
    if hop is settings:
        return error
    return HostError(
        settings.name, error.trouble, f"jump host {hop.name}: {error.evidence}", notes=error.notes, hints=error.hints
    )


def _broke(error: Exception, settings: HostSettings, attempt: Attempt) -> HostError:
    """The error for a connection that ended, or could not be agreed upon, before the login succeeded."""
    where = f"jump host {attempt.via}: " if attempt.via else ""
    if isinstance(error, paramiko.ssh_exception.IncompatiblePeer):
        return settings.error(Trouble.SILENT, f"{where}no common way to encrypt: {str(error).lower()}")
    if attempt.phase == "login":
        return settings.error(Trouble.LOST, f"{where}the connection ended during the login")
    reason = str(error).strip().lower() or "it hangs up"
    return settings.error(Trouble.SILENT, f"{where}no SSH connection comes about: {reason}")


def _reason_of_loss(error: Exception) -> str:
    if isinstance(error, EOFError | ConnectionError | paramiko.ChannelException):
        return "the host hung up"
    return system_reason(error).lower()


def _too_slow(name: str, attempt: Attempt, settings: HostSettings | None) -> HostError:
    within = f"within {render_seconds(attempt.timeout_s)}"
    port = settings.port if settings else SSH_PORT
    reasons = {
        "settings": (Trouble.SETTINGS, f"the ssh configuration was not read {within}"),
        "name": (Trouble.UNKNOWN_NAME, f"its name was not resolved {within}"),
        "tcp": (Trouble.UNREACHABLE, f"no answer on port {port} {within}"),
        "banner": (Trouble.SILENT, f"accepts connections on port {port} and sends nothing {within}"),
        "keys": (Trouble.SILENT, f"accepts connections on port {port} and agrees on no keys {within}"),
        "login": (Trouble.SILENT, f"the login was not answered {within}"),
    }
    trouble, reason = reasons[attempt.phase]
    reason = f"jump host {attempt.via}: {reason}" if attempt.via else reason
    return settings.error(trouble, reason) if settings else HostError(name, trouble, reason)


def _note_close(channel: paramiko.Channel, message: paramiko.Message) -> None:
    """Close a channel as paramiko does, and note that the host asked for it: a channel also closes when the connection breaks."""
    channel.closed_by_host = True  # type: ignore[attr-defined]
    channel._handle_close(message)  # type: ignore[attr-defined]  # noqa: SLF001
