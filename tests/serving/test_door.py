"""What the door keeps up whatever happens behind it and before it: restarts, limits, slow and hostile clients, ports and keys (D13)."""

import os
import re
import shlex
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from tests.serving.served import ROOT, events, serving, until
from ttlaunch.web import addresses

pytestmark = pytest.mark.slow

CURL = Path(__file__).with_name("curl_lines.txt")


def test_a_stream_goes_on_after_the_head_was_started_again_with_the_undisturbed_text(tmp_path):
    body = {"text": "r", "max_tokens": 120, "seed": 7, "use_memory": False}
    with serving(tmp_path, head=("--pace", "0.01")) as (served, http):
        undisturbed = http.post("/query", json=body).json()
        with http.stream("POST", "/chat", json=body) as response:
            lines = response.iter_lines()
            for _ in range(40):
                next(lines)
            served.tell("restarting", "rank 2 (stage, box-02) was killed by SIGKILL")
            served.kill_head()
            until(lambda: 503 == httpx.get(f"{served.url}/health", trust_env=False).status_code)
            assert "rank 2" in httpx.get(f"{served.url}/health", trust_env=False).json()["reason"]
            served.start_head()
            served.tell("running")
            rest = list(lines)
        assert any(
            line.startswith(': {"error": "rank 2 (stage, box-02) was killed by SIGKILL, restarting"') for line in rest
        )
        last = next(line for line in reversed(rest) if line)
        assert f'"full_text":"{undisturbed["generated_text"]}"' in last
        assert undisturbed["tokens_sha256"] in last


def test_a_stream_does_not_go_on_with_other_weights(tmp_path):
    with serving(tmp_path, head=("--pace", "0.01")) as (served, http):
        with http.stream("POST", "/chat", json={"text": "w", "max_tokens": 400}) as response:
            arriving = events(response)
            next(arriving)
            served.tell("restarting", "rank 1 ended")
            served.kill_head()
            served.start_head("--weights", "newer")
            *_, last = arriving
        assert "the weights have changed while the ranks were started again" == last["error"]


def test_health_is_not_true_while_no_token_passes_the_stages(tmp_path):
    with serving(tmp_path, head=("--silent",), wait=False) as (_, http):
        until(lambda: http.get("/config").status_code == 200)
        told = http.get("/health")
        assert (503, "degraded") == (told.status_code, told.json()["status"])
        assert "no token has passed every stage in the last 5 s" == told.json()["reason"]
        assert http.post("/query", json={"text": "a", "max_tokens": 2}).json()["success"]
        assert 200 == http.get("/health").status_code  # a real step has proven it


def test_the_door_says_that_it_loads_before_a_head_is_there(tmp_path):
    with serving(tmp_path, wait=False) as (served, http):
        served.kill_head()
        (tmp_path / "serve.sock").unlink(missing_ok=True)
        assert http.get("/health").json()["status"] in {"loading", "disconnected"}
        assert 503 == http.post("/query", json={"text": "a"}).status_code


def test_past_the_waiting_streams_a_request_is_told_to_come_again(tmp_path):
    """Two are computed and 32 wait, which is what a head takes unless it is told otherwise; the 33rd may not."""
    with ThreadPoolExecutor(34) as pool, serving(tmp_path, head=("--streams", "2", "--pace", "0.02")) as (served, http):
        body = {"text": "a", "max_tokens": 50, "use_memory": False}
        slow = httpx.Client(base_url=served.url, timeout=60, trust_env=False)
        running = [pool.submit(slow.post, "/query", json=body) for _ in range(34)]
        until(lambda: "ttlaunch_serve_waiting 32" in http.get("/metrics").text)
        refused = http.post("/query", json=body)
        assert (429, "1") == (refused.status_code, refused.headers["retry-after"])
        openai = http.post("/v1/completions", json={"prompt": "a"})
        assert (429, "too_many_streams") == (openai.status_code, openai.json()["error"]["code"])
        assert [50] * 34 == [one.result().json()["num_tokens"] for one in running]
        slow.close()


@pytest.fixture(scope="module")
def both(tmp_path_factory):
    with serving(tmp_path_factory.mktemp("served"), head=("--pace", "0.0005")) as both:
        yield both


def raw(served, sent):
    connection = socket.create_connection(("127.0.0.1", served.ports["api_port"]), timeout=30)
    connection.sendall(sent)
    return connection


def head_of(answer):
    return answer.split(b"\r\n", 1)[0].decode()


def test_a_long_body_is_refused_before_it_is_read(both):
    _, http = both
    assert (
        413 == http.post("/chat", content=b"x" * (10 << 20), headers={"content-type": "application/json"}).status_code
    )
    chunks = (b"x" * 65536 for _ in range(17))
    assert 413 == http.post("/chat", content=chunks, headers={"content-type": "application/json"}).status_code
    assert 200 == http.get("/health").status_code


def test_a_million_headers_are_refused(both):
    served, http = both
    with raw(served, b"GET /health HTTP/1.1\r\nHost: localhost\r\n") as connection:
        try:
            for _ in range(1000):
                connection.sendall(b"x-a: b\r\n" * 1000)
            answer = connection.recv(4096)
        except ConnectionError:
            answer = b""
    assert head_of(answer) in {"HTTP/1.1 400 Bad Request", ""}
    assert 200 == http.get("/health").status_code


def test_headers_that_arrive_at_once_are_bounded_too(both):
    served, http = both
    for size, status in ((20_000, "200 OK"), (40_000, "400 Bad Request")):
        with raw(served, b"GET /health HTTP/1.1\r\nHost: localhost\r\nx: " + b"a" * size + b"\r\n\r\n") as connection:
            assert f"HTTP/1.1 {status}" == head_of(connection.recv(4096))
    assert 200 == http.get("/health").status_code
    assert "" == served.errors.read_text()  # a stranger's request is no news for whoever started the run


def test_connections_that_send_nothing_give_way_to_those_that_ask(both):
    served, http = both
    slow = [raw(served, b"GET /health HT") for _ in range(90)]
    try:
        for _ in range(3):
            with httpx.Client(base_url=served.url, trust_env=False) as fresh:
                assert 200 == fresh.get("/health").status_code
        assert 200 == http.post("/query", json={"text": "a", "max_tokens": 3}).status_code
    finally:
        for one in slow:
            one.close()


def test_a_client_that_reads_nothing_is_paused_and_slows_nobody(tmp_path):
    """Its 20,000 tokens would be 600 KB of events. The head computes what the buffers on the way hold, and no more."""
    body = b'{"text":"s","max_tokens":20000,"use_memory":false}'
    asked = b"POST /chat HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%s"
    with serving(tmp_path, head=("--context", "30000", "--pace", "0.0001")) as (served, http), socket.socket() as idle:
        idle.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        idle.connect(("127.0.0.1", served.ports["api_port"]))
        idle.sendall(asked % (len(body), body))
        seen = []

        def stands_still():
            seen.append(tokens_in(http))
            return len(seen) > 10 and 0 < seen[-1] == seen[-10]

        until(stands_still)
        assert seen[-1] * 31 < 128 << 10  # an event has 31 bytes
        assert 400 == http.post("/query", json={"text": "q", "max_tokens": 400}).json()["num_tokens"]
        idle.close()
        until(lambda: "ttlaunch_serve_cancelled_total 1" in http.get("/metrics").text)


def tokens_in(http):
    return int(re.search(r"^ttlaunch_serve_tokens_total (\d+)$", http.get("/metrics").text, re.MULTILINE).group(1))


def test_the_curl_lines_of_the_document_run_as_written(both):
    served, _ = both
    for line in CURL.read_text().split("\n\n"):
        command = shlex.split(line.replace("\\\n", " ").replace("http://localhost:8080", served.url))
        assert "curl" == command[0]
        done = subprocess.run(
            [*command, "--silent", "--show-error", "--fail", "--noproxy", "*"],
            capture_output=True,
            check=False,
            timeout=60,
        )
        assert 0 == done.returncode, (line, done.stderr)
        assert re.search(rb"^(\{|data: \{)", done.stdout), line
        assert b'"error":"' not in done.stdout, (line, done.stdout[-300:])


def test_names_and_origins_of_others_are_refused(both):
    served, http = both
    assert 421 == http.get("/config", headers={"host": "evil.example"}).status_code
    assert 421 == http.get("/config", headers={"host": "127.0.0.1.evil.example:80"}).status_code
    refused = http.post("/query", json={"text": "a"}, headers={"origin": "http://evil.example"})
    assert (403, "pages of other sites may not ask this server") == (refused.status_code, refused.json()["error"])
    own = http.post("/query", json={"text": "a", "max_tokens": 1}, headers={"origin": served.url})
    assert 200 == own.status_code
    assert 415 == http.post("/query", content=b'{"text":"a"}', headers={"content-type": "text/plain"}).status_code
    assert not [name for name in own.headers if name.startswith("access-control")]
    assert "default-src 'none'" in own.headers["content-security-policy"]


def test_the_page_is_on_its_own_port_only_and_the_routes_are_on_both(both):
    served, http = both
    page = httpx.get(f"{served.page}/", trust_env=False)
    assert (200, "text/html; charset=utf-8") == (page.status_code, page.headers["content-type"])
    assert "script-src 'self'" in page.headers["content-security-policy"]
    assert 200 == httpx.get(f"{served.page}/config", trust_env=False).status_code
    assert 404 == http.get("/page/chat.js").status_code


def test_a_key_opens_everything_and_nothing_but_the_page_is_open_without_it(tmp_path):
    (tmp_path / "key").write_text("a-key-of-some-length\n")
    (tmp_path / "key").chmod(0o600)
    key = {"authorization": "Bearer a-key-of-some-length"}
    with serving(tmp_path, door=("--key-file", str(tmp_path / "key")), headers=key) as (served, http):
        assert 200 == http.get("/config").status_code
        for wrong in ({}, {"authorization": "Bearer a-key-of-some-lengt"}, {"authorization": "Basic x"}):
            refused = httpx.get(f"{served.url}/config", headers=wrong, trust_env=False)
            assert (401, "Bearer") == (refused.status_code, refused.headers["www-authenticate"])
            assert (
                401 == httpx.post(f"{served.page}/chat", headers=wrong, json={"text": "a"}, trust_env=False).status_code
            )
        assert 200 == httpx.get(f"{served.page}/", trust_env=False).status_code
        assert 401 == httpx.get(f"{served.url}/", trust_env=False).status_code


def refused(*arguments, **environment):
    command = [sys.executable, "-m", "ttlaunch.serving.door", "--socket", "/nowhere/serve.sock", *arguments]
    how = {"cwd": ROOT, "env": {**os.environ, **environment}, "stdin": subprocess.DEVNULL}
    done = subprocess.run(command, capture_output=True, text=True, check=False, **how)
    assert 2 == done.returncode
    return done.stderr


def test_a_taken_port_and_a_missing_key_are_told_in_one_line():
    with addresses.listen("127.0.0.1", 0) as taken:
        port = taken.getsockname()[1]
        expected = f"error: cannot listen on port {port} of 127.0.0.1: address already in use\n"
        assert expected == refused("--api-port", str(port))
    expected = (
        "error: 0.0.0.0 can be reached by others, so that clients need a key: --key-file FILE or $TTLAUNCH_SERVE_KEY\n"
    )
    assert expected == refused("--host", "0.0.0.0")  # noqa: S104 - it is refused
    for unfit in ("", "short", "a-long-key\nwith-two-lines"):
        told = refused("--host", "0.0.0.0", TTLAUNCH_SERVE_KEY=unfit)  # noqa: S104 - it is refused
        assert told.startswith("error: $TTLAUNCH_SERVE_KEY: expected one line of 16 to 512 visible ASCII characters")


def test_health_answers_while_a_long_prompt_is_computed_and_the_door_outlives_its_head(both):
    served, http = both
    stop = threading.Event()

    def load():
        while not stop.is_set():
            httpx.post(f"{served.url}/query", json={"text": "l" * 400, "max_tokens": 100}, timeout=60, trust_env=False)

    threads = [threading.Thread(target=load) for _ in range(2)]
    for one in threads:
        one.start()
    took = []
    for _ in range(20):
        begun = time.monotonic()
        assert 200 == http.get("/health").status_code
        took.append(time.monotonic() - begun)
    stop.set()
    for one in threads:
        one.join()
    print(f"health: median {sorted(took)[10] * 1000:.1f} ms, most {max(took) * 1000:.1f} ms")
