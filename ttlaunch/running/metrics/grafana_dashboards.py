"""Make the files that show runs in Grafana: dashboards, data sources, and the services around them.

The queries name the metrics of `to_prometheus` and the labels of `to_loki`. All of it is made by code, so a panel is one line
here, and a test asks a real Prometheus each of its queries.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from ttlaunch.quick_dataclass import dataclass

PROMETHEUS, LOKI = "ttlaunch-prometheus", "ttlaunch-loki"
"""The ids of the two data sources."""

PORTS = {"grafana": 3000, "loki": 3100, "prometheus": 9090}
_IMAGES = {
    "grafana": "grafana/grafana:12.1.1",
    "loki": "grafana/loki:3.5.3",
    "node-exporter": "quay.io/prometheus/node-exporter:v1.9.1",
    "prometheus": "prom/prometheus:v3.5.0",
}
TEXTFILES = "textfile"
"""The folder for the files of `--sink prometheus=FILE`."""

_SCHEMA_VERSION = 39  # of Grafana 10 and later, which move older dashboards up by themselves
_COLUMNS, _HEIGHT = 24, 8
_RUN = '{run=~"$run"}'
_OF_RANKS = '{run=~"$run", rank=~"$rank"}'
_LINES = '{job=~"$job-.+", host=~"$host", level=~"$level"} |= "$text"'


@dataclass(frozen=True)
class Panel:
    """A panel of a dashboard.

    Attributes:
        kind: Grafana's name for the type of the panel.
        queries: By legend, a query; the panel's data source follows from the dashboard.
        unit: Grafana's name for the unit of the values.
        width: In columns, of which a dashboard has 24.
        source: The id of the data source.
    """

    title: str
    kind: str
    queries: Mapping[str, str]
    unit: str = "short"
    width: int = 12
    source: str = PROMETHEUS


_BY_RANK = "rank {{rank}} ({{role}}, {{host}})"

DASHBOARDS: Mapping[str, Sequence[Panel]] = {
    "runs": (
        Panel("Runs that train", "stat", {"": "sum(ttlaunch_run_up) or vector(0)"}, width=6),
        Panel("Runs that have failed", "stat", {"": "count(ttlaunch_run_exit_status > 0) or vector(0)"}, width=6),
        Panel("Newest step", "stat", {"{{run}}": f"max by (run) (ttlaunch_step{_RUN})"}, width=12),
        Panel("Training loss", "timeseries", {"{{run}}": f"avg by (run) (ttlaunch_train_loss{_RUN})"}),
        Panel("Validation loss", "timeseries", {"{{run}}": f"avg by (run) (ttlaunch_validation_loss{_RUN})"}),
        Panel("Tokens a second", "timeseries", {"{{run}}": f"sum by (run) (ttlaunch_train_tokens_per_s{_RUN})"}),
        Panel("Time of a step", "timeseries", {"{{run}}": f"max by (run) (ttlaunch_train_step_time_s{_RUN})"}, "s"),
        Panel(
            "Runs",
            "table",
            {
                "up": f"ttlaunch_run_up{_RUN}",
                "seconds since the last event": f"time() - max by (run) (ttlaunch_last_event_timestamp_seconds{_RUN})",
            },
            width=24,
        ),
    ),
    "ranks": (
        Panel("Loss", "timeseries", {_BY_RANK: f"ttlaunch_train_loss{_OF_RANKS}"}),
        Panel("Norm of the gradient", "timeseries", {_BY_RANK: f"ttlaunch_train_grad_norm{_OF_RANKS}"}),
        Panel("Time of a step", "timeseries", {_BY_RANK: f"ttlaunch_train_step_time_s{_OF_RANKS}"}, "s"),
        Panel(
            "Parts of a step, slowest rank",
            "timeseries",
            {
                part: f"max by (run) (ttlaunch_time_{part}_s{_OF_RANKS})"
                for part in ("forward", "backward", "exchange", "update")
            },
            "s",
        ),
        Panel(
            "Seconds since a rank was last heard of",
            "timeseries",
            {_BY_RANK: f"time() - ttlaunch_last_event_timestamp_seconds{_OF_RANKS}"},
            "s",
        ),
        Panel("Step", "timeseries", {_BY_RANK: f"ttlaunch_step{_OF_RANKS}"}),
        Panel("Memory in use", "timeseries", {_BY_RANK: f"ttlaunch_processes_memory_bytes{_OF_RANKS}"}, "bytes"),
        Panel("Largest memory", "timeseries", {_BY_RANK: f"ttlaunch_memory_peak_bytes{_OF_RANKS}"}, "bytes"),
    ),
    "network": (
        Panel(
            "Bytes sent a second",
            "timeseries",
            {_BY_RANK: f"rate(ttlaunch_communication_sent_bytes_total{_OF_RANKS}[$__rate_interval])"},
            "Bps",
        ),
        Panel(
            "Messages sent a second",
            "timeseries",
            {_BY_RANK: f"rate(ttlaunch_communication_sent_messages_total{_OF_RANKS}[$__rate_interval])"},
        ),
        Panel(
            "Share of time that a rank waits for others",
            "timeseries",
            {_BY_RANK: f"rate(ttlaunch_communication_waited_s_total{_OF_RANKS}[$__rate_interval])"},
            "percentunit",
        ),
        Panel(
            "Bytes a second by operation",
            "timeseries",
            {
                "{{operation}}": "sum by (operation) "
                f"(rate(ttlaunch_operation_sent_bytes_total{_OF_RANKS}[$__rate_interval]))"
            },
            "Bps",
        ),
        Panel(
            "Bytes of a step",
            "timeseries",
            {
                "{{run}}": f"sum by (run) (increase(ttlaunch_communication_sent_bytes_total{_RUN}[$__rate_interval]))"
                f" / on (run) clamp_min(max by (run) (delta(ttlaunch_step{_RUN}[$__rate_interval])), 1)"
            },
            "bytes",
        ),
        Panel(
            "Share of the run that ranks have waited, by operation",
            "bargauge",
            {"{{operation}}": f"sum by (operation) (ttlaunch_operation_waited_s_total{_OF_RANKS})"},
            "s",
        ),
    ),
    "logs": (
        Panel(
            "Lines a minute",
            "timeseries",
            {"{{level}}": f"sum by (level) (count_over_time({_LINES} [1m]))"},
            width=12,
            source=LOKI,
        ),
        Panel(
            "Errors by rank",
            "timeseries",
            {"{{host}}": 'sum by (host) (count_over_time({job=~"$job-.+", host=~"$host", level="ERROR"} [1m]))'},
            width=12,
            source=LOKI,
        ),
        Panel("Errors", "logs", {"": '{job=~"$job-.+", host=~"$host", level="ERROR"}'}, width=24, source=LOKI),
        Panel("Lines", "logs", {"": _LINES}, width=24, source=LOKI),
    ),
}
"""By name, the panels of each dashboard."""

_OF_METRICS = ("run", "label_values(ttlaunch_run_up, run)"), ("rank", 'label_values(ttlaunch_step{run=~"$run"}, rank)')


def render_dashboard(name: str, *, job: str) -> str:
    """Render a dashboard as Grafana's provisioning reads it.

    Args:
        name: A name in `DASHBOARDS`.
        job: With what the label `job` of lines begins.
    """
    panels, x, y = [], 0, 0
    for number, panel in enumerate(DASHBOARDS[name], 1):
        if x + panel.width > _COLUMNS:
            x, y = 0, y + _HEIGHT
        height = _HEIGHT if panel.kind != "logs" else 2 * _HEIGHT
        panels.append(_panel(panel, number, {"x": x, "y": y, "w": panel.width, "h": height}))
        x += panel.width
        y, x = (y + height, 0) if x >= _COLUMNS else (y, x)
    content = {
        "uid": f"ttlaunch-{name}",
        "title": f"ttlaunch: {name}",
        "tags": ["ttlaunch"],
        "schemaVersion": _SCHEMA_VERSION,
        "editable": True,
        "refresh": "5s",
        "time": {"from": "now-1h", "to": "now"},
        "links": [
            {"type": "dashboards", "tags": ["ttlaunch"], "title": "ttlaunch", "asDropdown": False, "keepTime": True}
        ],
        "templating": {"list": _variables_of_logs(job) if name == "logs" else _variables_of_metrics()},
        "panels": panels,
    }
    return json.dumps(content, indent=1) + "\n"


def _panel(panel: Panel, number: int, place: Mapping[str, int]) -> dict[str, Any]:
    source = {"type": "loki" if panel.source == LOKI else "prometheus", "uid": panel.source}
    targets = [
        {"refId": chr(ord("A") + at), "expr": query, "legendFormat": legend, "datasource": source, **_form(panel)}
        for at, (legend, query) in enumerate(panel.queries.items())
    ]
    options: dict[str, Any] = {}
    if panel.kind == "logs":
        options = {"showTime": True, "wrapLogMessage": True, "sortOrder": "Descending", "enableLogDetails": True}
    return {
        "id": number,
        "title": panel.title,
        "type": panel.kind,
        "datasource": source,
        "gridPos": dict(place),
        "targets": targets,
        "fieldConfig": {"defaults": {"unit": panel.unit}, "overrides": []},
        "options": options,
    }


def _form(panel: Panel) -> dict[str, Any]:
    """Return whether a query asks for the present only, and in which form."""
    return {"instant": True, "format": "table"} if panel.kind == "table" else {}


def _variables_of_metrics() -> list[dict[str, Any]]:
    return [
        {
            "name": name,
            "type": "query",
            "datasource": {"type": "prometheus", "uid": PROMETHEUS},
            "query": {"query": query, "refId": name},
            "refresh": 2,
            "multi": True,
            "includeAll": True,
            "allValue": ".*",
            "current": {"text": "All", "value": "$__all"},
        }
        for name, query in _OF_METRICS
    ]


def _variables_of_logs(job: str) -> list[dict[str, Any]]:
    source = {"type": "loki", "uid": LOKI}
    labels = [
        {
            "name": name,
            "type": "query",
            "datasource": source,
            "query": {"label": name, "refId": name, "stream": f'{{job=~"{job}-.+"}}', "type": 1},
            "refresh": 2,
            "multi": True,
            "includeAll": True,
            "allValue": ".+",
            "current": {"text": "All", "value": "$__all"},
        }
        for name in ("host", "level")
    ]
    return [
        {"name": "job", "type": "textbox", "query": job, "current": {"text": job, "value": job}},
        *labels,
        {"name": "text", "type": "textbox", "query": "", "current": {"text": "", "value": ""}},
    ]


def render_files(*, job: str) -> dict[str, str]:
    """Render all files, by their paths in the folder."""
    return {
        "docker-compose.yml": _compose(),
        "prometheus.yml": _prometheus(),
        "provisioning/datasources/ttlaunch.yaml": _datasources(),
        "provisioning/dashboards/ttlaunch.yaml": _providers(),
        **{f"dashboards/{name}.json": render_dashboard(name, job=job) for name in DASHBOARDS},
    }


def _prometheus() -> str:
    return """\
scrape_configs:
  - job_name: ttlaunch
    scrape_interval: 5s
    static_configs:
      - targets: ["node-exporter:9100"]
"""


def _datasources() -> str:
    return f"""\
apiVersion: 1
datasources:
  - name: ttlaunch Prometheus
    uid: {PROMETHEUS}
    type: prometheus
    access: proxy
    url: http://prometheus:9090
    jsonData:
      timeInterval: 5s
  - name: ttlaunch Loki
    uid: {LOKI}
    type: loki
    access: proxy
    url: http://loki:3100
"""


def _providers() -> str:
    return """\
apiVersion: 1
providers:
  - name: ttlaunch
    type: file
    options:
      path: /etc/ttlaunch/dashboards
"""


def _compose() -> str:
    ports = {name: f'    ports: ["127.0.0.1:{port}:{port}"]' for name, port in PORTS.items()}
    return f"""\
# docker compose up -d
# ttlaunch run RECIPE --sink prometheus={TEXTFILES}/ttlaunch.prom --sink loki=http://localhost:{PORTS["loki"]}
# Then open http://localhost:{PORTS["grafana"]} (admin, admin). Only this machine can reach the ports.
services:
  node-exporter:
    image: {_IMAGES["node-exporter"]}
    command: ["--collector.disable-defaults", "--collector.textfile", "--collector.textfile.directory=/textfile"]
    volumes: ["./{TEXTFILES}:/textfile:ro"]
  prometheus:
    image: {_IMAGES["prometheus"]}
{ports["prometheus"]}
    volumes: ["./prometheus.yml:/etc/prometheus/prometheus.yml:ro"]
  loki:
    image: {_IMAGES["loki"]}
{ports["loki"]}
  grafana:
    image: {_IMAGES["grafana"]}
{ports["grafana"]}
    volumes:
      - ./provisioning:/etc/grafana/provisioning:ro
      - ./dashboards:/etc/ttlaunch/dashboards:ro
"""
