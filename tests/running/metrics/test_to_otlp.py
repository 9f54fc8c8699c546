"""Metrics and lines over OTLP: a receiver decodes the protocol buffers and is asked what it has got."""

import http.server
import json
import threading
from contextlib import contextmanager

import pytest

from tests.running.metrics.test_to_loki import PRINTED, ROLES, show
from ttlaunch.running.metrics import sending
from ttlaunch.running.metrics.event_log import EventLog
from ttlaunch.running.metrics.export import SinkState, export
from ttlaunch.running.metrics.names import metrics_of, series_of
from ttlaunch.running.metrics.sinks import SinkChoice

logs_pb2 = pytest.importorskip("opentelemetry.proto.collector.logs.v1.logs_service_pb2")
metrics_pb2 = pytest.importorskip("opentelemetry.proto.collector.metrics.v1.metrics_service_pb2")


def plain(attributes):
    return {one.key: one.value.string_value for one in attributes}


class Collector:
    """What it has: points by name and attributes, and records of logs, each kind in the order of its arrival."""

    def __init__(self):
        self.points, self.records, self.resources, self.headers = [], [], [], []
        self.answers = []  # the statuses of the next requests, before all others are taken
        self.address = None

    def take(self, path, body):
        if path == "/behind/v1/metrics":
            for resource in metrics_pb2.ExportMetricsServiceRequest.FromString(body).resource_metrics:
                self.resources.append(plain(resource.resource.attributes))
                for metric in resource.scope_metrics[0].metrics:
                    kind = metric.WhichOneof("data")
                    for point in getattr(metric, kind).data_points:
                        self.points.append((metric.name, kind, plain(point.attributes), point))
        elif path == "/behind/v1/logs":
            for resource in logs_pb2.ExportLogsServiceRequest.FromString(body).resource_logs:
                self.resources.append(plain(resource.resource.attributes))
                self.records += resource.scope_logs[0].log_records
        else:
            return 404
        return 200


@contextmanager
def running():
    collector = Collector()

    class Handler(http.server.BaseHTTPRequestHandler):
        def log_message(self, *_):
            pass

        def do_POST(self):
            assert "application/x-protobuf" == self.headers["Content-Type"]
            collector.headers.append(dict(self.headers))
            body = self.rfile.read(int(self.headers["Content-Length"]))
            status = collector.answers.pop(0) if collector.answers else collector.take(self.path, body)
            self.send_response(status)
            self.send_header("Content-Length", "0")
            self.end_headers()

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    collector.address = f"http://127.0.0.1:{server.server_port}/behind"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield collector
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@pytest.fixture
def collector(monkeypatch):
    monkeypatch.setattr(sending, "_FIRST_WAIT_S", 0.01)
    monkeypatch.setattr(sending, "_LONGEST_WAIT_S", 0.01)
    monkeypatch.setattr(sending, "_TICK_S", 0.005)
    with running() as one:
        yield one


def send(run, collector):
    return export(run.path, SinkChoice("otlp", collector.address), follow=False)


def test_every_number_of_the_log_arrives_with_the_time_at_which_it_was_measured(finished, collector):
    """E6: gauges as they are; sums, such as bytes, grow from the beginning of the run."""
    assert SinkState.DONE is send(finished, collector).state

    expected, sums = [], {}
    for event in EventLog(finished.path).poll():
        for name, value in metrics_of(event).items() if event.rank is not None else ():
            series, _, is_sum = series_of(name)
            key = event.rank, name
            sums[key] = sums.get(key, 0.0) + value
            kind, number = ("sum", sums[key]) if is_sum else ("gauge", value)
            name_there = f"ttlaunch.{series.replace('/', '.')}"
            expected.append((name_there, kind, str(event.rank), round(event.time * 1e9), number))
    found = [
        (name, kind, of["rank"], point.time_unix_nano, point.as_double) for name, kind, of, point in collector.points
    ]
    assert sorted(expected) == sorted(found)
    assert len(found) > 50
    (loss,) = {tuple(of.items()) for name, _, of, _ in collector.points if name == "ttlaunch.train.loss"}
    assert (("rank", "0"), ("role", "worker"), ("host", "box-0")) == loss
    assert {"gradients", "losses", "weights"} == {
        of["operation"] for *_, of, _ in collector.points if "operation" in of
    }
    run = finished.path.name
    assert [{"service.name": "ttlaunch", "ttlaunch.run": run, "ttlaunch.recipe": "elastic_dp"}] == [
        json.loads(one) for one in {json.dumps(one) for one in collector.resources}
    ]


def test_every_line_arrives_with_its_level_and_who_printed_it(written, collector):
    run = written(roles=ROLES)
    show(run, [(rank, stream, f"{line}\n".encode()) for rank, stream, _, line in PRINTED])
    record = send(run, collector)

    assert (SinkState.DONE, len(PRINTED)) == (record.state, record.lines)
    found = [
        (int(plain(one.attributes)["rank"]), plain(one.attributes)["stream"], one.severity_text, one.body.string_value)
        for one in collector.records
    ]
    assert PRINTED == found
    assert {"DEBUG": 5, "INFO": 9, "WARNING": 13, "ERROR": 17} == {
        one.severity_text: one.severity_number for one in collector.records
    }
    times = [one.time_unix_nano for one in collector.records]
    assert times == sorted({*times})


@pytest.mark.parametrize("answers", [[429], [503, 500], [200, 429]])
def test_a_collector_that_fails_for_a_while_gets_everything(finished, collector, answers):
    show(finished, [(0, "stdout", b"hello\n")])
    taken = answers.count(200)  # those are the metrics, in one request, which this receiver has thrown away
    collector.answers = list(answers)
    record = send(finished, collector)

    assert SinkState.DONE is record.state
    assert ["hello"] == [
        one.body.string_value for one in collector.records if "stdout" in plain(one.attributes).values()
    ]
    assert taken or collector.points


def test_a_collector_that_refuses_is_told_with_the_variable_that_identifies_the_user(finished, collector, monkeypatch):
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "api-key=a%20secret,x=y")
    collector.answers = [401]
    record = send(finished, collector)

    assert SinkState.FAILED is record.state
    assert record.error.endswith("answers 401: OTEL_EXPORTER_OTLP_HEADERS identifies you to it")
    assert ("a secret", "y") == (collector.headers[0]["api-key"], collector.headers[0]["x"])
    assert [] == [path for path in finished.path.rglob("*") if path.is_file() and b"secret" in path.read_bytes()]


@pytest.mark.parametrize(
    ("place", "message"),
    [
        ("http://me:s3cret@a:4318", "the address of the sink otlp contains credentials"),
        ("http://a:4318?job=x", "`--to otlp=http://a:4318?job=x` cannot be used: it has options, and none is known"),
        ("a:4318", "`--to otlp=a:4318` cannot be used: it does not begin with `http://` or `https://`"),
    ],
)
def test_an_address_that_cannot_be_used_is_told(ttlaunch, finished, place, message):
    answer = ttlaunch(f"metrics --to otlp={place}")

    assert (2, "") == (answer.status, answer.stdout)
    assert f"error[P088]: {message}" == answer.stderr.splitlines()[0]
    assert "s3cret" not in answer.stderr
