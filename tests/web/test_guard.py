"""The guard before an application: every rule with a request that breaks it, and one that just does not."""

import asyncio
import json

import pytest

from ttlaunch.web import guard
from ttlaunch.web.guard import LONGEST_BODY, POLICY, Guard, Rules

KEY = "a-key-of-some-length"
HOST = (b"host", b"localhost:8080")
JSON = (b"content-type", b"application/json")


async def echo(scope, receive, send):
    """An application that answers with the method and the body that it got, and its own policy at `/page`."""
    message = await receive() if scope["method"] == "POST" else {"body": b""}
    own = [(b"content-security-policy", b"script-src 'self'")] if scope["path"] == "/page" else []
    await send({"type": "http.response.start", "status": 200, "headers": own})
    await send({"type": "http.response.body", "body": scope["method"].encode() + b" " + message["body"]})


def ask(*headers, method="GET", path="/", body=(), key=None, app=echo):
    """Status, headers and body of the answer to a request; `body` is what arrives, piece by piece; None: the client leaves."""
    rules = Rules(
        names=frozenset({"localhost", "[::1]"}),
        key=key,
        is_open=lambda scope: scope["path"] == "/page",
        render=lambda path, refusal: {"path": path, "code": refusal.code, "message": refusal.message},
    )
    pieces, sent = list(body), []

    async def receive():
        if not pieces:
            return {"type": "http.request", "body": b"", "more_body": False}
        piece = pieces.pop(0)
        if piece is None:
            return {"type": "http.disconnect"}
        return {"type": "http.request", "body": piece, "more_body": bool(pieces)}

    async def send(message):
        sent.append(message)

    scope = {"type": "http", "method": method, "path": path, "scheme": "http", "headers": list(headers)}
    asyncio.run(Guard(app, rules)(scope, receive, send))
    start, *rest = sent
    return start["status"], dict(start["headers"]), b"".join(one["body"] for one in rest)


def post(*headers, **options):
    return ask(HOST, *headers, method="POST", **options)


def code(answer):
    return answer[0], json.loads(answer[2])["code"]


@pytest.mark.parametrize("host", [b"localhost", b"localhost:8080", b"LocalHost:1", b"[::1]:8080", b"[::1]"])
def test_a_host_that_is_ours_is_let_through(host):
    assert 200 == ask((b"host", host))[0]


@pytest.mark.parametrize(
    "hosts",
    [
        *((), (b"",), (b"evil.example",), (b"localhost.evil.example",), (b"localhost:8080@evil.example",)),
        *((b"localhost:x",), (b"localhost", b"localhost"), (b"localhost", b"evil.example"), (b"::1",), (b"\xff",)),
    ],
)
def test_another_host_or_two_or_none_is_refused(hosts):
    assert (421, "wrong_host") == code(ask(*((b"host", one) for one in hosts)))


@pytest.mark.parametrize(
    "origin", [b"http://evil.example", b"null", b"https://localhost:8080", b"http://localhost", b""]
)
def test_a_page_of_another_origin_changes_nothing(origin):
    assert (403, "wrong_origin") == code(post((b"origin", origin)))
    assert (
        200 == ask(HOST, (b"origin", origin))[0]
    )  # reading: the browser hides the answer from that page, without a CORS header


def test_the_own_page_may_ask():
    assert (200, b"POST ") == post((b"origin", b"http://localhost:8080"))[::2]


@pytest.mark.parametrize(
    "sent",
    [
        None,
        b"",
        b"Bearer",
        b"Bearer ",
        b"Bearer a-key-of-some-lengt",
        b"Basic " + KEY.encode(),
        KEY.encode(),
        b"Bearer \xe9",
    ],
)
def test_without_the_key_nothing_but_open_paths_is_read(sent):
    headers = () if sent is None else ((b"authorization", sent),)
    status, told, body = ask(HOST, *headers, key=KEY)
    assert (401, b"Bearer") == (status, told[b"www-authenticate"])
    assert KEY.encode() not in body
    assert 200 == ask(HOST, *headers, key=KEY, path="/page")[0]


@pytest.mark.parametrize("kind", [b"Bearer", b"bearer"])
def test_the_key_opens(kind):
    assert 200 == ask(HOST, (b"authorization", kind + b" " + KEY.encode()), key=KEY)[0]


def test_a_wrong_host_is_refused_before_the_key_is_looked_at():
    assert (421, "wrong_host") == code(ask((b"host", b"evil.example"), key=KEY))


@pytest.mark.parametrize("length", [str(LONGEST_BODY + 1).encode(), b"-1", b"1e3", b"\xb2", b"", b"9" * 5000])
def test_a_length_that_is_too_long_or_none_is_refused_before_the_body_is_read(length):
    async def unread(*_):
        raise AssertionError("the application was asked")

    answer = post((b"content-length", length), JSON, body=[None], app=unread)
    assert (413, "body_too_long") == code(answer)
    assert b"close" == answer[1][b"connection"]


def test_a_body_without_a_length_is_read_up_to_the_limit():
    half = b"a" * (LONGEST_BODY // 2)
    assert (200, b"POST " + half * 2) == post(JSON, body=[half, half])[::2]
    assert (413, "body_too_long") == code(post(JSON, body=[half, half, b"a", None]))


def test_a_client_that_leaves_within_its_body_is_nobody_s_request():
    assert (400, "body_incomplete") == code(post(JSON, body=[b"{", None]))


def test_a_body_that_does_not_arrive_is_given_up(monkeypatch):
    monkeypatch.setattr(guard, "LONGEST_BODY_S", 0.01)
    rules = Rules(names=frozenset({"localhost"}), key=None, is_open=lambda _: False, render=lambda _, one: vars(one))
    sent = []

    async def send(message):
        sent.append(message)

    async def ask_slowly():
        scope = {"type": "http", "method": "POST", "path": "/", "scheme": "http", "headers": [HOST, JSON]}
        await Guard(echo, rules)(scope, asyncio.Event().wait, send)

    asyncio.run(ask_slowly())
    assert 408 == sent[0]["status"]


@pytest.mark.parametrize(
    "kind", [None, b"text/plain", b"application/x-www-form-urlencoded", b"multipart/form-data; boundary=x"]
)
def test_a_body_that_a_form_of_another_page_can_send_is_refused(kind):
    headers = () if kind is None else ((b"content-type", kind),)
    assert (415, "wrong_content_type") == code(post(*headers, body=[b"{}"]))
    assert 200 == post(*headers)[0]  # without a body there is nothing to misread


def test_json_with_a_character_set_is_json():
    assert (200, b"POST {}") == post((b"content-type", b"Application/JSON; charset=utf-8"), body=[b"{", b"}"])[::2]


def test_every_answer_tells_browsers_to_trust_nothing():
    for answer in (ask(HOST), ask((b"host", b"evil.example"))):
        told = answer[1]
        assert POLICY.encode() == told[b"content-security-policy"]
        assert (b"nosniff", b"no-store") == (told[b"x-content-type-options"], told[b"cache-control"])
        assert not [name for name in told if name.startswith(b"access-control")]
    assert b"script-src 'self'" == ask(HOST, path="/page")[1][b"content-security-policy"]
