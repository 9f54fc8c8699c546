"""Audits in every recipe that has them, all ranks in this process: no bit of the training changes, and who computes wrong is named (E23)."""

import json
from contextlib import contextmanager
from unittest.mock import patch

import pytest
import torch
from safetensors.torch import load_file

from tests.lab.recorded_runs import record_run
from tests.runtime.layouts import watch_records
from ttlaunch import contract
from ttlaunch.planning.launch_plan import RankRow
from ttlaunch.running.failures.audited import audited_failure
from ttlaunch.running.runs.facts import RunFacts
from ttlaunch.runtime.context import RankContext

WORKERS = 3
LAYOUTS = {
    "data_parallel": ("data_parallel", {}),
    "hierarchical_parallel": ("hierarchical_parallel", {}),
    "sync_ps": ("sync_ps", {}),
    "sync_ps with a codec": ("sync_ps", {"compression_config.kind": "int8"}),
    "zero, stage 0": ("zero", {"zero_config.stage": 0}),
    "zero, stage 1": ("zero", {"zero_config.stage": 1}),
    "zero, stage 2": ("zero", {"zero_config.stage": 2}),
}
PARAMETER = "blocks.1.feed_forward_in.weight"
"""Whose gradient a defective rank gets wrong: that of the third of four layers."""


@contextmanager
def defective(rank, *, steps, trains=True, audits=True, times=None):
    """Let a rank get a bit of a gradient wrong, where it trains, where it audits, or both; as often as `times` says, or always."""
    made, whole = [], RankContext.watch

    def watch(ctx, model, *, values):
        def break_gradient(parameter):
            is_due = ctx.step in steps and (audits if ctx.auditor.is_computing else trains)
            if ctx.rank == rank and is_due and parameter.grad is not None and (times is None or len(made) < times):
                made.append(ctx.step)
                parameter.grad.view(-1).view(torch.int32)[5] ^= 1 << 20

        dict(model.named_parameters())[PARAMETER].register_post_accumulate_grad_hook(break_gradient)
        return whole(ctx, model, values=values)

    with patch.object(RankContext, "watch", watch):
        yield


def train(layout, runs_dir, *, interval, workers=WORKERS, during=None):
    recipe, changed = LAYOUTS[layout]
    audits = {"training_config.audit_interval": interval, "multihost_config.num_workers": workers}
    return record_run(recipe, runs_dir, changed=changed | audits, during=during)


def failure_of(run):
    """What the launcher says, if each rank were on a host of its own."""
    ranks = json.loads((run / contract.PLAN_FILE).read_text(encoding="utf-8"))["ranks"]
    rows = tuple(RankRow(row["rank"], f"box-{row['rank']}", 0, row["role"]) for row in ranks)
    audits = watch_records(run, len(ranks)).audits
    return audits, audited_failure(RunFacts(run.name, "", rows, is_recipe=True), audits)


def status_of(run):
    return json.loads((run / contract.REPORT_FILE).read_text(encoding="utf-8"))["status"]


@pytest.fixture(scope="module")
def runs_dir(tmp_path_factory):
    return tmp_path_factory.mktemp("audits") / "runs"


@pytest.mark.parametrize("layout", LAYOUTS)
def test_audits_change_no_bit_of_a_training_and_all_of_them_agree(layout, runs_dir):
    audited, plain = (train(layout, runs_dir, interval=interval) for interval in (2, None))

    audits, failure = failure_of(audited)
    assert (3, 6, None) == (audits.count, audits.clean, failure)
    assert 0 == failure_of(plain)[0].count
    for shard in sorted((plain / "checkpoints/step-7").glob("*.safetensors")):
        one, two = load_file(shard), load_file(audited / "checkpoints/step-7" / shard.name)
        assert one.keys() == two.keys()
        assert all(torch.equal(one[name], two[name]) for name in one)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_gradient_that_one_rank_gets_wrong_once_ends_the_run_before_the_update_and_names_the_rank(layout, runs_dir):
    wrong_once = defective(1, steps={4}, audits=False, times=1)
    run = train(layout, runs_dir, interval=2, during=wrong_once)

    audits, failure = failure_of(run)

    assert ("failed", 2) == (status_of(run), audits.clean)
    assert ("R089", "audited", 1, "box-1", 4) == (failure.code, failure.kind, failure.rank, failure.host, failure.step)
    part = "layer 2" if layout.startswith("zero") else "micro-batch 2"
    assert f"computed another gradient for {part} than ranks 0 and 2" == failure.cause
    assert "when it computed again, it found what the others had found: the fault does not repeat" in failure.evidence
    assert not (run / "checkpoints/step-4").exists()


def test_a_rank_that_audits_wrong_is_named_and_not_the_one_that_it_audits(runs_dir):
    run = train("data_parallel", runs_dir, interval=2, during=defective(2, steps={2}, trains=False, times=1))
    assert (2, True) == (failure_of(run)[1].rank, failure_of(run)[1].cause.endswith("than ranks 0 and 1"))


@pytest.mark.parametrize("layout", ["sync_ps", "zero, stage 2"])
def test_a_rank_that_always_computes_wrong_is_named_by_the_others(layout, runs_dir):
    run = train(layout, runs_dir, interval=2, during=defective(0, steps=range(9)))

    failure = failure_of(run)[1]

    assert (0, 2) == (failure.rank, failure.step)
    assert failure.evidence[1].startswith("when it computed again, it found the same")


def test_of_two_ranks_the_one_that_contradicts_itself_is_named(runs_dir):
    once = defective(1, steps={2}, audits=False, times=1)
    failure = failure_of(train("data_parallel", runs_dir, interval=2, workers=2, during=once))[1]
    assert (1, "computed micro-batch 2 twice, with different gradients,") == (failure.rank, failure.cause)


def test_of_two_ranks_of_which_none_contradicts_itself_both_are_named_and_none_is_blamed(runs_dir):
    always = defective(1, steps=range(9))
    failure = failure_of(train("hierarchical_parallel", runs_dir, interval=2, workers=2, during=always))[1]
    said = "rank 0 (worker, box-0) and rank 1 (worker, box-1) computed different gradients for micro-batch 0 in step 2"
    assert ("R089", None, said) == (failure.code, failure.rank, failure.message)


def test_what_goes_wrong_in_a_step_without_an_audit_is_not_noticed(runs_dir):
    run = train("data_parallel", runs_dir, interval=2, during=defective(1, steps={3, 5}))
    assert ("done", None) == (status_of(run), failure_of(run)[1])
