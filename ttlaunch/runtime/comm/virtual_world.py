"""Ranks on a virtual clock, of which equal ones run once: their messages, and how long these take.

Ranks are divided into classes, each of which one rank represents; only representatives run. What a representative sends at one time to
ranks of another class is a batch: in each rank of its class the same happens at the same time, so all of these messages are one
`Flow` of the network. The nth batch that one class sends to another under a tag is what that one receives as its nth batch from it. Both
must be equally many messages of equal size: a division into classes with which all of them are has the same times as a simulation of
all ranks, because every rank of a class then sees equal messages at equal times. Otherwise `NotAlikeError` says which classes have to be
divided. With one rank in each class, all ranks run.

A rank runs its code in a thread of its own, or it follows a script (`programs.py`), which needs none. A script begins transfers with `begin` and
waits with `pauses`.

Source: the divisions are the equitable partitions of C. Godsil, G. Royle, "Algebraic Graph Theory", Springer 2001, of a graph whose edges
are messages.
"""

from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import NoReturn

from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from ttlaunch.runtime.comm.fair_network import FairNetwork
from ttlaunch.runtime.comm.findings import Finding, Place, calling_place, find_deadlock, find_unmatched
from ttlaunch.runtime.comm.flow_table import Flow
from ttlaunch.runtime.comm.posted import PostedCommunicator
from ttlaunch.runtime.comm.protocol import CommunicationError, check_sendable, same_bytes
from ttlaunch.runtime.comm.turns import Script, Turns
from ttlaunch.runtime.comm.virtual_clock import Link, VirtualClock
from ttlaunch.runtime.comm.virtual_fates import Fates, RankEndedError
from ttlaunch.runtime.comm.virtual_messages import Batch, BatchKey, Form, VirtualTransfer, Wait
from ttlaunch.runtime.world import Rank

_NOWHERE = Place("", 0)
"""The line of a script, which has none."""

Classes = tuple[tuple[Rank, ...], ...]
"""Every rank in one class; the first rank of a class, its smallest, represents it."""


class NotAlikeError(Exception):
    """Ranks of one class do not do the same.

    Attributes:
        reason: What differs, as a clause.
        classes: The places of the classes of which one has to be divided; empty: nobody knows which.
    """

    def __init__(self, reason: str, *classes: int) -> None:
        super().__init__(reason)
        self.reason, self.classes = reason, classes


@dataclass
class VirtualOutcome:
    """How a world ended.

    Attributes:
        errors: The exception of each representative that raised one.
        findings: Mistakes in the messages.
        messages, message_bytes, step_bytes: What each representative has sent to each rank: how many messages, their bytes, and
            those of them that were within steps.
        seen: For each representative and each other rank, a number that is equal for those to and from which it has sent and received the same
            at the same times; nothing if no ranks are folded.
    """

    errors: dict[Rank, BaseException]
    findings: list[Finding] = field(default_factory=list)
    messages: Counter[tuple[Rank, Rank]] = field(default_factory=Counter)
    message_bytes: Counter[tuple[Rank, Rank]] = field(default_factory=Counter)
    step_bytes: Counter[tuple[Rank, Rank]] = field(default_factory=Counter)
    seen: dict[tuple[Rank, Rank], int] = field(default_factory=dict)


class VirtualWorld:
    """The representatives, their messages on the way, and whose turn it is."""

    def __init__(
        self,
        roles: Sequence[str],
        clock: VirtualClock,
        link: Link,
        *,
        classes: Classes | None = None,
        carries: Callable[[Tensor], bool] = lambda _: True,
        fates: Fates | None = None,
    ) -> None:
        """Create a world with one rank for each role.

        Args:
            roles: The role of each rank.
            clock: The clocks of the representatives.
            link: What messages cost.
            classes: The ranks that are alike; None: each one is unlike all others.
            carries: Whether the values of a tensor matter; if they do not, a message with it moves nothing.
            fates: What happens to representatives.
        """
        self._roles, self._clock, self._link, self._carries = tuple(roles), clock, link, carries
        self._classes = classes or tuple((Rank(rank),) for rank in range(len(roles)))
        self._class_of = [0] * len(roles)
        for place, ranks in enumerate(self._classes):
            for rank in ranks:
                self._class_of[rank] = place
        self._first = [ranks[0] for ranks in self._classes]
        self._is_folded = len(self._classes) < len(self._roles)
        self._turns = Turns(self._first, when_stuck=self._go_on)
        self._network = FairNetwork(link.capacity)
        self._is_shared = True  # whether all messages under way have their rates
        self._shares = 0  # how often they got some
        self._fates = fates or Fates((), self._first, clock)
        self._fates.begin(self._wake, lambda rank: rank in self._turns.finished)
        self._halted: set[Rank] = set()
        self._waiting: dict[Rank, Wait] = {}
        self._open: dict[BatchKey, list[Batch]] = {}  # of the newest time
        self._unpaired: dict[BatchKey, deque[Batch]] = {}
        self._newest_copy: Tensor | None = None
        self._in_step = dict.fromkeys(self._first, False)
        self._outcome = VirtualOutcome(self._turns.errors)

    @property
    def seen(self) -> Mapping[tuple[Rank, Rank], int]:
        """What representatives have seen of other ranks so far; see `VirtualOutcome`. Nothing if no ranks are folded."""
        return self._outcome.seen

    def communicator(self, rank: Rank) -> "VirtualCommunicator":
        """Return the communicator of a representative; only its own thread may use it."""
        return VirtualCommunicator(self, rank)

    def enter_step(self, rank: Rank, *, is_step: bool) -> None:
        """Note whether what a rank sends from now on belongs to a step."""
        self._in_step[rank] = is_step

    def compute(self, rank: Rank, seconds: float) -> None:
        """Let a representative, whose turn it is, compute what takes so long on a rank that is not slow."""
        self._clock.compute(rank, seconds)
        if self._fates.has_orders:
            self._sleep_in(rank, self._life(rank, has_work=True))

    def compute_each(self, rank: Rank, each_s: Sequence[float]) -> Iterator[None]:
        """Let a script's rank compute several things, one after the other, as `compute` does; yield where it has to wait."""
        if not self._fates.has_orders:
            self._clock.compute_each(rank, each_s)
            return
        for seconds in each_s:
            self._clock.compute(rank, seconds)
            yield from self._life(rank, has_work=True)

    def run(
        self, functions: Mapping[Rank, Callable[[], None]], scripts: Mapping[Rank, Script] | None = None
    ) -> VirtualOutcome:
        """Run a function or a script for every representative until all have ended; call this once.

        Raises:
            NotAlikeError: Ranks of a class do not do the same.
        """
        self._turns.run(functions, scripts)
        for error in self._outcome.errors.values():
            if isinstance(error, NotAlikeError):
                raise error
        if (
            not self._turns.is_over
            and not self._fates.is_broken
            and (left := [one for queue in self._unpaired.values() for one in queue])
        ):
            self._refuse_folded("messages have no counterpart", *left[0].key[:2])
            self._outcome.findings += find_unmatched([batch.side for batch in left])
        return self._outcome

    def end(self) -> NoReturn:
        """End all ranks before they have done all of their work; the rank whose turn it is calls this."""
        self._turns.end()

    def _refuse_folded(self, reason: str, *classes: int) -> None:
        """Raise `NotAlikeError` if some ranks are folded: then what looks like a mistake may only show that they are not alike."""
        if self._is_folded:
            raise NotAlikeError(reason, *classes)

    def _go_on(self) -> bool:
        """Let events happen until a rank can continue; without one, find the deadlock."""
        try:
            while not self._turns.can_go_on:
                if not self._clock.advance():
                    if self._fates.is_broken:
                        return False  # they wait for a rank that has ended or stands still
                    self._refuse_folded("ranks wait for each other")
                    finished = frozenset(self._turns.finished)
                    waiting = {other: wait.side(finished) for other, wait in sorted(self._waiting.items())}
                    sends = [one for key, queue in self._unpaired.items() if key.is_send for one in queue]
                    self._outcome.findings.append(find_deadlock(waiting, [one.side for one in sends], finished))
                    return False
        except NotAlikeError as error:
            self._turns.errors[self._first[0]] = error
            return False
        return True

    def wait_any(self, transfers: Sequence[VirtualTransfer], *, timeout_s: float | None) -> int | None:
        """Let time pass until one of the transfers is done, or until the timeout; return which."""
        self._sleep_in(transfers[0].rank, self.pauses(transfers, timeout_s=timeout_s))
        return next((place for place, one in enumerate(transfers) if one.batch.is_done), None)

    def wait(self, transfer: VirtualTransfer) -> None:
        """Let time pass until a transfer is done."""
        if transfer.batch.is_done and not self._fates.has_orders:  # most are, of the thousands of one batch
            self._turns.check()
        else:
            self._sleep_in(transfer.rank, self.pauses((transfer,)))
        if transfer.batch.error is not None:
            raise CommunicationError(transfer.batch.error)

    def look(self, transfer: VirtualTransfer) -> None:
        """Let happen what has happened by the time of a transfer's rank, before the rank asks whether it is done."""
        self._sleep_in(transfer.rank, self.pauses((transfer,), timeout_s=0.0))

    def _sleep_in(self, rank: Rank, pauses: Iterator[None]) -> None:
        """Let the thread of a rank sleep in each of its pauses."""
        for _ in pauses:
            self._turns.sleep(rank)

    def pauses(self, transfers: Sequence[VirtualTransfer], *, timeout_s: float | None = None) -> Iterator[None]:
        """Yield where a rank, whose turn it is, has to wait until one of its transfers is done, or until the timeout."""
        rank = transfers[0].rank
        yield from self.living(rank)
        wait = Wait(transfers, rank)
        for one in transfers:  # a plain loop: a server may wait for thousands, thousands of times
            batch = one.batch
            if batch.is_done:
                wait.is_over = True
                break
            batch.wait = wait
        if not wait.is_over:
            self._waiting[rank] = wait
            if timeout_s is not None:
                self._clock.at(self._clock.now_s(rank) + timeout_s, partial(self._end_wait, wait))
            yield
            del self._waiting[rank]
            self._clock.resume(rank, wait.ended_s)
            yield from self.living(rank)
        self._turns.check()

    def living(self, rank: Rank) -> Iterator[None]:
        """Let a rank, whose turn it is, stand still or end if that was to happen by now; yield where it stands still."""
        if self._fates.has_orders:
            yield from self._life(rank)

    def _life(self, rank: Rank, *, has_work: bool = False) -> Iterator[None]:
        """Let a rank stand still or end, if that was to happen by the time that its clock shows; yield where it stands still.

        Args:
            rank: The rank, whose turn it is.
            has_work: Whether it was computing, and does the rest of that when it is continued.
        """
        self._fates.come_to_now(rank)
        while (since_s := self._fates.halted_s(rank)) is not None:
            left_s = self._clock.now_s(rank) - since_s if has_work else 0.0
            self._halted.add(rank)
            yield
            self._halted.discard(rank)
            if (at_s := self._fates.end_halt(rank)) is None:
                raise RankEndedError
            self._clock.resume(rank, at_s)
            if self._fates.is_ending(rank):
                break
            self._clock.resume(rank, at_s + left_s)
        if self._fates.is_ending(rank):
            raise RankEndedError

    def _wake(self, rank: Rank, at_s: float) -> None:
        if rank in self._halted:
            self._turns.wake(rank)
        elif rank in self._waiting:
            self._end_wait(self._waiting[rank], at_s)

    def _end_wait(self, wait: Wait, at_s: float) -> None:
        if not wait.is_over:
            wait.is_over, wait.ended_s = True, at_s
            self._turns.wake(wait.rank)

    def post(self, tensor: Tensor, *, rank: Rank, peer: Rank, tag: int, is_send: bool) -> VirtualTransfer:
        """Begin a transfer: put it into a batch, which begins when its counterpart has begun."""
        check_sendable(tensor)
        if self._fates.has_orders:
            self._sleep_in(rank, self.living(rank))
        place = _NOWHERE if self._is_folded else calling_place()  # what folded ranks do wrong is not shown
        transfer = self.begin(Form.of(tensor), None, rank=rank, peer=peer, tag=tag, is_send=is_send, place=place)
        if self._carries(tensor):
            self._keep_values(tensor, transfer.batch, is_send=is_send)
        return transfer

    def _keep_values(self, tensor: Tensor, batch: Batch, *, is_send: bool) -> None:
        """Keep a copy of what is sent, and the tensor itself: it is compared with the copy, or filled."""
        if not is_send and not tensor.requires_grad:
            batch.tensors.append(tensor)
            return
        with _disable_current_modes():  # the copy is no memory of the rank
            own = tensor.detach()
            batch.tensors.append(own)
            if is_send:
                batch.sent.append(self._copy_of(own))

    def _copy_of(self, tensor: Tensor) -> Tensor:
        """Return a copy, which nobody changes: the last one if it is equal, as when a server sends a message to thousands of ranks."""
        known = self._newest_copy
        if known is None or (known.dtype, known.shape) != (tensor.dtype, tensor.shape) or not same_bytes(known, tensor):
            known = self._newest_copy = tensor.clone()
        return known

    def begin(
        self,
        form: Form,
        values: Tensor | None,
        *,
        rank: Rank,
        peer: Rank,
        tag: int,
        is_send: bool,
        place: Place = _NOWHERE,
    ) -> VirtualTransfer:
        """Begin a transfer of a rank that has no tensor to fill.

        Args:
            form: What the tensor would be.
            values: What is sent, if values matter; nobody may change it. What is received is in the batch, as soon as the transfer is done.
            rank, peer, tag, is_send: Between which ranks.
            place: The line that the user may look at.
        """
        if not 0 <= peer < len(self._roles):
            raise ValueError(f"there is no rank {peer} in a world of {len(self._roles)}")
        now_s = self._clock.now_s(rank)
        if is_send:
            edge = rank, peer
            self._outcome.messages[edge] += 1
            self._outcome.message_bytes[edge] += form.size
            if self._in_step[rank]:
                self._outcome.step_bytes[edge] += form.size
        mine, theirs = self._class_of[rank], self._class_of[peer]
        key = BatchKey(mine, theirs, tag, is_send) if is_send else BatchKey(theirs, mine, tag, is_send)
        batch = None
        if self._is_folded:
            seen = self._outcome.seen
            seen[rank, peer] = hash((seen.get((rank, peer)), tag, is_send, form.size, now_s))
            for one in self._open.get(key, ()):  # a plain loop, as in `pauses`
                if one.takes(form, peer, now_s):
                    batch = one
                    break
        if batch is None:
            roles = self._roles[rank], self._roles[peer]
            batch = self._begin_batch(Batch(key, form, now_s, rank, peer, roles, place))
        batch.peers.add(peer)
        if values is not None:
            batch.sent.append(values)
            batch.tensors.append(values)
        return VirtualTransfer(self, rank, batch)

    def _begin_batch(self, batch: Batch) -> Batch:
        """Let a batch begin together with its counterpart as soon as there is one."""
        key = batch.key
        if self._is_folded:
            same_time = self._open.get(key, [])
            self._open[key] = [one for one in same_time if one.posted_s == batch.posted_s and not one.has_begun] + [
                batch
            ]
        theirs = BatchKey(key.source, key.dest, key.tag, not key.is_send)
        others = self._unpaired.get(theirs)
        if others is None:
            self._unpaired.setdefault(key, deque()).append(batch)
            return batch
        other = others.popleft()
        if not others:
            del self._unpaired[theirs]
        pair = (batch, other) if key.is_send else (other, batch)
        self._clock.at(max(batch.posted_s, other.posted_s), partial(self._begin, *pair))
        return batch

    def _begin(self, sends: Batch, receives: Batch, at_s: float) -> None:
        """Let the messages of two batches begin; by now each representative has entered all of its own."""
        sends.has_begun = receives.has_begun = True
        source, dest, _, _ = sends.key
        if self._fates.has_ended(self._first[source], at_s) or self._fates.has_ended(self._first[dest], at_s):
            return
        self._check_alike(sends, receives)
        if sends.form != receives.form:
            self._report_mismatch(sends, receives)
        else:
            self._carry_values(sends, receives)
        self._clock.begin_message(self._first[source], at_s)
        self._clock.begin_message(self._first[dest], at_s)
        if not sends.form.size:
            self._leave(sends, receives, at_s)
            return
        # Every rank of a class has ports of its own with the same load, so those of the representative stand for all. Ranks that share
        # links are not folded: each of their batches is one message.
        ports = self._link.ports(self._first[source], self._first[dest])
        loads = dict.fromkeys(ports, 1) | {ports[0]: len(sends.peers), ports[-1]: len(receives.peers)}
        flow = Flow(loads, float(sends.form.size), partial(self._leave, sends, receives))
        self._network.begin(flow, now_s=at_s)
        self._share_at(at_s)

    def _share_at(self, at_s: float) -> None:
        """Give messages their rates when everything else of this time has happened."""
        if self._is_shared:
            self._is_shared = False
            self._clock.at(at_s, self._share, is_last=True)

    def _share(self, at_s: float) -> None:
        self._is_shared = True
        self._shares += 1
        next_s, passing = self._network.share(at_s)
        if passing:
            self._clock.at(next_s, partial(self._pass, deque(passing), self._shares))

    def _pass(self, passing: deque[Flow], shares: int, at_s: float) -> None:
        """Let the first of some flows end, which pass at this time unless rates have changed since they were found."""
        if shares == self._shares:
            flow = passing.popleft()
            self._network.end(flow)
            if passing:
                self._clock.at(at_s, partial(self._pass, passing, shares))
            self._share_at(at_s)
            flow.passed(at_s)

    def _leave(self, sends: Batch, receives: Batch, at_s: float) -> None:
        """Free the senders, whose last byte has left; it arrives after the latency."""
        if self._fates.has_ended(self._first[sends.key[0]], at_s):
            return
        self._clock.end_message(self._first[sends.key[0]], at_s)
        self._finish(sends, at_s)
        ends = self._first[sends.key[0]], self._first[receives.key[1]]
        self._clock.at(at_s + self._link.latency_between(*ends), partial(self._arrive, receives))

    def _arrive(self, receives: Batch, at_s: float) -> None:
        self._clock.end_message(self._first[receives.key[1]], at_s)
        self._finish(receives, at_s)

    def _finish(self, batch: Batch, at_s: float) -> None:
        batch.is_done = True
        if batch.wait is not None:
            self._end_wait(batch.wait, at_s)
            batch.wait = (
                None  # so that nothing refers to itself in a circle, which only a search of all objects would free
            )

    def _check_alike(self, sends: Batch, receives: Batch) -> None:
        source, dest, tag, _ = sends.key
        out, into = len(self._classes[source]) * len(sends.peers), len(self._classes[dest]) * len(receives.peers)
        if out != into or sends.form.size != receives.form.size:
            self._refuse_folded(
                f"{len(sends.peers)} messages of {sends.form.size} bytes under tag {tag} from rank {sends.rank} meet {len(receives.peers)} of "
                f"{receives.form.size} bytes at rank {receives.rank}",
                source,
                dest,
            )

    def _report_mismatch(self, sends: Batch, receives: Batch) -> None:
        one, other = sends.side, receives.side
        receives.error = f"{one.name} sent {one.what}, expected {other.what}"
        message = f"{one.name} sends {one.what} where {other.name} receives {other.what}"
        hint = "both ends of a message need the same dtype and shape"
        self._outcome.findings.append(Finding("R020", message, (other, one), hint))

    def _carry_values(self, sends: Batch, receives: Batch) -> None:
        """Copy values to whoever receives: in each rank of a class the same, as far as anybody knows."""
        if not sends.sent:
            return
        receives.values = sends.sent[0]
        with _disable_current_modes():  # it is either rank's turn, and the other one's memory is not its own
            for place, tensor in enumerate(receives.tensors):
                tensor.copy_(sends.sent[place % len(sends.sent)])
            changed = any(
                one is not other and not same_bytes(one, other)
                for one, other in zip(sends.sent, sends.tensors, strict=True)
            )
        if changed:
            message = f"{sends.side.name} changed {sends.side.what} after it had begun to send it, before `wait()` had returned"
            hint = "wait for the `isend` before the tensor changes, or send a copy"
            self._outcome.findings.append(Finding("R023", message, (sends.side, receives.side), hint))
        sends.sent, sends.tensors, receives.tensors = [], [], []


class VirtualCommunicator(PostedCommunicator[VirtualTransfer]):
    """One representative's end of the messages of a `VirtualWorld`; see `Communicator`.

    A send returns when the last byte has left, and a timeout passes on the rank's own clock.
    """
