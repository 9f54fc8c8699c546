"""Write what the ranks of a run print to a file that promtail or Alloy sends to Loki, with the labels that `to_loki` gives.

The file is only ever appended to, because such an agent remembers how far it has read. Each line says which part of a rank's
output it is, so the file itself is the memory of an export that was interrupted.
"""

import json
import os
from collections.abc import Iterator
from pathlib import Path

from ttlaunch.running.metrics.event_log import Event, LoggedRun
from ttlaunch.running.metrics.log_entries import Entry, LogEntries
from ttlaunch.running.runs.files import Tail, open_unlinked, write_whole

SCRAPE_FILE = "scrape.yaml"
_JOB = "ttlaunch"
_LONGEST_LINE = 8 << 20  # six bytes for each of a text, and some more
_DETAILS = ("rank", "role", "run", "recipe", "stream", "step", "part")


class LokiFileSink:
    """Appends to `DIR/RUN.jsonl`, and writes the configuration for promtail beside it."""

    def __init__(self, run: LoggedRun, place: Path, *, path: Path) -> None:
        """Begin behind the last whole line of the file, if there is one.

        Raises:
            OSError: The file cannot be written.
        """
        place.mkdir(parents=True, exist_ok=True)
        self.file = place / f"{run.run_id}.jsonl"
        self._output = open(self.file, "ab", opener=open_unlinked)  # noqa: SIM115 - `close` closes it
        self._output.truncate(_whole_lines(self.file))
        self._entries = LogEntries(path, run, after=_positions(self.file))
        self.confirmed = 0
        write_whole(place / SCRAPE_FILE, render_scrape(place))

    def take(self, event: Event) -> None:
        self._write(self._entries.of_event(event))

    def flush(self) -> None:
        self._write(self._entries.poll())
        self._output.flush()

    def close(self, status: str) -> None:
        del status
        self._write(self._entries.rest())
        self._output.close()

    def _write(self, entries: Iterator[Entry]) -> None:
        for entry in entries:
            self._output.write(_line(entry))
            self.confirmed += 1


def _line(entry: Entry) -> bytes:
    record = {
        "time": str(entry.time_ns),
        "job": f"{_JOB}-{entry.side}",
        "host": entry.host,
        "level": entry.level,
        "line": entry.text,
        **entry.details,
        "at": [entry.source, entry.end],
    }
    return json.dumps(record).encode() + b"\n"


def _whole_lines(file: Path) -> int:
    """Return the length of the part of a file that ends with its last whole line."""
    with file.open("rb") as reading:
        end = reading.seek(0, os.SEEK_END)
        begin = max(0, end - _LONGEST_LINE)
        reading.seek(begin)
        return begin + reading.read(_LONGEST_LINE).rfind(b"\n") + 1


def _positions(file: Path) -> dict[str, int]:
    """Return the positions behind the entries that a file has."""
    after: dict[str, int] = {}
    for line in Tail(file).read():
        try:
            source, end = json.loads(line)["at"]
            after[source] = max(end, after.get(source, -1))
        except (ValueError, KeyError, TypeError):  # a line that was cut off
            continue
    return after


def render_scrape(folder: Path) -> str:
    """Render the part of promtail's configuration that reads the files in a folder.

    `alloy convert --source-format=promtail` makes Alloy's configuration of it.
    """
    path = json.dumps(str(folder / "*.jsonl"))
    names = ("time", "job", "host", "level", "line", *_DETAILS)
    expressions = "\n".join(f"            {name}: {name}" for name in names)
    labels = "\n".join(f"            {name}:" for name in ("job", "host", "level"))
    details = "\n".join(f"            {name}:" for name in _DETAILS)
    return f"""\
# promtail -config.file={SCRAPE_FILE} -client.url=http://HOST:3100/loki/api/v1/push -positions.file=positions.yaml
scrape_configs:
  - job_name: {_JOB}
    static_configs:
      - targets: [localhost]
        labels:
          __path__: {path}
    pipeline_stages:
      - json:
          expressions:
{expressions}
      - timestamp:
          source: time
          format: UnixNs
      - labels:
{labels}
      - structured_metadata:
{details}
      - labeldrop: [filename]
      - output:
          source: line
"""
