"""The plan of a worker that joins: the run's configuration, and this machine's recipe and text."""

import json
from pathlib import Path

import pytest

from tests.running.membership.memory import ask, coordinator_in_memory, invited, join
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
    assert "--data" == refused(run, data="nosuch.txt").primary.span.source.name
    assert plan(run, data=str(here)).program.data["sha256"] == theirs.program.data["sha256"]


def test_a_recipe_that_is_not_here_is_asked_for():
    missing = refused(a_run(recipe="nonesuch")[1])
    assert missing.hints[-1] == "`--recipe DIR` names the run's recipe on this machine"


@pytest.mark.parametrize("path", ["{folder}", "../{name}", "..", "~/{name}", "./{name}"])
def test_a_run_cannot_choose_a_folder_of_this_machine_whose_code_is_imported(tmp_path, monkeypatch, path):
    folder = tmp_path / "planted"
    folder.mkdir()
    (folder / "recipe.py").write_text(f"open({str(tmp_path / 'imported')!r}, 'w')")
    (folder / "trainer.py").touch()
    monkeypatch.chdir(folder)
    monkeypatch.setenv("HOME", str(tmp_path))
    found = refused(a_run(recipe=path.format(folder=folder, name=folder.name))[1])
    assert ("R083", False) == (found.code, (tmp_path / "imported").exists())


def test_neither_code_nor_environment_nor_text_travels(tmp_path, monkeypatch):
    """What a worker gets before its first order: the whole answers, byte for byte."""
    monkeypatch.setenv("SECRET_OF_THE_RUN", "only on the machine of the run")
    text = tmp_path / "text.txt"
    text.write_text(TEXT)
    theirs, described = a_run(overrides=(f"training_config.data_path={text}",))
    coordinator = coordinator_in_memory()
    coordinator.run.update({name: vars(described)[name] for name in ("recipe", "layout", "role", "config")})
    token = invited(coordinator)
    status, known = ask(coordinator, "GET", "/run", token=token)
    welcome = join(coordinator)
    beat = {"incarnation": 1, "epoch": 0, "step": 0, "phase": "starting"}
    path = f"/workers/{welcome['worker_id']}/heartbeat"
    answered, orders = ask(coordinator, "POST", path, beat, token=welcome["token"])
    assert (200, 200) == (status, answered)
    sent = json.dumps([known, welcome, orders])
    sources = [path for path in Path(theirs.program.folder).glob("*.py") if path.read_text().strip()]
    lines = {line.strip() for path in sources for line in path.read_text().splitlines() if len(line.strip()) > 20}
    assert len(lines) > 50
    assert [] == [line for line in lines if json.dumps(line)[1:-1] in sent]
    assert not any(word in sent for word in ("SECRET_OF_THE_RUN", "only on the machine", TEXT[:20]))


def test_a_recipe_without_the_role_of_the_run_is_refused():
    _, run = a_run()
    assert refused(run, recipe="elastic_dp").code == "R083"


def test_a_configuration_that_is_none_is_refused_at_its_place():
    found = refused(a_run(config="training_config: {stepps: 3}\n")[1])
    assert (found.code, found.primary.span.source.name) == ("C004", "the run's configuration")
