"""Runs are launched, stopped and resumed from a page that may do so, after the checks of the command line; others have no such routes (X6)."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import httpx
import pytest
from starlette.testclient import TestClient
from typer.testing import CliRunner

from tests.dashboard.made_run import MadeRun
from ttlaunch import contract
from ttlaunch.cli.main import make_app
from ttlaunch.dashboard.actions import Actions, takes_plain_values
from ttlaunch.dashboard.application import make_application
from ttlaunch.dashboard.reading import Reading
from ttlaunch.running.runs.launcher import read_launcher, write_launcher
from ttlaunch.spec.recipe.discovery import list_recipes, load_recipe
from ttlaunch.spec.recipe.shared import settable_keys
from ttlaunch.web.addresses import LOOPBACK

KEY = "k" * 43
BEARER = {"authorization": f"Bearer {KEY}"}
PATHS = ("/api/actions/launch", "/api/runs/x/stop", "/api/runs/x/resume")
SMALL = {"training_config.steps": 2, "transformer_config.embedding_dim": 16, "training_config.validation_interval": 2}


@pytest.fixture
def runs(tmp_path):
    (tmp_path / "runs").mkdir()
    return tmp_path / "runs"


@pytest.fixture
def offer(runs):
    """`offer(actions)`: a browser on this machine."""

    def client(actions):
        application = make_application(Reading(runs), names=LOOPBACK, key=KEY, actions=actions)
        return TestClient(application, base_url="http://127.0.0.1:8765")

    return client


@pytest.fixture
def client(offer, runs):
    return offer(Actions(runs))


def launch(client, **order):
    return client.post("/api/actions/launch", json=order, headers=BEARER)


def refused(answer):
    assert 422 == answer.status_code, answer.text
    return answer.json()["diagnostics"][0]["text"]


def test_a_page_that_only_reads_has_no_routes_for_actions(offer):
    client = offer(None)
    assert 404 == client.get("/api/actions", headers=BEARER).status_code
    assert {404, 405} >= {client.post(path, json={}, headers=BEARER).status_code for path in PATHS}
    assert client.get("/api/about", headers=BEARER).json()["may_act"] is False


@pytest.mark.parametrize("path", PATHS)
def test_an_order_without_the_key_or_from_another_origin_or_of_a_form_is_refused(client, path):
    assert 401 == client.post(path, json={}).status_code
    assert 403 == client.post(path, json={}, headers={**BEARER, "origin": "http://evil.example"}).status_code
    form = {**BEARER, "content-type": "application/x-www-form-urlencoded"}
    assert 415 == client.post(path, content="recipe=zero", headers=form).status_code


@pytest.mark.parametrize("recipe", ["../zero", "/etc", ".", "", None, 7, "train.py", ["zero"], "serve2"])
def test_only_recipes_that_are_allowed_are_started(client, runs, recipe):
    assert "the page may start no recipe" in refused(launch(client, recipe=recipe))
    assert [] == [*runs.iterdir()]


def test_recipes_of_a_folder_are_allowed_by_naming_it(offer, runs, tmp_path):
    mine = tmp_path / "recipes" / "mine"
    mine.mkdir(parents=True)
    (mine / "recipe.py").write_text("RECIPE = 1\n")
    assert "no recipe `mine`" in refused(launch(offer(Actions(runs)), recipe="mine"))
    assert "[P006]" in refused(launch(offer(Actions(runs, tmp_path / "recipes")), recipe="mine"))


TEXTS = [
    (found.name, key)
    for found in list_recipes(Path("/nonexistent"))
    for key, field in settable_keys(load_recipe(found)).items()
    if "str" in str(field.annotation)
]


def test_no_key_that_takes_a_text_can_be_set_such_as_a_path(client, runs):
    assert {"training_config.data_path", "training_config.tokenizer_path", "checkpoint_config.initial_weights"} <= {
        key for _, key in TEXTS
    }
    for recipe, key in TEXTS:
        assert "cannot be set from the page" in refused(launch(client, recipe=recipe, set={key: "/etc/passwd"})), key
    section = launch(client, recipe="zero", set={"training_config": "{data_path: /etc/passwd}"})
    assert "cannot be set from the page" in refused(section)
    assert [] == [*runs.iterdir()]


def test_the_form_offers_no_key_that_cannot_be_set(client):
    offered = client.get("/api/actions", headers=BEARER).json()
    assert {(one["name"], key["key"]) for one in offered["recipes"] for key in one["keys"]}.isdisjoint(TEXTS)
    assert "data_parallel" in [one["name"] for one in offered["recipes"]]
    assert "serve" not in [one["name"] for one in offered["recipes"]]
    assert not takes_plain_values(str | None)
    assert takes_plain_values(int | None)


@pytest.mark.parametrize("setting", ["training_config.stps=3", "training_config.steps=-1", "training_config.steps=x y"])
def test_a_mistake_in_the_form_is_told_in_the_words_of_the_command_line(client, runs, setting):
    key, _, value = setting.partition("=")
    told = CliRunner().invoke(make_app("plan"), ["plan", "data_parallel", "--set", setting])
    assert refused(launch(client, recipe="data_parallel", set={key: value})).strip() in told.stderr
    assert [] == [*runs.iterdir()]


@pytest.mark.parametrize(
    "order",
    [
        {"ranks": "-1"},
        {"ranks": "many"},
        {"ranks": 10**9},
        {"on": "/etc"},
        {"on": "../local"},
        {"set": ["a=b"]},
        {"set": {"training_config.steps": "1\n--on"}},
    ],
)
def test_an_order_of_another_form_is_refused(client, runs, order):
    assert "error[" in refused(launch(client, recipe="data_parallel", **order))
    assert [] == [*runs.iterdir()]


@pytest.mark.parametrize("body", [b"[]", b"{", b"\xff", b"[" * 5000])
def test_an_order_that_is_no_object_is_refused(client, body):
    answer = client.post("/api/actions/launch", content=body, headers={**BEARER, "content-type": "application/json"})
    assert 422 == answer.status_code


def test_a_run_that_has_ended_is_not_stopped_and_one_that_goes_on_is_not_resumed(client, runs):
    ended = MadeRun(runs / "2026-01-01T00-00-00-aaaa")
    ended.end()
    assert "is not running here" in refused(client.post(f"/api/runs/{ended.path.name}/stop", json={}, headers=BEARER))
    assert "another one than the `data_parallel`" in refused(
        client.post(f"/api/runs/{ended.path.name}/resume", json={}, headers=BEARER)
    )
    running = MadeRun(runs / "2026-01-01T00-00-01-bbbb")
    write_launcher(running.path)  # this process
    assert "still running" in refused(client.post(f"/api/runs/{running.path.name}/resume", json={}, headers=BEARER))
    assert 404 == client.post("/api/runs/nobody/stop", json={}, headers=BEARER).status_code


def eventually(what, *, within_s=60):
    until = time.monotonic() + within_s
    while not (found := what()) and time.monotonic() < until:
        time.sleep(0.1)
    return found


@pytest.mark.mpi
def test_a_run_is_launched_stopped_as_ctrl_c_does_and_resumed_and_its_history_says_from_where(client, runs):
    many = {**SMALL, "training_config.steps": 100_000}
    answer = launch(client, recipe="data_parallel", ranks=1, set=many)
    assert 200 == answer.status_code, answer.text
    run = runs / answer.json()["run"]
    state = lambda: client.get(f"/api/runs/{run.name}", headers=BEARER).json()  # noqa: E731 - asked again and again
    assert eventually(lambda: state()["rank_states"][0]["step"] > 0)
    assert os.getsid(read_launcher(run).pid) != os.getsid(0)  # the end of the page's session is not that of the run
    assert 200 == client.post(f"/api/runs/{run.name}/stop", json={}, headers=BEARER).status_code
    assert eventually((run / "report.json").is_file)
    assert "interrupted" == json.loads((run / "report.json").read_text())["status"]
    assert ["launch", "stop"] == [
        one["text"].split(",")[0].split()[1] for one in state()["events"] if one["event"] == "action"
    ]
    answer = client.post(f"/api/runs/{run.name}/resume", json={}, headers=BEARER)
    assert 200 == answer.status_code, answer.text
    second = answer.json()["run"]
    assert 200 == client.post(f"/api/runs/{second}/stop", json={"now": True}, headers=BEARER).status_code
    assert eventually((runs / second / "report.json").is_file)
    assert eventually(lambda: client.get(f"/api/runs/{second}", headers=BEARER).json()["results"]["began_from"])


@pytest.mark.mpi
def test_a_run_goes_on_when_the_page_that_launched_it_is_killed_with_all_of_its_processes(runs, ttlaunch):
    words = [sys.executable, "-m", "ttlaunch", "dashboard", "--port", "0", "--allow-actions", "--runs-dir", str(runs)]
    order = {"recipe": "data_parallel", "ranks": 1, "set": {**SMALL, "training_config.steps": 100_000}}
    with subprocess.Popen(words, cwd=runs.parent, stdout=subprocess.PIPE, text=True, start_new_session=True) as page:
        try:
            printed = "".join(page.stdout.readline() for _ in range(3))
            url, key = re.search(r"open (\S+)#key=(\S+)", printed).groups()
            headers = {"authorization": f"Bearer {key}"}
            answer = httpx.post(
                f"{url}api/actions/launch", json=order, headers=headers, trust_env=False, timeout=120
            ).json()
            run = runs / answer["run"]
            assert eventually(lambda: steps_of(run) > 0)
        finally:
            os.killpg(page.pid, signal.SIGKILL)
    before = steps_of(run)
    try:
        assert eventually(lambda: steps_of(run) > before + 20)
        assert read_launcher(run).is_alive
    finally:
        assert 0 == ttlaunch(f"stop {run}").status
    assert "interrupted" == json.loads((run / "report.json").read_text())["status"]


def steps_of(run):
    progress = run / contract.progress_file(0)
    return progress.read_bytes().count(b'"step"') if progress.exists() else 0
