"""A world of ranks in one process, one thread for each rank; in a deadlock it reports which rank waits for which.

Only one rank runs at a time. When it has to wait, the next rank in order that can continue runs. So every run is equal to the
one before it, and a deadlock is the state in which no rank can continue. Sends are synchronous, as if MPI had no buffers: a send
that relies on buffers is found here and not on the cluster.

Ranks share everything that exists once in a process: module variables, the current folder, torch's default generator. No
computation of a built-in recipe depends on these.

With a `VirtualClock`, messages and waits take virtual time: they end at an event of the clock, which the world lets happen when no
rank can continue before it.
"""

import threading
from bisect import bisect_right, insort
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import NoReturn

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from ttlaunch.runtime.comm.findings import Finding, Side, calling_place, find_deadlock, find_unmatched
from ttlaunch.runtime.comm.protocol import CommunicationError, Pending, check_sendable, described
from ttlaunch.runtime.comm.virtual_clock import VirtualClock
from ttlaunch.runtime.world import Rank

Edge = tuple[Rank, Rank]
"""Source and destination of messages."""


class WorldEndedError(BaseException):
    """Ends a rank whose world has ended because of another rank; not an `Exception`, so that no recipe handles it."""


@dataclass
class Outcome:
    """How a world ended.

    Attributes:
        errors: The exception of each rank that raised one; ranks that ended because of another rank are left out.
        findings: Mistakes in the messages: mismatches, deadlocks, messages without a counterpart.
        messages, message_bytes: The number of messages and of bytes that were sent over each edge.
    """

    errors: dict[Rank, BaseException]
    findings: list[Finding]
    messages: Counter[Edge]
    message_bytes: Counter[Edge]


class InProcessWorld:
    """The ranks, their messages on the way, and whose turn it is."""

    def __init__(
        self,
        roles: Sequence[str],
        *,
        carries: Callable[[Tensor], bool] = lambda _: True,
        clock: VirtualClock | None = None,
    ) -> None:
        """Create a world with one rank for each role.

        Args:
            roles: The role of each rank.
            carries: Whether the values of a tensor matter; if they do not, a message with it moves nothing.
            clock: The time that messages take; None: none.
        """
        self._roles = tuple(roles)
        self._carries = carries
        self._clock = clock
        self._ranks = [Rank(rank) for rank in range(len(roles))]
        self._turns = {rank: threading.Semaphore(0) for rank in self._ranks}
        self._waiting: dict[Rank, _Wait] = {}
        self._ready = list(self._ranks)  # those that can continue, in order
        self._finished: set[Rank] = set()
        self._is_over = False
        self._sends: dict[tuple[Rank, Rank, int], deque[Transfer]] = defaultdict(deque)
        self._receives: dict[tuple[Rank, Rank, int], deque[Transfer]] = defaultdict(deque)
        self._outcome = Outcome({}, [], Counter(), Counter())

    def communicator(self, rank: Rank) -> "InProcessCommunicator":
        """Return the communicator of a rank; only this rank's thread may use it."""
        return InProcessCommunicator(self, rank)

    def run(self, functions: Mapping[Rank, Callable[[], None]]) -> Outcome:
        """Run a function for every rank until all have ended; call this once.

        As soon as one rank raises an exception, or no rank can continue, all others are ended too.

        Raises:
            ValueError: There is not exactly one function for each rank.
        """
        if set(functions) != set(self._ranks):
            raise ValueError(f"{len(functions)} functions for {len(self._ranks)} ranks")
        threads = [
            threading.Thread(target=self._run_rank, args=(rank, functions[rank]), name=f"rank {rank}", daemon=True)
            for rank in self._ranks
        ]
        for thread in threads:
            thread.start()
        self._turns[self._ready.pop(0)].release()
        for thread in threads:
            thread.join()
        left = [*self._sends.values(), *self._receives.values()]
        if not self._is_over:
            self._outcome.findings += find_unmatched([transfer.side for queue in left for transfer in queue])
        return self._outcome

    def end(self) -> NoReturn:
        """End all ranks before they have done all of their work; the rank whose turn it is calls this."""
        self._is_over = True
        raise WorldEndedError

    def _run_rank(self, rank: Rank, function: Callable[[], None]) -> None:
        self._turns[rank].acquire()
        try:
            if not self._is_over:
                function()
        except WorldEndedError:
            pass
        except BaseException as error:  # noqa: BLE001  SystemExit and KeyboardInterrupt end a rank just as early
            self._outcome.errors[rank] = error
            self._is_over = True
        self._finished.add(rank)
        self._pass_on(rank)

    def _pass_on(self, rank: Rank) -> None:
        """Let the next rank in order that can continue run; if no rank can and some have not ended, that is a deadlock."""
        if self._is_over:
            self._ready = [other for other in self._ranks if other not in self._finished]
        while self._clock is not None and not self._ready and self._clock.advance() is not None:
            pass
        if not self._ready and len(self._finished) < len(self._ranks):
            self._end_a_wait()
        if self._ready:
            place = bisect_right(self._ready, rank) % len(self._ready)
            self._turns[self._ready.pop(place)].release()

    def _end_a_wait(self) -> None:
        """End the first wait that has a timeout, which ends only when no rank can continue without it; without one, end the world."""
        unfinished = [other for other in self._ranks if other not in self._finished]
        timed = [other for other in unfinished if self._waiting[other].has_timeout][:1]
        if timed:
            self._waiting[timed[0]].has_timed_out = True
            self._end_wait(self._waiting[timed[0]])
            return
        unmatched = [t.side for queue in self._sends.values() for t in queue]
        waiting = {other: wait.side(self._finished) for other, wait in sorted(self._waiting.items())}
        self._outcome.findings.append(find_deadlock(waiting, unmatched, frozenset(self._finished)))
        self._is_over = True
        self._ready = unfinished

    def wait(self, transfer: "Transfer") -> None:
        """Let other ranks run until the transfer is done."""
        self._wait(_Wait((transfer,)), timeout_s=None)
        if transfer.error is not None:
            raise CommunicationError(transfer.error)

    def wait_any(self, transfers: Sequence["Transfer"], *, timeout_s: float | None) -> int | None:
        """Let other ranks run until one of the transfers is done, or, with a timeout, until no other rank can continue."""
        if timeout_s != 0 or self._clock is not None:  # a clock first lets happen what had happened by this rank's time
            self._wait(_Wait(tuple(transfers), has_timeout=timeout_s is not None), timeout_s=timeout_s)
        return next((place for place, transfer in enumerate(transfers) if transfer.is_done), None)

    def look(self, transfer: "Transfer") -> None:
        """Let what has happened by the time of a transfer's rank happen, before the rank asks whether it is done."""
        if self._clock is not None:
            self._wait(_Wait((transfer,), has_timeout=True), timeout_s=0.0)

    def _wait(self, wait: "_Wait", *, timeout_s: float | None) -> None:
        rank = wait.transfers[0].side.rank
        if not wait.may_end:
            self._waiting[rank] = wait
            if self._clock is not None and timeout_s is not None:
                self._clock.at(self._clock.now_s(rank) + timeout_s, partial(self._time_out, wait))
            self._pass_on(rank)
            self._turns[rank].acquire()
            del self._waiting[rank]
            if self._clock is not None and not self._is_over:
                self._clock.resume(rank, at_s=wait.ended_s, began_s=wait.began_s)
        if self._is_over:
            raise WorldEndedError

    def _time_out(self, wait: "_Wait", at_s: float) -> None:
        if not wait.is_over:
            wait.has_timed_out, wait.timed_out_s = True, at_s
            self._end_wait(wait)

    def _complete(self, transfer: "Transfer", at_s: float) -> None:
        """Mark a transfer as done, and its rank as ready if it waits for it."""
        transfer.is_done, transfer.done_s = True, at_s
        wait = self._waiting.get(transfer.side.rank)
        if wait is not None and not wait.is_over and transfer in wait.transfers:
            self._end_wait(wait)

    def _end_wait(self, wait: "_Wait") -> None:
        wait.is_over = True
        insort(self._ready, wait.transfers[0].side.rank)

    def post(self, tensor: Tensor, *, rank: Rank, peer: Rank, tag: int, is_send: bool) -> "Transfer":
        """Begin a transfer and complete it if its counterpart has begun."""
        if not 0 <= peer < len(self._ranks):
            raise ValueError(f"there is no rank {peer} in a world of {len(self._ranks)}")
        check_sendable(tensor)
        side = Side(rank, self._roles[rank], is_send, peer, self._roles[peer], tag, described(tensor), calling_place())
        size = tensor.numel() * tensor.element_size()
        transfer = Transfer(self, side, tensor.detach(), size)
        if self._clock is not None:
            transfer.posted_s = self._clock.now_s(rank)
        edge = (rank, peer) if is_send else (peer, rank)
        mine, theirs = (self._sends, self._receives) if is_send else (self._receives, self._sends)
        if is_send:
            if self._carries(tensor):
                with _disable_current_modes():  # the copy is no memory of the rank
                    transfer.sent = transfer.tensor.clone()
            self._outcome.messages[edge] += 1
            self._outcome.message_bytes[edge] += size
            if self._clock is not None:
                self._clock.sent(rank, peer, size)
        if theirs[*edge, tag]:
            other = theirs[*edge, tag].popleft()
            self._match(transfer if is_send else other, other if is_send else transfer)
        else:
            mine[*edge, tag].append(transfer)
        return transfer

    def _match(self, send: "Transfer", receive: "Transfer") -> None:
        self._begin(send, receive)
        if send.side.what != receive.side.what:
            receive.error = (
                f"rank {send.side.rank} ({send.side.role}) sent {send.side.what}, expected {receive.side.what}"
            )
            hint = "both ends of a message need the same dtype and shape"
            finding = Finding("R020", _mismatch_message(send.side, receive.side), (receive.side, send.side), hint)
            self._outcome.findings.append(finding)
            return
        if send.sent is not None and not _same_bytes(send.sent, send.tensor):
            hint = "wait for the `isend` before the tensor changes, or send a copy"
            self._outcome.findings.append(Finding("R023", _changed_message(send.side), (send.side, receive.side), hint))
        if self._carries(send.tensor):
            with _disable_current_modes():  # it is either rank's turn, and the other one's memory is not its own
                receive.tensor.copy_(send.tensor)
        send.sent = None

    def _begin(self, send: "Transfer", receive: "Transfer") -> None:
        """Complete both ends of a message, or let the clock do so when it has been carried."""
        send.began_s = receive.began_s = begins_s = max(send.posted_s, receive.posted_s)
        if self._clock is None:
            self._complete(send, begins_s)
            self._complete(receive, begins_s)
            return
        left, arrived = partial(self._complete, send), partial(self._complete, receive)
        self._clock.carry(send.side.edge, send.size, begins_s=begins_s, left=left, arrived=arrived)


@dataclass(eq=False)
class Transfer:
    """One end of a message, as `isend` and `irecv` return it.

    Attributes:
        size: Its bytes.
        posted_s, began_s, done_s: By the world's clock, when this end began, when both ends had, and when this one was done.
        sent: A copy of the tensor as the send began, which shows whether the sender changed it too early.
        error: The text of the error that the receiver raises.
    """

    world: InProcessWorld
    side: Side
    tensor: Tensor = field(repr=False)
    size: int
    posted_s: float = 0.0
    began_s: float = 0.0
    done_s: float = 0.0
    sent: Tensor | None = field(default=None, repr=False)
    is_done: bool = False
    error: str | None = None

    def wait(self) -> None:
        self.world.wait(self)

    def test(self) -> bool:
        self.world.look(self)
        return self.is_done


@dataclass
class _Wait:
    """What a rank waits for: any of some transfers.

    Attributes:
        has_timed_out: Whether its timeout has passed.
        timed_out_s: When, by the world's clock.
        is_over: Whether its rank has been made ready to continue.
    """

    transfers: tuple[Transfer, ...]
    has_timeout: bool = False
    has_timed_out: bool = False
    timed_out_s: float = 0.0
    is_over: bool = False

    @property
    def may_end(self) -> bool:
        return self.has_timed_out or self._done is not None

    @property
    def ended_s(self) -> float:
        """When it could end, by the world's clock."""
        return self.timed_out_s if self._done is None else self._done.done_s

    @property
    def began_s(self) -> float | None:
        """When the message that has ended it began; None if a timeout did."""
        return None if self._done is None else self._done.began_s

    @property
    def _done(self) -> Transfer | None:
        return next((transfer for transfer in self.transfers if transfer.is_done), None)

    def side(self, finished: Collection[Rank]) -> Side:
        """Return the transfer to report if the wait never ends: one whose peer has not ended, if possible."""
        sides = [transfer.side for transfer in self.transfers]
        return next((side for side in sides if side.peer not in finished), sides[0])


class InProcessCommunicator:
    """One rank's end of the messages of an `InProcessWorld`; see `Communicator`."""

    def __init__(self, world: InProcessWorld, rank: Rank) -> None:
        self.rank = rank
        self._world = world

    def send(self, tensor: Tensor, *, dest: Rank, tag: int = 0) -> None:
        """Send, and return when the peer has begun to receive."""
        self.isend(tensor, dest=dest, tag=tag).wait()

    def recv(self, tensor: Tensor, *, source: Rank, tag: int = 0) -> None:
        self.irecv(tensor, source=source, tag=tag).wait()

    def isend(self, tensor: Tensor, *, dest: Rank, tag: int = 0) -> Pending:
        return self._world.post(tensor, rank=self.rank, peer=dest, tag=tag, is_send=True)

    def irecv(self, tensor: Tensor, *, source: Rank, tag: int = 0) -> Pending:
        return self._world.post(tensor, rank=self.rank, peer=source, tag=tag, is_send=False)

    def wait_any(self, pending: Sequence[Pending], *, timeout_s: float | None = None) -> int | None:
        """Return the index of a complete transfer; None if, with a timeout, no rank can continue otherwise."""
        transfers = [transfer for transfer in pending if isinstance(transfer, Transfer)]
        return self._world.wait_any(transfers, timeout_s=timeout_s)


def _same_bytes(one: Tensor, other: Tensor) -> bool:
    return torch.equal(one.flatten().view(torch.uint8), other.flatten().view(torch.uint8))


def _mismatch_message(send: Side, receive: Side) -> str:
    return f"{send.name} sends {send.what} where {receive.name} receives {receive.what}"


def _changed_message(send: Side) -> str:
    return f"{send.name} changed {send.what} after it had begun to send it, before `wait()` had returned"
