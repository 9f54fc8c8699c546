"""Messages that are staged in host memory keep what every transport promises, between real ranks, however late copies are."""

from pathlib import Path

import pytest

from tests.recipes.peers import write_peers

pytestmark = pytest.mark.mpi

ROOT = Path(__file__).parents[2]

TRAINER = """
import importlib.util
from pathlib import Path
from ttlaunch.runtime.world import World

def peer(cfg, ctx):
    from tests.mpi import staged_promises
    size = len(ctx.ranks('peer'))
    world = World(Path(), '', ('peer',) * size, ('here',) * size, tuple(range(size)), {}, None, None)
    staged_promises.run(world, ctx.note)
"""


@pytest.mark.parametrize(
    ("sends", "peers"),
    [("buffered", 2), ("buffered", 3), ("synchronous", 1), ("synchronous", 2), ("synchronous", 4), ("in chunks", 2)],
)
def test_every_promise_is_kept_while_copies_are_late(run_ranks, tmp_path, sends, peers):
    trainer = TRAINER
    if sends == "in chunks":
        trainer += "import ttlaunch.runtime.comm.mpi as mpi\nmpi.CHUNK_BYTES, mpi.INLINE_BYTES = 1000, 100\n"
    environment = {"PYTHONPATH": str(ROOT)} | ({"TTLAUNCH_SYNCHRONOUS_SENDS": "1"} if sends == "synchronous" else {})
    folder = write_peers(tmp_path / "promises", trainer)
    run = run_ranks(folder, ["peer"] * peers, environment=environment, timeout_s=100)
    assert run.error(0) is None, run.error(0)["traceback"]
    notes = [record["text"] for record in run.records(0, "note")]
    assert (39, "a_message_of_another_kind_is_named") == (len(notes), notes[-1])
