"""Communicators between real ranks keep the promises that the world in one process keeps, whatever MPI buffers."""

import itertools
import json
from pathlib import Path

import pytest

from tests.recipes.peers import write_peers

pytestmark = pytest.mark.mpi

CONTRACT = Path(__file__).parents[1] / "runtime" / "communicator_contract.py"


KEEP_PROMISES = f"""
import importlib.util
import ttlaunch.runtime.comm.mpi as mpi
spec = importlib.util.spec_from_file_location('communicator_contract', {str(CONTRACT)!r})
contract = importlib.util.module_from_spec(spec)
spec.loader.exec_module(contract)

def peer(cfg, ctx):
    for promise in contract.CONTRACT:
        promise(ctx, list(ctx.ranks('peer')))
        ctx.note(promise.__name__)
"""


@pytest.mark.parametrize(
    ("sends", "peers"),
    [*itertools.product(["buffered", "synchronous"], [1, 2, 3, 5]), ("in chunks", 1), ("in chunks", 3)],
)
def test_every_promise_of_a_socket_is_kept(run_ranks, tmp_path, peers, sends):
    """One rank talks to itself; chunks of 1,000 bytes stand for those of 1 GiB, with the same arithmetic."""
    trainer = KEEP_PROMISES + ("mpi.CHUNK_BYTES, mpi.INLINE_BYTES = 1000, 100\n" if sends == "in chunks" else "")
    environment = {"TTLAUNCH_SYNCHRONOUS_SENDS": "1"} if sends == "synchronous" else {}
    folder = write_peers(tmp_path / "promises", trainer)
    run = run_ranks(folder, ["peer"] * peers, environment=environment, timeout_s=100)
    assert run.error(0) is None, run.error(0)["traceback"]
    notes = [record["text"] for record in run.records(0, "note")]
    assert "a_message_of_another_kind_is_named" == notes[-1]
    assert 12 == len(notes)


@pytest.mark.parametrize("peers", [1, 2, 3])
def test_fabric_sockets_keep_every_promise(run_ranks, tmp_path, peers):
    """Over gloo, set up from the launch contract; rank by rank the same functions as over MPI."""
    folder = write_peers(tmp_path / "promises", KEEP_PROMISES)
    config = {"multihost_config": {"socket_type": "fabric"}}
    run = run_ranks(folder, ["peer"] * peers, config, timeout_s=100)
    assert run.error(0) is None, run.error(0)["traceback"]
    notes = [record["text"] for record in run.records(0, "note")]
    assert (12, "a_message_of_another_kind_is_named") == (len(notes), notes[-1])


WAITS = """
import os
import time

import torch

def peer(cfg, ctx):
    box = torch.zeros(1)
    if ctx.rank == 0:
        ctx.recv(box, source=1)
        time.sleep(2)
        ctx.send(box, dest=1)
        return
    ctx.send(box, dest=0)
    yields, really = [], os.sched_yield
    os.sched_yield = lambda: (yields.append(time.monotonic()), really())
    began = time.monotonic()
    ctx.recv(box, source=0)
    ctx.note(f"{yields[-1] - began if yields else 0}")
"""


def test_a_rank_that_waits_for_long_sleeps_though_it_has_a_core(run_ranks, tmp_path):
    """Such as one of a server that nobody asks; a rank that only yields keeps its core busy."""
    run = run_ranks(write_peers(tmp_path / "waits", WAITS), ["peer"] * 2, timeout_s=100)
    assert run.error(1) is None, run.error(1)["traceback"]
    [yielded_for_s] = [float(record["text"]) for record in run.records(1, "note")]
    assert yielded_for_s < 1


def test_a_recipe_over_fabric_sockets_has_the_bits_of_one_over_mpi(run_ranks):
    """A11: both run."""
    shas = set()
    for kind in ("mpi", "fabric"):
        config = {
            "training_config": {"steps": 6, "batch_size": 6, "micro_batch_size": 1, "validation_sequences": 4},
            "transformer_config": {"num_blocks": 1, "num_heads": 2, "embedding_dim": 16, "max_sequence_length": 16},
            "multihost_config": {"socket_type": kind},
            "checkpoint_config": {"interval": None},
        }
        run = run_ranks("hierarchical_parallel", ["worker", "worker", "aggregator", "optimizer"], config)
        assert 0 == run.process.returncode, run.output
        shas.add(run.sha256)
    assert 1 == len(shas)


def test_large_tensors_are_never_copied(run_ranks, tmp_path):
    """200 MB go there and back; neither rank's memory grows by as much as a tenth of it."""
    trainer = """
import resource

def peer(cfg, ctx):
    other = 1 - ctx.rank
    tensor, small = torch.zeros(50_000_000), torch.zeros(1000)
    for vector in (small, tensor[:1_000_000]):
        exchange(ctx, vector, other)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    exchange(ctx, tensor, other)
    ctx.result(f'grown {ctx.rank}', (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1000)

def exchange(ctx, vector, other):
    for turn in range(2):
        if ctx.rank == turn:
            ctx.send(vector, dest=other)
        else:
            ctx.recv(vector, source=other)
"""
    run = run_ranks(write_peers(tmp_path / "large", trainer), ["peer"] * 2, timeout_s=100)
    assert 0 == run.process.returncode, run.output
    grown = [value for record in run.all_records("result") for value in record["values"].values()]
    assert 2 == len(grown)
    assert max(grown) < 20


def test_fabric_sockets_run_where_links_join_the_meshes(ttlaunch, here, write_cluster):
    """A11; without links between them the launcher refuses, as tests/cli has it."""
    folder = write_cluster(here / "configurations" / "pair", [(0, 1)])
    (folder / "hosts.txt").write_text("localhost slots=2\n")
    settings = "--set all_reduce_config.megabytes=0.1 --set multihost_config.socket_type=fabric"
    answer = ttlaunch(f"run fabric_minimal --on pair {settings} --format json")
    assert 0 == answer.status, answer.stderr
    assert 3.0 == json.loads(answer.stdout)["results"]["sum"]


SMALL = """
import torch

import ttlaunch.runtime.comm.mpi as mpi

made = []

class Counted(mpi._Sending):
    def __init__(self, *what):
        made.append(what)
        super().__init__(*what)

mpi._Sending = Counted

def peer(cfg, ctx):
    tensors = [torch.full((3, 5), float(place)) for place in range(500)]
    if ctx.rank == 0:
        made.clear()
        for tensor in tensors:
            ctx.send(tensor, dest=1)
        ctx.note(f"{len({tensor.data_ptr() for tensor in tensors})} addresses, {len(made)} requests")
        return
    arrived = [torch.zeros(3, 5) for _ in tensors]
    for tensor in arrived:
        ctx.recv(tensor, source=0)
    ctx.note(f"{sum(map(torch.equal, arrived, tensors))} arrived")
"""


def test_small_tensors_share_a_request_wherever_they_lie(run_ranks, tmp_path):
    """Tensors of a step seldom lie where those of the step before lay: with a request for each address there would be thousands."""
    run = run_ranks(write_peers(tmp_path / "small", SMALL), ["peer"] * 2, timeout_s=60)
    assert run.error(0) is None, run.error(0)["traceback"]
    assert ["500 addresses, 1 requests"] == [record["text"] for record in run.records(0, "note")]
    assert ["500 arrived"] == [record["text"] for record in run.records(1, "note")]
