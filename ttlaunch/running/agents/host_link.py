"""The launcher's link to the agent on one host, which may use several connections one after the other.

When a connection breaks or falls silent, the launcher connects again for as long as the agent's lease may last. Pieces of
files and orders are numbered, so no piece is lost and no order is carried out twice. A host counts as lost once its agent
must have ended its ranks by itself (`lost_hosts.Lease`), or at once if the agent is gone. When the run ends and a lost host
can be reached again, a new agent there ends what is left of the run and sends its files.
"""

import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Mapping
from typing import Any

from ttlaunch import contract
from ttlaunch.diagnostics.count import render_duration
from ttlaunch.errors import HostError, Trouble
from ttlaunch.hosts.transport.deadline import time_left
from ttlaunch.hosts.transport.frames import FrameStream
from ttlaunch.hosts.transport.pushed import Interpreter
from ttlaunch.hosts.transport.transport import CONNECT_S, Transport
from ttlaunch.quick_dataclass import dataclass
from ttlaunch.records.agents import (
    AgentAlive,
    AgentEnded,
    AgentFrame,
    AgentGone,
    AgentReady,
    FilePiece,
    FolderGone,
    ProcessReport,
    RanksEnded,
    ShimLost,
    parse_agent_frame,
)
from ttlaunch.records.parser import LONGEST_RECORD, BadRecord
from ttlaunch.running.agents.agent_connection import START_S, greeting, join_agent, put_agent
from ttlaunch.running.lost_folders import LostFolder, ends_run
from ttlaunch.running.lost_hosts import Lease, LostHost, SilentHost

_SEND_S, _JOIN_S = 3.0, 4.0
_END_S = 20.0  # for which an agent may send nothing new that was ordered to end, or whose ranks have all ended
_TOLD = 64  # orders to workers that may wait to be sent, of at most 128 KiB each; of more, the oldest are lost
_FIRST_PAUSE_S, _LONGEST_PAUSE_S, _LAST_WORD_S = 0.2, 1.0, 2.0
_MOST_BRIEF = 8  # connections in a row that may fall silent at once, as while a cable is plugged in


@dataclass
class _Connection:
    """An open connection to the agent.

    Attributes:
        ordered: The number of the newest order that was sent over this connection, or that the agent had carried out before.
        since: When the connection was opened, on the monotonic clock.
    """

    stream: FrameStream
    ordered: int
    since: float


class HostLink:
    """The link to one host of a run.

    Attributes:
        ports: The ports that the agent holds for ranks.
        clock_offset_s: By how many seconds the host's clock is ahead of this machine's; wrong by one message's time at most.
        killed: How many processes the agent had to kill; None until it has ended.
        lost: Why the host counts as lost; None while it does not.
        unwritable: Why a file from the host could not be written on this machine.
        lost_shims: Ranks whose shim is gone, with the time at which the agent noticed it.
        ranks_ended: How the process ended with which the agent started the ranks; None before.
        changed: Called when a rank has ended, or the host counts as lost.
        lost_folder: A folder that the run needs on the host and that was removed; None while all exist.
        over: Set when the host will send nothing more.
        agent: The process of the agent; None before the first greeting.
        is_cut: Whether `cut` was called.
    """

    def __init__(
        self,
        transport: Transport,
        arguments: Mapping[str, Any],
        *,
        ranks: Collection[int],
        last_step: int,
        python: str,
        keep: Callable[[FilePiece, bytes], None],
        note: Callable[..., None],
        goes_on: bool = False,
    ) -> None:
        """Prepare the link; `start` starts the agent.

        Args:
            transport: The host; connected already.
            arguments: The arguments of `agent/start_agent.py`.
            ranks: The ranks on the host; it may report and write for no others.
            last_step: The last step that can have a checkpoint; 0 if none can.
            python: The interpreter on the host that starts the agent.
            keep: Writes a piece of a file; called once for each piece, in order. It raises `OSError` if it cannot write, and
                `ValueError` if the piece does not continue the file.
            note: Adds an event to the run's history; called with the event's name, and its values by keyword.
            goes_on: Whether the run can go on without the host. Then nobody waits, after the lease, until its ranks must have ended.
        """
        self.host = transport.host
        self.clock_offset_s = 0.0
        self.ports: tuple[int, ...] = ()
        self.killed: int | None = None
        self.lost: LostHost | None = None
        self.unwritable: OSError | None = None
        self.lost_shims: dict[int, float] = {}
        self.lost_folder: LostFolder | None = None
        self.ranks_ended: RanksEnded | None = None
        self.changed: Callable[[], None] = lambda: None
        self._transport, self._arguments, self._pythons = transport, arguments, (python,)
        self._ranks, self._last_step = frozenset(ranks), last_step
        self._keep, self._note = keep, note
        self._lease = Lease(float(arguments["lease_s"]), goes_on=goes_on)
        self._connection: _Connection | None = None
        self.agent: int | None = None
        self._orders: list[dict[str, Any]] = []
        self._told: deque[tuple[int, bytes]] = deque(maxlen=_TOLD)
        self._received = self._question = 0
        self._answer: ProcessReport | None = None
        self._clock: float | None = None  # the newest reading of the agent's clock
        self._outage: HostError | None = None
        self.over, self._wake, self._ending = threading.Event(), threading.Event(), threading.Event()
        self._has_lied = self._never_ends = self.is_cut = self._is_abandoned = False
        self._brief = 0  # connections in a row that brought nothing once they were no longer new
        self._ended: set[int] = set()  # ranks whose records of their ends have come
        self._moved = time.monotonic()  # when the last piece came, or the end was ordered

    def start(self, interpreter: Interpreter | None = None) -> None:
        """Start the agent.

        Args:
            interpreter: A Python on the host that becomes the agent's; None to start one.

        Raises:
            HostError: The agent cannot be started, or cannot make the run's folder.
        """
        stream = put_agent(interpreter or Interpreter(self._transport), self._arguments, pythons=self._pythons)
        ready = self._greeted(stream, timeout_s=START_S)
        if isinstance(ready, AgentGone):
            what = "its agent cannot be started" if "replaces" in self._arguments else "the run's folder cannot be made"
            raise HostError(self.host, Trouble.DISK, f"{what}: {ready.reason}")
        self.clock_offset_s = ready.time - time.time()
        self.ports = ready.ports
        self._lease.heard()

    def follow(self) -> None:
        """Start the two threads of the link: one reads frames, the other renews the lease and sends orders."""
        for work in (self._follow, self._send):
            threading.Thread(target=work, daemon=True).start()

    def order(self, kind: str, **values: Any) -> None:
        """Queue an order, which the agent carries out once, as soon as it can be reached."""
        self._orders.append({"kind": kind, "order": len(self._orders) + 1, **values})
        self._wake.set()

    def tell(self, rank: int, message: bytes) -> None:
        """Have the agent pass an order to a worker; it is lost if the host cannot be reached now or does not keep up."""
        message_to = rank, message
        if (
            self._connection is not None and message_to not in self._told
        ):  # a repeated order that waits need not wait twice
            self._told.append(message_to)
            self._wake.set()

    def snapshot(self, question: int) -> ProcessReport | None:
        """Return the state of the ranks' processes on the host; None until the agent has answered.

        Call it with the same `question` until it answers; another number requests a new snapshot.
        """
        if self.lost is not None:  # a caller that waits for all hosts would wait forever
            return ProcessReport(question=question, stopped=(), faults=())
        if question != self._question:
            self._question = question
            self.order("look", question=question)
        answer = self._answer
        return answer if answer is not None and answer.question == question else None

    def end(self) -> None:
        """Order the agent to end what is left of the run and send its files; `over` is set when this is done or given up."""
        self.order("end")
        self._moved = time.monotonic()
        self._ending.set()

    def abandon(self) -> None:
        """Do nothing more about a lost host, because another link is to replace this one; `over` is then set at once."""
        self._is_abandoned = True
        self._ending.set()

    def cut(self) -> None:
        """Send nothing and ignore all that comes from now on, as if the cable were cut."""
        self.is_cut = True

    def silence(self) -> SilentHost | None:
        """Return the host's silence if it is long enough to inform the user and the host is not lost; else None."""
        return None if self.over.is_set() or self.lost is not None else self._lease.silence()

    # The thread that reads frames

    def _follow(self) -> None:
        try:
            while self.killed is None and self.lost is None:
                self._read()
                if self.killed is None and self.lost is None:
                    self._join_again()
            if self.killed is None and not self._never_ends:
                # The host is lost, and its ranks have ended. What it could not send is collected once the run ends.
                self._ending.wait()
                if not self._is_abandoned:
                    self._end_what_is_left()
        except OSError as error:
            self.unwritable = error
        finally:
            self.over.set()
            self._wake.set()
            self.changed()
            if self._connection is not None:
                self._connection.stream.process.kill()

    def _read(self) -> None:
        """Read frames until the agent has ended or the connection breaks."""
        connection = self._connection
        try:
            while connection is not None and self.killed is None and not (self.is_cut or self._never_ends):
                header, body = connection.stream.expect(timeout_s=self._lease.quiet_s, largest_body=LONGEST_RECORD)
                if not self.is_cut:
                    frame = parse_agent_frame(header, ranks=self._ranks, last_step=self._last_step)
                    self._handle(connection, frame, body)
                if time.monotonic() - self._moved > _END_S:
                    if self._ending.is_set():
                        self._give_up("it was ordered to end and sent nothing new")
                    elif self._owes_end():
                        self._give_up("its ranks have ended, and it has not confirmed that")
        except HostError as error:
            self._outage = error
        except ValueError as error:
            self._has_lied = True
            self._outage = HostError(self.host, Trouble.SCRIPT, f"what came from it is {error}")
            time.sleep(_FIRST_PAUSE_S)  # the next connection may bring the same frame; do not reconnect in a busy loop
        if self.killed is None and connection is not None and not self.is_cut:
            self._brief += 1
            self._connection = None
            connection.stream.process.kill()

    def _handle(self, connection: _Connection, frame: AgentFrame | BadRecord, body: bytes) -> None:
        match frame:
            case BadRecord():
                raise ValueError(frame.reason)
            case AgentAlive() if self._counts(connection):
                self._clock = frame.clock
            case ProcessReport():
                self._answer = frame
            case FilePiece():
                self._take_piece(frame, body)
            case ShimLost() | RanksEnded():
                self._note_end(frame)
            case FolderGone():
                self._note_folder(frame)
            case AgentGone():
                raise HostError(self.host, Trouble.SCRIPT, f"its agent reports: {frame.reason}")
            case AgentEnded():
                self._confirm_end(connection, frame.killed)
        self._note_life(connection)

    def _take_piece(self, piece: FilePiece, body: bytes) -> None:
        # The agent repeats what was not confirmed when a connection broke, so a gap means that a piece is lost.
        if piece.number != self._received + 1:
            raise ValueError(f"piece {piece.number} after {self._received}")
        self._keep(piece, body)
        self._received, self._moved = piece.number, time.monotonic()
        self._wake.set()
        if piece.whole:  # perhaps a record of an end
            self._ended |= {rank for rank in self._ranks if piece.name == contract.exit_file(rank)}
            self.changed()

    def _note_end(self, frame: ShimLost | RanksEnded) -> None:
        if isinstance(frame, ShimLost):
            self.lost_shims.setdefault(frame.rank, frame.time - self.clock_offset_s)
        else:
            self.ranks_ended = frame
        self.changed()

    def _note_folder(self, gone: FolderGone) -> None:
        """Keep the loss of a folder, and in place of one without which the run goes on, that of one without which it cannot."""
        if self.lost_folder is None or (ends_run(gone.what) and not self.lost_folder.ends_run):
            noticed = gone.time - self.clock_offset_s
            self.lost_folder = LostFolder(gone.what, gone.path, noticed, ends_run=ends_run(gone.what))

    def _note_life(self, connection: _Connection) -> None:
        if self._counts(connection):
            self._lease.heard()

    def _counts(self, connection: _Connection) -> bool:
        """Whether a frame that has come now is a sign of life, which renews the lease here and, by its clock, at the agent.

        Those of a new connection are not if the host has broken the protocol, or if many connections before it soon fell silent:
        a host that only greets would otherwise keep the run from ending.
        """
        is_new = time.monotonic() - connection.since <= self._lease.quiet_s
        if not is_new:
            self._brief = 0
        return not is_new or not (self._has_lied or self._brief >= _MOST_BRIEF)

    def _owes_end(self) -> bool:
        """Whether the agent started ranks, has sent the records of all their ends, and does not report that these were all.

        The process that started them ends with the last one, so an agent that does its work reports it at once.
        """
        is_over = self.ranks_ended is not None or not self._ranks <= self._ended
        return not is_over and any(order["kind"] == "start" for order in self._orders)

    def _give_up(self, reason: str) -> None:
        """Count the host as lost although it answers, because the run must be able to end."""
        self._never_ends = True
        error = HostError(self.host, Trouble.SCRIPT, f"{reason} for {render_duration(_END_S)}")
        self.lost = LostHost(error, self._lease.last_heard)

    def _confirm_end(self, connection: _Connection, killed: int) -> None:
        """Confirm to the agent that everything has arrived, and wait until it closes the connection.

        Raises:
            ValueError: Nobody has ordered it to end.
        """
        if not self._ending.is_set():
            raise ValueError("an end that nobody has ordered")
        with contextlib.suppress(HostError):
            connection.stream.send({"kind": "bye"}, timeout_s=_SEND_S)
            until = time.monotonic() + _LAST_WORD_S
            while (left := time_left(until)) and connection.stream.receive(timeout_s=left) is not None:
                continue
        self.killed = killed

    # Connections

    def _greeted(self, stream: FrameStream, *, timeout_s: float) -> AgentReady | AgentGone:
        """Exchange greetings over a new stream and keep the connection; return the agent's greeting, or why there is none."""
        ready = greeting(stream, timeout_s=timeout_s)
        if isinstance(ready, AgentGone):
            return ready
        self.agent = ready.pid
        stream.send({"kind": "hello", "version": contract.AGENT_VERSION, "received": self._received}, timeout_s=_SEND_S)
        self._connection = _Connection(stream, ready.done, time.monotonic())
        self._wake.set()
        return ready

    def _join_again(self) -> None:
        """Connect to the agent again, with growing pauses, until a connection is made or the host is lost."""
        outage = self._outage or HostError(self.host, Trouble.TIMED_OUT, "no answer from our script on it")
        silent_since, pause_s, latest = time.monotonic() - self._lease.silent_s, _FIRST_PAUSE_S, None
        # If only the channel broke, the SSH connection may be intact, so try a new channel first. After silence, do not.
        anew = outage.trouble is Trouble.TIMED_OUT
        while self._lease.left_s > 0.0:
            if not self.is_cut:
                try:
                    ready = self._join(anew=anew)
                except HostError as error:
                    # Trying again is no use: the package was replaced meanwhile, or Slurm has ended the job and all in it.
                    if error.trouble in {Trouble.VERSION, Trouble.ENDED}:
                        outage = error
                        break
                    latest, anew = error, error.trouble is not Trouble.STOPPED
                else:
                    if isinstance(ready, AgentGone):
                        outage = HostError(self.host, Trouble.LOST, ready.reason)
                        break
                    self._outage = None
                    self._note("host_joined_again", host=self.host, after_s=round(time.monotonic() - silent_since, 1))
                    return
            time.sleep(min(pause_s, self._lease.left_s))
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
        if latest is not None and latest.trouble is Trouble.STOPPED:
            outage, latest = latest, None
        elif outage.trouble is Trouble.TIMED_OUT:
            outage.evidence = f"it has not answered for {render_duration(self._lease.silent_s)}"
        notes = () if latest is None else (f"connecting to it again: {latest.evidence}",)
        self.lost = LostHost(HostError(self.host, outage.trouble, outage.evidence, notes=notes), self._lease.last_heard)

    def _join(self, *, anew: bool) -> AgentReady | AgentGone:
        if anew:
            self._transport.close()
            self._transport.connect(timeout_s=max(_FIRST_PAUSE_S, min(CONNECT_S, self._lease.left_s)))
        arguments = {**self._arguments, "agent": self.agent}
        stream = join_agent(self._transport, arguments, pythons=self._pythons, timeout_s=_JOIN_S)
        try:
            return self._greeted(stream, timeout_s=_JOIN_S)
        except HostError:
            stream.process.kill()
            raise

    def _end_what_is_left(self) -> None:
        """Start a new agent on a lost host, which ends what is left of the run there and sends its files."""
        if self.is_cut:
            return
        with contextlib.suppress(HostError):
            self._transport.close()
            self._transport.connect(timeout_s=_LAST_WORD_S if self._lease.left_s else 1.0)
            self._received, self._clock = 0, None
            self._orders = [{"kind": "end", "order": 1}]
            self.start()
            self._read()

    # The thread that sends

    def _send(self) -> None:
        """Renew the lease, confirm the received pieces, and send orders, until the link is over."""
        while not self.over.is_set():
            self._wake.wait(self._lease.renew_s)
            self._wake.clear()
            connection = self._connection
            if connection is None or self.is_cut:
                continue
            try:
                renewal = {"kind": "renew", "heard": self._clock, "received": self._received}
                connection.stream.send(renewal, timeout_s=_SEND_S)
                for order in self._orders[connection.ordered :]:
                    connection.stream.send(order, timeout_s=_SEND_S)
                    connection.ordered = order["order"]
                while self._told:
                    rank, message = self._told.popleft()
                    connection.stream.send({"kind": "tell", "rank": rank}, message, timeout_s=_SEND_S)
            except HostError:
                connection.stream.process.kill()  # the reading thread notices this and connects again
