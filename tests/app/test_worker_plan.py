"""The plan of a worker that joins: the run's configuration, and this machine's recipe and text."""

import json
from pathlib import Path

import pytest

from ttlaunch.app.dialogue import Unattended
from ttlaunch.app.prepare_run import prepare
from ttlaunch.app.run_spec import RunSpec
from ttlaunch.app.worker_plan import numbered, plan_worker
from ttlaunch.diagnostics import LaunchError
from ttlaunch.records.coordinator import Fingerprint, GivenLimits, RunDescription
from ttlaunch.runtime.world import read_world

NONE = Fingerprint(release="", recipe="", config="", corpus="", torch="", cpu_capability="", threads=1)
TEXT = "To be, or not to be, that is the question.\n" * 400


def a_run(overrides=(), **changes):
    spec = RunSpec("data_parallel", ranks=2, elastic="1:4", overrides=overrides)
    prepared = prepare(spec, Unattended())
    known = {
        "run_id": "2026-11-23T10-00-00-abcd",
        "recipe": "data_parallel",
        "layout": prepared.plan.program.layout,
        "role": "worker",
        "config": prepared.resolved_config,
        "elastic": GivenLimits(minimum=1, maximum=4, micro_batches=4, first=2),
        "fingerprint": NONE,
    }
    return prepared.plan, RunDescription(**{**known, **changes})


def plan(run, **options):
    return plan_worker(run, Unattended(), working_folder=Path.cwd(), **options)


def refused(run, **options):
    with pytest.raises(LaunchError) as error:
        plan(run, **options)
    return error.value.diagnostics[0]


def test_a_worker_has_the_configuration_and_the_text_of_the_run():
    theirs, run = a_run(overrides=("training_config.steps=7", "training_config.learning_rate=0.00001"))
    ours = plan(run)
    assert ours.program.config == theirs.program.config
    assert ours.program.data == theirs.program.data
    assert ours.program.start is None


def test_a_numbered_worker_finds_itself_in_its_row(tmp_path):
    _, run = a_run()
    (tmp_path / "plan.json").write_text(json.dumps(numbered(plan(run), 68, host="worker-0068.gpu-09").as_json()))
    world = read_world(tmp_path / "plan.json")
    assert (world.roles[68], world.hosts[68], world.local_ranks[68]) == ("worker", "worker-0068.gpu-09", 0)
    assert world.is_elastic
    assert world.hosts[67] != world.hosts[68]


def test_a_text_that_lies_elsewhere_here_is_named_by_the_user(tmp_path):
    there, here = tmp_path / "there.txt", tmp_path / "it's here.txt"
    there.write_text(TEXT)
    theirs, run = a_run(overrides=(f"training_config.data_path={there}",))
    there.rename(here)
    missing = refused(run)
    assert missing.code == "C021"
    assert missing.hints[-1] == "`--data FILE` names the same text on this machine"
    assert plan(run, data=str(here)).program.data["sha256"] == theirs.program.data["sha256"]


def test_a_recipe_that_is_not_here_is_asked_for():
    missing = refused(a_run(recipe="nonesuch")[1])
    assert missing.hints[-1] == "`--recipe DIR` names the run's recipe on this machine"


def test_a_recipe_without_the_role_of_the_run_is_refused():
    _, run = a_run()
    assert refused(run, recipe="elastic_dp").code == "R083"


def test_a_configuration_that_is_none_is_refused_at_its_place():
    found = refused(a_run(config="training_config: {stepps: 3}\n")[1])
    assert (found.code, found.primary.span.source.name) == ("C004", "the run's configuration")
