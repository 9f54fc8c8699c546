"""Lines in Loki: the queries of the user's document, servers that fail, texts of every kind (D22)."""

import json
import shutil
import socket
import threading
import time
import urllib.parse
import urllib.request

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from tests.running.metrics.loki_receiver import DROP, running
from ttlaunch import contract
from ttlaunch.running.metrics import sending, to_loki
from ttlaunch.running.metrics.addresses import NoAnswerError, parse_http_address, parse_loki_address, post
from ttlaunch.running.metrics.event_log import EventLog
from ttlaunch.running.metrics.export import SinkState, export
from ttlaunch.running.metrics.log_entries import LogEntries
from ttlaunch.running.metrics.sinks import SinkChoice

ROLES = ("worker", "worker", "optimizer")
TRACEBACK = [
    "Traceback (most recent call last):",
    '  File "train.py", line 6, in <module>',
    "    raise ValueError",
    "ValueError: bucket 7",
]
PRINTED = [  # rank, stream, level, line: as smolcluster's workers log
    (0, "stdout", "INFO", "2026-01-01 10:00:00 | worker | INFO | Epoch 1/3 loss 2.5"),
    (2, "stdout", "DEBUG", "2026-01-01 10:00:00 | server | DEBUG | Epoch state kept"),
    (1, "stdout", "INFO", "Epoch 1 done"),
    (0, "stderr", "WARNING", "only a word on stderr"),
    (0, "stderr", "WARNING", "WARNING:root:slow"),
    (2, "stdout", "INFO", "INFO:server:step 3"),
    *((1, "stderr", "ERROR", line) for line in TRACEBACK),
    (1, "stderr", "WARNING", "after it"),
    (0, "stdout", "INFO", "the word Epoch, again"),
]
ALL = '{run="all"}'


def name_of(rank, stream):
    return contract.stdout_file(rank) if stream == "stdout" else contract.stderr_file(rank)


def show(run, printed, *, time=100.0, is_merged=True):
    """Write lines (rank, stream, bytes) as ranks have printed them, 1 ms apart, and their order as a launcher does."""
    (run.path / contract.LOGS_DIR).mkdir(exist_ok=True)
    for number, (rank, stream, line) in enumerate(printed):
        path = run.path / name_of(rank, stream)
        offset = path.stat().st_size if path.exists() else 0
        with path.open("ab") as file:
            file.write(line)
        if is_merged:
            stretch = {
                "rank": rank,
                "stream": stream,
                "time": time + number / 1e3,
                "offset": offset,
                "length": len(line),
            }
            with (run.path / contract.LOGS_DIR / "merged.jsonl").open("a") as file:
                file.write(json.dumps(stretch) + "\n")


def send(run, loki, options=""):
    return export(run.path, SinkChoice("loki", f"{loki.address}{options}"), follow=False)


@pytest.fixture
def printed(written):
    """A run of three ranks whose second worker has failed."""
    run = written()
    shutil.rmtree(run.path)
    run.plan(roles=ROLES)
    show(run, [(rank, stream, f"{line}\n".encode()) for rank, stream, _, line in PRINTED])
    return run


@pytest.fixture
def loki():
    with running() as receiver:
        yield receiver


@pytest.fixture(autouse=True)
def at_once(monkeypatch):
    """No test waits for a server's sake."""
    monkeypatch.setattr(sending, "_FIRST_WAIT_S", 0.01)
    monkeypatch.setattr(sending, "_LONGEST_WAIT_S", 0.01)
    monkeypatch.setattr(sending, "_TICK_S", 0.005)


QUERIES = {
    '{job="smolcluster-worker"}': lambda rank, level, line: rank in {0, 1},
    '{job="smolcluster-server"}': lambda rank, level, line: rank == 2,
    '{host="worker-rank0-box-0"}': lambda rank, level, line: rank == 0,
    '{level="ERROR"}': lambda rank, level, line: level == "ERROR",
    '{level="INFO"} |= "Epoch"': lambda rank, level, line: level == "INFO" and "Epoch" in line,
}


@pytest.mark.parametrize("query", QUERIES)
def test_a_query_of_the_document_finds_what_a_filter_over_the_logs_finds(printed, loki, query):
    """D22: as typed there, but for the name of the host; the answer is read over HTTP, as Grafana does."""
    assert SinkState.DONE is send(printed, loki, "?job=smolcluster").state

    expected = [line for rank, _, level, line in PRINTED if QUERIES[query](rank, level, line)]
    url = f"{loki.address}/loki/api/v1/query_range?{urllib.parse.urlencode({'query': query})}"
    with urllib.request.urlopen(url) as answer:  # noqa: S310 - our own receiver
        (stream,) = json.load(answer)["data"]["result"]
    assert expected == [line for _, line in stream["values"]]
    assert len(expected) > 0


def test_each_stream_is_sent_in_strictly_increasing_order_of_time(printed, loki):
    send(printed, loki)

    for entries in loki.streams.values():
        times = [int(time) for time, *_ in entries]
        assert times == sorted({*times})


def test_who_printed_a_line_is_in_its_structured_metadata(printed, loki):
    send(printed, loki)

    (entry,) = loki.query('{level="DEBUG"}')
    run = printed.path.name
    assert {"rank": "2", "role": "optimizer", "run": run, "recipe": "elastic_dp", "stream": "stdout"} == entry[2]


def test_sending_again_doubles_nothing(printed, loki):
    first = send(printed, loki)
    there = dict(loki.streams)
    second = send(printed, loki)

    assert (len(PRINTED), len(PRINTED)) == (first.lines, second.lines)
    assert there == loki.streams


@pytest.mark.parametrize("answers", [[429], [500, 503], [DROP], [DROP, 429, 502, DROP]])
def test_a_server_that_fails_for_a_while_gets_every_line_once(printed, loki, answers):
    loki.answers = list(answers)
    record = send(printed, loki)

    assert (SinkState.DONE, len(PRINTED)) == (record.state, record.lines)
    assert sorted(line for *_, line in PRINTED) == sorted(line for kept in loki.streams.values() for _, line, _ in kept)


def test_a_request_that_was_not_taken_is_sent_again_as_it_was_and_the_next_one_is_another(printed, loki, monkeypatch):
    monkeypatch.setattr(sending, "_MOST_ENTRIES", 5)
    rendered, real = [], to_loki.render_push
    monkeypatch.setattr(to_loki, "render_push", lambda *given: rendered.append(real(*given)) or rendered[-1])
    loki.answers = [429, 500]
    assert SinkState.DONE is send(printed, loki).state
    bodies = [body for _, _, body in loki.requests]
    assert [bodies[0]] * 3 == bodies[:3]
    assert bodies[2:] == rendered
    assert len(rendered) == len({*rendered}) > 1


def test_after_an_address_where_nobody_listens_another_sending_brings_every_line_once(printed, loki, monkeypatch):
    monkeypatch.setattr(sending, "_FIRST_PATIENCE_S", 0.05)
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    record = export(printed.path, SinkChoice("loki", f"http://127.0.0.1:{port}"), follow=False)
    assert (SinkState.FAILED, 0) == (record.state, record.lines)
    assert "refused" in record.error

    record = send(printed, loki)
    assert (SinkState.DONE, len(PRINTED)) == (record.state, record.lines)
    assert sorted(line for *_, line in PRINTED) == sorted(line for kept in loki.streams.values() for _, line, _ in kept)


def test_a_server_that_asks_for_time_gets_it(printed, loki, monkeypatch):
    loki.answers = [(429, "too many", [("Retry-After", "7")])]
    now = [1000.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    own, sleep = threading.current_thread(), time.sleep

    def pass_time(seconds):
        if threading.current_thread() is own:  # and not a thread that an earlier test has left
            now[0] += 1.0
        else:
            sleep(seconds)

    monkeypatch.setattr("time.sleep", pass_time)
    record = send(printed, loki)

    assert (SinkState.DONE, 2) == (record.state, len(loki.requests))
    assert 1007.0 <= now[0] <= 1009.0


def test_what_was_interrupted_continues_where_it_ended(printed, loki, monkeypatch):
    monkeypatch.setattr(sending, "_MOST_ENTRIES", 5)
    loki.answers = [(204, ""), 404]
    record = send(printed, loki)
    assert (SinkState.FAILED, 5) == (record.state, record.lines)
    assert record.error == f"{loki.address}/loki/api/v1/push answers 404: nothing is received there"

    record = send(printed, loki)
    assert (SinkState.DONE, len(PRINTED) - 5) == (record.state, record.lines)
    record = send(printed, loki)  # a complete export is repeated from the start
    assert len(PRINTED) == record.lines


@pytest.mark.parametrize("end", range(len(PRINTED) + 1))
def test_behind_any_position_come_the_other_entries_with_the_same_times(printed, end):
    run = EventLog(printed.path).run
    whole = [*LogEntries(printed.path, run).poll()]
    after = {one.source: one.end for one in whole[:end]}

    assert whole[end:] == [*LogEntries(printed.path, run, after=after).poll()]


def test_lines_whose_order_a_killed_launcher_has_not_recorded_have_times_that_stay(printed, monkeypatch):
    show(printed, [(0, "stdout", b"late\n"), (1, "stdout", b"later\n")], is_merged=False)
    found = []
    for now in (1000.0, 2000.0):
        monkeypatch.setattr("time.time", lambda now=now: now)
        entries = LogEntries(printed.path, EventLog(printed.path).run)
        found.append([*entries.poll(), *entries.rest()])

    assert found[0] == found[1]
    assert ["late", "later"] == [one.text for one in found[0][-2:]]


NASTY = {
    "quotes": b'{"a": "b\\"c"} \'d\' `e`',
    "NUL": b"a\0b",
    "one MB": b"x" * 1_000_000,
    "one MB of characters of three bytes": "\u20ac".encode() * 350_000,
    "no UTF-8": b"\xff\xfe caf\xe9 \xc3",
    "escape codes": b"\x1b[31mred\x1b[0m",
    "nothing": b"",
    "separators of lines": "a\u2028b\x0bc\x85d".encode(),
}


@pytest.mark.parametrize("kind", NASTY)
@pytest.mark.parametrize("options", ["", "?metadata=off"])
def test_a_text_of_any_kind_arrives_once(written, loki, kind, options):
    run = written()
    show(run, [(0, "stdout", b"before\n"), (0, "stdout", NASTY[kind] + b"\n"), (0, "stdout", b"after\n")])
    assert SinkState.DONE is send(run, loki, options).state
    send(run, loki, options)

    first, *parts, last = loki.query('{level="INFO"}')
    numbers = [f"{number}/{len(parts)}" for number in range(1, len(parts) + 1)]
    if options:
        texts = [text.removeprefix(f"part {part}: ") for (_, text), part in zip(parts, numbers, strict=True)]
    else:
        assert len(parts) == 1 or numbers == [metadata["part"] for _, _, metadata in parts]
        texts = [text for _, text, _ in parts]
    assert ("before", NASTY[kind].decode("utf-8", "replace"), "after") == (first[1], "".join(texts), last[1])


def test_ten_thousand_lines_in_a_millisecond_are_all_there_in_their_order(written, loki):
    run = written()
    show(run, [(0, "stdout", b"".join(b"the same line\n" if n % 2 else b"line %d\n" % n for n in range(10_000)))])
    send(run, loki)

    found = loki.query('{level="INFO"}')
    assert [*range(0, 10_000, 2)] == [int(line.split()[1]) for _, line, _ in found if line != "the same line"]
    assert 10_000 == len({time for time, *_ in found})
    assert int(found[-1][0]) - int(found[0][0]) < 1_000_000


def test_what_ranks_report_and_the_failure_are_lines_too(finished, loki):
    report = json.loads((finished.path / contract.REPORT_FILE).read_text())
    failure = {"code": "R002", "rank": 0, "role": "worker", "host": "box-0", "cause": "raised ValueError", "step": 4}
    report["failure"] = {**failure, "time": 102.0, "evidence": ["`ValueError: bucket 7`"]}
    (finished.path / contract.REPORT_FILE).write_text(json.dumps(report))
    send(finished, loki)

    worker = loki.query('{host="worker-rank0-box-0"}')
    assert [
        (
            "100000000000",
            "validation, step 0: loss 4, perplexity 54.6, accuracy 0.125, tokens 64",
        )
    ] == [one[:2] for one in worker[:1]]
    assert "step 2: loss 2, tokens 50, grad_norm 0.5, learning_rate 0.001, step_time_s 0.25, tokens_per_s 200" in [
        one[1] for one in worker
    ]
    assert ["2"] == [one[2]["step"] for one in worker if one[1].startswith("step 2:")]
    expected = "error[R002]: rank 0 (worker, box-0) raised ValueError in step 4; `ValueError: bucket 7`"
    assert [expected] == loki.lines('{level="ERROR"}')


def test_a_server_without_structured_metadata_is_named_with_the_repair(printed, loki):
    loki.takes_metadata = False
    record = send(printed, loki)
    assert SinkState.FAILED is record.state
    assert record.error.endswith("a server without structured metadata needs `?metadata=off` at the end of the address")

    assert SinkState.DONE is send(printed, loki, "?metadata=off").state
    assert len(PRINTED) == sum(map(len, loki.streams.values()))


def test_entries_that_the_server_refuses_are_told_and_the_others_arrive(printed, loki, monkeypatch):
    monkeypatch.setattr(sending, "_MOST_ENTRIES", 5)
    loki.answers = [(400, "entry for stream '{}' has timestamp too old, total ignored: 5 out of 5")]
    record = send(printed, loki)

    assert SinkState.FAILED is record.state
    assert record.error.startswith("the server refuses some of the lines: entry for stream")
    assert len(PRINTED) - 5 == sum(map(len, loki.streams.values()))


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ((302, "", [("Location", "http://me:word@other/x")]), "redirects to http://other/x, which is not followed"),
        ((401, "who are you?"), "answers 401: LOKI_USERNAME and LOKI_PASSWORD, or LOKI_BEARER_TOKEN, identifies you"),
        ((418, "tea\x1b[2J" + "!" * 9999), "answers 418: tea\\x1b[2J!!!"),
    ],
)
def test_an_answer_that_would_come_again_ends_the_sending_with_its_meaning(printed, loki, answer, message):
    loki.answers = [answer]
    record = send(printed, loki)

    assert (SinkState.FAILED, 1) == (record.state, len(loki.requests))
    assert message in record.error
    assert len(record.error) <= 300


ENDLESS = b"HTTP/1.1 200 OK\r\n" + b"X: y\r\n" * 50
HOSTILE = {
    "nothing": (b"", False),
    "no HTTP": (b"SSH-2.0-OpenSSH_9\r\n", False),
    "a head without end": (ENDLESS * 1000, False),
    "a body without end": (b"HTTP/1.1 200 OK\r\n\r\n" + b"x" * 10_000_000, True),
    "a length that lies": (b"HTTP/1.1 200 OK\r\nContent-Length: -5\r\n\r\n", True),
    "a length that is none": (b"HTTP/1.1 200 OK\r\nContent-Length: \xc2\xb2\r\n\r\n", True),
    "a status that is none": (b"HTTP/1.1 99999 OK\r\n\r\n", False),
    "always continue": (b"HTTP/1.1 100 Continue\r\n\r\n" * 100_000, False),
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_a_hostile_server_is_bounded(kind):
    """Its answer is read up to 4 KiB and for a limited time; what is no answer is told as such."""
    data, is_answer = HOSTILE[kind]
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve():
            connection, _ = server.accept()
            with connection:
                try:
                    connection.recv(65536)
                    connection.sendall(data)
                    connection.shutdown(socket.SHUT_WR)
                    connection.recv(1)
                except OSError:
                    pass

        thread = threading.Thread(target=serve)
        thread.start()
        at, _ = parse_http_address(f"http://127.0.0.1:{server.getsockname()[1]}/push")
        try:
            if is_answer:
                assert len(post(at, b"x", headers={}, within_s=5.0).text) <= 200
            else:
                with pytest.raises(NoAnswerError):
                    post(at, b"x", headers={}, within_s=2.0)
        finally:
            thread.join()


def test_an_answer_that_drips_ends_at_the_deadline():
    with socket.create_server(("127.0.0.1", 0)) as server:
        at, _ = parse_http_address(f"http://127.0.0.1:{server.getsockname()[1]}/push")
        with pytest.raises(NoAnswerError, match="does not answer within"):
            post(at, b"x", headers={}, within_s=0.2)


@pytest.mark.parametrize(
    ("address", "reason"),
    [
        ("loki:3100", "it does not begin with `http://` or `https://`"),
        ("http://", "it has no host"),
        ("http://a:99999", "it is no address of the form http://HOST:PORT"),
        ("http://a:0", "its host or port cannot be used"),
        ("http://a b", "its host or port cannot be used"),
        ("http://[::1", "it is no address of the form http://HOST:PORT"),
        ("http://a/\u20ac", "its path cannot be used"),
        ("http://a/#x", "its path cannot be used"),
        ("http://a?jb=1", "'jb' is no option of it: `job` and `metadata` are"),
        ("http://a?job=1&job=2", "an option is given twice"),
        ("http://a?job=", "`job` needs 1 to 100 letters, digits or `_.:-`"),
        ('http://a?job="}', "`job` needs 1 to 100 letters, digits or `_.:-`"),
        ("http://a?metadata=no", "`metadata` is `on` or `off`"),
        ("http://me:word@a", "it contains credentials"),
    ],
)
def test_an_address_that_cannot_be_used_is_refused_with_the_reason(address, reason):
    assert reason == parse_loki_address(address)


@pytest.mark.parametrize(
    ("address", "target"),
    [
        ("http://a:3100", "/loki/api/v1/push"),
        ("http://a:3100/", "/loki/api/v1/push"),
        ("https://a/behind/", "/behind/loki/api/v1/push"),
        ("https://a/loki/api/v1/push?job=x", "/loki/api/v1/push"),
    ],
)
def test_the_path_of_an_address_leads_to_where_lines_are_pushed(address, target):
    assert target == parse_loki_address(address).at.path


@given(st.text() | st.text(alphabet="htps:/@?#[]%&=.a1\u00b2"))
def test_no_text_breaks_the_parser_of_addresses(text):
    for one in (text, f"http://{text}"):
        found = parse_loki_address(one)
        assert isinstance(found, str) or "@" not in str(found.at)


def test_credentials_come_from_the_variables_of_logcli_and_stay_out_of_the_run_folder(printed, loki, monkeypatch):
    monkeypatch.setenv("LOKI_USERNAME", "me")
    monkeypatch.setenv("LOKI_PASSWORD", "my word of passage")
    monkeypatch.setenv("LOKI_ORG_ID", "lab")
    send(printed, loki)

    ((_, headers, _),) = loki.requests
    assert ("Basic bWU6bXkgd29yZCBvZiBwYXNzYWdl", "lab") == (headers["Authorization"], headers["X-Scope-OrgID"])
    kept = [path for path in printed.path.rglob("*") if path.is_file()]
    assert [] == [path for path in kept if b"passage" in path.read_bytes() or b"bWU6" in path.read_bytes()]


def test_an_address_with_credentials_is_refused_without_showing_them(ttlaunch, here, finished):
    for line in ("run data_parallel --sink loki=http://me:s3cret@a:3100", "logs --to loki=http://me:s3cret@a:3100"):
        answer = ttlaunch(line)
        assert 2 == answer.status
        assert answer.stderr.startswith("error[P088]: the address of the sink loki contains credentials\n")
        assert "LOKI_USERNAME" in answer.stderr
        assert "s3cret" not in answer.stdout + answer.stderr


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("logs --to prometheus=m.prom", "error[P046]: the sink prometheus takes metrics and no lines\n"),
        ("logs --to loki", "error[P046]: `--to loki` names no place\n"),
        (
            "logs --to loki=a:1",
            "error[P088]: `--to loki=a:1` cannot be used: it does not begin with `http://` or `https://`\n",
        ),
        (
            "logs --to loki-file=x --only rank=0",
            "error[P009]: `--to` sends all lines, and a choice of lines was given\n",
        ),
    ],
)
def test_a_mistake_in_where_lines_go_is_told(ttlaunch, finished, line, message):
    answer = ttlaunch(line)

    assert (2, "") == (answer.status, answer.stdout)
    assert answer.stderr.startswith(message)


def test_the_command_sends_and_says_how_many_lines(ttlaunch, finished, loki):
    show(finished, [(0, "stdout", b"hello\n")])
    answer = ttlaunch(f"logs --to loki={loki.address}")

    expected = f"loki: 10 lines of {finished.path.name} in {loki.address}\n"
    assert (0, expected, "") == (answer.status, answer.stdout, answer.stderr)


LEVELS = {
    "INFO:root:hello": "INFO",
    "2026-01-01 10:00:00,123 - name - ERROR - hello": "ERROR",
    "2026-01-01T10:00:00.5Z WARN hello": "WARNING",
    "[10:00:00] [CRITICAL] hello": "CRITICAL",
    "\x1b[32m12:00 | name | DEBUG | hello\x1b[0m": "DEBUG",
    'time="10:00" level=error msg="x"': "ERROR",
    "FATAL: no more room": "CRITICAL",
    "INFORMATION about it": "INFO",
    "there was no ERROR in it": "INFO",
    "loss 0.5 - 3 WARNINGS": "INFO",
    "": "INFO",
}


@pytest.mark.parametrize("line", LEVELS)
def test_the_level_of_a_line_is_its_own_or_that_of_its_stream(written, line):
    run = written()
    show(run, [(0, "stdout", f"{line}\n".encode())])

    assert [LEVELS[line]] == [one.level for one in LogEntries(run.path, EventLog(run.path).run).poll()]


def as_promtail_reads(folder):
    """What the stages of `scrape.yaml` make of the lines in its folder."""
    config = yaml.safe_load((folder / "scrape.yaml").read_text())["scrape_configs"][0]
    names = {name: value for stage in config["pipeline_stages"] for name, value in stage.items()}
    (path,) = [one["labels"]["__path__"] for one in config["static_configs"]]
    assert str(folder / "*.jsonl") == path
    for file in folder.glob("*.jsonl"):
        for line in file.read_text().splitlines():
            record = json.loads(line)
            found = {name: record[key] for name, key in names["json"]["expressions"].items() if key in record}
            labels = tuple(sorted((name, found[name]) for name in names["labels"]))
            metadata = {name: found[name] for name in names["structured_metadata"] if name in found}
            yield labels, (found[names["timestamp"]["source"]], found[names["output"]["source"]], metadata)


def test_a_file_for_promtail_has_what_is_sent_to_loki(printed, here, loki):
    send(printed, loki)
    record = export(printed.path, SinkChoice("loki-file", str(here / "out")), follow=False)

    found = {}
    for labels, entry in as_promtail_reads(here / "out"):
        found.setdefault(labels, []).append(entry)
    assert (SinkState.DONE, loki.streams) == (record.state, found)


@pytest.mark.parametrize("cut", [1, 30, 400])
def test_a_file_that_was_cut_off_is_continued(printed, here, cut):
    choice = SinkChoice("loki-file", str(here / "out"))
    export(printed.path, choice, follow=False)
    (file,) = (here / "out").glob("*.jsonl")
    whole = file.read_bytes()
    file.write_bytes(whole[:-cut])
    export(printed.path, choice, follow=False)
    assert whole == file.read_bytes()

    assert 0 == export(printed.path, choice, follow=False).lines
    assert whole == file.read_bytes()
