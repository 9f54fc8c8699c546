"""Torch's own all-reduces in the flight recorder: a rank that hangs or dies in one, or never comes to it, is told with the bucket."""

import pytest

from tests.recipes.peers import PEERS

pytestmark = pytest.mark.mpi

TRAINER = """\
import os, signal, time
import torch
from ttlaunch.train import process_group
from ttlaunch.runtime.parallel.gradients.replicas import replicate


def peer(cfg, ctx):
    torch.manual_seed(1)
    peers = ctx.ranks("peer")
    with process_group(ctx, among=peers, device=torch.device("cpu")):
        replica = replicate(ctx, torch.nn.Linear(4, 2), among=peers)
        for step in range(1, 5):
            ctx.step = step
            ctx.traffic.begin_step(step)
            loss = replica(torch.ones(3, 4)).sum()
            if step == 3 and ctx.rank == 1:
                BREAKS
            loss.backward()
            ctx.report(step)
"""
OPERATION = "torch's all_reduce of 40 bytes, bucket 0, step 3"


@pytest.fixture
def start(here, start_run):
    (here / "mine").mkdir()
    (here / "mine/recipe.py").write_text(PEERS)
    (here / "mine/train.yaml").write_text("{}\n")

    def start(breaks):
        (here / "mine/trainer.py").write_text(TRAINER.replace("BREAKS", breaks))
        return start_run("mine", "-n", "2", "--hang-timeout", "3")

    return start


def test_a_rank_that_does_not_come_to_an_all_reduce_of_torch_is_named(start):
    run = start("time.sleep(600)")
    assert run.ends(within_s=60) == 6, run.stderr
    assert run.report["failure"]["rank"] == 1
    assert "1 rank waits for it, and it waits for none, in `peer` at trainer.py:17 in step 3\n" in run.stderr
    assert run.stderr.startswith("error[R014]: rank 1 (peer, localhost) has not moved for ")
    assert run.report["failure"]["evidence"][0].startswith(
        f"rank 0 (peer)  waits for rank 1  {OPERATION}  trainer.py:18"
    )


def test_a_rank_that_dies_leaves_its_peer_in_an_all_reduce_that_has_a_name(start):
    run = start("os.kill(os.getpid(), signal.SIGKILL)")
    assert run.ends(within_s=60) == 1, run.stderr
    assert run.report["failure"]["rank"] == 1
    assert run.report["ranks"][0]["last_operation"]["text"].startswith(f"{OPERATION}, begun ")


SHARDED = """\
import time
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from ttlaunch.train import process_group
from ttlaunch.runtime.parallel.sharded.collectives import Ring, count_collectives


def peer(cfg, ctx):
    torch.manual_seed(1)
    peers = ctx.ranks("peer")
    with process_group(ctx, among=peers, device=torch.device("cpu")):
        with ctx.announced("import"):  # of what torch needs on first use
            unit = fully_shard(torch.nn.Linear(4, 2), mesh=init_device_mesh("cpu", (2,)))
        count_collectives([unit], shards=Ring(ctx.traffic, rank=ctx.rank, among=peers), replicas=None)
        unit.set_force_sum_reduction_for_comms(True)  # gloo has no mean
        for step in range(1, 5):
            ctx.step = step
            ctx.traffic.begin_step(step)
            if step == 3 and ctx.rank == 1:
                time.sleep(600)
            unit(torch.ones(3, 4)).sum().backward()
            ctx.report(step)
"""


def test_a_rank_that_does_not_come_to_a_gather_of_torch_is_named(here, start_run):
    """E1: of FSDP2, with the unit and its bytes."""
    (here / "mine").mkdir()
    (here / "mine/recipe.py").write_text(PEERS)
    (here / "mine/trainer.py").write_text(SHARDED)
    run = start_run("mine", "-n", "2", "--hang-timeout", "3")
    assert run.ends(within_s=60) == 6, run.stderr
    assert run.report["failure"]["rank"] == 1
    assert run.report["failure"]["evidence"][0].startswith(
        "rank 0 (peer)  waits for rank 1  weights (torch) of 40 bytes, bucket 0, step 3"
    )
