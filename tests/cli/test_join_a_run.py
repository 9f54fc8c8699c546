"""A worker of another machine in a real run: it gets the state from the others, makes steps with them, and the bits stay the same."""

import json
import os
import socket
import subprocess
import sys
import time

import pytest

from tests.changed_recipes import slow_recipe
from tests.security.listeners import places_of
from ttlaunch import contract
from ttlaunch.agent.run_processes import processes_of_runs

pytestmark = pytest.mark.slow

SOON_S = 240.0
STEPS = "training_config.steps=100"
"""At the slow pace most of a minute: a worker that imports torch meanwhile joins a run that is not over."""


def command(*words, folder, **options):
    return subprocess.Popen(
        [sys.executable, "-m", "ttlaunch", *words],
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "NO_COLOR": "1"},
        **options,
    )


def answer(*words, folder):
    process = command(*words, folder=folder)
    stdout, stderr = process.communicate(timeout=SOON_S)
    assert process.returncode == 0, stderr
    return json.loads(stdout)


def wait(happened):
    deadline = time.monotonic() + SOON_S
    while not happened():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.5)  # some of what is looked at takes a command, and the workers need the cores


@pytest.fixture
def run(tmp_path):
    """An elastic run in the background that takes workers on loopback and is slow until `quick` is there, and its folder."""
    slow_recipe(tmp_path)
    process = command(
        *("run", "mine", "-n", "2", "--elastic", "1:3", "--coordinator", "127.0.0.1:0", "--set", STEPS),
        *("--format", "json"),
        folder=tmp_path,
    )
    try:
        wait(lambda: list(tmp_path.glob(f"runs/*/{contract.COORDINATOR_FILE}")) or process.poll() is not None)
        assert process.poll() is None, process.communicate()
        yield process, next(tmp_path.glob(f"runs/*/{contract.COORDINATOR_FILE}")).parent
    finally:
        process.terminate()
        process.communicate()


def test_a_worker_that_joins_changes_no_bit(run, tmp_path):
    process, folder = run
    invitation = answer("workers", "latest", "--invite", "--format", "json", folder=tmp_path)["invitation"]
    elsewhere = tmp_path / "another machine"
    elsewhere.mkdir()
    slow_recipe(elsewhere)
    (elsewhere / "token").write_text(invitation["token"])
    joining = command("join", invitation["url"], "--token-file", "token", "--format", "json", folder=elsewhere)
    listed = {}

    def takes_part():
        journal = folder / "members.jsonl"  # there once the run has begun
        lines = journal.read_text().splitlines() if journal.exists() else []
        if [0, 1, 34] not in [json.loads(line).get("members") for line in lines]:
            return False
        found = answer("workers", "latest", "--format", "json", folder=tmp_path)["workers"]
        listed.update({one["worker_id"]: one for one in found})
        return [one for one in found if one["worker_id"] == "worker-0034" and one["rank"] == 2]

    wait(takes_part)
    ours = [pid for pid, run_id in processes_of_runs() if run_id == folder.name]
    found = {str(getattr(address, "ipv4_mapped", None) or address) for address, _ in places_of(ours)}
    assert found == {"127.0.0.1"}
    for place in (tmp_path, elsewhere):
        (place / "quick").touch()
    stdout, stderr = process.communicate(timeout=SOON_S)
    joined, said = joining.communicate(timeout=SOON_S)
    assert process.returncode == 0, stderr
    assert joining.returncode == 0, said
    assert json.loads(joined)["outcome"] == "done"
    assert listed["worker-0034"]["memory_bytes"] > 0
    journal = [json.loads(line) for line in (folder / "members.jsonl").read_text().splitlines()]
    assert [0, 1, 34] in [entry.get("members") for entry in journal]
    metrics = [json.loads(line) for line in (folder / contract.METRICS_FILE).read_text().splitlines()]
    steps = [event["step"] for event in metrics if event.get("rank") == 34 and event["kind"] == "step"]
    [summary] = [row for row in json.loads(stdout)["ranks"] if row["rank"] == 34]
    assert (max(steps), "worker") == (summary["step"], summary["role"])
    assert any(event.get("rank") == 34 and event["kind"] == "usage" for event in metrics)
    assert any(event.get("rank") == 0 and event["kind"] == "usage" for event in metrics)
    alone = answer("run", "mine", "-n", "1", "--set", STEPS, "--format", "json", folder=elsewhere)
    assert json.loads(stdout)["parameters_sha256"] == alone["parameters_sha256"]


@pytest.mark.parametrize("place", ["192.0.2.1:7000", "127.0.0.1:{taken}"])
def test_an_address_that_cannot_be_used_is_refused_before_the_run_has_a_folder(ttlaunch, here, place):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        place = place.format(taken=taken.getsockname()[1])
        answer = ttlaunch(f"run data_parallel -n 2 --elastic 1:2 --coordinator {place}")
    expected = f"error[P082]: `--coordinator {place}` cannot be used: "
    assert (2, expected) == (answer.status, answer.stderr[: len(expected)])
    assert [] == list(here.glob("runs/*"))


def test_loopback_is_refused_where_ranks_are_on_other_hosts(ttlaunch, here):
    (here / "hosts.txt").write_text("far.example slots=2\n")
    answer = ttlaunch("run data_parallel --hostfile hosts.txt -n 2 --elastic 1:2 --coordinator 127.0.0.1:0")
    expected = (
        "error[P082]: `--coordinator 127.0.0.1:0` can be reached from no other machine, and the ranks are on hosts"
    )
    assert (2, expected) == (answer.status, answer.stderr.splitlines()[0])
    assert [] == list(here.glob("runs/*"))
