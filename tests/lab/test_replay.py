"""A step computed again has the bits of the run, in every layout, and says so only where it has compared them."""

import json
import random
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import ttlaunch as library
from tests.changed_recipes import copied_recipe, write_before
from tests.lab.recorded_runs import TINY, record_run
from tests.runtime.flips import flipping
from ttlaunch.app.dialogue import Unattended
from ttlaunch.diagnostics import LaunchError
from ttlaunch.lab.replay import plan_replay, prepare_replay
from ttlaunch.lab.repro import read_origin_of

RECIPES = Path(__file__).parents[2] / "recipes"

PIPELINE = {
    "multihost_config.pipeline_parallel_config": {"blocks_per_rank": [1, 1]},
    "multihost_config.num_workers": None,
}
LAYOUTS = {
    "data_parallel, one rank": ("data_parallel", {"multihost_config.num_workers": 1}),
    "data_parallel, three ranks": ("data_parallel", {"multihost_config.num_workers": 3}),
    "data_parallel with a codec": ("data_parallel", {"compression_config.kind": "int8"}),
    "hierarchical_parallel": ("hierarchical_parallel", {}),
    "sync_ps": ("sync_ps", {}),
    "zero, stage 1": ("zero", {"zero_config.stage": 1}),
    "zero, stage 3": ("zero", {"zero_config.stage": 3}),
    "pipeline_parallel": ("pipeline_parallel", PIPELINE),
    "tensor_parallel": ("tensor_parallel", {"multihost_config.num_workers": None}),
    "classic_dp": ("classic_dp", {"classic_dp_config.staleness_bound": 0}),
    "local_sgd": ("local_sgd", {"local_sgd_config.every": 2}),
    "diloco": ("diloco", {"diloco_config.every": 2}),
}


@pytest.fixture(scope="module")
def runs_dir(tmp_path_factory):
    """A folder of runs, which all keep the same code."""
    return tmp_path_factory.mktemp("replay") / "runs"


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_step_computed_again_has_the_digests_of_the_run(layout, runs_dir):
    recipe, changed = LAYOUTS[layout]
    run = record_run(recipe, runs_dir, changed=changed)

    found = library.replay(run, step=6)

    assert (4, "equal", ()) == (found.began, found.verdict, found.agreement.mismatches)
    assert found.agreement.tensors[6] > 0
    micro_batches = TINY["training_config.batch_size"] // TINY["training_config.micro_batch_size"]
    assert set(range(micro_batches)) == {index for rank in found.ranks for index in rank.batches}


def test_updates_of_an_asynchronous_server_are_made_again_in_the_order_in_which_gradients_arrived(runs_dir):
    order = (0, 0, 1, 1, 0, 1, 0)  # another one than that of a simulation without a recorded order
    run = record_run("elastic_dp", runs_dir, order=order)
    assert order == read_origin_of(run).arrivals

    found = library.replay(run, step=6)

    assert (0, "equal", ()) == (found.began, found.verdict, found.agreement.mismatches)
    assert found.agreement.tensors[6] > 0


@pytest.mark.parametrize(("bound", "workers"), [(1, 2), (2, 3)])
def test_updates_from_old_gradients_are_made_again_from_the_versions_of_the_weights_that_the_run_recorded(
    bound, workers, runs_dir
):
    changed = {"classic_dp_config.staleness_bound": bound, "multihost_config.num_workers": workers}
    run = record_run("classic_dp", runs_dir, changed=changed)
    assert any(version != step - 1 for step, one in read_origin_of(run).updates.items() for _, _, version in one.parts)

    found = library.replay(run, step=6)

    assert (0, "equal", ()) == (found.began, found.verdict, found.agreement.mismatches)
    assert found.agreement.tensors[6] > 0
    assert 1 == len(found.ranks)  # one process has the weights and makes all updates


@pytest.fixture(scope="module")
def run(runs_dir):
    """A run of `data_parallel` that has come to its end."""
    return record_run("data_parallel", runs_dir)


def test_a_step_without_digests_is_compared_by_its_numbers_and_begins_at_the_newest_checkpoint_before_it(run):
    found = library.replay(run, step=5)

    assert (4, "consistent") == (found.began, found.verdict)
    assert (3, 4) == (found.agreement.numbers[5], found.agreement.last_proven)
    assert found.model.weights_N.isfinite().all()
    inputs, targets = found.batch
    assert inputs[0, 1:].tolist() == targets[0, :-1].tolist()


def test_the_model_that_is_returned_has_the_tensors_of_the_checkpoint_of_the_same_step(run):
    shard = run / "checkpoints/step-4/rank-0.safetensors"
    stored = load_file(shard)

    found = library.replay(run, step=4)

    assert found.began == 0
    for name, parameter in found.model.named_parameters():
        assert torch.equal(stored[name], parameter)


def test_a_flipped_bit_in_the_run_is_named_with_its_step_its_tensor_and_its_rank(here):
    name = "blocks.1.feed_forward_in.weight"
    run = record_run("data_parallel", here / "runs", during=flipping(1, name, random.Random(3), step=6))  # noqa: S311 - no secret

    found = library.replay(run, step=6)

    assert "different" == found.verdict
    tensors = [one for one in found.agreement.mismatches if one.kind == "tensor"]
    assert [(6, name, (1,))] == [(one.step, one.name, one.ranks) for one in tensors]
    with pytest.raises(LaunchError, match=f"in step 6: tensor `{name}` of rank 1"):
        found.raise_for_difference()


def test_a_run_that_failed_is_replayed_up_to_the_micro_batch_that_broke_it(here):
    folder = here / "recipes/breaking"
    trainer = copied_recipe(folder)
    broken = '            if (step, index) == (6, 2):\n                raise ArithmeticError("bad micro-batch")\n'
    write_before(trainer, "            exchange.accumulate(index, tokens=tokens, loss=loss)\n", broken)
    run = record_run(folder, here / "runs")
    (run / "report.json").write_text(json.dumps({"status": "failed", "failure": {"step": 6}}), encoding="utf-8")

    found = library.replay(run)

    assert (6, 4) == (found.step, found.began)
    assert [2] == list(found.ranks[1].batches)  # the last thing that this rank read


def test_a_script_and_a_step_that_the_run_does_not_have_are_refused_by_name(run):
    with pytest.raises(LaunchError, match="has no step 8") as caught:
        library.replay(run, step=8)
    assert "its steps are 1 to 7" in str(caught.value)
    origin = replace(read_origin_of(run), is_command=True)
    with pytest.raises(LaunchError, match=r"P086.*cannot be replayed: it ran a program"):
        prepare_replay(origin, Unattended())


def test_a_replay_that_fails_where_the_run_did_not_proves_nothing_and_says_so(here, ttlaunch, monkeypatch):
    folder = here / "recipes/moody"
    needs = '            if __import__("os").environ.get("MOODY"):\n                raise ArithmeticError("not here")\n'
    write_before(copied_recipe(folder), "            exchange.accumulate(index, tokens=tokens, loss=loss)\n", needs)
    run = record_run(folder, here / "runs")
    monkeypatch.setenv("MOODY", "yes")

    answer = ttlaunch(f"replay {run} --step 3")

    assert 1 == answer.status
    assert "failed, and the run did not fail in step 3" in answer.stderr
    assert "ArithmeticError" in answer.stderr
    assert "it failed, so nothing is proven" in answer.stdout


def test_ttlaunch_as_it_was_gets_no_key_that_has_come_since(run):
    prepared = prepare_replay(read_origin_of(run), Unattended())
    path = run / "plan.json"
    known = path.read_text(encoding="utf-8")
    plan = json.loads(known)
    del plan["config"]["training_config"]["on_not_finite"]
    path.write_text(json.dumps(plan), encoding="utf-8")
    try:
        then, _, _ = plan_replay(replace(prepared, package=run), step=2)
        now, _, _ = plan_replay(prepared, step=2)
    finally:
        path.write_text(known, encoding="utf-8")
    assert "on_not_finite" not in then.program.config["training_config"]
    assert "stop" == now.program.config["training_config"]["on_not_finite"]


def test_a_micro_batch_that_the_step_does_not_have_is_refused(run, ttlaunch):
    answer = ttlaunch(f"replay {run} --step 6 --micro-batch 99")
    assert (2, "") == (answer.status, answer.stdout)
    assert "step 6 of" in answer.stderr
    assert "its micro-batches are 0 to 3" in answer.stderr


def test_a_micro_batch_of_another_rank_is_refused_with_the_rank_that_computed_it(run, ttlaunch):
    answer = ttlaunch(f"replay {run} --step 6 --rank 1 --micro-batch 0")
    assert (2, "") == (answer.status, answer.stdout)
    assert "rank 1 did not compute micro-batch 0 of step 6" in answer.stderr
    assert "`--rank 0` did" in answer.stderr


def test_the_repair_of_changed_code_is_a_command_that_has_the_option(run, ttlaunch, monkeypatch):
    monkeypatch.setattr("ttlaunch.lab.repro.changed_code", lambda _origin: "the recipe has changed")

    answer = ttlaunch(f"replay {run} --step 6")

    assert f"`ttlaunch repro {run.name} --with-changes`" in answer.stderr


@pytest.mark.slow
def test_the_command_shows_texts_layers_and_gradients_and_json_has_hashes_of_all(run, ttlaunch, monkeypatch):
    answer = ttlaunch(f"replay {run} --step 6 --format json")
    found = json.loads(answer.stdout)
    assert (0, "equal", 6) == (answer.status, found["verdict"], found["step"])
    worker = found["ranks"][1]
    assert [2, 3] == [batch["index"] for batch in worker["batches"]]
    assert ["embedding", "blocks.0", "blocks.1", "head"] == [one["name"] for one in worker["activations"][:4]]
    assert {2, 3} == {one["micro_batch"] for one in worker["micro_gradients"]}
    assert found["ranks"][0]["gradients"] == worker["gradients"]
    assert all(len(one["facts"]["sha256"]) == 64 for one in worker["tensors"])

    monkeypatch.setattr("ttlaunch.lab.replay._SAY_AFTER_S", 0.0)  # a second, which a small model may not take
    shown = ttlaunch(f"replay {run} --step 6 --rank 1 --micro-batch 3")
    assert "the bits of the run:" in shown.stdout
    assert f"computing {run.name} again: step " in shown.stderr
    assert "micro-batch 3" in shown.stdout
    assert "rank 0" not in shown.stdout


def test_a_debugger_opens_before_a_line_of_the_role_while_the_other_ranks_wait(run):
    text = (RECIPES / "data_parallel/trainer.py").read_text(encoding="utf-8").splitlines()
    line = next(at for at, words in enumerate(text, 1) if "exchange.accumulate(" in words)
    command = [sys.executable, "-m", "ttlaunch", "replay", str(run), "--step", "6", "--rank", "1"]
    typed = "p ('here', step, index, ctx.rank)\nq\n"

    answer = subprocess.run(
        [*command, "--break", f"trainer.py:{line}"], input=typed, capture_output=True, text=True, check=False
    )

    assert "('here', 6, 2, 1)" in answer.stdout
    assert (0, "") == (answer.returncode, answer.stderr)
