"""Dashboards for Grafana: each query is asked of a real Prometheus that reads node_exporter's textfile (D25)."""

import json
import shutil
import socket
import subprocess
import time
import urllib.parse
import urllib.request
from contextlib import ExitStack, contextmanager
from itertools import combinations

import pytest
import yaml

from ttlaunch import contract
from ttlaunch.running.metrics.event_log import EventLog
from ttlaunch.running.metrics.grafana_dashboards import DASHBOARDS, LOKI, PROMETHEUS, render_dashboard, render_files
from ttlaunch.running.metrics.to_prometheus import PrometheusSink

VARIABLES = {"$run": ".*", "$rank": ".*", "$__rate_interval": "1m"}
PATIENCE_S = 60.0


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


@contextmanager
def started(*argv):
    with subprocess.Popen(argv, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        try:
            yield
        finally:
            process.kill()


class Prometheus:
    def __init__(self, folder):
        exporter, port = free_port(), free_port()
        self.textfiles, self._url = folder / "textfile", f"http://127.0.0.1:{port}/api/v1/query"
        self.textfiles.mkdir()
        scrape = {"job_name": "t", "scrape_interval": "300ms", "scrape_timeout": "300ms"}
        scrape["static_configs"] = [{"targets": [f"127.0.0.1:{exporter}"]}]
        (folder / "p.yml").write_text(yaml.safe_dump({"scrape_configs": [scrape]}))
        self._argv = [
            [
                "prometheus-node-exporter",
                "--collector.disable-defaults",
                "--collector.textfile",
                f"--collector.textfile.directory={self.textfiles}",
                f"--web.listen-address=127.0.0.1:{exporter}",
            ],
            [
                "prometheus",
                f"--config.file={folder / 'p.yml'}",
                f"--storage.tsdb.path={folder / 'data'}",
                f"--web.listen-address=127.0.0.1:{port}",
            ],
        ]
        self._stack = ExitStack()

    def __enter__(self):
        for argv in self._argv:
            self._stack.enter_context(started(*argv))
        return self

    def __exit__(self, *_):
        self._stack.close()

    def ask(self, query):
        url = f"{self._url}?{urllib.parse.urlencode({'query': query})}"
        with urllib.request.urlopen(url, timeout=10) as answer:  # noqa: S310 - started above
            return json.load(answer)["data"]["result"]

    def wait_for(self, query):
        """Wait until a query has an answer."""
        until = time.monotonic() + PATIENCE_S
        while True:
            try:
                if self.ask(query):
                    return
            except OSError:
                pass
            assert time.monotonic() < until, query
            time.sleep(0.1)


def as_asked(query):
    for name, value in VARIABLES.items():
        query = query.replace(name, value)
    return query


def spend_all_phases(run, steps):
    """Let the newest telemetry of rank 0 have the phases of a real run."""
    path = run.path / contract.traffic_file(0)
    *before, last = path.read_text().splitlines()
    stretch = json.loads(last)
    stretch["spent"] += [[phase, {str(step): 500 for step in steps}] for phase in ("exchange", "update")]
    path.write_text("".join(f"{line}\n" for line in [*before, json.dumps(stretch)]))


def test_every_query_of_metrics_has_rows_on_a_real_prometheus(here, written, skip_or_fail):
    """D25: fed by `--sink prometheus=FILE` while a run grows, through node_exporter."""
    if not (shutil.which("prometheus") and shutil.which("prometheus-node-exporter")):
        skip_or_fail("Debian's packages prometheus and prometheus-node-exporter are not installed")
    run = written()
    with Prometheus(here) as prometheus:
        sink = PrometheusSink(EventLog(run.path).run, prometheus.textfiles / "ttlaunch.prom")
        log = EventLog(run.path)
        for steps in (range(1, 3), range(3, 5)):
            run.steps(steps)
            run.telemetry(steps=steps)
            spend_all_phases(run, steps)
            run.record(0, kind="usage", time=102.0, cpu_percent=90, memory_bytes=10_000_000, count=2)
            if steps[-1] == 4:
                run.end()
            for event in log.events():
                sink.take(event)
            sink.flush() if steps[-1] < 4 else sink.close("done")
            prometheus.wait_for(f'ttlaunch_operation_sent_bytes_total{{operation="gradients"}} == {100 * steps[-1]}')
        queries = [
            query
            for panels in DASHBOARDS.values()
            for panel in panels
            if panel.source == PROMETHEUS
            for query in panel.queries.values()
        ]
        assert [] == [query for query in queries if not prometheus.ask(as_asked(query))]
        (sent,) = prometheus.ask(as_asked('sum(ttlaunch_operation_sent_bytes_total{operation="gradients"})'))
        assert "400" == sent["value"][1]


@pytest.mark.parametrize("name", DASHBOARDS)
def test_panels_of_a_dashboard_lie_beside_each_other(name):
    dashboard = json.loads(render_dashboard(name, job="lab"))
    places = [panel["gridPos"] for panel in dashboard["panels"]]

    assert all(0 <= one["x"] and one["x"] + one["w"] <= 24 for one in places)
    for one, other in combinations(places, 2):
        beside = one["x"] + one["w"] <= other["x"] or other["x"] + other["w"] <= one["x"]
        below = one["y"] + one["h"] <= other["y"] or other["y"] + other["h"] <= one["y"]
        assert beside or below
    assert len(places) == len({panel["id"] for panel in dashboard["panels"]})


def test_each_panel_has_a_data_source_that_is_provisioned():
    files = render_files(job="lab")
    known = {one["uid"] for one in yaml.safe_load(files["provisioning/datasources/ttlaunch.yaml"])["datasources"]}

    assert {PROMETHEUS, LOKI} == known
    for name in DASHBOARDS:
        for panel in json.loads(files[f"dashboards/{name}.json"])["panels"]:
            assert {panel["datasource"]["uid"]} | {one["datasource"]["uid"] for one in panel["targets"]} <= known


def test_what_the_services_mount_is_written(ttlaunch, here):
    answer = ttlaunch("grafana export out --job smolcluster")
    assert (0, "") == (answer.status, answer.stderr)

    services = yaml.safe_load((here / "out" / "docker-compose.yml").read_text())["services"]
    mounted = [volume.split(":")[0] for one in services.values() for volume in one.get("volumes", [])]
    assert [] == [path for path in mounted if not (here / "out" / path).exists()]
    assert 4 == len(mounted)
    ports = [port for one in services.values() for port in one.get("ports", [])]
    assert all(port.startswith("127.0.0.1:") for port in ports)
    assert (
        "smolcluster"
        == json.loads((here / "out" / "dashboards" / "logs.json").read_text())["templating"]["list"][0]["query"]
    )


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("grafana export there", "there/prometheus.yml exists already; nothing was written"),
        ("grafana export out --job 'a\"b'", '`--job a"b` needs 1 to 100 letters, digits or `_.:-`'),
        ("grafana export file/x", "file/x cannot be written: not a directory"),
    ],
)
def test_a_folder_or_name_that_cannot_be_used_is_told(ttlaunch, here, line, message):
    (here / "there").mkdir()
    (here / "there" / "prometheus.yml").write_text("mine\n")
    (here / "file").write_text("")
    answer = ttlaunch(line)

    assert (2, "") == (answer.status, answer.stdout)
    assert message in answer.stderr.splitlines()[0]
    assert "mine\n" == (here / "there" / "prometheus.yml").read_text()
    assert [here / "file", here / "there", here / "there" / "prometheus.yml"] == sorted(here.rglob("*"))
