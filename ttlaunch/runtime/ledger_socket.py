"""A rank's socket with books: every message passes through here, is counted, and what it made the rank wait is timed."""

import time

from torch import Tensor

from ttlaunch.runtime.ledger import Ledger, caller_label
from ttlaunch.runtime.sockets import Pending, Socket
from ttlaunch.runtime.trace import Trace
from ttlaunch.runtime.world import Rank

_now = time.monotonic_ns
_Label = tuple[str, int | None]


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
        if self._open_trace() is not None:
            self.isend(tensor, dest=dest, tag=tag).wait()
            return
        label = self.ledger.label or caller_label()
        began = _now()
        self._socket.send(tensor, dest=dest, tag=tag)
        self.ledger.waited(label[0], _now() - began)
        self.ledger.sent(label, dest, tensor.nbytes)

    def recv(self, tensor: Tensor, *, source: Rank, tag: int = 0) -> None:
        """Receive and wait; see `Socket`."""
        if self._open_trace() is not None:
            self.irecv(tensor, source=source, tag=tag).wait()
            return
        label = self.ledger.label or caller_label()
        began = _now()
        self._socket.recv(tensor, source=source, tag=tag)
        self.ledger.waited(label[0], _now() - began)

    def isend(self, tensor: Tensor, *, dest: Rank, tag: int = 0) -> Pending:
        label = self.ledger.label or caller_label()
        began = _now()
        pending = self._socket.isend(tensor, dest=dest, tag=tag)
        ended = _now()
        self.ledger.waited(label[0], ended - began)
        self.ledger.sent(label, dest, tensor.nbytes)
        trace = self._open_trace()
        if trace is None:
            return _Timed(pending, self.ledger, label[0])
        number = trace.number(is_send=True, peer=dest, tag=tag)
        message = _Message(trace, label, dest, tag, number, tensor.nbytes, self.ledger.step, is_send=True)
        message.begin(began, ended)
        return _Traced(pending, self.ledger, message)

    def irecv(self, tensor: Tensor, *, source: Rank, tag: int = 0) -> Pending:
        label = self.ledger.label or caller_label()
        pending = self._socket.irecv(tensor, source=source, tag=tag)
        trace = self._open_trace()
        if trace is None:
            return _Timed(pending, self.ledger, label[0])
        number = trace.number(is_send=False, peer=source, tag=tag)
        message = _Message(trace, label, source, tag, number, tensor.nbytes, self.ledger.step, is_send=False)
        return _Traced(pending, self.ledger, message)

    def _open_trace(self) -> Trace | None:
        """None also when the steps that were to be traced are over."""
        trace = self.ledger.trace
        return trace if trace is not None and trace.is_open else None


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


class _Message:
    """One end of a message in the trace: what it is, when its send began, when its receive was complete."""

    def __init__(
        self, trace: Trace, label: _Label, peer: Rank, tag: int, number: int, size: int, step: int, *, is_send: bool
    ) -> None:
        operation, bucket = label
        self.operation = operation
        self._trace = trace
        self._is_send = is_send
        self._name = operation if bucket is None else f"{operation} {bucket}"
        self._facts = {"peer": peer, "tag": tag, "number": number, "bytes": size, "step": step}
        self._is_done = False

    def begin(self, began: int, ended: int) -> None:
        """The call that began a send."""
        self._trace.span(f"send {self._name}", "send", began, ended, **self._facts)
        self._trace.message(self._name, is_send=True, when=began, facts=self._facts)

    def end(self, began: int, ended: int) -> None:
        """A wait for it; only the first one can take time."""
        if self._is_done:
            return
        self._is_done = True
        verb = "wait: send" if self._is_send else "recv"
        self._trace.span(f"{verb} {self._name}", "wait" if self._is_send else "recv", began, ended, **self._facts)
        if not self._is_send:
            self._trace.message(self._name, is_send=False, when=ended, facts=self._facts)


class _Traced:
    """A transfer whose wait is timed and traced."""

    __slots__ = ("_ledger", "_message", "_pending")

    def __init__(self, pending: Pending, ledger: Ledger, message: _Message) -> None:
        self._pending = pending
        self._ledger = ledger
        self._message = message

    def wait(self) -> None:
        began = _now()
        self._pending.wait()
        ended = _now()
        self._ledger.waited(self._message.operation, ended - began)
        self._message.end(began, ended)
