"""The chat's own routes, over HTTP, against a head that answers with the first letter of its prompt (D13)."""

import json
import threading

import httpx
import pytest

from tests.serving.served import events, serving, until
from ttlaunch.serving.receipt import hash_tokens

TIMES = ("total_time_ms", "time_to_first_token_ms", "tokens_per_second")


@pytest.fixture(scope="module")
def both(tmp_path_factory):
    with serving(tmp_path_factory.mktemp("served")) as both:
        yield both


@pytest.fixture
def http(both):
    return both[1]


def chat(http, **body):
    with http.stream("POST", "/chat", json=body) as response:
        assert 200 == response.status_code, response.read()
        assert response.headers["content-type"].startswith("text/event-stream")
        return list(events(response))


def metric(http, name):
    found = [line.split()[1] for line in http.get("/metrics").text.splitlines() if line.startswith(f"{name} ")]
    return float(found[0])


def test_the_routes_without_a_body_answer_as_the_document_says(both):
    served, http = both
    assert {"status": "ok", "service": "ttlaunch serve"} == http.get("/").json()
    assert {"status": "connected", "healthy": True} == http.get("/health").json()
    assert {"enabled": True, "backend": "process", "error": None} == http.get("/memory/status").json()
    config = http.get("/config").json()
    assert served.ports["api_port"] == config["api_port"]
    assert served.ports["port"] == config["frontend_port"]
    assert ["echo", [0, 1, 2], "stages"] == [config[key] for key in ("model_name", "available_worker_ranks", "split")]
    assert str(served.socket) not in json.dumps(config)


def test_a_chat_streams_its_tokens_and_ends_with_its_figures(http):
    *tokens, last = chat(http, text="a", max_tokens=6, decoding_strategy="greedy", seed=5, use_memory=False)
    assert [{"token": "a", "done": False}] * 6 == tokens
    for name in TIMES:
        assert last.pop(name) >= 0
    assert {
        "done": True,
        "full_text": "aaaaaa",
        "worker_rank": 0,
        "num_tokens": 6,
        "seed": 5,
        "tokens_sha256": hash_tokens([97] * 6),
        "finish_reason": "length",
    } == last


def test_a_query_answers_at_once_and_a_receipt_comes_with_it(http):
    answer = http.post("/query", json={"text": "b", "max_tokens": 4, "seed": 1, "receipt": True}).json()
    for name in TIMES:
        assert answer.pop(name) >= 0
    receipt = answer.pop("receipt")
    assert [98] == receipt["prompt_tokens"]
    assert answer["tokens_sha256"] == receipt["tokens_sha256"]
    assert "bbb" == answer["generated_text"][:3]
    assert [True, None, 0, 4] == [answer[key] for key in ("success", "error", "worker_rank", "num_tokens")]


def test_a_drawn_seed_is_told_and_gives_the_same_text_again(http):
    first = http.post("/query", json={"text": "c", "max_tokens": 40}).json()
    again = http.post("/query", json={"text": "c", "max_tokens": 40, "seed": first["seed"]}).json()
    other = http.post("/query", json={"text": "c", "max_tokens": 40}).json()
    assert first["generated_text"] == again["generated_text"]
    assert first["generated_text"] != other["generated_text"]


def test_characters_of_several_bytes_are_never_halved(http):
    *tokens, last = chat(http, text="é", max_tokens=3, decoding_strategy="greedy")
    assert "" == last["full_text"]  # the head repeats the first byte only, which is never a whole character
    assert [] == tokens


def test_a_session_is_remembered_in_order_and_cleared(http):
    """D15."""
    assert "turns" == chat(http, text="turns", max_tokens=1, session_id="s-1")[-1]["full_text"].replace("t", "turns")
    chat(http, text="again", max_tokens=1, session_id="s-1")
    chat(http, text="other", max_tokens=1, session_id="s-2")
    history = http.get("/memory/history", params={"session_id": "s-1", "limit": 3}).json()
    assert ["t", "again", "t"] == [
        one["content"] for one in history["messages"]
    ]  # the chat's first letter is still `t`
    assert ["assistant", "user", "assistant"] == [one["role"] for one in history["messages"]]
    assert {"enabled": True, "cleared": 1} == http.post("/memory/clear", json={"session_ids": ["s-1", "none"]}).json()
    assert [] == http.get("/memory/history", params={"session_id": "s-1"}).json()["messages"]
    assert 2 == len(http.get("/memory/history", params={"session_id": "s-2"}).json()["messages"])


def test_a_chat_without_a_session_gets_one_that_nobody_can_guess(http):
    one, other = (chat(http, text="x", max_tokens=1)[-1]["session_id"] for _ in range(2))
    assert one != other
    assert 32 == len(one)
    assert 2 == len(http.get("/memory/history", params={"session_id": one}).json()["messages"])


def test_a_chat_that_outgrows_the_context_forgets_its_oldest_turns(http):
    forgotten = [chat(http, text="y" * 150, max_tokens=2, session_id="long")[-1]["forgotten_turns"] for _ in range(5)]
    assert [0, 0, 0, 2, 2] == forgotten


def test_earlier_turns_give_way_to_an_answer_that_would_end_at_once(http):
    """Two texts of 150 and an answer of 200 tokens fit into a context of 512, and would leave the next answer 10."""
    lasts = [chat(http, text="y" * 150, max_tokens=200, session_id="room")[-1] for _ in range(3)]
    assert [(0, 200), (2, 200), (2, 200)] == [(last["forgotten_turns"], last["num_tokens"]) for last in lasts]


@pytest.mark.parametrize(
    ("body", "status", "expected"),
    [
        ({"text": "a", "temprature": 1}, 422, "`temprature`: is not a known key; did you mean `temperature`?"),
        ({"text": "a", "temperature": -1}, 422, "`temperature`: expected a number from 0 to 100"),
        ({"text": "a" * 600}, 400, "the prompt does not fit into the context (prompt_tokens: 600) (context: 512)"),
        ({"text": "\ud800"}, 422, "`text`: expected a text without lone surrogates"),
        ({"messages": []}, 422, "`messages`: expected at least one message"),
        ({"text": ""}, 422, "the prompt is empty"),
        ({}, 422, "`text`: expected exactly one of `text` and `messages`"),
        (
            {"messages": [{"role": "root", "content": "a"}]},
            422,
            "`messages[0].role`: expected one of system, user, assistant",
        ),
        (
            {"text": "a", "decoding_strategy": "top_k"},
            422,
            "`top_k`: `decoding_strategy` is top_k, which needs a `top_k` of at least 1",
        ),
        ([], 422, "expected an object"),
    ],
    ids=lambda one: str(one)[:40],
)
@pytest.mark.parametrize("route", ["/chat", "/query"])
def test_wrong_asks_are_refused_with_place_and_rule(http, route, body, status, expected):
    answer = http.post(route, content=json.dumps(body), headers={"content-type": "application/json"})
    assert (status, expected) == (answer.status_code, answer.json()["error"])


def test_a_body_that_is_not_json_and_a_route_that_is_not_there(http):
    answer = http.post("/chat", content=b"{", headers={"content-type": "application/json"})
    assert (400, "the body is not JSON") == (answer.status_code, answer.json()["error"])
    assert (404, "GET /nothing: Not Found") == ((answer := http.get("/nothing")).status_code, answer.json()["error"])
    assert (405, "GET /chat: Method Not Allowed") == ((answer := http.get("/chat")).status_code, answer.json()["error"])


def test_a_rank_that_is_not_there_is_named(http):
    (event,) = chat(http, text="a", worker_rank=3)
    message = "there is no rank 3: this run has ranks 0 to 2, and all of them compute every answer"
    assert {"error": message, "done": True} == event
    assert 2 == chat(http, text="a", max_tokens=1, worker_rank=2)[-1]["worker_rank"]


def test_eight_chats_at_once_never_mix(both):
    """D15."""
    served, _ = both
    texts = {}

    def run(letter):
        with httpx.Client(base_url=served.url, timeout=60, trust_env=False) as http:
            texts[letter] = chat(http, text=letter * 9, max_tokens=200, decoding_strategy="greedy")[-1]["full_text"]

    threads = [threading.Thread(target=run, args=(letter,)) for letter in "ABCDEFGH"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert {letter: letter * 200 for letter in "ABCDEFGH"} == texts


@pytest.mark.parametrize("route", ["/chat", "/query", "/v1/completions"])
def test_a_client_that_leaves_ends_its_stream(both, route):
    served, http = both
    before = metric(http, "ttlaunch_serve_cancelled_total")
    body = {"prompt" if "v1" in route else "text": "z", "max_tokens": 500}
    with httpx.Client(base_url=served.url, trust_env=False) as leaving:
        if route == "/chat":
            with leaving.stream("POST", route, json=body) as response:
                next(events(response))
        else:
            with pytest.raises(httpx.ReadTimeout):
                leaving.post(route, json=body, timeout=0.2)
    until(lambda: before + 1 == metric(http, "ttlaunch_serve_cancelled_total"))
    until(lambda: 0 == metric(http, "ttlaunch_serve_streams"))


def test_metrics_are_lines_that_prometheus_reads(http):
    text = http.get("/metrics").text
    assert http.get("/metrics").headers["content-type"].startswith("text/plain; version=0.0.4")
    assert 'ttlaunch_serve_sent_bytes_total{from="0",to="1"} 4096' in text
    assert 'ttlaunch_serve_time_to_first_token_seconds_bucket{le="+Inf"} ' in text
    for line in text.splitlines():
        name, value = line.rsplit(" ", 1)
        assert line.startswith("# ") or (name.startswith("ttlaunch_serve_") and float(value) >= 0), line


def test_a_text_that_the_model_cannot_go_on_with_ends_with_the_reason_and_is_no_turn_of_the_chat(http):
    body = {"text": "?", "session_id": "broken-model", "use_memory": True, "max_tokens": 50}
    with http.stream("POST", "/chat", json=body) as response:
        *tokens, last = events(response)
    assert [1, 1, 1] == [len(one["token"]) for one in tokens]
    reason = "the model's logits are not numbers"
    assert {"error": reason, "done": True, "finish_reason": "error"} == last
    assert [] == http.get("/memory/history", params={"session_id": "broken-model"}).json()["messages"]
    answer = http.post("/query", json=body)
    assert (503, False, reason) == (answer.status_code, *(answer.json()[name] for name in ("success", "error")))
    asked = {"model": "echo", "prompt": "?", "max_tokens": 50}
    answer = http.post("/v1/completions", json=asked)
    assert (503, reason) == (answer.status_code, answer.json()["error"]["message"])
    with http.stream("POST", "/v1/completions", json={**asked, "stream": True}) as response:
        *_, last = events(response)
    assert reason == last["error"]["message"]
