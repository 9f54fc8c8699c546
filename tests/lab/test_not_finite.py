"""A training that meets a value that is no number stops, and the replay of its step names the layer, the pass and the texts."""

import json
from contextlib import contextmanager

import pytest
import torch
from safetensors.torch import load_file

import ttlaunch as library
from tests.lab.recorded_runs import record_run
from tests.lab.test_replay import LAYOUTS
from tests.runtime.layouts import watch_records
from ttlaunch import contract
from ttlaunch.running.failures.attribution import first_failure
from ttlaunch.running.failures.divergence import with_first_micro_batch
from ttlaunch.runtime.model import gpt

STOPPING = ("hierarchical_parallel", "sync_ps", "zero, stage 3", "pipeline_parallel", "local_sgd")
"""Layouts in which other ranks know the norm than those that have the micro-batch, or several do."""


class Poison(torch.autograd.Function):
    """Passes a tensor on, and makes one value of it, or of its gradient, infinite."""

    @staticmethod
    def forward(ctx, x, backward):
        ctx.backward = backward
        out = x.clone()
        if not backward:
            out.view(-1)[0] = torch.inf
        return out

    @staticmethod
    def backward(ctx, gradient):
        gradient = gradient.clone()
        if ctx.backward:
            gradient.view(-1)[0] = torch.inf
        return gradient, None


@contextmanager
def poisoned(step, micro_batches, *, backward=False):
    """Break the second block in some micro-batches of a step, in whatever rank of this process has them."""
    whole = gpt.Block.forward

    def forward(self, x_BTD, masks):
        out = whole(self, x_BTD, masks)
        is_second = self.attention_dropout._layer == "blocks.1.attention"
        if is_second and masks is not None and masks.step == step and masks.micro_batch in micro_batches:
            return Poison.apply(out, backward)
        return out

    gpt.Block.forward = forward
    try:
        yield
    finally:
        gpt.Block.forward = whole


def steps_of(run):
    lines = (run / contract.progress_file(0)).read_text(encoding="utf-8").splitlines()
    return [one["step"] for line in lines if (one := json.loads(line))["kind"] == "step"]


def verdict_on(run):
    """What the launcher says of the ranks' records."""
    ranks = json.loads((run / contract.PLAN_FILE).read_text(encoding="utf-8"))["ranks"]
    watch = watch_records(run, len(ranks))
    failure = first_failure(watch.ranks, lost_shims={}, stopped=False)
    return with_first_micro_batch(failure, watch.ranks, run_id="3fa1")


def has_failed_in(run, step):
    report = {"status": "failed", "run_id": run.name, "failure": {"step": step}}
    (run / contract.REPORT_FILE).write_text(json.dumps(report), encoding="utf-8")


@pytest.fixture(scope="module")
def runs_dir(tmp_path_factory):
    return tmp_path_factory.mktemp("not-finite") / "runs"


@pytest.mark.parametrize("layout", STOPPING)
def test_a_run_stops_in_the_step_whose_gradient_is_no_number_and_names_rank_and_micro_batch(layout, runs_dir):
    recipe, changed = LAYOUTS[layout]
    run = record_run(recipe, runs_dir, changed=changed, during=poisoned(6, {2, 3}))

    failure = verdict_on(run)

    assert ("R011", "diverged", 6, True) == (failure.code, failure.kind, failure.step, failure.comes_again)
    assert "had a loss of nan in micro-batch 2: training has diverged" == failure.cause
    assert "`ttlaunch replay 3fa1 --step 6` names the layer and shows the texts" == failure.next_step
    assert not (run / "checkpoints/step-6").exists()
    assert not (run / "checkpoints/step-7").exists()


@pytest.mark.parametrize("backward", [False, True])
def test_a_replay_names_the_first_layer_and_the_pass_that_made_a_value_that_is_no_number(runs_dir, backward):
    run = record_run("data_parallel", runs_dir, during=poisoned(6, {2, 3}, backward=backward))
    failure = verdict_on(run)
    assert ("R011", 6) == (failure.code, failure.step)
    assert (
        "micro-batch 2" in failure.cause
    ) is not backward  # its loss was a number: only the norm of the sum was none

    has_failed_in(run, 6)
    with poisoned(6, {2, 3}, backward=backward):
        found = library.replay(run)

    assert 6 == found.step
    rank, first = found.not_finite
    assert (1, 2, "blocks.1", backward) == (rank, first.micro_batch, first.layer, first.is_backward)
    assert first.nans + first.infs > 0
    assert library.replay(run, step=5).not_finite is None


@pytest.mark.parametrize(("choice", "is_finite"), [("skip", True), ("continue", False)])
def test_a_run_may_leave_out_such_an_update_or_make_it(runs_dir, choice, is_finite):
    changed = {"training_config.on_not_finite": choice}
    parameters = []
    for workers in (1, 2):
        more = {"multihost_config.num_workers": workers}
        run = record_run("data_parallel", runs_dir, changed=changed | more, during=poisoned(6, {3}))
        assert verdict_on(run) is None
        assert list(range(1, 8)) == steps_of(run)
        parameters.append(load_file(run / "checkpoints/step-7/rank-0.safetensors"))
    one, two = parameters
    assert is_finite == all(bool(tensor.isfinite().all()) for tensor in one.values())
    assert all(torch.equal(one[name].view(torch.uint8), two[name].view(torch.uint8)) for name in one if one[name].dim())


def test_a_replay_says_so_on_the_command_line(ttlaunch, here):
    """A rate of learning that breaks every run, in the ranks' own code: the replay's process computes it too."""
    run = record_run("data_parallel", here / "runs", changed={"training_config.learning_rate": 1e30})
    step = verdict_on(run).step
    has_failed_in(run, step)

    lines = [line.strip() for line in ttlaunch(f"replay {run.name}").stdout.splitlines()]

    assert f", step {step}: " in lines[0]
    place = next(at for at, line in enumerate(lines) if line.startswith("first not finite"))
    assert lines[place].startswith("first not finite rank 0 (worker), micro-batch 0: the forward pass of ")
    assert lines[place + 1].startswith("made ")
