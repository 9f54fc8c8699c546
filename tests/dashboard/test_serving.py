"""A serving run on the page: what its ranks wrote last, and its own chat page, which no file of a stranger can replace."""

import json

import pytest

from tests.dashboard.made_run import DOOR, MadeRun, serving_run
from ttlaunch import contract
from ttlaunch.dashboard.reading import Reading
from ttlaunch.running.metrics.served import served_work
from ttlaunch.running.metrics.telemetry import read_telemetry
from ttlaunch.running.runs.facts import DOOR_FILE


@pytest.fixture
def run(tmp_path):
    return serving_run(tmp_path / "runs" / "2026-01-01T00-00-00-aaaa")


def serving(run):
    return Reading(run.path.parent).serving(run.path.name)


def test_the_newest_numbers_of_each_rank_are_those_of_the_report(run):
    with (run.path / contract.traffic_file(0)).open("a") as file:
        file.write('{"format": 1, "last"')  # is being written
    whole = served_work(read_telemetry(run.path, world_size=2))
    assert whole.as_json() == serving(run)["served"]
    assert (5, 210, 2, 1) == (whole.texts, whole.tokens, whole.open_texts, whole.waiting_texts)


def test_a_run_that_has_written_nothing_yet_has_no_numbers(tmp_path):
    run = MadeRun(tmp_path / "runs" / "2026-01-01T00-00-00-aaaa", name="serve", roles=("head",))
    assert {"served": None, "time": 0.0, "is_running": False, "chat": None} == serving(run)


def test_the_chat_is_a_link_only_while_the_run_is_active(run):
    assert DOOR == serving(run)["chat"]
    run.end()
    assert serving(run)["chat"] is None


@pytest.mark.parametrize(
    "address",
    [
        "http://203.0.113.7:5050",  # an address that this machine cannot have
        "http://evil.example:5050",
        "http://127.0.0.1:5050/path",
        "http://user@127.0.0.1:5050",
        "http://127.0.0.1:5050#key=a",
        "https://127.0.0.1:5050",
        "javascript:alert(1)",
        "http://127.0.0.1",
        "http://127.0.0.1:0",
        "http://127.0.0.1:99999",
        "http://[::1:5050",
        "http://127.1:5050",
        7,
    ],
)
@pytest.mark.parametrize("name", ["page", "api"])
def test_a_folder_of_a_stranger_cannot_send_the_reader_to_another_page(run, name, address):
    (run.path / DOOR_FILE).write_text(json.dumps({**DOOR, name: address}))
    assert serving(run)["chat"] is None
