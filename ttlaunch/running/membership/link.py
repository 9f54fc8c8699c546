"""The connection of a worker that came by itself to its run's coordinator: its rank's records go up, orders for it come down.

Two threads talk to the coordinator, each over a connection of its own: one reports as soon as there is something to report, the other
waits for orders. Both survive broken connections for as long as the lease allows.
"""

import json
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from http import HTTPStatus
from typing import Any

from ttlaunch import contract
from ttlaunch.diagnostics.suggest import shown
from ttlaunch.records.coordinator import GivenOrders, Leaving, Welcome
from ttlaunch.running.membership.client import CoordinatorClient, NoAnswerError, RefusedError
from ttlaunch.running.membership.http_service import LARGEST_BODY
from ttlaunch.running.membership.members import ENDED, Order

FORWARDED = frozenset(
    {
        contract.KIND_MEMBER,
        contract.KIND_READY,
        contract.KIND_STEP,
        contract.KIND_VALIDATION,
        contract.KIND_NOTE,
        contract.KIND_USAGE,
        contract.KIND_LOST_CHECKPOINT,
        contract.KIND_PARAMETERS,
        contract.KIND_RESULT,
        contract.KIND_DONE,
    }
)
"""The kinds of records that the run takes from a rank elsewhere; all others stay on its machine."""
_MOST_BODY = LARGEST_BODY - 4096
"""What records may take of a body, besides its other fields."""
_MOST_LINES = 10_000
"""The most records that wait to be sent: a rank may write faster than the coordinator takes them."""
_WAIT_S = 10.0  # for an order
_ANSWER_S = 5.0
_PAUSE_S = 0.2  # before another try
_GOODBYE_S = 3.0
_LONGEST_REASON = 200


class Why(StrEnum):
    """Why a worker takes part no longer."""

    FINISHED = "finished"  # the run has made its last step
    DISMISSED = "dismissed"  # the coordinator has let it go
    FENCED = "fenced"  # another process has its place
    REFUSED = "refused"  # the coordinator takes nothing more from it
    LOST = "lost"  # the coordinator has not answered for as long as the lease


@dataclass(frozen=True)
class LinkEnd:
    """Why the connection has no more use; the text is one clause."""

    why: Why
    text: str

    @property
    def is_friendly(self) -> bool:
        """Whether the worker may end by itself, and still reports."""
        return self.why in {Why.FINISHED, Why.DISMISSED}


@dataclass
class Beat:
    """How far the rank is, as every report says it; the owner of the link changes it."""

    step: int = 0
    phase: str = "starting"
    loss: float | None = None
    tokens_per_s: float | None = None
    memory_bytes: int | None = None

    def fields(self) -> dict[str, Any]:
        """Return its part of the body of a heartbeat."""
        values = {"loss": self.loss, "tokens_per_s": self.tokens_per_s, "rss": self.memory_bytes}
        return {"step": self.step, "phase": self.phase, **{k: v for k, v in values.items() if v is not None}}


@dataclass
class CoordinatorLink:
    """Both directions of the connection; start it, then report and take as long as `end` is None.

    Attributes:
        welcome: The answer to the worker's registration.
        open_client: Makes a client that shows the worker's token.
        report_progress: Called with lines for the user of this machine.
        beat: How far the rank is.
        end: Why the link has no more use; None while it has.
        dropped: How many records were not sent, because they were too long or too many.
        epoch: The newest epoch that the coordinator has named.
    """

    welcome: Welcome
    open_client: Callable[[], CoordinatorClient]
    report_progress: Callable[[str], None] = lambda _: None
    beat: Beat = field(default_factory=Beat)
    end: LinkEnd | None = None
    dropped: int = 0
    epoch: int = 0
    _lines: deque[str] = field(default_factory=deque)
    _orders: deque[bytes] = field(default_factory=deque)
    _changed: threading.Condition = field(default_factory=threading.Condition)
    _threads: list[threading.Thread] = field(default_factory=list)
    _heard: float = 0.0
    _is_closed: bool = False

    def start(self) -> None:
        """Begin to report, and to wait for orders."""
        self._heard = time.monotonic()
        for name, work in (("reports", self._report_for_ever), ("orders", self._wait_for_ever)):
            thread = threading.Thread(target=work, name=f"coordinator-{name}", daemon=True)
            self._threads.append(thread)
            thread.start()

    def report(self, lines: Iterable[bytes]) -> None:
        """Send the records among these lines of a progress file which the run takes, in order and at once."""
        kept = [line.decode("utf-8", "replace") for line in lines if _kind_of(line) in FORWARDED]
        if not kept:
            return
        with self._changed:
            for line in kept:
                if len(json.dumps(line)) > _MOST_BODY or len(self._lines) >= _MOST_LINES:
                    self.dropped += 1
                else:
                    self._lines.append(line)
            self._changed.notify_all()

    def take(self) -> list[bytes]:
        """Return the orders for the rank that have come since the last call."""
        with self._changed:
            found = list(self._orders)
            self._orders.clear()
        return found

    def leave(self) -> int:
        """Ask to leave at the next boundary; returns the last step in which the worker takes part.

        Raises:
            NoAnswerError: The coordinator does not answer.
            RefusedError: The worker cannot leave now.
        """
        client = self.open_client()
        try:
            return client.ask(Leaving, "DELETE", f"/workers/{self.welcome.worker_id}").leaves_after_step
        finally:
            client.close()

    def close(self) -> None:
        """Send what is left, say that the worker's process has ended, and stop; takes a few seconds at most."""
        if self._is_closed:
            return
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        for thread in self._threads[:1]:  # the other one may wait for an order, which nobody needs any more
            thread.join(_ANSWER_S)
        if self.end is not None and not self.end.is_friendly:
            return
        self.beat.phase = ENDED
        client, deadline = self.open_client(), time.monotonic() + _GOODBYE_S
        try:
            while time.monotonic() < deadline and self._ask(client, self._batch(), wait_s=0.0) and self._lines:
                pass
        except (NoAnswerError, RefusedError):
            return  # it will notice by itself
        finally:
            client.close()

    def _report_for_ever(self) -> None:
        client = self.open_client()
        while (batch := self._next_batch()) is not None:
            try:
                self._ask(client, batch, wait_s=0.0)
            except NoAnswerError as error:
                self._put_back(batch)
                self._note_silence(error)
            except RefusedError as error:
                self._note_refusal(error)
        client.close()

    def _wait_for_ever(self) -> None:
        client = self.open_client()
        while not self._is_over:
            try:
                self._ask(client, [], wait_s=_WAIT_S)
            except NoAnswerError as error:
                self._note_silence(error)
            except RefusedError as error:
                self._note_refusal(error)
        client.close()

    @property
    def _is_over(self) -> bool:
        # One that was let go may still need its last order.
        return self._is_closed or (self.end is not None and not self.end.is_friendly)

    def _ask(self, client: CoordinatorClient, records: list[str], *, wait_s: float) -> bool:
        body = {"incarnation": self.welcome.incarnation, "epoch": self.epoch, **self.beat.fields(), "wait_s": wait_s}
        target = f"/workers/{self.welcome.worker_id}/heartbeat"
        given = client.ask(
            GivenOrders, "POST", target, body=_finite({**body, "records": records}), within_s=wait_s + _ANSWER_S
        )
        with self._changed:
            self._heard = time.monotonic()
            self.epoch = max(self.epoch, given.epoch)
            for message in given.messages:
                data = json.dumps(message).encode()
                if len(data) <= contract.LARGEST_ORDER:
                    self._orders.append(data)
        if given.order == Order.FENCED:
            self._finish(Why.FENCED, f"another process has registered as {self.welcome.worker_id}")
        elif given.order == Order.LEAVE:
            is_finished = any(isinstance(one, dict) and one.get("kind") == "finish" for one in given.messages)
            if is_finished:
                self._finish(Why.FINISHED, "")
            self._finish(Why.DISMISSED, _reason_in(given.messages))
            self._pause()  # the coordinator answers at once from now on
        return True

    def _next_batch(self) -> list[str] | None:
        """Wait for records, or until it is time for a heartbeat; None when the link is over."""
        with self._changed:
            self._changed.wait_for(lambda: self._lines or self._is_over, self.welcome.heartbeat_s)
            return None if self._is_over else self._batch()

    def _batch(self) -> list[str]:
        """Take as many records as fit into a body."""
        batch, size = [], 0
        with self._changed:
            while self._lines:
                size += len(json.dumps(self._lines[0])) + 1
                if size > _MOST_BODY:
                    break
                batch.append(self._lines.popleft())
        return batch

    def _put_back(self, batch: list[str]) -> None:
        with self._changed:
            self._lines.extendleft(reversed(batch))

    def _note_silence(self, error: NoAnswerError) -> None:
        silent_s = time.monotonic() - self._heard
        if silent_s > self.welcome.lease_s:
            self._finish(Why.LOST, f"the coordinator has not answered for {silent_s:.0f} s: {error}")
        self._pause()

    def _pause(self) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._is_over, _PAUSE_S)

    def _note_refusal(self, error: RefusedError) -> None:
        if error.status == HTTPStatus.UNPROCESSABLE_ENTITY:  # records that it cannot use are not sent again
            self.dropped += 1
            return
        self._finish(Why.REFUSED, f"the coordinator refuses its reports: {error}")

    def _finish(self, why: Why, text: str) -> None:
        with self._changed:
            self.end = self.end or LinkEnd(why, shown(text, longest=500))
            self._changed.notify_all()


def _kind_of(line: bytes) -> object:
    record = contract.read_record(line)
    return None if record is None else record.get("kind")


def _finite(body: Mapping[str, Any]) -> dict[str, Any]:
    """Write NaN and infinities as `contract.record_line` does."""
    return {
        name: str(value) if isinstance(value, float) and value - value != 0 else value for name, value in body.items()
    }


def _reason_in(messages: Sequence[object]) -> str:
    """Return why the run dismisses this worker, in its words."""
    reasons = (one.get("reason") for one in messages if isinstance(one, dict) and one.get("kind") == "dismiss")
    said = next((reason for reason in reasons if isinstance(reason, str)), "")
    return shown(said, longest=_LONGEST_REASON) or "the run goes on without it"
