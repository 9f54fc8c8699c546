"""Chats of a model that came with a chat template: each route renders it, and a bad one costs its own request (D13)."""

import asyncio
import hashlib
import os
import signal
from types import SimpleNamespace

import pytest

pytest.importorskip("jinja2")
from tests.serving.served import events, serving
from ttlaunch.serving.door import templates
from ttlaunch.serving.wire import ChatMessage
from ttlaunch.untrusted.child import Child

TEMPLATE = (
    "{% if messages[0].content == 'bomb' %}{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
    "{% endif %}{{ bos_token }}{% for m in messages %}{{ m.role[0] }}:{{ m.content }};{% endfor %}"
    "{% if messages[0].content == 'no' %}{{ raise_exception('roles must alternate') }}{% endif %}"
)


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    with serving(tmp_path_factory.mktemp("served"), head=("--template", TEMPLATE)) as both:
        yield both


def test_every_route_of_chats_renders_the_models_template(served):
    """The head answers with the first letter of its prompt, which is that of the token of beginnings."""
    _, http = served
    body = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 3, "temperature": 0}
    openai = http.post("/v1/chat/completions", json={**body, "model": "echo"}).json()
    assert "ZZZ" == openai["choices"][0]["message"]["content"]
    with http.stream(
        "POST", "/chat", json={"text": "hello", "max_tokens": 3, "decoding_strategy": "greedy"}
    ) as response:
        assert "ZZZ" == list(events(response))[-1]["full_text"]
    assert "ZZZ" == http.post("/query", json={**body, "decoding_strategy": "greedy"}).json()["generated_text"]
    plain = {"text": "hello", "max_tokens": 3, "decoding_strategy": "greedy"}
    assert "hhh" == http.post("/query", json=plain).json()["generated_text"]


def test_the_receipt_has_the_hash_of_the_template(served):
    _, http = served
    body = {"text": "hello", "max_tokens": 2, "receipt": True}
    with http.stream("POST", "/chat", json=body) as response:
        receipt = list(events(response))[-1]["receipt"]
    assert hashlib.sha256(TEMPLATE.encode()).hexdigest() == receipt["template_sha256"]
    assert list(b"Zu:hello;") == receipt["prompt_tokens"]


@pytest.mark.parametrize(
    ("content", "said"), [("no", "it says: roles must alternate"), ("bomb", "more than 2 s of processor time")]
)
def test_a_template_that_refuses_or_never_ends_costs_its_own_request(served, content, said):
    _, http = served
    body = {"model": "echo", "messages": [{"role": "user", "content": content}]}
    answer = http.post("/v1/chat/completions", json=body, timeout=60)
    assert (400, True) == (answer.status_code, said in answer.json()["error"]["message"])
    assert 200 == http.get("/health").status_code


@pytest.mark.parametrize("is_killed", [False, True])
def test_the_child_of_the_next_chat_is_started_ahead_and_replaced_if_it_is_killed(monkeypatch, is_killed):
    started = []

    class Recorded(Child):
        def __init__(self, task):
            super().__init__(task)
            started.append(self)

    monkeypatch.setattr(templates, "Child", Recorded)
    hello = SimpleNamespace(chat_template=TEMPLATE, template_sha256="0", special_tokens={"bos_token": "Z"})
    rendered = templates.Templates()
    rendered.begin()
    assert [True] == [one.is_alive for one in started]
    if is_killed:
        os.kill(started[0]._process.pid, signal.SIGKILL)
        started[0]._process.wait()
    assert "Zu:hello;" == asyncio.run(rendered.render(hello, (ChatMessage(role="user", content="hello"),)))
    expected = [False, False, True] if is_killed else [False, True]
    assert expected == [one.is_alive for one in started]
    rendered.close()
    assert not any(one.is_alive for one in started)
