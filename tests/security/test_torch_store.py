"""The store of torch in rank 0 of a script: who can reach it."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

import ttlaunch
from ttlaunch import contract
from ttlaunch.agent.held_port import hold_port

pytestmark = pytest.mark.mpi

AT_START = Path(ttlaunch.__file__).parent / "at_start"
SCRIPT = """\
import os, sys, time, torch, torch.distributed as dist
for again in range(2):
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    if again and rank == 0:
        print("ready", flush=True)
        sys.stdin.readline()
    dist.barrier()
    dist.destroy_process_group()
    if rank == 0:
        open(os.environ["ENDED"], "w").close()
    while not os.path.exists(os.environ["ENDED"]):
        time.sleep(0.01)
"""
"""Rank 1 waits until rank 0 has ended the first store: it could join that one a second time, and fail with it."""


@pytest.fixture
def rank_0(here):
    """Two ranks that have joined a group for the second time, as their shims start them; the port of the store and its rank."""
    (here / contract.RECORDS_DIR).mkdir()
    held = hold_port()
    port = held.getsockname()[1]
    plain = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    ranks = []
    for rank in range(2):
        own = {
            "RANK": str(rank),
            "WORLD_SIZE": "2",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            contract.ENV_RANK: str(rank),
            contract.ENV_WORLD_SIZE: "2",
            contract.ENV_EXCEPTIONS: str(here / contract.exceptions_file(rank)),
            contract.ENV_SCRATCH: str(here),
            "ENDED": str(here / "ended"),
            "PYTHONPATH": str(AT_START),
        }
        pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
        ranks.append(subprocess.Popen([sys.executable, "-c", SCRIPT], env=plain | own, text=True, **pipes))
    try:
        assert ranks[0].stdout.readline() == "ready\n", ranks[0].stderr.read()
        yield port
        ends = [rank.communicate("go\n", timeout=60) for rank in ranks]
        assert [0, 0] == [rank.returncode for rank in ranks], ends
    finally:
        held.close()
        for rank in ranks:
            rank.kill()
            rank.wait()
            for pipe in (rank.stdin, rank.stdout, rank.stderr):
                pipe.close()


def test_the_store_of_a_script_listens_on_the_address_of_the_ranks_alone(rank_0):
    socket.create_connection(("127.0.0.1", rank_0), timeout=5).close()
    for address in ("127.0.0.2", "::1"):
        with pytest.raises(OSError, match=r"refused|Cannot assign"):
            socket.create_connection((address, rank_0), timeout=5)
