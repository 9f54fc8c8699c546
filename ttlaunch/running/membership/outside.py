"""The workers of an elastic run as its service shows them, and the orders for those that have joined by themselves."""

import json
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import field
from typing import Any

from ttlaunch.contract import worker_name
from ttlaunch.membership.coordinator import Phase as MembersPhase
from ttlaunch.membership.messages import Finish, Member, order_to_json
from ttlaunch.membership.messages import Order as OrderTo
from ttlaunch.quick_dataclass import dataclass
from ttlaunch.records.coordinator import Heartbeat
from ttlaunch.records.members import MemberReport
from ttlaunch.records.ranks import AnyProgress, StepDone
from ttlaunch.running.membership.journal import Journal
from ttlaunch.running.membership.members import ENDED, Admitted, NotAdmittedError, Order, Orders, Worker
from ttlaunch.running.membership.membership import Membership
from ttlaunch.running.watch import Phase, RankState

_MOST_WORKERS = 1024  # that may ever join a run
_KEPT_ORDERS = 16
_ORDER_OF = {"prepare": Order.PREPARE, "dismiss": Order.LEAVE, "finish": Order.LEAVE}


@dataclass
class _Joined:
    """A worker that has joined by itself.

    Attributes:
        orders: Those that it has not taken yet; an older one than the newest few was repeated since.
        has_ended: Whether its process has said that it ends.
        changed_at: When its progress last changed, on the monotonic clock.
    """

    number: int
    incarnation: int
    address: tuple[str, int]
    name: str
    since: float
    step: int | None = None
    loss: float | None = None
    tokens_per_s: float | None = None
    memory_bytes: int | None = None
    has_ended: bool = False
    changed_at: float = field(default_factory=time.monotonic)
    orders: deque[Mapping[str, Any]] = field(default_factory=lambda: deque(maxlen=_KEPT_ORDERS))


class OutsideWorkers:
    """Lets workers join that the run does not start itself; implements `Members`. Any thread may call any method."""

    def __init__(
        self, membership: Membership, journal: Journal, *, planned: int, ranks: Callable[[], Sequence[RankState]]
    ) -> None:
        """Know nobody yet.

        Args:
            membership: Who takes part.
            journal: Its journal.
            planned: How many rows the plan has; workers that join have the numbers from there on.
            ranks: Returns the states of the workers that the run starts itself.
        """
        self._membership, self._journal, self._planned, self._ranks = membership, journal, planned, ranks
        self._joined: dict[int, _Joined] = {}
        self._is_closed = False
        self._changed = threading.Condition()

    def close(self) -> None:
        """Admit nobody any more, because the run is being ended."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()

    def wait_for_ends(self, within_s: float) -> None:
        """Wait until the processes of all workers that have joined have said that they end."""
        with self._changed:
            self._changed.wait_for(lambda: all(one.has_ended for one in self._joined.values()), within_s)

    def pass_on(self, member: Member, message: bytes) -> None:
        """Keep an order until its worker asks for it."""
        with self._changed:
            joined = self._joined.get(member.number)
            if joined is not None and joined.incarnation == member.incarnation:
                joined.orders.append(json.loads(message))
                self._changed.notify_all()

    def register(self, number: int | None, *, address: tuple[str, int], name: str, have_step: int) -> Admitted:
        with self._changed:
            self._check_admits(number)
            if number is None:
                number = max([self._planned - 1, *self._joined]) + 1
            before = self._joined.get(number)
            incarnation = before.incarnation + 1 if before else 1
            self._joined[number] = _Joined(number, incarnation, address, name, time.time(), step=have_step or None)
            self._changed.notify_all()  # an earlier incarnation may wait for orders
        if before is not None:
            self._membership.lose(number, "was replaced by a newer process of the same worker", time.monotonic())
        return Admitted(number, incarnation, None)

    def leave(self, number: int) -> int:
        state = self._membership.state
        if number not in state.workers:
            raise KeyError(number)
        self._membership.let_leave(number, time.monotonic())
        return (state.workers[number].applied or 0) + 1

    def heartbeat(self, number: int, beat: Heartbeat, records: Sequence[AnyProgress], *, wait_s: float) -> Orders:
        now = time.monotonic()
        with self._changed:
            joined = self._joined[number]
            self._note(joined, beat, records, now=now)
        for record in records:
            if isinstance(record, MemberReport) and record.incarnation == joined.incarnation:
                self._membership.take(number, _placed(record, joined), now)
        if beat.phase == ENDED:
            self._note_end(joined)
        with self._changed:
            self._changed.wait_for(
                lambda: joined.orders or self._is_closed or self._joined[number] is not joined,
                0.0 if joined.has_ended else wait_s,
            )
            found = tuple(joined.orders)
            joined.orders.clear()
        if self._joined[number] is not joined:
            return Orders(self._membership.state.epoch, Order.FENCED)
        if self._is_closed and self._membership.phase is MembersPhase.FINISHED:
            found = (*found, json.loads(order_to_json(OrderTo(Member(number, joined.incarnation), Finish()))))
        kinds = [_ORDER_OF.get(str(one.get("kind")), Order.GO) for one in found]
        return Orders(self._membership.state.epoch, kinds[-1] if kinds else Order.GO, found)

    def _note_end(self, joined: _Joined) -> None:
        is_over = self._membership.phase is MembersPhase.FINISHED or joined.number in self._membership.left
        if not is_over:
            self._membership.lose(joined.number, "has ended", time.monotonic())
        with self._changed:
            joined.has_ended = True
            self._changed.notify_all()

    def ready(self) -> Sequence[Worker]:
        state = self._membership.state
        numbers = state.begin.numbers if state.begin is not None else sorted(state.workers)
        return [one for one in self.workers() if one.number in numbers]

    def workers(self) -> Sequence[Worker]:
        started = [self._of_rank(state) for state in self._ranks() if state.phase is not Phase.ABSENT]
        return [*started, *(self._of_joined(joined) for _, joined in sorted(self._joined.items()))]

    def epochs(self) -> Sequence[Mapping[str, Any]]:
        return self._journal.entries

    def _check_admits(self, number: int | None) -> None:
        if self._is_closed or self._membership.phase in {MembersPhase.FINISHED, MembersPhase.STRANDED}:
            raise NotAdmittedError("the run is ending")
        if self._membership.is_frozen:
            raise NotAdmittedError("the journal of the run cannot be written, so nobody joins any more")
        if number is not None and number < self._planned:
            raise NotAdmittedError("the run starts the worker of this number itself")
        if number is not None and number not in self._joined:
            raise NotAdmittedError("no worker has had this number")
        if number is None and len(self._joined) >= _MOST_WORKERS:
            raise NotAdmittedError(f"{_MOST_WORKERS} workers have joined this run, and it takes no more")

    def _note(self, joined: _Joined, beat: Heartbeat, records: Sequence[AnyProgress], *, now: float) -> None:
        steps = [record for record in records if isinstance(record, StepDone)]
        step = max([beat.step, joined.step or 0, *(record.step for record in steps)]) or None
        if step != joined.step or records:
            joined.changed_at = now
        losses = [float(record.loss) for record in steps if record.loss is not None]
        joined.step = step
        joined.loss = losses[-1] if losses else beat.loss if beat.loss is not None else joined.loss
        joined.tokens_per_s = beat.tokens_per_s if beat.tokens_per_s is not None else joined.tokens_per_s
        joined.memory_bytes = beat.rss if beat.rss is not None else joined.memory_bytes

    def _of_joined(self, joined: _Joined) -> Worker:
        number = joined.number
        return Worker(
            number=number,
            incarnation=joined.incarnation,
            rank=self._rank_of(number),
            ip_address=joined.address[0],
            port=joined.address[1],
            state=self._state_of(number),
            name=joined.name,
            step=joined.step,
            loss=joined.loss,
            tokens_per_s=joined.tokens_per_s,
            memory_bytes=joined.memory_bytes,
            since=joined.since,
            last_progress_s=round(time.monotonic() - joined.changed_at, 3),
            left=self._left(number),
        )

    def _of_rank(self, state: RankState) -> Worker:
        number = state.row.rank
        known = self._membership.state.workers.get(number)
        address, _, port = (known.seat.address or "").rpartition(":") if known else ("", "", "")
        last = state.last_step_time
        return Worker(
            number=number,
            incarnation=0,
            rank=self._rank_of(number),
            ip_address=address or state.row.host,
            port=int(port) if port.isdecimal() else None,
            state=self._state_of(number),
            step=state.step or None,
            loss=state.loss,
            tokens_per_s=state.tokens_per_s,
            memory_bytes=state.usage.memory_bytes if state.usage else None,
            since=state.started.time if state.started else None,
            last_progress_s=None if last is None else round(max(0.0, time.time() - last), 3),
            left=self._left(number),
        )

    def _rank_of(self, number: int) -> int | None:
        begin = self._membership.state.begin
        return begin.numbers.index(number) if begin is not None and number in begin.numbers else None

    def _left(self, number: int) -> str:
        return "" if number in self._membership.state.workers else self._membership.left.get(number, "")

    def _state_of(self, number: int) -> str:
        state = self._membership.state
        if number not in state.workers:
            return "gone" if number in self._membership.left else "starting"
        if number not in state.members:
            return "spare"
        return "training" if state.begin is not None else "changing"


def _placed(record: MemberReport, joined: _Joined) -> MemberReport:
    """Return a report with the place at which the worker has registered: it may name no host of another worker, nor its address."""
    if record.what != "registered":
        return record
    address, port = joined.address
    place = f"[{address}]:{port}" if ":" in address else f"{address}:{port}"
    return MemberReport(**{**vars(record), "host": f"{worker_name(joined.number)} at {address}", "address": place})
