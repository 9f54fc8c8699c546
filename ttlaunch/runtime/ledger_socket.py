"""A rank's socket with books: every message passes through here, is counted, and what it made the rank wait is timed."""

import time

from torch import Tensor

from ttlaunch.runtime.ledger import Ledger, caller_label
from ttlaunch.runtime.sockets import Pending, Socket
from ttlaunch.runtime.world import Rank

_now = time.monotonic_ns


class LedgerSocket:
    """Another socket's messages, unchanged, and entered into a ledger.

    Cost: no message; about 2 µs for each, at its sender and at its receiver.
    """

    def __init__(self, socket: Socket, ledger: Ledger) -> None:
        self.rank = socket.rank
        self.ledger = ledger
        self._socket = socket

    def send(self, tensor: Tensor, *, dest: Rank, tag: int = 0) -> None:
        """Send and wait; see `Socket`."""
        label = self.ledger.label or caller_label()
        began = _now()
        self._socket.send(tensor, dest=dest, tag=tag)
        self.ledger.waited(label[0], _now() - began)
        self.ledger.sent(label, dest, tensor.nbytes)

    def recv(self, tensor: Tensor, *, source: Rank, tag: int = 0) -> None:
        """Receive and wait; see `Socket`."""
        label = self.ledger.label or caller_label()
        began = _now()
        self._socket.recv(tensor, source=source, tag=tag)
        self.ledger.waited(label[0], _now() - began)

    def isend(self, tensor: Tensor, *, dest: Rank, tag: int = 0) -> Pending:
        label = self.ledger.label or caller_label()
        began = _now()
        pending = self._socket.isend(tensor, dest=dest, tag=tag)
        self.ledger.waited(label[0], _now() - began)
        self.ledger.sent(label, dest, tensor.nbytes)
        return _Timed(pending, self.ledger, label[0])

    def irecv(self, tensor: Tensor, *, source: Rank, tag: int = 0) -> Pending:
        label = self.ledger.label or caller_label()
        return _Timed(self._socket.irecv(tensor, source=source, tag=tag), self.ledger, label[0])


class _Timed:
    """A transfer whose wait is timed, for the operation that began it."""

    __slots__ = ("_ledger", "_operation", "_pending")

    def __init__(self, pending: Pending, ledger: Ledger, operation: str) -> None:
        self._pending = pending
        self._ledger = ledger
        self._operation = operation

    def wait(self) -> None:
        began = _now()
        self._pending.wait()
        self._ledger.waited(self._operation, _now() - began)
