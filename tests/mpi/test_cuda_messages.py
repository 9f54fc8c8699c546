"""Tensors of CUDA devices between real ranks, which share one GPU if there is only one; skipped where torch finds none."""

import json

import pytest
import torch

from tests.mpi.test_communicators import KEEP_PROMISES
from tests.recipes.peers import write_peers

pytestmark = [
    pytest.mark.mpi,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch finds no CUDA device"),
]

ON_CUDA = "torch.set_default_device('cuda')\n"


@pytest.mark.parametrize("sends", ["buffered", "synchronous"])
@pytest.mark.parametrize("peers", [1, 2, 3])
def test_every_promise_is_kept(run_ranks, tmp_path, peers, sends):
    environment = {"TTLAUNCH_SYNCHRONOUS_SENDS": "1"} if sends == "synchronous" else {}
    folder = write_peers(tmp_path / "promises", ON_CUDA + KEEP_PROMISES)
    run = run_ranks(folder, ["peer"] * peers, environment=environment, timeout_s=100)
    assert run.error(0) is None, run.error(0)["traceback"]
    assert 12 == len(run.records(0, "note"))


LATE = """
BUSY = 2_000_000_000  # cycles, about a second

def peer(cfg, ctx):
    other, size = 1 - ctx.rank, SIZE
    torch.cuda.set_device(0)
    sent, box = torch.zeros(size, device='cuda'), torch.zeros(size, device='cuda')
    for value in range(3):  # the first round makes rooms and requests
        torch.cuda.synchronize()
        if value == 2:
            torch.cuda._sleep(BUSY)  # what a backward pass would compute
        sent.fill_(float(value + 1))
        began = time.monotonic()
        receiving, sending = ctx.irecv(box, source=other), ctx.isend(sent, dest=other)
        begun_s = time.monotonic() - began
        torch.cuda._sleep(BUSY // 100)
        sending.wait()
        sent.fill_(-1.0)
        receiving.wait()
        total = box.sum()  # queued behind the copy
        box.fill_(-2.0)
        assert (value + 1) * size == total.item(), (value, total)
    ctx.result(f'begun {ctx.rank}', begun_s)
"""


@pytest.mark.parametrize("size", [1000, 1_000_000, 10_000_000])
def test_a_send_does_not_wait_for_the_computation_and_has_its_values(run_ranks, tmp_path, size):
    folder = write_peers(tmp_path / "late", LATE.replace("SIZE", str(size)))
    run = run_ranks(folder, ["peer"] * 2, timeout_s=100)
    assert 0 == run.process.returncode, run.output
    begun = [value for record in run.all_records("result") for value in record["values"].values()]
    assert 2 == len(begun)
    assert max(begun) < 0.2


def test_memory_that_cannot_be_pinned_carries_messages_all_the_same(run_ranks, tmp_path):
    trainer = "import ttlaunch.runtime.comm.cuda_copier as copier\ncopier._PORTABLE = 1 << 20\n"
    folder = write_peers(tmp_path / "unpinned", trainer + ON_CUDA + KEEP_PROMISES)
    run = run_ranks(folder, ["peer"] * 2, timeout_s=100)
    assert run.error(0) is None, run.error(0)["traceback"]
    assert 12 == len(run.records(0, "note"))


STEADY = """
from ttlaunch.runtime.comm.cuda_copier import CudaCopier

def peer(cfg, ctx):
    other, sizes = 1 - ctx.rank, (1000, 500_000)
    made, allocate = [], CudaCopier.allocate
    CudaCopier.allocate = lambda self, size: made.append(size) or allocate(self, size)
    for value in range(100):
        for size in sizes:
            box = torch.empty(size, device='cuda')
            sending = ctx.isend(torch.full((size,), float(value), device='cuda'), dest=other)
            ctx.recv(box, source=other)
            sending.wait()
            assert (box == value).all().item()
    ctx.result(f'rooms {ctx.rank}', len(made))
"""


def test_rooms_are_used_again(run_ranks, tmp_path):
    run = run_ranks(write_peers(tmp_path / "steady", STEADY), ["peer"] * 2, timeout_s=100)
    assert 0 == run.process.returncode, run.output
    made = [value for record in run.all_records("result") for value in record["values"].values()]
    assert 2 == len(made)
    assert max(made) <= 8


SMALL = {
    "training_config": {"steps": 6, "batch_size": 8, "micro_batch_size": 1, "validation_sequences": 4},
    "transformer_config": {"num_blocks": 2, "num_heads": 2, "embedding_dim": 64, "max_sequence_length": 32},
    "multihost_config": {"bucket_megabytes": 0.1},
    "checkpoint_config": {"interval": None},
    "device_config": {"device": "cuda"},
}

WORLDS = [
    ("data_parallel", ["trainer"]),
    ("data_parallel", ["worker"] * 2),
    ("data_parallel", ["worker"] * 3),
    ("hierarchical_parallel", ["worker", "worker", "aggregator", "optimizer"]),
    ("zero", ["worker"] * 2),
]


def test_recipes_on_a_gpu_have_the_bits_of_one_process(run_ranks):
    shas = {}
    for recipe, roles in WORLDS:
        run = run_ranks(recipe, roles, SMALL, timeout_s=200)
        assert 0 == run.process.returncode, run.output
        shas[recipe, len(roles)] = run.sha256
    assert 1 == len(set(shas.values())), shas


def test_recipes_over_grpc_on_a_gpu_have_the_bits_of_those_over_mpi(ttlaunch, here):
    found = set()
    for socket in ("mpi", "grpc"):
        settings = ["training_config.steps=6", "device_config.device=cuda", f"multihost_config.socket_type={socket}"]
        words = " ".join(f"--set {setting}" for setting in [*settings, "multihost_config.num_workers=2"])
        answer = ttlaunch(f"run data_parallel {words} --format json")
        assert 0 == answer.status, answer.stderr
        found.add(json.loads(answer.stdout)["parameters_sha256"])
    assert 1 == len(found)
