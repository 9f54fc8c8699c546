"""Plain scripts of torch whose ranks do not do the same: the run names the rank, its line, and where the others wait.

Their ranks are forks, which saves each the seconds of importing torch; `tests/torch_hooks` has the same hooks in ranks that import it.
"""

import pytest

pytestmark = pytest.mark.mpi

SCRIPT = """\
import os, sys, time
import torch, torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
dist.init_process_group("gloo")
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 8))
replica = WRAP
optimizer = torch.optim.SGD(replica.parameters(), lr=0.01)
skips = dist.get_rank() == 1
for step in range(6):
    loss = replica(torch.ones(4, 64)).square().mean()
    if not (skips and step == 3 and SKIPS):
        loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    AFTER
dist.barrier()
"""
DDP, FSDP = (
    "nn.parallel.DistributedDataParallel(model)",
    "[fully_shard(one) for one in (model[0], model[2], model)][-1]",
)
BACKWARD = "DistributedDataParallel's backward pass"


@pytest.fixture
def start(here, start_run):
    def start(*options, wrap=DDP, skips="True", after="pass"):
        text = SCRIPT.replace("WRAP", wrap).replace("SKIPS", skips).replace("AFTER", after)
        (here / "train.py").write_text(text)
        return start_run("--warm", *options, "-n", "2", "train.py")

    return start


@pytest.mark.core
def test_the_exception_of_one_rank_comes_first_and_what_follows_in_the_others_is_one_note(start):
    """What torchrun prints of it, without `@record`, is the statuses of both ranks. `benchmarks/attribution.py` measures how long it takes."""
    run = start(skips="False", after="if skips and step == 3: raise ValueError('sample 7 is corrupt')")
    assert 1 == run.ends(within_s=90), run.stderr
    failure = run.report["failure"]
    assert ("R002", 1, "raised") == (failure["code"], failure["rank"], failure["class"])
    assert [0] == [follower["rank"] for follower in failure["cascade"]]
    report = run.stderr[run.stderr.index("error[") :]
    assert report.startswith("error[R002]: rank 1 (rank, localhost) raised ValueError")
    assert "--> train.py:17" in report
    assert "sample 7 is corrupt" in report
    assert 1 == report.count("error[")
    assert 1 == report.count(" = note: the first rank to fail; then rank 0 ")


def test_a_rank_that_skips_a_backward_pass_is_named_where_the_run_hangs_at_its_end(start):
    run = start("--hang-timeout", "4")
    assert 6 == run.ends(within_s=90), run.stderr
    failure = run.report["failure"]
    assert ("R037", 1) == (failure["code"], failure["rank"])
    assert failure["place"].endswith("train.py:12")
    assert (
        f"has skipped {BACKWARD} after its forward pass at train.py:12: it called torch's barrier at train.py:18, "
        f"and rank 0 waits in {BACKWARD} at train.py:14\n" in run.stderr
    )
    assert run.report["ranks"][0]["last_operation"]["text"].startswith(f"{BACKWARD} of 74.8 kB, begun ")


def test_a_rank_that_skips_a_backward_pass_is_named_where_torch_aborts_a_rank(start):
    run = start(after="dist.all_reduce(loss.detach().clone())")
    assert 1 == run.ends(within_s=90), run.stderr
    failure = run.report["failure"]
    assert ("R037", "departed", 1) == (failure["code"], failure["class"], failure["rank"])
    assert failure["place"].endswith("train.py:14")
    assert f"has skipped {BACKWARD} of 74.8 kB at train.py:14: it called torch's all_reduce of 4 bytes" in run.stderr


def test_a_rank_that_skips_a_backward_pass_of_sharded_parameters_is_named(start):
    run = start(wrap=FSDP)
    assert 1 == run.ends(within_s=90), run.stderr
    failure = run.report["failure"]
    assert ("R037", "departed", 1) == (failure["code"], failure["class"], failure["rank"])
    assert failure["place"].endswith("train.py:14")
    assert "has skipped torch's all_gather_single of 8.2 kB at train.py:14 and the 3 operations after it" in run.stderr


def test_ranks_that_call_different_collectives_are_told_with_both_lines(start):
    after = "(dist.barrier() if skips\n     else dist.all_reduce(torch.ones(5)))"
    run = start("--hang-timeout", "4", skips="False", after=after)
    assert 6 == run.ends(within_s=90), run.stderr
    failure = run.report["failure"]
    assert "R037" == failure["code"]
    assert "torch's barrier at train.py:17" in failure["cause"]
    assert "torch's all_reduce of 20 bytes at train.py:18" in failure["cause"]


def test_a_rank_that_leaves_early_is_named_and_the_other_shows_where_it_waited(start):
    run = start(skips="False", after="(skips and step == 3 and sys.exit(0))")
    assert 1 == run.ends(within_s=90), run.stderr
    assert ("left_early", 1) == (run.report["failure"]["class"], run.report["failure"]["rank"])
    text = run.report["ranks"][0]["last_operation"]["text"]
    assert text.startswith(f"{BACKWARD} of 74.8 kB, begun ")
    assert text.endswith("at train.py:14")


def test_a_rank_that_sleeps_is_named_by_the_collective_in_which_the_other_waits(start):
    run = start("--hang-timeout", "4", skips="False", after="(skips and step == 3 and time.sleep(600))")
    assert 6 == run.ends(within_s=90), run.stderr
    failure = run.report["failure"]
    assert ("R014", 1) == (failure["code"], failure["rank"])
    assert failure["evidence"][0].startswith(f"rank 0 (rank)  waits for rank 1  {BACKWARD} of 74.8 kB")


ALONE = """\
import torch
model = torch.nn.Linear(4, 1)
loss = model(torch.ones(2, 4)).sum()
LAST
print("trained", loss.item() < 100)
"""


@pytest.fixture
def start_alone(here, start_run):
    def start(*options, last="loss.backward()"):
        (here / "train.py").write_text(ALONE.replace("LAST", last))
        return start_run("--warm", *options, "-n", "2", "train.py")

    return start


def test_a_script_whose_ranks_train_a_model_each_is_told_at_the_end(start_alone):
    run = start_alone()
    assert 1 == run.ends(within_s=90), run.stderr
    assert ("R074", "trained_alone") == (run.report["failure"]["code"], run.report["failure"]["class"])
    assert "error[R074]: rank 0 and 1 of 2 trained a model each" in run.stderr
    assert "ACCELERATE_USE_CPU=true" in run.stderr


def test_a_script_whose_ranks_are_meant_to_train_a_model_each_is_done(start_alone):
    run = start_alone("--independent")
    assert 0 == run.ends(within_s=90), run.stderr


def test_a_script_that_only_computes_forward_is_done(start_alone):
    run = start_alone(last="pass")
    assert 0 == run.ends(within_s=90), run.stderr


def test_a_script_that_joins_its_ranks_after_a_first_pass_is_done(start_alone):
    run = start_alone(
        last="loss.backward()\nimport torch.distributed as dist\ndist.init_process_group('gloo')\ndist.barrier()"
    )
    assert 0 == run.ends(within_s=90), run.stderr


def test_steps_that_a_script_logs_are_metrics_of_the_run(here, start_run):
    code = "import ttlaunch\nfor step in (1, 2):\n    ttlaunch.log(step=step, loss=1 / step, accuracy=0.5)\n"
    (here / "train.py").write_text(code)
    run = start_run("-n", "2", "train.py")
    assert 0 == run.ends(within_s=60), run.stderr
    assert [2, 2] == [rank["step"] for rank in run.report["ranks"]]
    lines = [line for path in here.glob("runs/*/metrics.jsonl") for line in path.read_text().splitlines()]
    assert 4 == sum('"accuracy": 0.5' in line for line in lines)
