"""Send metrics and lines of a run to a server of OpenTelemetry, such as its collector, in OTLP over HTTP.

The messages are those of `opentelemetry-proto`. They are made here and not by the SDK, which would give everything the present
time: what a sink sends has the time at which it was measured, also long after the run. Sums grow from the beginning of the run
(cumulative), so a value that comes twice is the same value.
"""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from urllib.parse import unquote

from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import ExportLogsServiceRequest
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, InstrumentationScope, KeyValue
from opentelemetry.proto.logs.v1.logs_pb2 import LogRecord, ResourceLogs, ScopeLogs
from opentelemetry.proto.metrics.v1.metrics_pb2 import (
    AGGREGATION_TEMPORALITY_CUMULATIVE,
    Gauge,
    Metric,
    NumberDataPoint,
    ResourceMetrics,
    ScopeMetrics,
    Sum,
)
from opentelemetry.proto.resource.v1.resource_pb2 import Resource

from ttlaunch.quick_dataclass import dataclass
from ttlaunch.running.metrics.addresses import HttpAddress, parse_otlp_address
from ttlaunch.running.metrics.event_log import Event, LoggedRun
from ttlaunch.running.metrics.log_entries import Entry, LogEntries, ns_of
from ttlaunch.running.metrics.names import metrics_of, series_of
from ttlaunch.running.metrics.sending import EntrySender, RefusedError, Waits, refusal, send, wait_until_sent

POSITIONS = "otlp.sent"
_SEVERITIES = {"DEBUG": 5, "INFO": 9, "WARNING": 13, "ERROR": 17, "CRITICAL": 21}
"""OpenTelemetry's numbers for levels."""
_MOST_POINTS = 2000
_HEADERS = "OTEL_EXPORTER_OTLP_HEADERS"


@dataclass(frozen=True)
class Point:
    """A value of a metric at a time."""

    name: str
    labels: tuple[tuple[str, str], ...]
    is_sum: bool
    begin_ns: int
    time_ns: int
    value: float


class OtlpSink:
    """Sends a run; `flush` returns why the server has not confirmed all of it yet."""

    def __init__(self, run: LoggedRun, place: str, *, path: Path, sinks_folder: Path) -> None:
        """Begin with the first metric, and with the lines where an interrupted sending to the same place ended.

        Args:
            run: The facts about the run.
            place: The address of the server, without `/v1/…`.
            path: The run's folder.
            sinks_folder: The folder in it for the positions.

        Raises:
            RefusedError: The address cannot be used.
        """
        found = parse_otlp_address(place)
        if isinstance(found, str):
            raise RefusedError(f"the address cannot be used: {found}")
        self._at = found
        self._run = run
        self._resource = Resource(
            attributes=_attributes(
                {"service.name": "ttlaunch", "ttlaunch.run": run.run_id, "ttlaunch.recipe": run.recipe}
            )
        )
        self._points: list[Point] = []
        self._confirmed_points = 0
        self._sums: dict[tuple[str, tuple[tuple[str, str], ...]], float] = {}
        self._begin_ns: int | None = None
        self._waits = Waits()
        self._lines = EntrySender(
            lambda after: LogEntries(path, run, after=after),
            self._push_lines,
            positions=sinks_folder / POSITIONS,
            place=place,
        )

    @property
    def confirmed(self) -> int:
        """How many lines the server has confirmed."""
        return self._lines.confirmed

    def take(self, event: Event) -> None:
        self._lines.take(event)
        begin_ns = self._begin_ns = ns_of(event.time) if self._begin_ns is None else self._begin_ns
        if event.rank is None:
            return
        row = self._run.ranks[event.rank]
        whose = (("rank", str(row.rank)), ("role", row.role), ("host", row.host))
        for name, value in metrics_of(event).items():
            series, more, is_sum = series_of(name)
            labels = (*whose, *more)
            if is_sum:
                value = self._sums[series, labels] = value + self._sums.get((series, labels), 0.0)  # noqa: PLW2901
            self._points.append(Point(series, labels, is_sum, begin_ns, ns_of(event.time), value))

    def flush(self) -> str | None:
        return self._send_points() or self._lines.flush()

    def close(self, status: str) -> None:
        """Send the rest, and wait for a server that does not answer.

        Raises:
            RefusedError: The server did not answer for long, or refuses what is sent.
        """
        del status
        wait_until_sent(self._send_points, confirmed=lambda: self._confirmed_points)
        self._lines.close()

    def _send_points(self) -> str | None:
        while self._points and not self._waits.are_on:
            some = self._points[:_MOST_POINTS]
            self._push("/v1/metrics", render_metrics(some, self._resource), waits=self._waits)
            if self._waits.problem is not None:
                break
            del self._points[: len(some)]
            self._confirmed_points += len(some)
        return self._waits.problem

    def _push_lines(self, entries: list[Entry]) -> None:
        self._push("/v1/logs", render_logs(entries, self._resource), waits=self._lines.waits)

    def _push(self, path: str, body: bytes, *, waits: Waits) -> None:
        at = HttpAddress(self._at.scheme, self._at.host, self._at.port, f"{self._at.path.rstrip('/')}{path}")
        headers = {"Content-Type": "application/x-protobuf", **otlp_headers(os.environ)}
        answer = send(at, body, headers, waits=waits)
        if answer is not None:
            raise RefusedError(refusal(answer, at, variables=_HEADERS))


def otlp_headers(variables: Mapping[str, str]) -> dict[str, str]:
    """Return the headers in the variable of OpenTelemetry's exporters: `name=value,name=value`, percent-encoded."""
    pairs = (one.partition("=") for one in variables.get(_HEADERS, "").split(",") if "=" in one)
    return {name.strip(): unquote(value.strip()) for name, _, value in pairs}


def render_metrics(points: Sequence[Point], resource: Resource) -> bytes:
    """Render a request with points, one metric for each name."""
    metrics: dict[str, Metric] = {}
    for one in points:
        name = "ttlaunch." + one.name.replace("/", ".")
        if name not in metrics:
            kind = AGGREGATION_TEMPORALITY_CUMULATIVE
            total = Sum(aggregation_temporality=kind, is_monotonic=True) if one.is_sum else None
            metrics[name] = Metric(name=name, sum=total) if total is not None else Metric(name=name, gauge=Gauge())
        metric = metrics[name]
        (metric.sum if one.is_sum else metric.gauge).data_points.append(
            NumberDataPoint(
                attributes=_attributes(dict(one.labels)),
                start_time_unix_nano=one.begin_ns if one.is_sum else 0,
                time_unix_nano=one.time_ns,
                as_double=one.value,
            )
        )
    scope = ScopeMetrics(scope=InstrumentationScope(name="ttlaunch"), metrics=list(metrics.values()))
    request = ExportMetricsServiceRequest(resource_metrics=[ResourceMetrics(resource=resource, scope_metrics=[scope])])
    return bytes(request.SerializeToString())


def render_logs(entries: Sequence[Entry], resource: Resource) -> bytes:
    """Render a request with entries."""
    records = [
        LogRecord(
            time_unix_nano=entry.time_ns,
            observed_time_unix_nano=entry.time_ns,
            severity_number=_SEVERITIES[entry.level],  # type: ignore[arg-type] # enumerations of protobuf are numbers
            severity_text=entry.level,
            body=AnyValue(string_value=entry.text),
            attributes=_attributes({"host": entry.host, **entry.details}),
        )
        for entry in entries
    ]
    scope = ScopeLogs(scope=InstrumentationScope(name="ttlaunch"), log_records=records)
    request = ExportLogsServiceRequest(resource_logs=[ResourceLogs(resource=resource, scope_logs=[scope])])
    return bytes(request.SerializeToString())


def _attributes(values: Mapping[str, str]) -> list[KeyValue]:
    return [KeyValue(key=name, value=AnyValue(string_value=value)) for name, value in values.items()]
