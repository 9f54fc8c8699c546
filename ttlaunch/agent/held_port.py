"""Draw a port at random for rank 0 of a Python program, and hold it, so that no other run on this host draws it too.

A constant port, such as torchrun's 29500, is taken if two runs share a host. A port of the ephemeral range may be given to any connection
between the moment when it is found free and the moment when rank 0 listens. Python 3.9 and the standard library only.
"""

from __future__ import annotations

import socket

TYPE_CHECKING = False  # what typing.TYPE_CHECKING is, without the time to import it
if TYPE_CHECKING:
    from collections.abc import Sequence

FIRST, LAST = 10000, 65535
_EPHEMERAL = (32768, 60999)  # Linux's default
_TRIES = 200


def ephemeral_range() -> tuple[int, int]:
    """Return the ports that the kernel gives to connections, the first and the last."""
    try:
        with open("/proc/sys/net/ipv4/ip_local_port_range", encoding="ascii") as file:
            first, last = file.read().split()
            return int(first), int(last)
    except (OSError, ValueError):
        return _EPHEMERAL


def candidates(ephemeral: tuple[int, int]) -> list[int]:
    """Return the ports outside a range; all ports from `FIRST` on if nearly all of them are in the range."""
    outside = [port for port in range(FIRST, LAST + 1) if not ephemeral[0] <= port <= ephemeral[1]]
    return outside if len(outside) >= _TRIES else list(range(FIRST, LAST + 1))


def hold_port(ports: Sequence[int] = ()) -> socket.socket:
    """Bind a socket to a free port, for as long as the socket is open; `ports` are those to draw from, if not all.

    The socket does not listen and shares its address: a server that sets SO_REUSEADDR, as torch's store does, can listen on
    the port, while a second call of this function cannot draw it.

    Raises:
        OSError: No port is free.
    """
    family = socket.AF_INET6 if socket.has_dualstack_ipv6() else socket.AF_INET
    import random  # noqa: PLC0415 - most hosts hold no port

    draw = random.SystemRandom()
    ports = ports or candidates(ephemeral_range())
    for port in draw.sample(ports, min(_TRIES, len(ports))):
        held = socket.socket(family, socket.SOCK_STREAM)
        try:
            if family == socket.AF_INET6:
                held.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
            # Only after the bind: with SO_REUSEADDR, the bind would succeed on a port that another run holds.
            held.bind(("", port))
            held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        except OSError:
            held.close()
            continue
        return held
    raise OSError("no port that was drawn at random is free")
