"""Move the sockets on which other processes listen: from all interfaces to one address, without a lost connection.

Both generations of Open MPI listen on all interfaces, whatever their settings say, and whoever connects there is asked for no
key. The kernel lets a process use the descriptors of its descendants and stop them as a debugger does. Where it does not
(Linux before 5.6, a container or a security policy that forbids it), they listen as they chose to.

Python 3.9 and the standard library only.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import select
import socket
import struct
import time

from ttlaunch.agent.run_processes import tree_below
from ttlaunch.agent.tracing import TracedProcess, frozen, has_peer, has_tracer, read_text

TYPE_CHECKING = False  # what typing.TYPE_CHECKING is, without the time to import it
if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping, Sequence

    Addresses = Mapping[int, str]
    SocketOption = Sequence[int]

LOOPBACK: Addresses = {int(socket.AF_INET): "127.0.0.1", int(socket.AF_INET6): "::1"}
"""The loopback addresses, by family."""

_FORBIDDEN = {errno.EPERM, errno.EACCES, errno.ENOSYS}
_ATTACH_FILTER = 26  # SO_ATTACH_FILTER
_DROP_ALL = struct.pack("HBBI", 0x06, 0, 0, 0)  # a program for the kernel's packet filter: keep 0 bytes of every packet
_HALF_OPEN = "03"  # SYN_RECV in the kernel's tables
_BACKLOG = 128
_LOOK_S = 0.005
_LONGEST_S = 10.0
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.01, 1.0
_ANY_PORT = 9  # nothing is sent there


class Listeners:
    """The listening sockets of this process's descendants, as they are found."""

    def __init__(self, addresses: Addresses, *, options: Collection[SocketOption] = ()) -> None:
        """Remember where sockets are to listen.

        Args:
            addresses: The address for each family of sockets.
            options: Socket options as level, name and value; a socket that has another value is left alone.
        """
        self.moved = 0  # how many sockets were moved
        self._addresses = addresses
        self._options = options
        self._known: set[str] = set()

    @property
    def seen(self) -> int:
        """How many sockets need no further look."""
        return len(self._known)

    def look(self, pid: int) -> bool:
        """Move each new socket on which a process listens on all interfaces. Nobody else may wait for it meanwhile.

        Returns:
            False if the kernel does not let this process see the other's sockets, or stop it.
        """
        try:
            process = TracedProcess(pid)
        except OSError as error:
            return error.errno != errno.ENOSYS  # otherwise it has ended
        try:
            for number, target in process.sockets():
                if target not in self._known and self._is_settled(process, number):
                    self._known.add(target)
        except OSError as error:
            # Otherwise a socket or a thread has gone while it was looked at; the next look finds what there is then.
            return error.errno not in _FORBIDDEN or has_tracer(pid)
        finally:
            process.close()
        return True

    def _is_settled(self, process: TracedProcess, number: int) -> bool:
        """Move a socket if it has to be moved; returns whether it needs no further look."""
        with process.borrowed(number) as found:
            if found.family not in LOOPBACK or found.type != socket.SOCK_STREAM:
                return True
            if not found.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                return has_peer(found)  # without a peer it may listen later
            if _is_everywhere(found) and self._has_options(found):
                if not _move(process, found, self._addresses[found.family]):
                    return False
                self.moved += not _is_everywhere(found)
            return True

    def _has_options(self, found: socket.socket) -> bool:
        return all(found.getsockopt(level, name) == value for level, name, value in self._options)


def _is_everywhere(found: socket.socket) -> bool:
    """Whether a socket listens on all interfaces: its address is zero."""
    return not any(socket.inet_pton(found.family, found.getsockname()[0].partition("%")[0]))


def refuse_connections(pid: int) -> None:
    """Let a descendant take no further connection, and keep those that it has; nothing if the kernel forbids it."""
    with contextlib.suppress(OSError):  # it has ended, or may not be touched
        process = TracedProcess(pid)
        with contextlib.closing(process):
            for number, _ in process.sockets():
                with process.borrowed(number) as found:
                    if found.family in LOOPBACK and found.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                        drop_packets(found)


def move_until_it_has_children(pid: int, addresses: Addresses) -> bool:
    """Watch a child that has just been started, and move each socket on which it listens on all interfaces.

    It returns when the child has children itself, which for an engine are its ranks or its connections to hosts, after 10 s,
    or at once if the child has ended.

    Returns:
        False if the kernel forbids it.
    """
    deadline = time.monotonic() + _LONGEST_S
    listeners = Listeners(addresses)
    descriptor = os.pidfd_open(pid)
    try:
        while not _has_ended(descriptor, within_s=_LOOK_S) and time.monotonic() < deadline:
            # Asked first: an engine listens before it starts processes, so the look that follows sees every socket.
            has_children = any(True for _ in descendants(pid))
            if not listeners.look(pid):
                return False
            if has_children:
                break
    finally:
        os.close(descriptor)
    return True


def move_until_it_ends(pid: int, networks: str, options: Collection[SocketOption]) -> bool:
    """Keep the sockets of a child and its descendants that listen on all interfaces on the chosen networks until the child ends.

    Programs load their libraries at different times, or several in turn, so the looks never stop. They become rarer, down to one
    a second, until a new socket is seen.

    Args:
        pid: The child.
        networks: As for `addresses_in`.
        options: Socket options as level, name and value; a socket that has another value is left alone.

    Returns:
        False if the kernel forbids it; the child has not ended then.
    """
    addresses = addresses_in(networks)
    if not addresses:
        return True
    listeners = Listeners(addresses, options=options)
    try:
        descriptor = os.pidfd_open(pid)
    except OSError:
        return False
    pause_s, seen = _FIRST_PAUSE_S, 0
    try:
        while not _has_ended(descriptor, within_s=pause_s):
            if not listeners.look(pid):
                return False
            for child, _ in descendants(pid):
                listeners.look(child)  # it may have other rights than ours, which is no concern of ours
            pause_s = min(pause_s * 1.05, _LONGEST_PAUSE_S) if listeners.seen == seen else _FIRST_PAUSE_S
            seen = listeners.seen
    finally:
        os.close(descriptor)
    return True


def _has_ended(descriptor: int, *, within_s: float) -> bool:
    """Whether a process has ended, after a time in which it may do so."""
    return bool(select.select([descriptor], [], [], within_s)[0])


def addresses_in(networks: str) -> Addresses:
    """Return on which addresses sockets are to listen so that only these networks and this machine reach them.

    Args:
        networks: The networks of IPv4 in CIDR notation, separated by commas.

    Returns:
        This machine's address in the networks, and the loopback address of IPv6. Empty if the machine has no address there or
        several, as a socket listens on one address or on all, or if a network is named in another way.
    """
    found = set()
    try:
        ranges = [_range(network) for network in networks.split(",")]
    except (OSError, ValueError):
        return {}
    for first, last in ranges:
        inside = min(first + 1, last).to_bytes(4, "big")
        try:
            with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
                # The kernel chooses an own address for what would be sent there; nothing is sent.
                asking.connect((socket.inet_ntoa(inside), _ANY_PORT))
                own = asking.getsockname()[0]
        except OSError:  # no way leads there
            continue
        found |= {own for first, last in ranges if first <= _number(own) <= last}
    return {**LOOPBACK, int(socket.AF_INET): found.pop()} if len(found) == 1 else {}


def descendants(pid: int) -> Iterator[tuple[int, str]]:
    """Yield the children of a process, their children and so on, with their names, as far as they have not ended."""
    for child in tree_below(pid):
        name, _, rest = read_text(f"/proc/{child}/stat").partition(" (")[2].rpartition(") ")
        if rest[:1] not in {"", "Z", "X"}:
            yield child, name


def _range(network: str) -> tuple[int, int]:
    """Return the first and the last address of a network as numbers.

    Raises:
        ValueError: This is no network of IPv4 in CIDR notation.
        OSError: As above.
    """
    address, slash, length = network.partition("/")
    size = 1 << (32 - int(length)) if slash else 1
    first = _number(address) // size * size
    return first, first + size - 1


def _number(address: str) -> int:
    return int.from_bytes(socket.inet_pton(socket.AF_INET, address), "big")


def _move(process: TracedProcess, listener: socket.socket, address: str) -> bool:
    """Let a socket listen on one address in place of all interfaces, with the same port.

    Returns:
        False if a connection is being made: it would be lost.
    """
    before, *rest = listener.getsockname()
    with contextlib.ExitStack() as after:
        # The kernel lets several sockets have one place if all of them agree: this one, the gate and accepted connections.
        for member in (listener, *after.enter_context(process.connections(listener))):
            member.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            after.callback(member.setsockopt, socket.SOL_SOCKET, socket.SO_REUSEPORT, 0)
        # While nobody listens, the kernel would refuse connections, for which a rank gives up. The gate drops their packets, so
        # that they are sent again a second later, when the socket listens in its new place.
        after.enter_context(_gate(listener, (address, *rest)))
        # The process must not find its socket in between, when it does not listen: it would report an error, and listen no
        # more. A stop by signal would do, but Open MPI 4 prints a line about the signal that continues it.
        after.enter_context(frozen(process.pid))
        if _has_arrivals(process, listener):
            return False
        listener.shutdown(socket.SHUT_RDWR)  # gives back a port that the kernel chose, so that it can be bound again
        try:
            listener.bind((address, *rest))
        except OSError:  # this machine has no such address, or the process chose the port itself and has kept it
            with contextlib.suppress(OSError):
                listener.bind((before, *rest))
        listener.listen(_BACKLOG)
    return True


@contextlib.contextmanager
def _gate(listener: socket.socket, place: tuple[str | int, ...]) -> Iterator[None]:
    """Drop what is sent to a place on which nobody listens, in place of refusing it.

    Raises:
        OSError: The place is taken.
    """
    with socket.socket(listener.family, socket.SOCK_STREAM) as gate:
        gate.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        if listener.family == socket.AF_INET6:
            gate.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        drop_packets(gate)
        try:
            gate.bind(place)
            gate.listen(1)
        except OSError as error:
            if error.errno != errno.EADDRNOTAVAIL:
                raise
        yield


def drop_packets(listener: socket.socket) -> None:
    """Let a listening socket take no further connection; those that it has taken go on."""
    program = ctypes.create_string_buffer(_DROP_ALL)
    listener.setsockopt(socket.SOL_SOCKET, _ATTACH_FILTER, struct.pack("@HP", 1, ctypes.addressof(program)))


def _has_arrivals(process: TracedProcess, listener: socket.socket) -> bool:
    """Whether a connection waits to be accepted, or is being made."""
    if select.select([listener], [], [], 0)[0]:
        return True
    table = "tcp" if listener.family == socket.AF_INET else "tcp6"
    with open(f"/proc/{process.pid}/net/{table}", encoding="ascii") as file:
        rows = [line.split() for line in file]
    port = listener.getsockname()[1]
    return any(row[3] == _HALF_OPEN and row[1].endswith(f":{port:04X}") for row in rows)
