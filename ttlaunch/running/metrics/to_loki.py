"""Send what the ranks of a run print to Loki; it keeps one of two entries with the same labels, time and text."""

import json
import os
from collections.abc import Sequence
from pathlib import Path

from ttlaunch.running.metrics.addresses import LokiAddress, loki_headers, parse_loki_address
from ttlaunch.running.metrics.event_log import Event, LoggedRun
from ttlaunch.running.metrics.log_entries import Entry, LogEntries
from ttlaunch.running.metrics.sending import BAD_REQUEST, EntrySender, RefusedError, refusal, send

POSITIONS = "loki.sent"
"""The file in the folder of sinks with the positions up to which the server has confirmed lines."""

_OF_ENTRIES = ("too far behind", "too old", "too new", "out of order", "max entry size", "ignored")
"""What Loki says of entries that it refuses while it takes the others of a request."""
_VARIABLES = "LOKI_USERNAME and LOKI_PASSWORD, or LOKI_BEARER_TOKEN,"


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
        self._address = address
        self._refused: str | None = None
        self._rendered: tuple[list[Entry], bytes] | None = None  # of the last request, which may have to be sent again
        self._sender = EntrySender(
            lambda after: LogEntries(path, run, after=after),
            self._push,
            positions=sinks_folder / POSITIONS,
            place=place,
        )

    @property
    def confirmed(self) -> int:
        """How many lines the server has confirmed."""
        return self._sender.confirmed

    def take(self, event: Event) -> None:
        self._sender.take(event)

    def flush(self) -> str | None:
        return self._sender.flush()

    def close(self, status: str) -> None:
        """Send the rest, and wait for a server that does not answer.

        Raises:
            RefusedError: The server did not answer for long, or refuses entries.
        """
        del status
        self._sender.close()
        if self._refused:
            raise RefusedError(f"the server refuses some of the lines: {self._refused}")

    def _push(self, entries: list[Entry]) -> None:
        headers = {"Content-Type": "application/json", **loki_headers(os.environ)}
        if self._rendered is None or self._rendered[0] is not entries:
            self._rendered = entries, render_push(entries, self._address)
        answer = send(self._address.at, self._rendered[1], headers, waits=self._sender.waits)
        if answer is None:
            return
        if answer.status == BAD_REQUEST and any(word in answer.text for word in _OF_ENTRIES):
            self._refused = self._refused or answer.text  # the others of the request are taken
            self._sender.waits.end()
            return
        text = refusal(answer, self._address.at, variables=_VARIABLES)
        if answer.status == BAD_REQUEST and self._address.with_metadata:
            text += "; a server without structured metadata needs `?metadata=off` at the end of the address"
        raise RefusedError(text)


def render_push(entries: Sequence[Entry], address: LokiAddress) -> bytes:
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
