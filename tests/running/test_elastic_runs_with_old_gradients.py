"""Elastic runs whose gradients may be old: each task counts once, all workers end equal, and `repro` gets the same bits."""

import os
import random
import signal
import subprocess
import sys
import time
from collections import defaultdict

import pytest

from tests.changed_recipes import slow_recipe
from tests.running.test_elastic_runs import MOST_S, running
from ttlaunch import contract

pytestmark = pytest.mark.mpi

STEPS, LONG = 40, 60
SMALL = {"transformer_config.num_blocks": 1, "transformer_config.embedding_dim": 16, "training_config.batch_size": 4}
SMALL |= {"training_config.micro_batch_size": 1, "training_config.validation_interval": LONG}


def options(settings):
    return [
        word
        for key, value in ({"training_config.steps": STEPS} | settings).items()
        for word in ("--set", f"{key}={value}")
    ]


def updates_of(run):
    """What was recorded of each update, in the latest epoch that made it; those that recorded it then agree."""
    found = defaultdict(lambda: defaultdict(list))
    for file in sorted(run.folder.glob("records/rank-*.progress.jsonl")):
        for record in map(contract.read_record, file.read_text().splitlines()):
            if record and record["kind"] == contract.KIND_UPDATE:
                found[record["step"]][record["epoch"]].append((record["task"], record["parts"]))
    latest = {step: epochs[max(epochs)] for step, epochs in found.items()}
    assert {} == {step: others for step, others in latest.items() if any(one != others[0] for one in others)}
    return {step: others[0] for step, others in latest.items()}


def assert_each_task_counts_once(run, *, steps=STEPS, bound=None):
    updates = updates_of(run)
    assert list(range(1, steps + 1)) == sorted(updates)
    assert list(range(1, steps + 1)) == sorted(task for task, _ in updates.values())
    for step, (_, parts) in updates.items():
        covered = [index for first, stop, _ in parts for index in range(first, stop)]
        assert list(range(len(covered))) == covered
        assert all(0 <= version < step for _, _, version in parts)
        assert bound is None or all(step - 1 - version <= bound for _, _, version in parts)
    return updates


def repeated(run):
    """Repeat a run, and return whether its bits were the same."""
    name = run.folder.name
    command = [sys.executable, "-m", "ttlaunch", "repro", name]
    done = subprocess.run(command, cwd=run.here, capture_output=True, text=True, timeout=MOST_S, check=False)
    return done.returncode == 0 and f"same bits as     {name}" in done.stdout, done.stderr


def kill(run, victim, *, step, chance):
    """Kill a worker's process at a random instant soon after a step."""
    run.until(lambda: run.step() >= step)
    time.sleep(chance.uniform(0, 0.1))
    os.kill(run.pid(victim), signal.SIGKILL)


@pytest.mark.parametrize(("bound", "kills"), [(1, {3: 0, 14: 2}), (3, {5: 1, 9: 0})])
def test_workers_that_lead_by_some_steps_are_lost(tmp_path, bound, kills):
    chance = random.Random(bound)  # noqa: S311 - the same instants every time
    settings = {"classic_dp_config.staleness_bound": bound, "training_config.validation_interval": 10}
    with running(tmp_path, *options(settings), recipe="classic_dp") as run:
        for step, victim in kills.items():
            kill(run, victim, step=step, chance=chance)
        report = run.report()
    assert ("done", True, STEPS) == (report["status"], report["parameters_agree"], report["steps"])
    assert list(kills.values()) == [entry["worker"] for entry in run.journal("lost")]
    assert len(report["epochs"]) > len(kills)
    updates = assert_each_task_counts_once(run, bound=bound)
    assert any(version < step - 1 for step, (_, parts) in updates.items() for _, _, version in parts)
    assert (True, "") == repeated(run)


def test_a_worker_that_comes_later_gets_the_weights_behind_old_gradients_and_takes_part(tmp_path):
    settings = {"classic_dp_config.staleness_bound": 2, "training_config.steps": LONG, **SMALL}
    slow_recipe(tmp_path, recipe="classic_dp")
    with running(tmp_path, *options(settings), recipe="mine", ranks=2, elastic="1:2") as run:
        run.until(lambda: run.step() >= 3)
        os.kill(run.pid(1), signal.SIGKILL)
        run.until(lambda: any(3 in entry["members"] for entry in run.journal("epoch")))
        (tmp_path / "quick").touch()
        first = run.step()
        run.until(lambda: run.step() > first + 5)
        os.kill(run.pid(0), signal.SIGKILL)  # now the weights are nowhere but in the one that has come
        report = run.report()
    assert ("done", LONG) == (report["status"], report["steps"])
    updates = assert_each_task_counts_once(run, steps=LONG, bound=2)
    assert {1, 2} == {len(parts) for _, parts in updates.values()}
    assert (True, "") == repeated(run)


@pytest.mark.parametrize("kills", [{3: 2}, {4: 1, 12: 3}])
def test_tasks_of_workers_that_are_killed_are_handed_out_again(tmp_path, kills):
    chance = random.Random(len(kills))  # noqa: S311 - the same instants every time
    with running(tmp_path, *options({}), recipe="elastic_dp", ranks=4, elastic="2:4") as run:
        for step, victim in kills.items():
            kill(run, victim, step=step, chance=chance)
        report = run.report()
    assert ("done", STEPS) == (report["status"], report["steps"])
    assert list(kills.values()) == [entry["worker"] for entry in run.journal("lost")]
    assert 1 <= report["results"]["tasks handed out again"] <= 2 * len(kills)
    updates = assert_each_task_counts_once(run)
    assert any(version < step - 1 for step, (_, parts) in updates.items() for _, _, version in parts)
    assert (True, "") == repeated(run)


@pytest.mark.parametrize("ranks", [2, 3])  # with 2, the server waits alone
def test_a_worker_that_comes_later_gets_weights_and_tasks_from_the_server(tmp_path, ranks):
    settings, later = {"training_config.steps": LONG, **SMALL}, ranks + 1
    slow_recipe(tmp_path, recipe="elastic_dp")
    with running(tmp_path, *options(settings), recipe="mine", ranks=ranks, elastic="2:3") as run:
        run.until(lambda: run.step() >= 3)
        os.kill(run.pid(1), signal.SIGKILL)
        came = lambda: any(later in entry["members"] for entry in run.journal("epoch"))  # noqa: E731
        run.until(came)
        (tmp_path / "quick").touch()
        report = run.report()
    assert ("done", LONG) == (report["status"], report["steps"])
    assert any(later in epoch["members"] for epoch in report["epochs"])
    lines = (run.folder / contract.progress_file(0)).read_text().splitlines()
    assert later in {record.get("arrived_from") for record in map(contract.read_record, lines) if record}
    assert_each_task_counts_once(run, steps=LONG)
    assert (True, "") == repeated(run)


def report_without_server(tmp_path, number):
    """The report of a run whose server got a signal after five steps, without which nobody can go on."""
    with running(tmp_path, *options({"training_config.steps": 4000}), recipe="elastic_dp", elastic="2:3") as run:
        run.until(lambda: run.step() >= 5)
        os.kill(run.pid(0), number)
        report = run.report()
    assert "stranded" == run.journal("stranded")[-1]["what"]
    return report


def test_a_run_whose_server_is_killed_ends_and_names_it(tmp_path):
    report = report_without_server(tmp_path, signal.SIGKILL)
    failure = report["failure"]
    assert ("failed", "R004", 0) == (report["status"], failure["code"], failure["rank"])


def test_a_run_whose_server_is_stopped_ends_and_names_it_and_not_who_killed_it(tmp_path):
    report = report_without_server(tmp_path, signal.SIGSTOP)
    failure = report["failure"]
    assert ("hung", 6, "R075", 0) == (report["status"], report["exit_status"], failure["code"], failure["rank"])
    assert failure["cause"].startswith("took the weights with it: it was killed because it made no progress for 5")
    assert ("hung", "localhost", "member") == (failure["class"], failure["host"], failure["role"])
