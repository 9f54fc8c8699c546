"""Counts every message of a rank, times what the rank waits for, and enters both into its flight recorder."""

import time
from collections.abc import Sequence
from contextlib import nullcontext
from typing import cast

from torch import Tensor

from ttlaunch.flight_recorder import ANY, IRECV, ISEND, RECV, SEND, WAIT_ANY, WAIT_RECV, WAIT_SEND
from ttlaunch.flight_recorder_writer import FlightRecorder, Place
from ttlaunch.runtime.comm.protocol import Communicator, Pending
from ttlaunch.runtime.telemetry.trace import Trace
from ttlaunch.runtime.telemetry.traffic_counter import TrafficCounter, caller
from ttlaunch.runtime.world import Rank

_now = time.monotonic_ns
_Label = tuple[str, int | None]
"""An operation, and its bucket if it has one."""


class CountingCommunicator:
    """Send and receive through another communicator, and count and record every message.

    Cost: no message of its own. Each message takes about 2 µs more at its sender and at its receiver, and under 1 µs more for
        the flight recorder.
    """

    def __init__(self, communicator: Communicator, traffic: TrafficCounter) -> None:
        self.rank = communicator.rank
        self.traffic = traffic
        self._communicator = communicator
        self._numbers: Sequence[int] | None = None

    def take_place(self, rank: Rank, *, numbers: Sequence[int]) -> None:
        """Be another rank from now on, and record every rank by its number, which stays the same while ranks change."""
        self.rank, self._numbers = rank, numbers

    def _number(self, rank: Rank) -> Rank:
        return rank if self._numbers is None else Rank(self._numbers[rank])

    def send(self, tensor: Tensor, *, dest: Rank, tag: int = 0) -> None:
        """Send and wait; see `Communicator`."""
        if self._active_trace() is not None:
            self.isend(tensor, dest=dest, tag=tag).wait()
            return
        label, place = self._label_and_place()
        recorder, offset, size = self.traffic.recorder, 0, tensor.nbytes
        began = _now()
        if recorder is not None:
            offset = recorder.begin(SEND, label, place, peer=self._number(dest), tag=tag, size=size, now=began)
        with self.traffic.waiting(), self.traffic.marked("send", label[0]):
            self._communicator.send(tensor, dest=dest, tag=tag)
        ended = _now()
        if recorder is not None:
            recorder.end(offset, ended)
        self.traffic.waited(label[0], ended - began)
        self.traffic.sent(label, self._number(dest), size)

    def recv(self, tensor: Tensor, *, source: Rank, tag: int = 0) -> None:
        """Receive and wait; see `Communicator`."""
        if self._active_trace() is not None:
            self.irecv(tensor, source=source, tag=tag).wait()
            return
        label, place = self._label_and_place()
        recorder, offset = self.traffic.recorder, 0
        began = _now()
        if recorder is not None:
            offset = recorder.begin(
                RECV, label, place, peer=self._number(source), tag=tag, size=tensor.nbytes, now=began
            )
        with self.traffic.waiting(), self.traffic.marked("recv", label[0]):
            self._communicator.recv(tensor, source=source, tag=tag)
        ended = _now()
        if recorder is not None:
            recorder.end(offset, ended)
        self.traffic.waited(label[0], ended - began)

    def isend(self, tensor: Tensor, *, dest: Rank, tag: int = 0) -> Pending:
        label, place = self._label_and_place()
        size, began = tensor.nbytes, _now()
        entry = self._enter(
            ISEND, WAIT_SEND, label, place=place, peer=self._number(dest), tag=tag, size=size, now=began
        )
        with self.traffic.marked("isend", label[0]):
            pending = self._communicator.isend(tensor, dest=dest, tag=tag)
        ended = _now()
        if entry is not None:
            entry.end_post(ended)
        self.traffic.waited(label[0], ended - began)
        self.traffic.sent(label, self._number(dest), size)
        trace = self._active_trace()
        if trace is None:
            return _Timed(pending, self.traffic, label[0], entry=entry, tag=tag, size=size)
        number = trace.number(is_send=True, peer=self._number(dest), tag=tag)
        message = _Message(trace, label, dest, tag=tag, number=number, size=size, step=self.traffic.step, is_send=True)
        message.begin(began, ended)
        return _Traced(pending, self.traffic, message, entry=entry, tag=tag, size=size)

    def irecv(self, tensor: Tensor, *, source: Rank, tag: int = 0) -> Pending:
        label, place = self._label_and_place()
        entry = self._enter(
            IRECV, WAIT_RECV, label, place=place, peer=self._number(source), tag=tag, size=tensor.nbytes, now=_now()
        )
        pending = self._communicator.irecv(tensor, source=source, tag=tag)
        if entry is not None:
            entry.end_post(_now())
        trace = self._active_trace()
        if trace is None:
            return _Timed(pending, self.traffic, label[0], entry=entry, tag=tag, size=tensor.nbytes)
        number = trace.number(is_send=False, peer=self._number(source), tag=tag)
        message = _Message(
            trace, label, source, tag=tag, number=number, size=tensor.nbytes, step=self.traffic.step, is_send=False
        )
        return _Traced(pending, self.traffic, message, entry=entry, tag=tag, size=tensor.nbytes)

    def wait_any(self, pending: Sequence[Pending], *, timeout_s: float | None = None) -> int | None:
        """Wait for the first of several transfers; see `Communicator`.

        The flight recorder enters one wait, for any rank that has not yet sent what this rank has requested under the tag.
        """
        transfers = cast("Sequence[_Timed | _Traced]", pending)
        label, place = self._label_and_place()
        recorder, offset, began = self.traffic.recorder, 0, _now()
        if recorder is not None and timeout_s != 0:  # with 0 the rank only looks and does not wait
            # `irecv` has already counted the messages; a number other than 0 keeps the recorder from counting another one.
            offset = recorder.begin(
                WAIT_ANY, label, place, peer=ANY, tag=transfers[0].tag, size=transfers[0].size, now=began, message=1
            )
        with nullcontext() if timeout_s == 0 else self.traffic.waiting():
            found = self._communicator.wait_any([one.pending for one in transfers], timeout_s=timeout_s)
        ended = _now()
        if recorder is not None and timeout_s != 0:
            recorder.end(offset, ended)
        self.traffic.waited(label[0], ended - began)
        return found

    def _label_and_place(self) -> tuple[_Label, Place | None]:
        """Return the label in force, without a place; if there is none, the label and the place that `caller` finds."""
        label = self.traffic.label
        return caller() if label is None else (label, None)

    def _enter(
        self, begins: int, waits: int, label: _Label, *, place: Place | None, peer: Rank, tag: int, size: int, now: int
    ) -> "_Entry | None":
        """Enter a transfer into the flight recorder, if there is one; `begins` and `waits` are its two operations there."""
        recorder = self.traffic.recorder
        return (
            None
            if recorder is None
            else _Entry(recorder, begins, waits, label=label, place=place, peer=peer, tag=tag, size=size, now=now)
        )

    def _active_trace(self) -> Trace | None:
        """Return the trace; None without one, and after the last step that it covers."""
        trace = self.traffic.trace
        return trace if trace is not None and trace.is_open else None


def counting(communicator: Communicator, traffic: TrafficCounter) -> CountingCommunicator:
    """Return a communicator that counts what goes through another one, or that one itself if it has its own way to count."""
    return (
        communicator if isinstance(communicator, CountingCommunicator) else CountingCommunicator(communicator, traffic)
    )


class _Entry:
    """A transfer in the flight recorder: an operation that begins it, and one that waits for it."""

    __slots__ = ("_label", "_message", "_offset", "_peer", "_place", "_recorder", "_size", "_tag", "_waits")

    def __init__(
        self,
        recorder: FlightRecorder,
        begins: int,
        waits: int,
        *,
        label: _Label,
        place: Place | None,
        peer: Rank,
        tag: int,
        size: int,
        now: int,
    ) -> None:
        self._recorder = recorder
        self._waits = waits
        self._label = label
        self._place = place
        self._peer = peer
        self._tag = tag
        self._size = size
        self._offset = recorder.begin(begins, label, place, peer=peer, tag=tag, size=size, now=now)
        self._message = recorder.message

    def end_post(self, now: int) -> None:
        self._recorder.end(self._offset, now)

    def begin_wait(self, now: int) -> None:
        self._offset = self._recorder.begin(
            self._waits,
            self._label,
            self._place,
            peer=self._peer,
            tag=self._tag,
            size=self._size,
            now=now,
            message=self._message,
        )

    def end_wait(self, now: int) -> None:
        self._recorder.end(self._offset, now)


class _Timed:
    """A transfer that counts the time spent waiting for it under the operation that began it."""

    __slots__ = ("_entry", "_operation", "_traffic", "pending", "size", "tag")

    def __init__(
        self, pending: Pending, traffic: TrafficCounter, operation: str, *, entry: _Entry | None, tag: int, size: int
    ) -> None:
        self.pending = pending
        self.tag = tag
        self.size = size
        self._traffic = traffic
        self._operation = operation
        self._entry = entry

    def wait(self) -> None:
        _wait(self.pending, self._traffic, self._operation, entry=self._entry)

    def test(self) -> bool:
        return self.pending.test()


def _wait(pending: Pending, traffic: TrafficCounter, operation: str, *, entry: _Entry | None) -> tuple[int, int]:
    """Wait for a transfer; return when the wait began and when it ended."""
    began = _now()
    if entry is not None:
        entry.begin_wait(began)
    with traffic.waiting(), traffic.marked("wait", operation):
        pending.wait()
    ended = _now()
    if entry is not None:
        entry.end_wait(ended)
    traffic.waited(operation, ended - began)
    return began, ended


class _Message:
    """One end of a message in the trace: what it is, when its send began, when its receive was complete."""

    def __init__(
        self, trace: Trace, label: _Label, peer: Rank, *, tag: int, number: int, size: int, step: int, is_send: bool
    ) -> None:
        operation, bucket = label
        self.operation = operation
        self._trace = trace
        self._is_send = is_send
        self._name = operation if bucket is None else f"{operation} {bucket}"
        self._facts = {"peer": peer, "tag": tag, "number": number, "bytes": size, "step": step}
        self._is_done = False

    def begin(self, began: int, ended: int) -> None:
        """Record the call that began to send the message."""
        self._trace.span(f"send {self._name}", "send", began=began, ended=ended, **self._facts)
        self._trace.message(self._name, is_send=True, when=began, facts=self._facts)

    def end(self, began: int, ended: int) -> None:
        """Record the first wait for the message; any further wait returns at once and is left out."""
        if self._is_done:
            return
        self._is_done = True
        verb = "wait: send" if self._is_send else "recv"
        self._trace.span(
            f"{verb} {self._name}", "wait" if self._is_send else "recv", began=began, ended=ended, **self._facts
        )
        if not self._is_send:
            self._trace.message(self._name, is_send=False, when=ended, facts=self._facts)


class _Traced:
    """A transfer that counts the time spent waiting for it, and records its wait in the trace."""

    __slots__ = ("_entry", "_message", "_traffic", "pending", "size", "tag")

    def __init__(
        self, pending: Pending, traffic: TrafficCounter, message: _Message, *, entry: _Entry | None, tag: int, size: int
    ) -> None:
        self.pending = pending
        self.tag = tag
        self.size = size
        self._traffic = traffic
        self._message = message
        self._entry = entry

    def wait(self) -> None:
        self._message.end(*_wait(self.pending, self._traffic, self._message.operation, entry=self._entry))

    def test(self) -> bool:
        return self.pending.test()
