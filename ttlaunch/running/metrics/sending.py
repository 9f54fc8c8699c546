"""Send a run to a server, once each, however often the server is away: when it is asked again, and where an interrupted sending continues.

Lines stay in the run's folder, so nothing is held in memory for a server that does not answer: the next lines are read when the
last ones are confirmed. A position in each rank's files is written down after each confirmed request; if the sending is
interrupted, it continues from there. If it ends, the position is removed, so the next export sends everything again.
"""

import contextlib
import json
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from itertools import chain
from pathlib import Path

from ttlaunch.diagnostics import shown
from ttlaunch.errors import TtlaunchError
from ttlaunch.running.metrics.addresses import Answer, HttpAddress, NoAnswerError, post
from ttlaunch.running.metrics.event_log import Event
from ttlaunch.running.metrics.log_entries import Entry, LogEntries
from ttlaunch.running.runs.files import read_object_if_any, write_whole

BAD_REQUEST = 400
_MOST_ENTRIES, _MOST_BYTES = 1000, 1 << 20
_PATIENCE_S = 30.0
_FIRST_PATIENCE_S = 10.0
"""How long an ended run waits for a server that has never confirmed anything."""
_FIRST_WAIT_S, _LONGEST_WAIT_S = 0.5, 5.0
_TICK_S = 0.1
_DONE, _TOO_MANY, _REDIRECTS, _FAULTS = range(200, 300), 429, range(300, 400), range(500, 600)
_UNKNOWN_USER, _NOT_FOUND = frozenset({401, 403}), 404


class RefusedError(TtlaunchError):
    """A server refuses what is sent, and would again; the text says what, and what to change."""


class Waits:
    """When a server that did not take a request is asked again: after 0.5 s, then after twice the time, up to 5 s.

    Attributes:
        problem: Why the server did not take the last request; None if it did.
    """

    def __init__(self) -> None:
        self.problem: str | None = None
        self._wait_s = _FIRST_WAIT_S
        self._until = 0.0

    @property
    def are_on(self) -> bool:
        """Whether it is too early for the next request."""
        return time.monotonic() < self._until

    def begin(self, problem: str, *, at_least_s: float = 0.0) -> str:
        """Begin to wait because of a problem, and return it."""
        wait_s = max(self._wait_s, min(at_least_s, _PATIENCE_S / 2))
        self.problem, self._until = problem, time.monotonic() + wait_s
        self._wait_s = min(self._wait_s * 2, _LONGEST_WAIT_S)
        return problem

    def end(self) -> None:
        self.problem, self._wait_s, self._until = None, _FIRST_WAIT_S, 0.0


def send(at: HttpAddress, body: bytes, headers: Mapping[str, str], *, waits: Waits) -> Answer | None:
    """Send a request; return None if the server took it, or if it may take it later: `waits` then says why.

    Returns:
        An answer that would come again.
    """
    try:
        answer = post(at, body, headers=headers)
    except NoAnswerError as error:
        waits.begin(str(error))
        return None
    if answer.status in _DONE:
        waits.end()
        return None
    if answer.status == _TOO_MANY or answer.status in _FAULTS:
        waits.begin(f"{at} answers {answer.status}: {answer.text}", at_least_s=answer.retry_after_s)
        return None
    return answer


def refusal(answer: Answer, at: HttpAddress, *, variables: str) -> str:
    """Say what an answer means that would come again.

    Args:
        answer: The answer.
        at: Whom it comes from.
        variables: The variables from which credentials come.
    """
    if answer.status in _REDIRECTS:
        where = shown(_without_credentials(answer.location))
        return f"{at} redirects to {where}, which is not followed: name that address"
    if answer.status in _UNKNOWN_USER:
        return f"{at} answers {answer.status}: {variables} identifies you to it"
    if answer.status == _NOT_FOUND:
        return f"{at}{at.path} answers 404: nothing is received there"
    return f"{at} answers {answer.status}: {answer.text}"


def _without_credentials(location: str) -> str:
    scheme, separator, rest = location.partition("://")
    host, slash, path = rest.partition("/")
    return f"{scheme}{separator}{host.rpartition('@')[2]}{slash}{path}"


def wait_until_sent(try_to_send: Callable[[], str | None], *, confirmed: Callable[[], int]) -> None:
    """Send at the end of a run; wait while the server confirms something now and then.

    Args:
        try_to_send: Sends, and returns why not everything is confirmed; None if it is.
        confirmed: How much is confirmed, a number that grows.

    Raises:
        RefusedError: The server confirmed nothing for long.
    """
    since, known = time.monotonic(), confirmed()
    while (problem := try_to_send()) is not None:
        if confirmed() > known:
            since, known = time.monotonic(), confirmed()
        patience_s = _PATIENCE_S if known else _FIRST_PATIENCE_S
        if time.monotonic() >= since + patience_s:
            raise RefusedError(f"{problem}, and that for {patience_s:.0f} s")
        time.sleep(_TICK_S)


class EntrySender:
    """Sends the entries of a run's log in their order; `flush` returns why the server has not confirmed all of them yet.

    Attributes:
        confirmed: How many entries the server has confirmed.
        waits: When the server is asked again.
    """

    def __init__(
        self,
        entries: Callable[[Mapping[str, int]], LogEntries],
        push: Callable[[list[Entry]], None],
        *,
        positions: Path,
        place: str,
    ) -> None:
        """Begin where an interrupted sending to the same place ended.

        Args:
            entries: Makes the entries of the run behind positions.
            push: Sends entries; if they are not taken, it lets `waits` begin or raises `RefusedError`.
            positions: The file of positions.
            place: The address as the user gave it.
        """
        self.confirmed = 0
        self.waits = Waits()
        self._positions, self._place, self._push = positions, place, push
        self._after = _read_positions(positions, place)
        self._entries = entries(self._after)
        self._reported: deque[Entry] = deque()
        self._lines: Iterator[Entry] = iter(())
        self._is_at_end = True
        self._unconfirmed: list[Entry] = []

    def take(self, event: Event) -> None:
        """Take what a rank reports."""
        self._reported.extend(self._entries.of_event(event))

    def flush(self) -> str | None:
        """Send what is new; return why not everything is confirmed, or None."""
        if self.waits.are_on:
            return self.waits.problem
        if self._is_at_end:  # otherwise the reader stands in the middle of what it has found
            self._lines, self._is_at_end = self._entries.poll(), False
        return self._send()

    def close(self) -> None:
        """Send the rest, and wait for a server that does not answer.

        Raises:
            RefusedError: The server did not answer for long, or refuses entries.
        """
        self._lines = chain(self._lines, self._entries.rest())
        wait_until_sent(self._send, confirmed=lambda: self.confirmed)
        with contextlib.suppress(OSError):
            self._positions.unlink(missing_ok=True)

    def _send(self) -> str | None:
        """Send entries until there are no more, or the server does not confirm some."""
        while not self.waits.are_on and (self._unconfirmed or self._gather()):
            self._push(self._unconfirmed)
            if self.waits.problem is not None:
                break
            self._confirm()
        return self.waits.problem

    def _gather(self) -> bool:
        """Gather the entries of the next request; return whether there are any."""
        size = 0
        while len(self._unconfirmed) < _MOST_ENTRIES and size < _MOST_BYTES:
            entry = self._reported.popleft() if self._reported else next(self._lines, None)
            if entry is None:
                self._is_at_end = True
                break
            self._unconfirmed.append(entry)
            size += len(entry.text)
        return bool(self._unconfirmed)

    def _confirm(self) -> None:
        for entry in self._unconfirmed:
            self._after[entry.source] = max(entry.end, self._after.get(entry.source, -1))
        self.confirmed += len(self._unconfirmed)
        self._unconfirmed = []
        with contextlib.suppress(OSError):
            write_whole(self._positions, json.dumps({"place": self._place, "after": self._after}) + "\n")


def _read_positions(file: Path, place: str) -> dict[str, int]:
    content = read_object_if_any(file)
    after = content.get("after")
    if content.get("place") != place or not isinstance(after, dict):
        return {}
    return {source: end for source, end in after.items() if type(end) is int}
