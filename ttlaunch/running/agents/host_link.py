"""The launcher's end of what it has to do with the agent on one host, over as many connections as it takes.

A connection that breaks or falls silent is made again, without asking anybody anything, while the host's lease may run.
Pieces of files and orders are numbered, so nothing is lost and nothing is done twice. A host counts as lost once its
agent must have ended its ranks by itself, or at once if there is none any more; then what it left there is ended and
brought home if the host can be reached when the run ends.
"""

import contextlib
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ttlaunch import contract
from ttlaunch.errors import HostError, Trouble
from ttlaunch.hosts.transport.frames import FrameStream
from ttlaunch.hosts.transport.transport import CONNECT_S, Transport
from ttlaunch.records.agents import (
    AgentAlive,
    AgentEnded,
    AgentFrame,
    AgentGone,
    AgentReady,
    FilePiece,
    ProcessReport,
    ShimLost,
    parse_agent_frame,
)
from ttlaunch.records.parser import BadRecord
from ttlaunch.running.agents.reach_agent import START_S, greeting, join_agent, put_agent
from ttlaunch.running.lost_hosts import LostHost, SilentHost

FENCE_S = 2.5  # what an agent may take, after its lease has run out, until its ranks are gone
_RENEW_S = 1.0
_QUIET_S = 4.0  # an agent says something every second
_SILENCE_S = 8.0  # of which the user is told
_SEND_S = 3.0
_FIRST_PAUSE_S, _LONGEST_PAUSE_S, _LAST_WORD_S = 0.2, 1.0, 2.0


@dataclass
class _Joined:
    """A connection that stands.

    Attributes:
        ordered: The newest order that was sent over it, or carried out before.
    """

    stream: FrameStream
    ordered: int


class HostLink:
    """One host of a run.

    Attributes:
        clock_offset_s: How much later it is there than here, to within the time a message takes.
        killed: How many processes the agent had to kill; None until it has ended.
        lost: Why the host counts as lost; None while it does not.
        unwritable: Why what came could not be kept here.
        over: Set when nothing more comes.
    """

    def __init__(
        self,
        transport: Transport,
        arguments: Mapping[str, Any],
        *,
        world_size: int,
        pythons: Sequence[str],
        keep: Callable[[FilePiece, bytes], None],
        note: Callable[..., None],
    ) -> None:
        """Nothing is started yet.

        Args:
            transport: The host; connected already.
            arguments: What `agent/start_agent.py` is to know.
            world_size: How many ranks there are on all hosts.
            pythons: Interpreters to try first.
            keep: Takes each piece of a file, once and in order; raises `OSError` if it cannot.
            note: Takes what is worth an event of the run: a name, and values by keyword.
        """
        self.host = transport.host
        self.clock_offset_s = 0.0
        self.killed: int | None = None
        self.lost: LostHost | None = None
        self.unwritable: OSError | None = None
        self.over = threading.Event()
        self.lost_shims: dict[int, float] = {}
        self._transport, self._arguments, self._pythons = transport, arguments, pythons
        self._world_size = world_size
        self._keep, self._note = keep, note
        self._lease_s = float(arguments["lease_s"])
        self._quiet_s = max(2.0, min(_QUIET_S, 0.3 * self._lease_s))
        self._joined: _Joined | None = None
        self._is_cut = False
        self._orders: list[dict[str, Any]] = []
        self._received = self._asked = 0
        self._looked: ProcessReport | None = None
        self._clock: float | None = None  # the agent's, as it last came
        self._heard = time.monotonic()
        self._heard_at = time.time()
        self._outage: HostError | None = None
        self._wake, self._ending = threading.Event(), threading.Event()

    def start(self) -> None:
        """Put the agent there.

        Raises:
            HostError: It cannot be started, or cannot make the run's folder.
        """
        stream = put_agent(self._transport, self._arguments, pythons=self._pythons)
        ready = self._greeted(stream, timeout_s=START_S)
        if isinstance(ready, AgentGone):
            raise HostError(self.host, Trouble.DISK, f"the run's folder cannot be made: {ready.reason}")
        self.clock_offset_s = ready.time - time.time()
        self._heard, self._heard_at = time.monotonic(), time.time()

    def follow(self) -> None:
        """Begin to take in what comes and to renew the lease."""
        for work in (self._follow, self._keep_up):
            threading.Thread(target=work, daemon=True).start()

    def order(self, kind: str, **values: Any) -> None:
        """Have the agent do something, once, as soon as it can be told; returns at once."""
        self._orders.append({"kind": kind, "order": len(self._orders) + 1, **values})
        self._wake.set()

    def snapshot(self, question: int) -> ProcessReport | None:
        """How the ranks' processes there are; None until it has said so. Ask again with the same number."""
        if self.lost is not None:  # whoever waits for all hosts would wait forever
            return ProcessReport(question=question, stopped=(), faults=())
        if question != self._asked:
            self._asked = question
            self.order("look", question=question)
        looked = self._looked
        return looked if looked is not None and looked.question == question else None

    def end(self) -> None:
        """Have it end what is left of the run and send the rest; `over` tells when that is done or given up."""
        self.order("end")
        self._ending.set()

    def cut(self) -> None:
        """From now on, send nothing and take nothing."""
        self._is_cut = True

    def silence(self) -> SilentHost | None:
        """Since when the host has not answered, if that is long ago and it is not lost yet."""
        if (
            self.over.is_set()
            or self.lost is not None
            or time.monotonic() - self._heard < min(_SILENCE_S, 0.55 * self._lease_s)
        ):
            return None
        return SilentHost(self._heard_at, self._heard_at + self._lease_s + FENCE_S)

    # What comes

    def _follow(self) -> None:
        try:
            while self.killed is None and self.lost is None:
                self._read()
                if self.killed is None:
                    self._join_again()
            if self.killed is None:
                self._ending.wait()
                self._end_what_is_left()
        except OSError as error:
            self.unwritable = error
        finally:
            self.over.set()
            self._wake.set()
            if self._joined is not None:
                self._joined.stream.process.kill()

    def _read(self) -> None:
        """Take in what comes until the agent has ended or the connection breaks."""
        joined = self._joined
        try:
            while joined is not None and self.killed is None and not self._is_cut:
                header, body = joined.stream.expect(timeout_s=self._quiet_s)
                if not self._is_cut:
                    self._take(joined, parse_agent_frame(header, world_size=self._world_size), body)
        except HostError as error:
            self._outage = error
        except ValueError as error:
            self._outage = HostError(self.host, Trouble.SCRIPT, f"what came from it is {error}")
            time.sleep(_FIRST_PAUSE_S)  # it may be the same again
        if self.killed is None and joined is not None and not self._is_cut:
            self._joined = None
            joined.stream.process.kill()

    def _take(self, joined: _Joined, frame: AgentFrame | BadRecord, body: bytes) -> None:
        match frame:
            case BadRecord():
                raise ValueError(frame.reason)
            case AgentAlive():
                self._clock = frame.clock
            case ProcessReport():
                self._looked = frame
            case FilePiece(number=number) as piece:
                if number != self._received + 1:
                    raise ValueError(f"piece {number} after {self._received}")
                self._keep(piece, body)
                self._received = number
                self._wake.set()
            case ShimLost():
                self.lost_shims.setdefault(frame.rank, frame.time - self.clock_offset_s)
            case AgentGone():
                raise HostError(self.host, Trouble.SCRIPT, f"its agent says: {frame.reason}")
            case AgentEnded():
                self._let_go(joined, frame.killed)
        self._heard, self._heard_at = time.monotonic(), time.time()

    def _let_go(self, joined: _Joined, killed: int) -> None:
        """Tell the agent that all is here, and wait until it has gone."""
        with contextlib.suppress(HostError):
            joined.stream.send({"kind": "bye"}, timeout_s=_SEND_S)
            while joined.stream.receive(timeout_s=_LAST_WORD_S) is not None:
                continue
        self.killed = killed

    # Connections

    def _greeted(self, stream: FrameStream, *, timeout_s: float) -> AgentReady | AgentGone:
        """Join the agent at the other end of a new stream, if there is one."""
        ready = greeting(stream, timeout_s=timeout_s)
        if isinstance(ready, AgentGone):
            return ready
        stream.send({"kind": "hello", "version": contract.AGENT_VERSION, "received": self._received}, timeout_s=_SEND_S)
        self._joined = _Joined(stream, ready.done)
        self._wake.set()
        return ready

    @property
    def _left_s(self) -> float:
        return max(0.0, self._heard + self._lease_s + FENCE_S - time.monotonic())

    def _join_again(self) -> None:
        """Make the connection again, or find that the host is lost."""
        outage = self._outage or HostError(self.host, Trouble.TIMED_OUT, "no answer from our script on it")
        silent_since, pause_s, latest = self._heard, _FIRST_PAUSE_S, None
        anew = outage.trouble is Trouble.TIMED_OUT
        while self._left_s > 0.0:
            if not self._is_cut:
                try:
                    ready = self._join(anew=anew)
                except HostError as error:
                    if error.trouble is Trouble.VERSION:  # it will not learn it: the package was replaced meanwhile
                        outage = error
                        break
                    latest, anew = error, True
                else:
                    if isinstance(ready, AgentGone):
                        outage = HostError(self.host, Trouble.LOST, ready.reason)
                        break
                    self._outage = None
                    self._note("host_joined_again", host=self.host, after_s=round(time.monotonic() - silent_since, 1))
                    return
            time.sleep(min(pause_s, self._left_s))
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
        if outage.trouble is Trouble.TIMED_OUT:
            outage.evidence = f"it has not answered for {time.monotonic() - self._heard:.0f} s"
        notes = () if latest is None else (f"connecting to it again: {latest.evidence}",)
        self.lost = LostHost(HostError(self.host, outage.trouble, outage.evidence, notes=notes), self._heard_at)

    def _join(self, *, anew: bool) -> AgentReady | AgentGone:
        if anew:
            self._transport.close()
            self._transport.connect(timeout_s=max(_FIRST_PAUSE_S, min(CONNECT_S, self._left_s)))
        stream = join_agent(self._transport, self._arguments, pythons=self._pythons, timeout_s=_QUIET_S)
        try:
            return self._greeted(stream, timeout_s=_QUIET_S)
        except HostError:
            stream.process.kill()
            raise

    def _end_what_is_left(self) -> None:
        """Put another agent beside what the lost one may have left, and have it end that and bring it home."""
        if self._is_cut:
            return
        with contextlib.suppress(HostError):
            self._transport.close()
            self._transport.connect(timeout_s=_LAST_WORD_S if self._left_s else 1.0)
            self._received, self._clock = 0, None
            self._orders = [{"kind": "end", "order": 1}]
            self.start()
            self._read()

    # What goes

    def _keep_up(self) -> None:
        """Renew the lease, confirm what has come, and pass orders on."""
        while not self.over.is_set():
            self._wake.wait(_RENEW_S)
            self._wake.clear()
            joined = self._joined
            if joined is None or self._is_cut:
                continue
            try:
                renewal = {"kind": "renew", "heard": self._clock, "received": self._received}
                joined.stream.send(renewal, timeout_s=_SEND_S)
                for order in self._orders[joined.ordered :]:
                    joined.stream.send(order, timeout_s=_SEND_S)
                    joined.ordered = order["order"]
            except HostError:
                joined.stream.process.kill()  # whoever reads from it notices
