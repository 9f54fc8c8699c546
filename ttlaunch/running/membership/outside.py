"""The workers of an elastic run as its service shows them, and the orders for those that have joined by themselves."""

import json
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import field
from typing import Any

from ttlaunch import contract
from ttlaunch.contract import worker_name
from ttlaunch.membership.coordinator_state import Phase as MembersPhase
from ttlaunch.membership.messages import Finish, Member, order_to_json
from ttlaunch.planning.launch_plan import RankRow
from ttlaunch.quick_dataclass import dataclass
from ttlaunch.records.coordinator import Heartbeat
from ttlaunch.records.members import MOST_JOINED, MemberReport
from ttlaunch.records.ranks import (
    AnyProgress,
    Done,
    LayerNorms,
    Note,
    Ready,
    StepDone,
    Usage,
    Validation,
    moved_back,
)
from ttlaunch.running.membership.journal import Journal
from ttlaunch.running.membership.members import ENDED, Admitted, NotAdmittedError, Order, Orders, Worker
from ttlaunch.running.membership.membership import Membership
from ttlaunch.running.runs.facts import JOINED
from ttlaunch.running.runs.run_folder import RunFolder
from ttlaunch.running.watch import Phase, RankState, fold

_KEPT_ORDERS = 16
_MOST_BYTES = 256 * 1024 * 1024  # of records that are kept of all workers that join a run
_KEPT = (Ready, StepDone, Validation, LayerNorms, Note, Usage, Done)
"""The records that are kept as those of a rank that runs here. A worker of another machine says nothing about parameters or checkpoints."""
_ORDER_OF = {"prepare": Order.PREPARE, "dismiss": Order.LEAVE, "finish": Order.LEAVE}


@dataclass
class _Joined:
    """A worker that has joined by itself.

    Attributes:
        state: What its rank has reported, in all of its incarnations.
        ahead_s: By how much its clock is ahead of this machine's, with the way of its first record; None before that.
        orders: Those that it has not taken yet; an older one than the newest few was repeated since.
        has_ended: Whether its process has said that it ends.
        changed_at: When its progress last changed, on the monotonic clock.
    """

    number: int
    incarnation: int
    address: tuple[str, int]
    name: str
    since: float
    state: RankState
    memory_bytes: int | None = None
    ahead_s: float | None = None
    has_ended: bool = False
    changed_at: float = field(default_factory=time.monotonic)
    orders: deque[Mapping[str, Any]] = field(default_factory=lambda: deque(maxlen=_KEPT_ORDERS))


class OutsideWorkers:
    """Lets workers join that the run does not start itself; implements `Members`. Any thread may call any method."""

    def __init__(
        self,
        membership: Membership,
        journal: Journal,
        *,
        planned: int,
        ranks: Callable[[], Sequence[RankState]],
        folder: RunFolder,
        role: str = "worker",
    ) -> None:
        """Know nobody yet.

        Args:
            membership: Who takes part.
            journal: Its journal.
            planned: How many rows the plan has; workers that join have the numbers from there on.
            ranks: Returns the states of the workers that the run starts itself.
            folder: Gets a file of records of each worker that joins, as if it ran here.
            role: The role of all workers.
        """
        self._folder, self._role, self._left_bytes = folder, role, _MOST_BYTES
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
            state = before.state if before else RankState(RankRow(number, address[0], 0, self._role, later=True))
            state.step = max(state.step, have_step)
            self._joined[number] = _Joined(number, incarnation, address, name, time.time(), state)
            self._journal.write(JOINED, worker=number, incarnation=incarnation, host=address[0], name=name)
            self._changed.notify_all()  # an earlier incarnation may wait for orders
        if before is not None:
            self._membership.let_come_again(number, time.monotonic())
        return Admitted(number, incarnation, None)

    def leave(self, number: int) -> int:
        state = self._membership.state
        if number not in state.workers:
            known = [one for one in self.workers() if one.number == number]
            if not known:
                raise KeyError(number)
            raise NotAdmittedError(f"{worker_name(number)} does not take part: it {_whereabouts(known[0])}")
        self._membership.let_leave(number, time.monotonic())
        return (state.workers[number].applied or 0) + 1

    def heartbeat(self, number: int, beat: Heartbeat, records: Sequence[AnyProgress], *, wait_s: float) -> Orders:
        now = time.monotonic()
        with self._changed:
            joined = self._joined[number]
            if beat.incarnation != joined.incarnation:
                return Orders(self._membership.state.epoch, Order.FENCED)
            self._note(joined, beat, records, now=now)
        reports = [one for one in records if isinstance(one, MemberReport) and one.incarnation == joined.incarnation]
        self._membership.take([(number, _placed(report, joined)) for report in reports], now)
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
            found = (*found, json.loads(order_to_json(Member(number, joined.incarnation), Finish())))
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

    def summaries(self) -> list[Mapping[str, Any]]:
        """Return what the report says of each worker that has joined, in the form of its ranks."""
        return [self._summary(joined) for _, joined in sorted(self._joined.items())]

    def _summary(self, joined: _Joined) -> Mapping[str, Any]:
        state, number = joined.state, joined.number
        is_over = joined.has_ended or number in self._membership.left
        return {
            "rank": number,
            "role": self._role,
            "host": joined.address[0],
            "state": str(Phase.DONE if is_over or self._membership.phase is MembersPhase.FINISHED else state.phase),
            "step": state.step,
            "name": joined.name,
            "incarnation": joined.incarnation,
            "tokens_per_s": state.own_per_s("tokens"),
            "loss": state.loss,
            "memory_bytes": state.usage.memory_bytes if state.usage else joined.memory_bytes,
            "left": self._left(number),
            "last_operation": None,
        }

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
        if number is None and len(self._joined) >= MOST_JOINED:
            raise NotAdmittedError(f"{MOST_JOINED} workers have joined this run, and it takes no more")

    def _note(self, joined: _Joined, beat: Heartbeat, records: Sequence[AnyProgress], *, now: float) -> None:
        """Fold the records into the worker's state, and keep them where views, metrics and the report find those of ranks."""
        if records:
            joined.changed_at = now
        joined.memory_bytes = beat.rss if beat.rss is not None else joined.memory_bytes
        kept = []
        for line, record in zip(beat.records, records, strict=False):
            if isinstance(record, _KEPT):
                joined.ahead_s = record.time - time.time() if joined.ahead_s is None else joined.ahead_s
                moved = moved_back(record, joined.ahead_s)
                fold(joined.state, moved)
                kept.append(contract.record_line({**(contract.read_record(line) or {}), "time": moved.time}).encode())
        self._keep(joined.number, b"".join(kept))

    def _keep(self, number: int, lines: bytes) -> None:
        """Append records of a worker to its file; those of all workers together are bounded."""
        if not lines or len(lines) > self._left_bytes:
            return
        self._left_bytes -= len(lines)
        path = self._folder.file(contract.progress_file(number))
        try:
            with open(path, "ab", buffering=0, opener=contract.open_private) as file:
                file.write(lines)
        except OSError:
            self._left_bytes = 0  # the run goes on; the journal says that a disk is full

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
            step=joined.state.step or None,
            loss=joined.state.loss,
            tokens_per_s=joined.state.own_per_s("tokens"),
            memory_bytes=joined.state.usage.memory_bytes if joined.state.usage else joined.memory_bytes,
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
            tokens_per_s=state.own_per_s("tokens"),
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


def _whereabouts(worker: Worker) -> str:
    """Return why somebody does not take part, as a clause whose subject is the worker."""
    if worker.left:
        return "has left" if worker.left == "left" else worker.left
    return "is still starting"


def _placed(record: MemberReport, joined: _Joined) -> MemberReport:
    """Return a report with the place at which the worker has registered: it may name no host of another worker, nor its address."""
    if record.what != "registered":
        return record
    address, port = joined.address
    place = f"[{address}]:{port}" if ":" in address else f"{address}:{port}"
    return MemberReport(**{**vars(record), "host": f"{worker_name(joined.number)} at {address}", "address": place})
