"""Receives the coordinator's orders: datagrams on a Unix socket in the run's private folder, one for each order.

Orders may be lost or repeated; the coordinator repeats them until they are obeyed, so a datagram that is no order is dropped.
"""

import os
import socket
import struct
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ttlaunch import contract
from ttlaunch.membership.messages import Member, Message, order_from_json
from ttlaunch.records.parser import BadRecord

MOST_BYTES = 128 * 1024
"""The longest order."""

_SENDER = struct.Struct("3i")  # process, user and group, as the kernel states them


class OrdersSocket:
    """Takes orders in a thread of its own, from its user and from root.

    Attributes:
        thread: Takes the orders.
        dropped: How many datagrams were none of this worker's orders, or came from another user.
    """

    def __init__(
        self, folder: Path, own: Member, *, take: Callable[[Message], object], abandon: Callable[[], object]
    ) -> None:
        """Begin to listen.

        Args:
            folder: The run's private folder on this host.
            own: Whose orders are taken.
            take: Called in the thread with each order.
            abandon: Called in the thread when the run has lost its coordinator.

        Raises:
            OSError: The socket cannot be made.
        """
        self.dropped = 0
        self._own, self._take, self._abandon = own, take, abandon
        self._path = folder / contract.orders_socket(own.number)
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        try:
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
            self._path.unlink(missing_ok=True)  # an earlier life of this worker may have left it
            self._socket.bind(str(self._path))
        except OSError:
            self._socket.close()
            raise
        self.thread = threading.Thread(target=self._receive, name="orders", daemon=True)
        self.thread.start()

    def close(self) -> None:
        """Take no further order."""
        self._path.unlink(missing_ok=True)
        self._socket.shutdown(socket.SHUT_RDWR)

    def _receive(self) -> None:
        with self._socket:
            while True:
                data, about, flags, _ = self._socket.recvmsg(MOST_BYTES, socket.CMSG_SPACE(_SENDER.size))
                if not data and not about:
                    return  # closed
                is_allowed = not flags & socket.MSG_TRUNC and _is_allowed(about)
                if is_allowed and data == contract.ORDER_TO_SAVE:
                    self._abandon()
                    continue
                order = order_from_json(data) if is_allowed else None
                if order is None or isinstance(order, BadRecord) or order.to != (self._own,):
                    self.dropped += 1
                else:
                    self._take(order.message)


def _is_allowed(about: list[tuple[int, int, Any]]) -> bool:
    senders = [
        _SENDER.unpack(content)[1]
        for level, kind, content in about
        if level == socket.SOL_SOCKET and kind == socket.SCM_CREDENTIALS and len(content) == _SENDER.size
    ]
    return bool(senders) and set(senders) <= {0, os.getuid()}
