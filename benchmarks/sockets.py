"""Tensors over `MpiSocket` beside raw mpi4py buffers and beside pickled objects: ping-pong between two ranks.

    python benchmarks/sockets.py [--rounds 31]

One run of two ranks under the mpirun beside this Python, one torch thread each. The three ways take turns, some hundred
messages at a time; medians over the rounds of half the time there and back. Raw is `comm.Send` and `comm.Recv` of the
tensor's memory, as a program without checks would write it; pickled is `comm.send` and `comm.recv` of the tensor. To be met: latency at 4 KB at most 1.6 times raw, bandwidth
from 1 MB up at least 0.95 of raw, and at 1 MB at least 20 times that of a pickled send.
"""

import argparse
import os
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

SIZES = (4096, 2**16, 2**20, 2**24)
_SETTINGS = ["--bind-to", "none", "--mca", "pml", "ob1", "--mca", "btl", "self,sm,tcp"]


def main() -> None:
    """Start the two ranks, or be one of them."""
    parser = argparse.ArgumentParser(description="Measure sockets against raw buffers and pickled objects.")
    parser.add_argument("--rounds", type=int, default=31)
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank:
        measure(options.rounds)
        return
    beside = Path(sys.executable).with_name("mpirun")
    mpirun = str(beside) if beside.is_file() else shutil.which("mpirun") or "mpirun"
    root = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, __file__, "--rank", "--rounds", str(options.rounds)]
    argv = [mpirun, *_SETTINGS, "--mca", "mpi_yield_when_idle", "1", "--map-by", ":oversubscribe", "-n", "2", *command]
    sys.exit(subprocess.run(argv, env=os.environ | root, check=False).returncode)


def measure(rounds: int) -> None:
    """Ping-pong with the other rank; rank 0 prints."""
    import mpi4py

    mpi4py.rc.initialize = False
    from mpi4py import MPI

    MPI.Init_thread(MPI.THREAD_FUNNELED)
    import torch

    from ttlaunch.runtime.mpi import MpiSocket
    from ttlaunch.runtime.world import Rank, World

    torch.set_num_threads(1)
    comm = MPI.COMM_WORLD
    me, other = comm.rank, 1 - comm.rank
    world = World("", Path(), "", ("peer",) * 2, ("here",) * 2, (0, 1), {}, None, None)
    socket = MpiSocket(comm, world=world, rank=Rank(me))
    load = os.getloadavg()[0]
    if me == 0:
        print(f"{'bytes':>10}{'raw µs':>11}{'socket':>11}{'pickled':>11}{'socket/raw':>13}{'pickled/socket':>17}")
    for size in SIZES:
        tensor = torch.zeros(size // 4)
        array = tensor.numpy()
        ways = {
            "raw": (lambda a=array: comm.Send(a, other), lambda a=array: comm.Recv(a, other)),
            "socket": (lambda t=tensor: socket.send(t, dest=other), lambda t=tensor: socket.recv(t, source=other)),
            "pickled": (lambda t=tensor: comm.send(t, other, 1), lambda: comm.recv(None, other, 1)),
        }
        seconds = _medians(ways, rounds=rounds, repeats=max(4, min(100, 2**23 // size)), first=me == 0)
        if me == 0:
            raw, ours, pickled = (seconds[way] * 1e6 for way in ways)
            print(f"{size:>10}{raw:>11.2f}{ours:>11.2f}{pickled:>11.2f}{ours / raw:>13.2f}{pickled / ours:>17.1f}")
    if me == 0:
        print(f"load of this machine before: {load:.1f} on {os.cpu_count()} cores")
    MPI.Finalize()


def _medians(
    ways: dict[str, tuple[Callable[[], object], Callable[[], object]]], *, rounds: int, repeats: int, first: bool
) -> dict[str, float]:
    """Median seconds of one message each way, the ways taking turns; the first round does not count."""
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(rounds + 1):
        for name, (send, receive) in ways.items():
            one, two = (send, receive) if first else (receive, send)
            began = time.perf_counter()
            for _ in range(repeats):
                one()
                two()
            seconds[name].append((time.perf_counter() - began) / repeats / 2)
    return {name: statistics.median(found[1:]) for name, found in seconds.items()}


if __name__ == "__main__":
    main()
