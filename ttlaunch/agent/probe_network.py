"""Part of the probe: a host's IPv4 interfaces, asked from the kernel, and what the names of other hosts mean there."""

from __future__ import annotations

import array
import contextlib
import fcntl
import os
import socket
import struct
import threading
import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

_REQUEST = 40  # size of a struct ifreq on 64-bit Linux
_MOST_ADDRESSES = 1024
_LIST, _FLAGS, _NETMASK, _MTU = 0x8912, 0x8913, 0x891B, 0x8921  # SIOCGIFCONF, …FLAGS, …NETMASK, …MTU
_UP, _RUNNING = 0x1, 0x40
_GATEWAY = 0x2
_MOST_THREADS = 16


def find_interfaces() -> dict[str, Any]:
    """Every IPv4 address with its interface, and the interface of the default route."""
    found = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as kernel:
        buffer = array.array("B", bytes(_REQUEST * _MOST_ADDRESSES))
        address, length = buffer.buffer_info()
        asked = struct.pack("iP", length, address)
        size = struct.unpack("iP", fcntl.ioctl(kernel, _LIST, asked))[0]
        data = buffer.tobytes()[:size]
        for start in range(0, size, _REQUEST):
            with contextlib.suppress(OSError):
                found.append(_interface(kernel, data[start : start + _REQUEST]))
    return {"interfaces": found, "default_interface": _default_route()}


def _interface(kernel: socket.socket, request: bytes) -> dict[str, Any]:
    label = request[:16].partition(b"\0")[0]
    name = label.partition(b":")[0].decode("utf-8", "replace")  # an alias such as eth0:1 belongs to eth0
    mask = fcntl.ioctl(kernel, _NETMASK, request)[20:24]  # the request names label and address, so a second one works
    flags = struct.unpack("H", fcntl.ioctl(kernel, _FLAGS, request)[16:18])[0]
    mtu = struct.unpack("i", fcntl.ioctl(kernel, _MTU, request)[16:20])[0]
    prefix = bin(int.from_bytes(mask, "big")).count("1")  # noqa: FURB161 - Python 3.9
    return {
        "name": name,
        "address": f"{socket.inet_ntoa(request[20:24])}/{prefix}",
        "mtu": mtu,
        "up": bool(flags & _UP and flags & _RUNNING),
        "speed_mbit": _speed(name),
        "bridge": os.path.isdir(f"/sys/class/net/{name}/bridge"),
    }


def _speed(name: str) -> int | None:
    try:
        with open(f"/sys/class/net/{name}/speed", encoding="ascii") as file:
            speed = int(file.read())
    except (OSError, ValueError):
        return None
    return speed if speed > 0 else None


def _default_route() -> str | None:
    with contextlib.suppress(OSError):
        with open("/proc/net/route", encoding="ascii") as file:
            rows = [line.split() for line in file.readlines()[1:]]
        routes = [(int(row[6]), row[0]) for row in rows if row[1] == "00000000" and int(row[3], 16) & _GATEWAY]
        return min(routes)[1] if routes else None
    return None


def resolve(names: list[str], *, timeout_s: float) -> dict[str, list[str]]:
    """Addresses of each name as this host understands it; a name without an answer in time is missing."""
    found: dict[str, list[str]] = {}
    waiting = list(names)

    def work() -> None:
        while waiting:
            try:
                name = waiting.pop()
            except IndexError:
                return
            try:
                answers = socket.getaddrinfo(name, None, socket.AF_INET, socket.SOCK_STREAM)
            except (OSError, UnicodeError):
                found[name] = []
            else:
                found[name] = sorted({str(answer[4][0]) for answer in answers})

    end = time.monotonic() + timeout_s
    threads = [threading.Thread(target=work, daemon=True) for _ in range(min(_MOST_THREADS, len(names)))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(max(0.0, end - time.monotonic()))
    return dict(found)
