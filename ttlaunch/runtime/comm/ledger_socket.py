"""A rank's socket with books: every message passes through here, is counted, and what it made the rank wait is timed."""

import time
from collections.abc import Sequence

from torch import Tensor

from ttlaunch.flight_recorder import ANY, IRECV, ISEND, RECV, SEND, WAIT_ANY, WAIT_RECV, WAIT_SEND
from ttlaunch.runtime.comm.protocol import Pending, Socket
from ttlaunch.runtime.telemetry.black_box import BlackBox, Place
from ttlaunch.runtime.telemetry.ledger import Ledger, caller
from ttlaunch.runtime.telemetry.trace import Trace
from ttlaunch.runtime.world import Rank

_now = time.monotonic_ns
_Label = tuple[str, int | None]


class LedgerSocket:
    """Another socket's messages, unchanged, entered into a ledger and into the rank's black box.

    Cost: no message; about 2 µs for each, at its sender and at its receiver, and under 1 µs for the black box.
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
        label, place = self._named()
        box, at, size = self.ledger.box, 0, tensor.nbytes
        began = _now()
        if box is not None:
            at = box.begin(SEND, label, place, dest, tag, size, began)
        with self.ledger.marked("send", label[0]):
            self._socket.send(tensor, dest=dest, tag=tag)
        ended = _now()
        if box is not None:
            box.end(at, ended)
        self.ledger.waited(label[0], ended - began)
        self.ledger.sent(label, dest, size)

    def recv(self, tensor: Tensor, *, source: Rank, tag: int = 0) -> None:
        """Receive and wait; see `Socket`."""
        if self._open_trace() is not None:
            self.irecv(tensor, source=source, tag=tag).wait()
            return
        label, place = self._named()
        box, at = self.ledger.box, 0
        began = _now()
        if box is not None:
            at = box.begin(RECV, label, place, source, tag, tensor.nbytes, began)
        with self.ledger.marked("recv", label[0]):
            self._socket.recv(tensor, source=source, tag=tag)
        ended = _now()
        if box is not None:
            box.end(at, ended)
        self.ledger.waited(label[0], ended - began)

    def isend(self, tensor: Tensor, *, dest: Rank, tag: int = 0) -> Pending:
        label, place = self._named()
        size, began = tensor.nbytes, _now()
        entry = self._enter(ISEND, WAIT_SEND, label, place, dest, tag, size, began)
        with self.ledger.marked("isend", label[0]):
            pending = self._socket.isend(tensor, dest=dest, tag=tag)
        ended = _now()
        if entry is not None:
            entry.posted(ended)
        self.ledger.waited(label[0], ended - began)
        self.ledger.sent(label, dest, size)
        trace = self._open_trace()
        if trace is None:
            return _Timed(pending, self.ledger, label[0], entry, tag, size)
        number = trace.number(is_send=True, peer=dest, tag=tag)
        message = _Message(trace, label, dest, tag, number, size, self.ledger.step, is_send=True)
        message.begin(began, ended)
        return _Traced(pending, self.ledger, message, entry, tag, size)

    def irecv(self, tensor: Tensor, *, source: Rank, tag: int = 0) -> Pending:
        label, place = self._named()
        entry = self._enter(IRECV, WAIT_RECV, label, place, source, tag, tensor.nbytes, _now())
        pending = self._socket.irecv(tensor, source=source, tag=tag)
        if entry is not None:
            entry.posted(_now())
        trace = self._open_trace()
        if trace is None:
            return _Timed(pending, self.ledger, label[0], entry, tag, tensor.nbytes)
        number = trace.number(is_send=False, peer=source, tag=tag)
        message = _Message(trace, label, source, tag, number, tensor.nbytes, self.ledger.step, is_send=False)
        return _Traced(pending, self.ledger, message, entry, tag, tensor.nbytes)

    def wait_any(self, pending: Sequence[Pending], *, timeout_s: float | None = None) -> int | None:
        """See `Socket`. The box then says that the rank waits for any of those that still owe it something under this tag."""
        transfers = [one for one in pending if isinstance(one, _Timed | _Traced)]
        label, place = self._named()
        box, at, began = self.ledger.box, 0, _now()
        if box is not None and timeout_s != 0:
            at = box.begin(WAIT_ANY, label, place, ANY, transfers[0].tag, transfers[0].size, began, message=1)
        found = self._socket.wait_any([one.pending for one in transfers], timeout_s=timeout_s)
        ended = _now()
        if box is not None and timeout_s != 0:
            box.end(at, ended)
        self.ledger.waited(label[0], ended - began)
        return found

    def _named(self) -> tuple[_Label, Place | None]:
        """The operation in force; if none is, that of the calling function, of which the line is then known too."""
        label = self.ledger.label
        return caller() if label is None else (label, None)

    def _enter(
        self, begins: int, waits: int, label: _Label, place: Place | None, peer: Rank, tag: int, size: int, now: int
    ) -> "_Entry | None":
        box = self.ledger.box
        return None if box is None else _Entry(box, begins, waits, label, place, peer, tag, size, now)

    def _open_trace(self) -> Trace | None:
        """None also when the steps that were to be traced are over."""
        trace = self.ledger.trace
        return trace if trace is not None and trace.is_open else None


class _Entry:
    """A transfer in the black box: an operation that begins it, and one that waits for it."""

    __slots__ = ("_at", "_box", "_label", "_message", "_peer", "_place", "_size", "_tag", "_waits")

    def __init__(
        self,
        box: BlackBox,
        begins: int,
        waits: int,
        label: _Label,
        place: Place | None,
        peer: Rank,
        tag: int,
        size: int,
        now: int,
    ) -> None:
        self._box = box
        self._waits = waits
        self._label = label
        self._place = place
        self._peer = peer
        self._tag = tag
        self._size = size
        self._at = box.begin(begins, label, place, peer, tag, size, now)
        self._message = box.message

    def posted(self, now: int) -> None:
        self._box.end(self._at, now)

    def wait(self, now: int) -> None:
        self._at = self._box.begin(
            self._waits, self._label, self._place, self._peer, self._tag, self._size, now, self._message
        )

    def waited(self, now: int) -> None:
        self._box.end(self._at, now)


class _Timed:
    """A transfer whose wait is timed, for the operation that began it."""

    __slots__ = ("_entry", "_ledger", "_operation", "pending", "size", "tag")

    def __init__(
        self, pending: Pending, ledger: Ledger, operation: str, entry: _Entry | None, tag: int, size: int
    ) -> None:
        self.pending = pending
        self.tag = tag
        self.size = size
        self._ledger = ledger
        self._operation = operation
        self._entry = entry

    def wait(self) -> None:
        _wait(self.pending, self._ledger, self._operation, self._entry)

    def test(self) -> bool:
        return self.pending.test()


def _wait(pending: Pending, ledger: Ledger, operation: str, entry: _Entry | None) -> tuple[int, int]:
    """Wait for a transfer, and say from when to when."""
    began = _now()
    if entry is not None:
        entry.wait(began)
    with ledger.marked("wait", operation):
        pending.wait()
    ended = _now()
    if entry is not None:
        entry.waited(ended)
    ledger.waited(operation, ended - began)
    return began, ended


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

    __slots__ = ("_entry", "_ledger", "_message", "pending", "size", "tag")

    def __init__(
        self, pending: Pending, ledger: Ledger, message: _Message, entry: _Entry | None, tag: int, size: int
    ) -> None:
        self.pending = pending
        self.tag = tag
        self.size = size
        self._ledger = ledger
        self._message = message
        self._entry = entry

    def wait(self) -> None:
        self._message.end(*_wait(self.pending, self._ledger, self._message.operation, self._entry))

    def test(self) -> bool:
        return self.pending.test()
