"""Send what the ranks of a run print to Loki, once each, however often the server is away.

Lines stay in the run's folder, so nothing is held in memory for a server that does not answer: the next lines are read when the
last ones are confirmed. A position in each rank's files is written down after each confirmed request; if the sending is
interrupted, it continues from there. If it ends, the position is removed, so the next export sends everything again.
"""

import contextlib
import json
import os
import time
from collections import deque
from collections.abc import Iterator
from itertools import chain
from pathlib import Path

from ttlaunch.diagnostics import shown
from ttlaunch.errors import TtlaunchError
from ttlaunch.running.metrics.addresses import (
    Answer,
    LokiAddress,
    NoAnswerError,
    loki_headers,
    parse_loki_address,
    post,
)
from ttlaunch.running.metrics.event_log import Event, LoggedRun
from ttlaunch.running.metrics.log_entries import Entry, LogEntries
from ttlaunch.running.runs.files import read_object_if_any, write_whole

POSITIONS = "loki.sent"
"""The file in the folder of sinks with the positions up to which the server has confirmed lines."""

_MOST_ENTRIES, _MOST_BYTES = 1000, 1 << 20
_PATIENCE_S = 30.0
_FIRST_PATIENCE_S = 10.0
"""How long an ended run waits for a server that has never confirmed anything."""
_FIRST_WAIT_S, _LONGEST_WAIT_S = 0.5, 5.0
_TICK_S = 0.1
_DONE, _TOO_MANY, _BAD_REQUEST, _REDIRECTS, _FAULTS = range(200, 300), 429, 400, range(300, 400), range(500, 600)
_UNKNOWN_USER, _NOT_FOUND = frozenset({401, 403}), 404
_OF_ENTRIES = ("too far behind", "too old", "too new", "out of order", "max entry size", "ignored")
"""What Loki says of entries that it refuses while it takes the others of a request."""


class RefusedError(TtlaunchError):
    """A server refuses what is sent, and would again; the text says what, and what to change."""


class LokiSink:
    """Sends the lines of a run; `flush` returns why the server has not confirmed all of them yet."""

    def __init__(self, run: LoggedRun, place: str, *, path: Path, sinks_folder: Path) -> None:
        """Begin where an interrupted sending to the same place ended.

        Args:
            run: The facts about the run.
            place: The address, as `parse_loki_address` reads it.
            path: The run's folder.
            sinks_folder: The folder in it for the positions.

        Raises:
            RefusedError: The address cannot be used.
        """
        address = parse_loki_address(place)
        if isinstance(address, str):
            raise RefusedError(f"the address cannot be used: {address}")
        self._address, self._place = address, place
        self._positions = sinks_folder / POSITIONS
        self._after = _read_positions(self._positions, place)
        self._entries = LogEntries(path, run, after=self._after)
        self._reported: deque[Entry] = deque()
        self._lines: Iterator[Entry] = iter(())
        self._is_at_end = True
        self._unconfirmed: list[Entry] = []
        self._waits = Waits()
        self.confirmed = 0
        self._refused: str | None = None

    def take(self, event: Event) -> None:
        self._reported.extend(self._entries.of_event(event))

    def flush(self) -> str | None:
        if self._waits.are_on:
            return self._waits.problem
        if self._is_at_end:  # otherwise the reader stands in the middle of what it has found
            self._lines, self._is_at_end = self._entries.poll(), False
        return self._send()

    def close(self, status: str) -> None:
        """Send the rest, and wait for a server that does not answer.

        Raises:
            RefusedError: The server did not answer for long, or refuses entries.
        """
        del status
        self._lines = chain(self._lines, self._entries.rest())
        since, confirmed = time.monotonic(), self.confirmed
        while (problem := self._send()) is not None:
            if self.confirmed > confirmed:
                since, confirmed = time.monotonic(), self.confirmed
            patience_s = _PATIENCE_S if self.confirmed else _FIRST_PATIENCE_S
            if time.monotonic() >= since + patience_s:
                raise RefusedError(f"{problem}, and that for {patience_s:.0f} s")
            time.sleep(_TICK_S)
        if self._refused:
            raise RefusedError(f"the server refuses some of the lines: {self._refused}")
        with contextlib.suppress(OSError):
            self._positions.unlink(missing_ok=True)

    def _send(self) -> str | None:
        """Send entries until there are no more, or the server does not confirm some."""
        while not self._waits.are_on and (self._unconfirmed or self._gather()):
            problem = self._push(self._unconfirmed)
            if problem is not None:
                return problem
            self._confirm()
        return self._waits.problem

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

    def _push(self, entries: list[Entry]) -> str | None:
        headers = {"Content-Type": "application/json", **loki_headers(os.environ)}
        try:
            answer = post(self._address.at, render_push(entries, self._address), headers=headers)
        except NoAnswerError as error:
            return self._waits.begin(str(error))
        if answer.status in _DONE:
            self._waits.end()
            return None
        if answer.status == _TOO_MANY or answer.status in _FAULTS:
            problem = f"{self._address.at} answers {answer.status}: {answer.text}"
            return self._waits.begin(problem, at_least_s=answer.retry_after_s)
        if answer.status == _BAD_REQUEST and any(word in answer.text for word in _OF_ENTRIES):
            self._refused = self._refused or answer.text  # the others of the request are taken
            return None
        raise RefusedError(_refusal(answer, self._address))

    def _confirm(self) -> None:
        for entry in self._unconfirmed:
            self._after[entry.source] = max(entry.end, self._after.get(entry.source, -1))
        self.confirmed += len(self._unconfirmed)
        self._unconfirmed = []
        with contextlib.suppress(OSError):
            write_whole(self._positions, json.dumps({"place": self._place, "after": self._after}) + "\n")


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


def render_push(entries: list[Entry], address: LokiAddress) -> bytes:
    """Render the body of a request: a stream for each combination of labels, with its entries in their order."""
    streams: dict[tuple[str, str, str], list[list[object]]] = {}
    for entry in entries:
        labels = (f"{address.job}-{entry.side}", entry.host, entry.level)
        value: list[object] = [str(entry.time_ns), entry.text]
        if address.with_metadata:
            value.append(dict(entry.details))
        elif "part" in entry.details:
            value[1] = f"part {entry.details['part']}: {entry.text}"
        streams.setdefault(labels, []).append(value)
    content = [
        {"stream": dict(zip(("job", "host", "level"), labels, strict=True)), "values": values}
        for labels, values in streams.items()
    ]
    return json.dumps({"streams": content}).encode()


def _refusal(answer: Answer, address: LokiAddress) -> str:
    """Say what an answer means that would come again."""
    at = address.at
    if answer.status in _REDIRECTS:
        return f"{at} redirects to {shown(_without_credentials(answer.location))}, which is not followed: name that address"
    if answer.status in _UNKNOWN_USER:
        return (
            f"{at} answers {answer.status}: LOKI_USERNAME and LOKI_PASSWORD, or LOKI_BEARER_TOKEN, identify you to it"
        )
    if answer.status == _BAD_REQUEST and address.with_metadata:
        without = "a server without structured metadata needs `?metadata=off` at the end of the address"
        return f"{at} answers 400: {answer.text}; {without}"
    if answer.status == _NOT_FOUND:
        return f"{at}{at.path} answers 404: no Loki receives lines there"
    return f"{at} answers {answer.status}: {answer.text}"


def _without_credentials(location: str) -> str:
    scheme, separator, rest = location.partition("://")
    host, slash, path = rest.partition("/")
    return f"{scheme}{separator}{host.rpartition('@')[2]}{slash}{path}"


def _read_positions(file: Path, place: str) -> dict[str, int]:
    content = read_object_if_any(file)
    after = content.get("after")
    if content.get("place") != place or not isinstance(after, dict):
        return {}
    return {source: end for source, end in after.items() if type(end) is int}
