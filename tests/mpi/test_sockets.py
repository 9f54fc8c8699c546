"""Sockets between real ranks keep the promises that the world in one process keeps, whatever MPI buffers."""

from pathlib import Path

import pytest

pytestmark = pytest.mark.mpi

CONTRACT = Path(__file__).parents[1] / "runtime" / "socket_contract.py"


def write_recipe(folder, trainer):
    folder.mkdir()
    (folder / "recipe.py").write_text(
        "from ttlaunch.recipe import ConfigFile, Layout, Recipe, all_pairs\n"
        "class Config(ConfigFile): pass\n"
        "RECIPE = Recipe('A test.', Config, [Layout('all', peer=None)], [all_pairs('peer')], uses_data=False)\n"
    )
    (folder / "trainer.py").write_text("import torch\nfrom .recipe import Config\n" + trainer)
    return folder


KEEP_PROMISES = f"""
import importlib.util
import ttlaunch.runtime.mpi as mpi
spec = importlib.util.spec_from_file_location('socket_contract', {str(CONTRACT)!r})
contract = importlib.util.module_from_spec(spec)
spec.loader.exec_module(contract)

def peer(cfg, ctx):
    for promise in contract.CONTRACT:
        promise(ctx, list(ctx.ranks('peer')))
        ctx.note(promise.__name__)
"""


@pytest.mark.parametrize("peers", [1, 2, 3, 5])
@pytest.mark.parametrize("sends", ["buffered", "synchronous", "in chunks"])
def test_every_promise_of_a_socket_is_kept(run_ranks, tmp_path, peers, sends):
    """One rank talks to itself; chunks of 1,000 bytes stand for those of 1 GiB, with the same arithmetic."""
    trainer = KEEP_PROMISES + ("mpi.CHUNK_BYTES, mpi.INLINE_BYTES = 1000, 100\n" if sends == "in chunks" else "")
    environment = {"TTLAUNCH_SYNCHRONOUS_SENDS": "1"} if sends == "synchronous" else {}
    folder = write_recipe(tmp_path / "promises", trainer)
    run = run_ranks(folder, ["peer"] * peers, environment=environment, timeout_s=100)
    assert run.error(0) is None, run.error(0)["traceback"]
    notes = [record["text"] for record in run.records(0, "note")]
    assert "a_message_of_another_kind_is_named" == notes[-1]
    assert 10 == len(notes)


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
    run = run_ranks(write_recipe(tmp_path / "large", trainer), ["peer"] * 2, timeout_s=100)
    assert 0 == run.process.returncode, run.output
    grown = [value for record in run.all_records("result") for value in record["values"].values()]
    assert 2 == len(grown)
    assert max(grown) < 20
