"""Pass the coordinator's orders to a worker of an elastic run on this host: a datagram each to the worker's socket.

An order may be lost: the coordinator repeats it until the worker has answered. So nothing here waits, and a worker that
is gone, has not begun or reads too slowly costs nothing. Python 3.9 and the standard library only.
"""

from __future__ import annotations

import os
import re
import socket
import stat

from ttlaunch import contract

TYPE_CHECKING = False  # what typing.TYPE_CHECKING is, without the time to import it
if TYPE_CHECKING:
    from typing import Optional

_ORDERS = re.compile(r"rank-([0-9]{1,9})\.orders")  # `contract.orders_socket`


def pass_order(scratch: str, number: int, message: bytes) -> bool:
    """Send an order to the socket of a worker, if it is a socket of this user, and return at once.

    Args:
        scratch: The run's private folder on this host.
        number: The worker's number.
        message: The order, at most `contract.LARGEST_ORDER` bytes.

    Returns:
        Whether the worker's socket took the order; False if there is none, it is not ours, or it is full.
    """
    found = _open_socket(os.path.join(scratch, contract.orders_socket(number)))
    if found is None:
        return False
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
            # Through its descriptor, the socket is the one that was checked, whatever has the path by now.
            sender.sendto(message, socket.MSG_DONTWAIT, f"/proc/self/fd/{found}")
    except OSError:  # nobody listens, or it is full
        return False
    finally:
        os.close(found)
    return True


def order_to_save(scratch: str) -> list[int]:
    """Order all workers of an elastic run on this host to save their state and to end: the run has lost its coordinator.

    Returns:
        The numbers of the workers that got the order; none if the run is not elastic, or has no worker here.
    """
    try:
        names = os.listdir(scratch)
    except OSError:
        return []
    numbers = [int(found[1]) for found in map(_ORDERS.fullmatch, names) if found]
    return [number for number in sorted(numbers) if pass_order(scratch, number, contract.ORDER_TO_SAVE)]


def _open_socket(path: str) -> Optional[int]:  # noqa: UP045 - Python 3.9
    """Return a descriptor of a socket file of this user; None for anything else. No link is followed."""
    try:
        descriptor = os.open(path, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return None
    found = os.fstat(descriptor)
    if stat.S_ISSOCK(found.st_mode) and found.st_uid == os.geteuid():
        return descriptor
    os.close(descriptor)
    return None
