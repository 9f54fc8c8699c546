"""OpenAI's routes, asked by OpenAI's own client, and as raw events compared with a golden file (D13)."""

import json
import re
from importlib import import_module
from pathlib import Path

import httpx
import pytest

from tests.serving.served import serving

GOLDEN = Path(__file__).parents[1] / "golden" / "openai_events.txt"
CHAT = [{"role": "user", "content": "hello"}]


@pytest.fixture(scope="module")
def openai():
    """OpenAI's library: a second and a half of imports, which no other file needs."""
    return import_module("openai")


@pytest.fixture(scope="module")
def both(tmp_path_factory):
    with serving(tmp_path_factory.mktemp("served")) as both:
        yield both


@pytest.fixture
def client(both, openai):
    with (
        httpx.Client(trust_env=False) as http,
        openai.OpenAI(base_url=f"{both[0].url}/v1", api_key="none", http_client=http, max_retries=0) as client,
    ):
        yield client


def test_a_chat_is_answered_with_usage_and_fingerprint(client):
    answer = client.chat.completions.create(model="echo", messages=CHAT, max_completion_tokens=6, temperature=0)
    (choice,) = answer.choices
    assert ("assistant", "hhhhhh", "length") == (choice.message.role, choice.message.content, choice.finish_reason)
    assert (5, 6, 11) == (answer.usage.prompt_tokens, answer.usage.completion_tokens, answer.usage.total_tokens)
    assert re.fullmatch(r"[0-9a-f]{12}", answer.system_fingerprint)


def test_a_stream_has_the_text_of_the_answer_and_its_usage_at_the_end(client):
    asked = {"model": "echo", "messages": CHAT, "max_tokens": 20, "seed": 3}
    whole = client.chat.completions.create(**asked)
    *chunks, last = client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True})
    assert whole.choices[0].message.content == "".join(one.choices[0].delta.content or "" for one in chunks)
    assert "length" == chunks[-1].choices[0].finish_reason
    assert ([], whole.usage) == (last.choices, last.usage)


def test_two_choices_differ_and_each_can_be_repeated(client):
    asked = {"model": "echo", "prompt": "p", "max_tokens": 60, "seed": 8}
    one, two = client.completions.create(**asked, n=2).choices
    assert (0, 1) == (one.index, two.index)
    assert one.text != two.text
    assert one.text == client.completions.create(**asked).choices[0].text
    streamed = {0: "", 1: ""}
    for chunk in client.completions.create(**asked, n=2, stream=True):
        streamed[chunk.choices[0].index] += chunk.choices[0].text
    assert {0: one.text, 1: two.text} == streamed


def test_logprobs_come_with_every_token_in_either_form(client):
    chat = client.chat.completions.create(
        model="echo", messages=CHAT, max_tokens=2, temperature=0, logprobs=True, top_logprobs=1
    )
    first = chat.choices[0].logprobs.content[0]
    assert ("h", -0.5, [104], "h") == (first.token, first.logprob, first.bytes, first.top_logprobs[0].token)
    text = client.completions.create(model="echo", prompt="hello", max_tokens=3, temperature=0, logprobs=1)
    logprobs = text.choices[0].logprobs
    assert (["h"] * 3, [-0.5] * 3, [0, 1, 2]) == (logprobs.tokens, logprobs.token_logprobs, logprobs.text_offset)


def test_a_prompt_of_token_ids_and_a_stop_text(client):
    answer = client.completions.create(model="echo", prompt=[120, 121], max_tokens=9, temperature=0, stop="xxx")
    assert ("stop", 3) == (answer.choices[0].finish_reason, answer.usage.completion_tokens)


def test_the_models_are_the_one_that_is_served(client):
    assert ["echo"] == [one.id for one in client.models.list()]
    assert "echo" == client.models.retrieve("echo").id


@pytest.mark.parametrize(
    ("asked", "status", "param", "expected"),
    [
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, 400, "tools", "`tools` is not served here"),
        ({"logit_bias": {"1": 5}}, 400, "logit_bias", "`logit_bias` is not served here"),
        ({"presence_penalty": 0.5}, 400, "presence_penalty", "`presence_penalty` is not served here"),
        ({"response_format": {"type": "json_object"}}, 400, "response_format", "`response_format` is not served here"),
        ({"extra_body": {"echo": True}}, 400, "echo", "`echo` is not served here"),
        ({"extra_body": {"sed": 1}}, 400, "sed", "`sed`: is not a known key; did you mean `seed`?"),
        ({"n": 9}, 400, "n", "`n`: expected a whole number from 1 to 8"),
        ({"temperature": -1}, 400, "temperature", "`temperature`: expected a number from 0 to 2"),
        ({"top_logprobs": 2}, 400, "top_logprobs", "`top_logprobs`: needs `logprobs` to be true"),
        ({"model": "gpt-5"}, 404, "model", "the model served here is `echo`"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
            400,
            "messages[0].content[0]",
            "`messages[0].content[0]`: only parts of type `text` are served here",
        ),
        (
            {"messages": [{"role": "user", "content": "a" * 600}]},
            400,
            None,
            "the prompt does not fit into the context (prompt_tokens: 600) (context: 512)",
        ),
    ],
    ids=lambda one: str(one)[:30],
)  # fmt: skip
def test_what_is_not_served_is_refused_by_name(client, openai, asked, status, param, expected):
    error = {400: openai.BadRequestError, 404: openai.NotFoundError}[status]
    with pytest.raises(error) as caught:
        client.chat.completions.create(**{"model": "echo", "messages": CHAT, "max_tokens": 1} | asked)
    assert (expected, param) == (caught.value.body["message"], caught.value.body["param"])


def test_what_changes_nothing_is_taken(client):
    answer = client.chat.completions.create(
        model="echo",
        messages=CHAT,
        max_tokens=1,
        presence_penalty=0,
        tools=[],
        user="u",
        response_format={"type": "text"},
    )
    assert "h" == answer.choices[0].message.content


@pytest.mark.parametrize("route", ["chat/completions", "completions"])
def test_the_raw_events_are_those_of_the_golden_file(both, route):
    prompt = {"messages": CHAT} if route.startswith("chat") else {"prompt": "hello"}
    body = {"model": "echo", "max_tokens": 2, "temperature": 0, "seed": 1, "stream": True, **prompt}
    text = both[1].post(f"/v1/{route}", json=body).text
    text = re.sub(r'"created":\d+', '"created":0', re.sub(r"cmpl-[0-9a-f]{24}", "cmpl-ID", text))
    golden = dict(part.split("\n", 1) for part in GOLDEN.read_text().split("### ")[1:])
    assert golden[route] == text


def test_an_error_in_the_midst_of_a_stream_is_an_error_of_the_client(tmp_path, openai):
    with serving(tmp_path) as (served, http):
        with (
            httpx.Client(trust_env=False) as inner,
            openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", http_client=inner, max_retries=0) as client,
        ):
            stream = client.completions.create(model="echo", prompt="hello", max_tokens=500, stream=True)
            next(stream)
            served.kill_head()
            served.tell("failed", "rank 2 (stage, box-02) was killed by SIGKILL")
            with pytest.raises(openai.APIError, match=r"rank 2 \(stage, box-02\) was killed by SIGKILL"):
                list(stream)
        health = http.get("/health")
        assert 503 == health.status_code
        told = health.json()
        assert ["disconnected", False, "rank 2 (stage, box-02) was killed by SIGKILL"] == [
            told[name] for name in ("status", "healthy", "reason")
        ]
        refused = http.post("/query", json={"text": "a"})
        assert 503 == refused.status_code
        assert "rank 2 (stage, box-02) was killed by SIGKILL" == json.loads(refused.text)["error"]
        assert "\nttlaunch_serve_healthy 0\n" in http.get("/metrics").text
