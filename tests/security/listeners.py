"""Which sockets listen on a machine, and on which addresses, from the kernel's own tables."""

import ipaddress
import socket
import struct
from pathlib import Path

_LISTENS = "0A"


def addresses_of(pids):
    """The addresses on which any of these processes listens, as objects of `ipaddress`; each has its own network."""
    return [address for address, _ in places_of(pids)]


def places_of(pids):
    """As `addresses_of`, each with its port."""
    found = []
    for process in (Path(f"/proc/{pid}") for pid in pids):
        sockets = set(_links(process / "fd"))
        found += [place for inode, place in _listening(process) if f"socket:[{inode}]" in sockets]
    return found


def _links(folder):
    for path in folder.iterdir() if folder.is_dir() else ():
        try:
            yield str(path.readlink())
        except OSError:
            continue


def _listening(process):
    for table in ("tcp", "tcp6"):
        for line in (process / "net" / table).read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == _LISTENS:
                address, _, port = fields[1].partition(":")
                yield fields[9], (_address(address), int(port, 16))


def _address(text):
    """The kernel prints 32-bit words in the machine's own order."""
    packed = b"".join(struct.pack("=I", int(text[at : at + 8], 16)) for at in range(0, len(text), 8))
    return ipaddress.ip_address(socket.inet_ntop(socket.AF_INET if len(packed) == 4 else socket.AF_INET6, packed))
