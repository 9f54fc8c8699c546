"""A world of ranks in one process, one thread for each rank; in a deadlock it reports which rank waits for which.

Only one rank runs at a time. When it has to wait, the next rank in order that can continue runs. So every run is equal to the
one before it, and a deadlock is the state in which no rank can continue. Sends are synchronous, as if MPI had no buffers: a send
that relies on buffers is found here and not on the cluster.

Ranks share everything that exists once in a process: module variables, the current folder, torch's default generator. No
computation of a built-in recipe depends on these.
"""

from collections import Counter, defaultdict, deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NoReturn

from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from ttlaunch.runtime.comm.findings import Finding, Side, calling_place, find_deadlock, find_unmatched, unfinished_side
from ttlaunch.runtime.comm.posted import PostedCommunicator
from ttlaunch.runtime.comm.protocol import CommunicationError, check_sendable, described, same_bytes
from ttlaunch.runtime.comm.turns import Turns
from ttlaunch.runtime.world import Rank

Edge = tuple[Rank, Rank]
"""Source and destination of messages."""


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

    def __init__(self, roles: Sequence[str], *, carries: Callable[[Tensor], bool] = lambda _: True) -> None:
        """Create a world with one rank for each role.

        Args:
            roles: The role of each rank.
            carries: Whether the values of a tensor matter; if they do not, a message with it moves nothing.
        """
        self._roles = tuple(roles)
        self._carries = carries
        self._turns = Turns([Rank(rank) for rank in range(len(roles))], when_stuck=self._end_a_wait)
        self._waiting: dict[Rank, _Wait] = {}
        self._sends: dict[tuple[Rank, Rank, int], deque[Transfer]] = defaultdict(deque)
        self._receives: dict[tuple[Rank, Rank, int], deque[Transfer]] = defaultdict(deque)
        self._outcome = Outcome(self._turns.errors, [], Counter(), Counter())

    def communicator(self, rank: Rank) -> "InProcessCommunicator":
        """Return the communicator of a rank; only this rank's thread may use it."""
        return InProcessCommunicator(self, rank)

    def run(self, functions: Mapping[Rank, Callable[[], None]]) -> Outcome:
        """Run a function for every rank until all have ended; call this once.

        As soon as one rank raises an exception, or no rank can continue, all others are ended too.

        Raises:
            ValueError: There is not exactly one function for each rank.
        """
        self._turns.run(functions)
        left = [*self._sends.values(), *self._receives.values()]
        if not self._turns.is_over:
            self._outcome.findings += find_unmatched([transfer.side for queue in left for transfer in queue])
        return self._outcome

    def end(self) -> NoReturn:
        """End all ranks before they have done all of their work; the rank whose turn it is calls this."""
        self._turns.end()

    def _end_a_wait(self) -> bool:
        """End the first wait that has a timeout, which ends only when no rank can continue without it; without one, find the deadlock."""
        timed = [rank for rank in self._turns.unfinished if self._waiting[rank].has_timeout][:1]
        if timed:
            self._waiting[timed[0]].has_timed_out = True
            self._end_wait(self._waiting[timed[0]])
            return True
        unmatched = [t.side for queue in self._sends.values() for t in queue]
        finished = frozenset(self._turns.finished)
        waiting = {other: wait.side(finished) for other, wait in sorted(self._waiting.items())}
        self._outcome.findings.append(find_deadlock(waiting, unmatched, finished))
        return False

    def wait(self, transfer: "Transfer") -> None:
        """Let other ranks run until the transfer is done."""
        self._wait(_Wait((transfer,)))
        if transfer.error is not None:
            raise CommunicationError(transfer.error)

    def wait_any(self, transfers: Sequence["Transfer"], *, timeout_s: float | None) -> int | None:
        """Let other ranks run until one of the transfers is done, or, with a timeout, until no other rank can continue."""
        if timeout_s != 0:
            self._wait(_Wait(tuple(transfers), has_timeout=timeout_s is not None))
        return next((place for place, transfer in enumerate(transfers) if transfer.is_done), None)

    def _wait(self, wait: "_Wait") -> None:
        rank = wait.transfers[0].side.rank
        if not wait.may_end:
            self._waiting[rank] = wait
            self._turns.sleep(rank)
            del self._waiting[rank]
        self._turns.check()

    def _complete(self, transfer: "Transfer") -> None:
        """Mark a transfer as done, and wake its rank if it waits for it."""
        transfer.is_done = True
        wait = self._waiting.get(transfer.side.rank)
        if wait is not None and not wait.is_over and transfer in wait.transfers:
            self._end_wait(wait)

    def _end_wait(self, wait: "_Wait") -> None:
        wait.is_over = True
        self._turns.wake(wait.transfers[0].side.rank)

    def post(self, tensor: Tensor, *, rank: Rank, peer: Rank, tag: int, is_send: bool) -> "Transfer":
        """Begin a transfer and complete it if its counterpart has begun."""
        if not 0 <= peer < len(self._roles):
            raise ValueError(f"there is no rank {peer} in a world of {len(self._roles)}")
        check_sendable(tensor)
        side = Side(rank, self._roles[rank], is_send, peer, self._roles[peer], tag, described(tensor), calling_place())
        transfer = Transfer(self, side, tensor.detach())
        edge = (rank, peer) if is_send else (peer, rank)
        mine, theirs = (self._sends, self._receives) if is_send else (self._receives, self._sends)
        if is_send:
            if self._carries(tensor):
                with _disable_current_modes():  # the copy is no memory of the rank
                    transfer.sent = transfer.tensor.clone()
            self._outcome.messages[edge] += 1
            self._outcome.message_bytes[edge] += tensor.numel() * tensor.element_size()
        if theirs[*edge, tag]:
            other = theirs[*edge, tag].popleft()
            self._match(transfer if is_send else other, other if is_send else transfer)
        else:
            mine[*edge, tag].append(transfer)
        return transfer

    def _match(self, send: "Transfer", receive: "Transfer") -> None:
        self._complete(send)
        self._complete(receive)
        if send.side.what != receive.side.what:
            receive.error = (
                f"rank {send.side.rank} ({send.side.role}) sent {send.side.what}, expected {receive.side.what}"
            )
            hint = "both ends of a message need the same dtype and shape"
            finding = Finding("R020", _mismatch_message(send.side, receive.side), (receive.side, send.side), hint)
            self._outcome.findings.append(finding)
            return
        if send.sent is not None and not same_bytes(send.sent, send.tensor):
            hint = "wait for the `isend` before the tensor changes, or send a copy"
            self._outcome.findings.append(Finding("R023", _changed_message(send.side), (send.side, receive.side), hint))
        if self._carries(send.tensor):
            with _disable_current_modes():  # it is either rank's turn, and the other one's memory is not its own
                receive.tensor.copy_(send.tensor)
        send.sent = None


@dataclass(eq=False)
class Transfer:
    """One end of a message, as `isend` and `irecv` return it.

    Attributes:
        sent: A copy of the tensor as the send began, which shows whether the sender changed it too early.
        error: The text of the error that the receiver raises.
    """

    world: InProcessWorld
    side: Side
    tensor: Tensor = field(repr=False)
    sent: Tensor | None = field(default=None, repr=False)
    is_done: bool = False
    error: str | None = None

    def wait(self) -> None:
        self.world.wait(self)

    def test(self) -> bool:
        return self.is_done


@dataclass
class _Wait:
    """What a rank waits for: any of some transfers.

    Attributes:
        has_timed_out: Whether its timeout has passed.
        is_over: Whether its rank has been made ready to continue.
    """

    transfers: tuple[Transfer, ...]
    has_timeout: bool = False
    has_timed_out: bool = False
    is_over: bool = False

    @property
    def may_end(self) -> bool:
        return self.has_timed_out or any(transfer.is_done for transfer in self.transfers)

    def side(self, finished: Collection[Rank]) -> Side:
        """Return the transfer to report if the wait never ends: one whose peer has not ended, if possible."""
        return unfinished_side([transfer.side for transfer in self.transfers], finished)


class InProcessCommunicator(PostedCommunicator["Transfer"]):
    """One rank's end of the messages of an `InProcessWorld`; see `Communicator`.

    A send returns when the peer has begun to receive, and a timeout ends when no rank can continue otherwise.
    """


def _mismatch_message(send: Side, receive: Side) -> str:
    return f"{send.name} sends {send.what} where {receive.name} receives {receive.what}"


def _changed_message(send: Side) -> str:
    return f"{send.name} changed {send.what} after it had begun to send it, before `wait()` had returned"
