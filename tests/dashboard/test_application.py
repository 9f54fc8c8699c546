"""The dashboard's server refuses every method but GET and HEAD, a wrong key and a wrong host; hostile names and lines are data (X4, X5)."""

import json
from contextlib import suppress
from urllib.parse import quote

import pytest
from starlette.testclient import TestClient
from typer.testing import CliRunner

from tests.dashboard.made_run import HOSTILE, elastic_run
from ttlaunch.cli.main import make_app
from ttlaunch.dashboard.application import make_application
from ttlaunch.dashboard.page import CONTENT_SECURITY_POLICY, page_files
from ttlaunch.dashboard.reading import Reading
from ttlaunch.web.addresses import LOOPBACK

KEY = "k" * 43
BEARER = {"authorization": f"Bearer {KEY}"}
METHODS = ("POST", "PUT", "PATCH", "DELETE", "OPTIONS", "CONNECT", "TRACE", "PROPFIND")


@pytest.fixture
def client(tmp_path):
    """A browser on this machine, without the key."""
    (tmp_path / "runs").mkdir()
    application = make_application(Reading(tmp_path / "runs"), names=LOOPBACK, key=KEY)
    with TestClient(application, base_url="http://127.0.0.1:8765") as client:
        yield client


def get(client, path):
    answer = client.get(path, headers=BEARER)
    assert 200 == answer.status_code, answer.text
    return answer.json()


def every_path():
    """Those of the whole application, whoever has added them."""
    reading = Reading.__new__(Reading)  # only its routes are asked for
    guarded = make_application(reading, names=LOOPBACK, key=KEY)
    return [route.path.replace("{run}", "x").replace("{code}", "R004") for route in guarded._app.routes]


def test_every_file_and_every_question_of_the_page_is_among_the_paths_that_are_tried():
    assert {*page_files(), "/api/runs", "/api/runs/x/events", "/api/explain/R004"} <= {*every_path()}


@pytest.mark.parametrize("path", every_path())
def test_nothing_can_be_changed_with_any_method_and_everything_but_the_pages_files_needs_the_key(client, path):
    for method in METHODS:
        assert 405 == client.request(method, path, headers=BEARER).status_code, method
    is_file = path in page_files()
    assert (200 if is_file else 401) == client.get(path).status_code
    assert (200 if is_file else 401) == client.get(path, headers={"authorization": "Bearer wrong"}).status_code


@pytest.mark.parametrize("host", ["evil.example", "127.0.0.1.evil.example:8765", "10.0.0.5:8765", ""])
def test_a_name_that_is_not_this_machines_is_refused_whatever_it_resolves_to(client, host):
    assert 421 == client.get("/api/runs", headers={**BEARER, "host": host}).status_code


@pytest.mark.parametrize("origin", ["null", "http://evil.example", "http://127.0.0.1:9999"])
def test_no_answer_lets_a_page_of_another_origin_read_it(client, origin):
    answer = client.get("/api/runs", headers={**BEARER, "origin": origin})

    assert not [name for name in answer.headers if name.startswith("access-control")]
    assert "same-origin" == answer.headers["cross-origin-resource-policy"]
    assert "DENY" == answer.headers["x-frame-options"]


def test_the_page_may_load_only_its_own_files_and_no_inline_code(client):
    answer = client.get("/")

    assert CONTENT_SECURITY_POLICY == answer.headers["content-security-policy"]
    assert "script-src 'self'" in CONTENT_SECURITY_POLICY
    assert "unsafe" not in CONTENT_SECURITY_POLICY
    assert "<script>" not in answer.text
    assert " on" not in answer.text.replace(" once", "")


@pytest.mark.parametrize("run", ["..", ".", "../runs", "/etc", "", "a\0b", ".hidden", "nowhere", "x/../run"])
def test_only_runs_of_the_folder_can_be_named(tmp_path, client, run, make_run):
    make_run(".hidden")
    assert Reading(tmp_path / "runs").catalogue.find(run) is None
    assert client.get(f"/api/runs/{quote(run, safe='') or 'x'}/logs", headers=BEARER).status_code == 404


def test_a_run_with_a_hostile_name_and_hostile_lines_is_shown_as_text(client, make_run):
    run = make_run(HOSTILE, name=HOSTILE)
    run.print(0, f"<script>document.title=1</script>\x1b]0;owned\x07{HOSTILE}\u202e\n")
    name = quote(run.path.name, safe="")

    assert [HOSTILE] == [one["name"] for one in get(client, "/api/runs")["runs"]]
    assert HOSTILE == get(client, f"/api/runs/{name}")["name"]
    (line,) = get(client, f"/api/runs/{name}/logs")["lines"]
    assert "\x1b" not in line["text"]
    assert "<script>document.title=1</script>" in line["text"]


def test_a_run_and_its_report_are_those_of_the_command_line(client, make_run):
    run = make_run()
    run.steps(1, 12)
    run.telemetry(10)
    run.end()
    shown = get(client, f"/api/runs/{run.path.name}")
    printed = json.loads(CliRunner().invoke(make_app("report"), ["report", str(run.path), "--format", "json"]).stdout)
    for name in ("schema", "diagnostics", "verdict"):  # the page predicts nothing, which takes seconds of a processor
        del printed[name]

    assert printed == shown["report"]
    listed = get(client, "/api/runs")["runs"][0]
    ps = CliRunner().invoke(make_app("ps"), ["ps", "--all", "--runs-dir", str(run.path.parent), "--format", "json"])
    row = next(one for one in json.loads(ps.stdout)["runs"] if one["folder"] == str(run.path))
    for name in ("run_id", "name", "state", "step", "total_steps", "loss", "ranks"):
        assert row[name] == listed[name]
    assert {1, 12} <= {step for step, _ in listed["curve"]}


def test_the_timeline_has_the_last_steps_with_their_phases(client, make_run):
    run = make_run()
    run.steps(1, 30)
    run.telemetry(30)
    ranks = get(client, f"/api/runs/{run.path.name}/steps?last=5")["ranks"]

    assert [[26, 27, 28, 29, 30]] * 2 == [[one["step"] for one in rank["steps"]] for rank in ranks]
    last = ranks[0]["steps"][-1]
    assert {"forward": 0.06, "backward": 0.09, "update": 0.009} == last["phases"]
    assert (0.25, {"gradients": 0.015}) == (last["end"] - last["begin"], last["waits"])


def test_two_runs_differ_as_the_command_line_says(client, make_run):
    one, two = make_run(), make_run("2026-01-01T00-00-01-bbbb")
    one.steps(1, 3)
    two.steps(1, 3)
    (two.path / "train.yaml").write_text("training_config:\n  seed: 1  # --set\n")
    shown = get(client, f"/api/runs/{two.path.name}/differences?from={one.path.name}")
    printed = json.loads(
        CliRunner().invoke(make_app("diff"), ["diff", str(one.path), str(two.path), "--format", "json"]).stdout
    )

    del printed["schema"]
    assert printed == shown


@pytest.mark.parametrize(
    ("query", "status"),
    [("before=x", 422), ("level=loud", 422), ("after=9999999.5", 200), ("ranks=7,x", 200), ("lines=999999999", 200)],
)
def test_a_query_that_makes_no_sense_is_refused_or_finds_nothing(client, make_run, query, status):
    run = make_run()
    run.print(0, "one\n")
    answer = client.get(f"/api/runs/{run.path.name}/logs?{query}", headers=BEARER)

    assert status == answer.status_code
    if status == 422:
        assert answer.json()["error"].startswith("the run cannot be read")


def test_a_folder_whose_plan_is_none_is_reported_and_does_not_hide_the_others(client, make_run):
    run, broken = make_run(), make_run("2026-01-01T00-00-02-cccc")
    (broken.path / "plan.json").write_text("[]")

    assert {run.path.name, broken.path.name} == {one["run_id"] for one in get(client, "/api/runs")["runs"]}
    assert 422 == client.get(f"/api/runs/{broken.path.name}", headers=BEARER).status_code


def test_members_and_waits_of_a_run_that_lasts_are_those_of_the_report_of_the_command_line(tmp_path, client):
    run = elastic_run(tmp_path / "runs" / "2026-01-01T00-00-08-eeee")
    facts, waits = (get(client, f"/api/runs/{run.path.name}{part}") for part in ("", "/waits"))
    printed = CliRunner().invoke(
        make_app(), ["report", str(run.path), "--format", "json", "--runs-dir", str(tmp_path / "runs")]
    )
    report = json.loads(printed.stdout)

    assert report["epochs"] == facts["report"]["epochs"]
    assert [[0, 1], [0], [0, 2]] == [epoch["members"] for epoch in report["epochs"]]
    assert [None, 0.078, None] == [epoch.get("pause_s") for epoch in report["epochs"]]
    names = ("rank", "state", "waits_for", "operation")
    assert [[one[name] for name in names] for one in report["waits"]] == [
        [one[name] for name in names] for one in waits["waits"]
    ]
    assert (0, "waits for rank 2", [2], "recv of 8 bytes, gradients, tag 7, step 3") == tuple(
        report["waits"][0][name] for name in names
    )

    run.end()
    assert {"waits": []} == get(client, f"/api/runs/{run.path.name}/waits")


def test_a_folder_whose_name_is_no_utf_8_and_half_a_character_in_a_plan_hide_no_other_run(tmp_path, client, make_run):
    whole, broken = make_run(), make_run("2026-01-01T00-00-02-cccc", name="half \ud800", hosts=["a\udfff", "b"])
    broken.record(0, kind="note", time=1e9, text="\udcff")
    with suppress(OSError):  # of a file system that takes only UTF-8
        make_run("a\udcff")
    assert {whole.path.name, broken.path.name} <= {one["run_id"] for one in get(client, "/api/runs")["runs"]}
    for part in ("", "/numbers", "/steps", "/waits", "/cluster", "/logs"):
        assert get(client, f"/api/runs/{broken.path.name}{part}") is not None
    assert "half \\ud800" == get(client, f"/api/runs/{broken.path.name}")["name"]
