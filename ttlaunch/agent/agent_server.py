"""Serve the launcher from beside a run on one host, over any number of connections, until the run's lease runs out.

The launcher's connection may break at any moment and come back. Pieces of files are numbered and kept until the launcher
has confirmed them; orders are numbered by the launcher and carried out once. At least every second, a frame `alive` carries this
host's clock, and the launcher sends the reading back. The lease lasts `lease_s` from the newest reading that came back. So
the launcher knows, without trusting the network, that the lease has run out `lease_s` after the last frame that it got. On a host
of a Slurm job the agent also ends with its step, of which Slurm may kill nothing but the shell.

Frames from the launcher: `hello` (its version, and how many pieces it has), `renew` (a reading of this host's clock, and how
many pieces it has), orders (`start`, `signal`, `signal_starter`, `look`, `stack_dump`, `end`), `tell` (the coordinator's order to a
worker of an elastic run, which is passed on at once or lost) and `bye` (it has everything). Frames to it:
`ready`, `file` (a piece), `lost_shim`, `ranks_ended`, `folder_gone`, `looked`, `alive`, `ended`, `refused`. Python 3.9 and the standard library only.
"""

from __future__ import annotations

import math
import os
import select
import signal
import socket
import time
from collections import deque

from ttlaunch import contract
from ttlaunch.agent.claims import is_same_user
from ttlaunch.agent.line import Line

TYPE_CHECKING = False  # what typing.TYPE_CHECKING is, without the time to import it
if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from typing import Any

    from ttlaunch.agent.hosted_run import HostedRun
    from ttlaunch.agent.starter import Starter

_TICK_S = 0.05
_BOXES_S = 5.0
_UNDERWAY_BYTES = 1024 * 1024  # of pieces that the launcher has not confirmed; more would delay `alive` on a slow line
_STRANGERS = 8  # connections that have not sent `hello` yet
_SHOWN = 100  # characters of a wrong frame in a message
_ORDERS = ("start", "signal", "signal_starter", "look", "stack_dump", "end")


def lease_clock() -> float:
    """Return the seconds of a clock that also runs while the machine sleeps."""
    return time.clock_gettime(getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC))


class AgentServer:
    """Serves the launcher until it orders the end, or until the lease runs out.

    Attributes:
        starter: Starts the ranks when the launcher orders it; None if the engine reaches this host itself.
    """

    def __init__(
        self,
        run: HostedRun,
        listener: socket.socket,
        *,
        lease_s: float,
        held: Sequence[socket.socket] = (),
        step: int | None = None,
    ) -> None:
        """Begin to serve.

        Args:
            run: The run on this host.
            listener: Where the launcher connects.
            lease_s: Seconds that ranks may run without a frame from the launcher.
            held: Keep ports for ranks, until this server is closed.
            step: The writing end of a pipe that the shell of the agent's Slurm step reads; None if this host is in no step.
        """
        self._held, self._step = held, step
        self.starter: Starter | None = None
        self._reported_end = False  # of the starter
        listener.settimeout(0)
        self._run = run
        self._listener = listener
        self._lease_s = lease_s
        self._expires = lease_clock() + lease_s
        self._line: Line | None = None  # to the launcher; None while there is no connection
        self._strangers: list[Line] = []
        self._pieces: Iterator[tuple[dict[str, Any], bytes]] = iter(())
        self._scanned_last = False
        self._sent = self._confirmed = 0  # numbers of pieces
        self._underway: deque[tuple[int, str, int, int]] = deque()  # number, name, its end, bytes
        self._done = 0  # orders
        self._killed: int | None = None  # once the end was ordered
        self._sent_ended = self._dismissed = False
        self._question: int | None = None
        self._answered: int | None = None
        self._reported_shims: set[int] = set()
        self._reported_folders: set[str] = set()
        self._alive_at = self._boxes_at = -math.inf

    def serve(self) -> str | None:
        """Serve until the end; returns None if the launcher has everything and sent `bye`, else, for a clause about the agent, why the ranks must end."""
        while not self._dismissed:
            if lease_clock() >= self._expires:
                return f"heard nothing from the launching machine for {self._lease_s:g} s"
            if self._step is not None and _has_no_reader(self._step):
                return "noticed that Slurm had ended its step"
            self._wait()
            self._run.look()
            self._send_what_is_due()
        return None

    def close(self) -> None:
        for line in [*self._strangers, *([self._line] if self._line else [])]:
            line.flush()
            line.close()
        for port in self._held:
            port.close()

    # Receive

    def _wait(self) -> None:
        """Wait one tick for data and receive them; return at once while there is something to send."""
        lines = [line for line in [*self._strangers, self._line] if line is not None and line.is_open]
        poll = select.poll()
        poll.register(self._listener, select.POLLIN)
        if self.starter is not None and self.starter.status is None:
            poll.register(
                self.starter.output, select.POLLIN
            )  # a line for each end of a shim: its record is sent at once
        for line in lines:
            poll.register(line.connection, select.POLLIN | (0 if line.is_idle else select.POLLOUT))
        ready = dict(poll.poll(_TICK_S * 1000))
        if self.starter is not None:
            self.starter.look()
        if self._listener.fileno() in ready:
            self._accept()
        for line in lines:
            events = ready.get(line.connection.fileno(), 0)
            if events & select.POLLOUT:
                line.flush()
            if line.is_open and events & ~select.POLLOUT:
                self._receive(line)
        self._strangers = [line for line in self._strangers if line.is_open]
        if self._line is not None and not self._line.is_open:
            self._line = None

    def _accept(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except OSError:
            return
        if not is_same_user(connection):
            connection.close()
            return
        line = Line(connection)
        ready = {"kind": "ready", "time": time.time(), "clock": lease_clock(), "pid": os.getpid()}
        ready["version"] = contract.AGENT_VERSION
        if self._held:
            ready["ports"] = [port.getsockname()[1] for port in self._held]
        line.send({**ready, "sent": self._sent, "done": self._done})
        self._strangers.append(line)
        for forgotten in self._strangers[:-_STRANGERS]:
            forgotten.close()

    def _receive(self, line: Line) -> None:
        try:
            for frame, body in line.receive():
                self._take(line, frame, body)
        except (ValueError, TypeError, KeyError, OverflowError) as error:
            line.send({"kind": "refused", "reason": f"the data are not a launcher's message: {error}"[:_SHOWN]})
            line.close()

    def _take(self, line: Line, frame: dict[str, Any], body: bytes) -> None:
        """Carry out a frame; raises `ValueError` and the like for a frame that no launcher sends."""
        kind = frame.get("kind")
        if kind == "hello":
            if frame.get("version", 0) != contract.AGENT_VERSION:
                version = str(frame.get("version", 0))
                raise ValueError(f"it is of version {version}, this agent of {contract.AGENT_VERSION}"[:_SHOWN])
            self._welcome(line, _whole(frame["received"]))
        elif line is not self._line:
            raise ValueError(f"{str(kind)[:_SHOWN]} before hello")
        elif kind == "renew":
            self._renew(frame.get("heard"), _whole(frame["received"]))
        elif kind in _ORDERS:
            self._obey(frame, _whole(frame["order"]))
        elif kind == "tell" and len(body) <= contract.LARGEST_ORDER:
            self._run.tell(_whole(frame["rank"]), body)
        elif kind == "bye" and self._sent_ended:
            self._dismissed = True
        else:
            raise ValueError(str(frame)[:_SHOWN])

    def _welcome(self, line: Line, received: int) -> None:
        """Use this connection as the launcher's from now on; an earlier one is dead, even if no error has shown it yet."""
        self._confirm(received)
        if self._line is not None and self._line is not line:
            self._line.close()
        self._strangers = [one for one in self._strangers if one is not line]
        self._line = line
        # Pieces may have been lost with the earlier connection: those that the launcher does not have are sent again.
        self._sent = received
        self._underway.clear()
        self._run.rewind()
        self._look_anew()
        self._sent_ended = False
        self._reported_shims.clear()
        self._reported_end = False
        self._reported_folders.clear()
        self._alive_at = -math.inf

    def _confirm(self, received: int) -> None:
        if not self._confirmed <= received <= self._sent:
            raise ValueError(f"{received} pieces received, of which {self._confirmed} to {self._sent} are in question")
        self._confirmed = received
        while self._underway and self._underway[0][0] <= received:
            _, name, end, _ = self._underway.popleft()
            self._run.confirm(name, end)

    def _renew(self, heard: Any, received: int) -> None:
        self._confirm(received)
        if heard is not None:
            # A reading from the future counts as now: else the frame of a broken launcher could extend the lease for ever.
            self._expires = max(self._expires, min(_number(heard), lease_clock()) + self._lease_s)

    def _obey(self, frame: dict[str, Any], order: int) -> None:
        """Carry out an order that has not been carried out yet."""
        if order <= self._done:
            return
        if order != self._done + 1:
            raise ValueError(f"order {order} after {self._done}")
        kind, ranks, number, marker = frame["kind"], frame.get("ranks", []), frame.get("number", 0), frame.get("marker")
        later = frame.get("later", [])
        is_signal = isinstance(marker, (dict, type(None))) and number in set(signal.Signals)
        variables = frame.get("variables", {})
        is_start = isinstance(variables, dict) and all(isinstance(text, str) for text in variables.values())
        if (
            not isinstance(ranks, list)
            or not isinstance(later, list)
            or not is_start
            or (kind.startswith("signal") and not is_signal)
        ):
            raise ValueError(str(frame)[:_SHOWN])
        if kind == "look":
            self._question = _whole(frame["question"])
        # Counted before it is carried out: an order that fails half-way is not carried out twice after a new connection.
        self._done = order
        self._carry_out(kind, ranks, number, marker=marker, variables=variables, later=later)
        if kind in ("look", "end"):
            self._look_anew()

    def _carry_out(
        self,
        kind: str,
        ranks: list[int],
        number: int,
        *,
        marker: dict[str, Any] | None,
        variables: dict[str, str],
        later: list[int],
    ) -> None:
        if kind == "start" and self.starter is not None:
            self.starter.start(self._run.own(ranks), variables, self._run.own(later))
        elif kind == "signal_starter" and self.starter is not None:
            self.starter.signal(number)
        elif kind == "signal":
            self._run.signal_ranks(ranks, number, marker=marker)
        elif kind == "stack_dump":
            self._run.dump_stacks(ranks)
        elif kind == "end":
            self._killed = self._run.sweep()

    def _look_anew(self) -> None:
        """Scan all files again, so that what they hold now is sent before an answer about it."""
        self._pieces, self._scanned_last, self._boxes_at = iter(()), False, -math.inf
        self._answered = None

    # Send

    def _send_what_is_due(self) -> None:
        line, now = self._line, time.monotonic()
        if line is None:
            return
        if now - self._alive_at >= contract.beat_s(self._lease_s):
            self._alive_at = now
            line.send({"kind": "alive", "clock": lease_clock(), "done": self._done})
            lost = None if self._killed is not None else self._run.lost_folder()
            # Removing a tree takes time, so the folder that is missing first may not be the last or the worst one.
            if lost is not None and lost["what"] not in self._reported_folders:
                self._reported_folders.add(lost["what"])
                line.send({"kind": "folder_gone", **lost})
        for rank in [rank for rank in self._run.lost_shims if rank not in self._reported_shims]:
            self._reported_shims.add(rank)
            line.send({"kind": "lost_shim", "rank": rank, "time": self._run.lost_shims[rank]})
        if self.starter is not None and self.starter.status is not None and not self._reported_end:
            self._reported_end = True
            line.send(self.starter.frame())
        while line.is_open and line.is_idle and sum(size for *_, size in self._underway) < _UNDERWAY_BYTES:
            if not self._send_piece(line, now):
                break
        if self._scanned_last and not self._underway and not self._sent_ended:
            self._sent_ended = True
            line.send({"kind": "ended", "killed": self._killed})

    def _send_piece(self, line: Line, now: float) -> bool:
        """Send the next piece; returns whether there was one.

        If a scan finds nothing after the run's processes were killed, all their output has been sent: nobody writes any more.
        """
        found = next(self._pieces, None)
        if found is None:
            boxes = now - self._boxes_at >= _BOXES_S
            self._boxes_at = now if boxes else self._boxes_at
            self._pieces = self._run.pieces(with_boxes=boxes)
            found = next(self._pieces, None)
        if found is None:
            self._scanned_last = self._killed is not None
            if self._answered != self._question:
                self._answered = self._question
                line.send({"kind": "looked", "question": self._question, **self._run.processes()})
            return False
        header, body = found
        self._sent += 1
        self._underway.append((self._sent, header["name"], header["offset"] + len(body), len(body)))
        line.send({**header, "number": self._sent}, body)
        return True


def _has_no_reader(pipe: int) -> bool:
    """Whether nobody can read what would be written into a pipe."""
    poll = select.poll()
    poll.register(pipe, 0)
    return bool(poll.poll(0))


def _whole(value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise ValueError(f"{value!r:.50} in place of a count")
    return value


def _number(value: Any) -> float:
    if not isinstance(value, (int, float)) or not value < math.inf:
        raise ValueError(f"{value!r:.50} in place of a time")
    return float(value)
