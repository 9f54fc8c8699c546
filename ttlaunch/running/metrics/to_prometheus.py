"""Write metrics to a text file for Prometheus' node_exporter; the file is replaced in one step, so it is always complete.

Point node_exporter's `--collector.textfile.directory` at the file's folder. The file has the newest value of each metric, with
the labels run, recipe, rank, role and host. The format is version 0.0.4 of Prometheus' text exposition format.
"""

import math
import re
import time
from pathlib import Path

from ttlaunch.running.metrics.event_log import END, Event, LoggedRun
from ttlaunch.running.metrics.names import metrics_of, series_of

_SUFFIX = ".prom"
_EVERY_S = 1.0

Series = tuple[str, tuple[tuple[str, str], ...]]
"""A metric's name and its labels."""


class PrometheusSink:
    """Writes one file; `.prom` is added to its name if it is missing, because node_exporter reads only such files."""

    def __init__(self, run: LoggedRun, place: Path) -> None:
        self.file = place if place.suffix == _SUFFIX else place.with_name(place.name + _SUFFIX)
        self.file.parent.mkdir(parents=True, exist_ok=True)
        self._run = run
        self._values: dict[Series, float] = {}
        self._written = -math.inf

    def take(self, event: Event) -> None:
        if event.kind == END:
            self._set("ttlaunch_run_exit_status", (), float(event.values.get("exit_status") or 0))
        if event.rank is None:
            return
        labels = self._labels(event.rank)
        for name, value in metrics_of(event).items():
            self._enter(name, labels, value)
        if event.step is not None:
            key = ("ttlaunch_step", labels)
            self._values[key] = max(event.step, self._values.get(key, 0))
        self._values["ttlaunch_last_event_timestamp_seconds", labels] = event.time

    def flush(self) -> None:
        if time.monotonic() - self._written >= _EVERY_S:
            self._write(is_up=True)

    def close(self, status: str) -> None:
        self._set("ttlaunch_run_done", (), float(status == "done"))
        self._write(is_up=False)

    def _enter(self, name: str, labels: tuple[tuple[str, str], ...], value: float) -> None:
        name, more, is_sum = series_of(name)
        labels = (*labels, *more)
        series = "ttlaunch_" + re.sub(r"[^a-zA-Z0-9_]", "_", name)
        if is_sum:
            series = f"{series}_total"
            value += self._values.get((series, labels), 0.0)
        self._values[series, labels] = value

    def _set(self, name: str, labels: tuple[tuple[str, str], ...], value: float) -> None:
        self._values[name, (("run", self._run.run_id), ("recipe", self._run.recipe), *labels)] = value

    def _labels(self, rank: int) -> tuple[tuple[str, str], ...]:
        row = self._run.ranks[rank]
        whose = (("rank", str(rank)), ("role", row.role), ("host", row.host))
        return (("run", self._run.run_id), ("recipe", self._run.recipe), *whose)

    def _write(self, *, is_up: bool) -> None:
        self._set("ttlaunch_run_up", (), float(is_up))
        unfinished = self.file.with_name(f".{self.file.name}.tmp")
        unfinished.write_text(render_prometheus(self._values), encoding="utf-8")
        unfinished.chmod(0o644)  # node_exporter is another user
        unfinished.replace(self.file)
        self._written = time.monotonic()


def render_prometheus(values: dict[Series, float]) -> str:
    """Render series in the exposition format, grouped by name."""
    lines = []
    named = None
    for (name, labels), value in sorted(values.items()):
        if name != named:
            named = name
            lines.append(f"# TYPE {name} {'counter' if name.endswith('_total') else 'gauge'}")
        shown = ",".join(f'{key}="{_escaped(text)}"' for key, text in labels)
        lines.append(f"{name}{{{shown}}} {_number(value)}")
    return "".join(f"{line}\n" for line in lines)


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace("\n", "\\n").replace('"', '\\"')


def _number(value: float) -> str:
    if math.isnan(value):
        return "NaN"
    if math.isinf(value):
        return "+Inf" if value > 0 else "-Inf"
    return repr(int(value)) if value == int(value) else repr(value)
