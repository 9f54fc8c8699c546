"""One real message of more than 2 GiB, whose length no 32-bit count can hold: every byte arrives in its place."""

import psutil
import pytest

pytestmark = [pytest.mark.mpi, pytest.mark.slow]

TRAINER = """
import torch
from .recipe import Config

SIZE = 2**31 + 2**20 + 5
PATTERN = torch.randint(256, (2**22 - 3,), dtype=torch.uint8, generator=torch.Generator().manual_seed(7))

def pieces(tensor_N):
    # The pattern's length is no power of two, so a chunk in another chunk's place does not look right.
    for start in range(0, SIZE, len(PATTERN)):
        piece = tensor_N[start : start + len(PATTERN)]
        yield piece, PATTERN[: len(piece)]

def peer(cfg, ctx):
    tensor_N = torch.zeros(SIZE, dtype=torch.uint8)
    if ctx.rank == 0:
        for piece, pattern in pieces(tensor_N):
            piece.copy_(pattern)
        ctx.send(tensor_N, dest=1)
    else:
        ctx.recv(tensor_N, source=0)
        wrong = sum(not torch.equal(piece, pattern) for piece, pattern in pieces(tensor_N))
        ctx.result('wrong', wrong)
        ctx.result('bytes', tensor_N.nbytes)
"""


def test_a_message_of_more_than_2_gib_arrives_byte_for_byte(run_ranks, tmp_path, skip_or_fail):
    """4.3 GB in both ranks together, in chunks of `CHUNK_BYTES`, as any message of its size."""
    if psutil.virtual_memory().available < 6e9:
        skip_or_fail("less than 6 GB of memory are free")
    folder = tmp_path / "large"
    folder.mkdir()
    (folder / "recipe.py").write_text(
        "from ttlaunch.recipe import ConfigFile, Layout, Recipe, all_pairs\n"
        "class Config(ConfigFile): pass\n"
        "RECIPE = Recipe('A test.', Config, [Layout('all', peer=None)], [all_pairs('peer')], uses_data=False)\n"
    )
    (folder / "trainer.py").write_text(TRAINER)
    run = run_ranks(folder, ["peer"] * 2, timeout_s=200)
    assert run.process.returncode == 0, run.output
    values = {name: value for record in run.all_records("result") for name, value in record["values"].items()}
    assert {"wrong": 0, "bytes": 2**31 + 2**20 + 5} == values
