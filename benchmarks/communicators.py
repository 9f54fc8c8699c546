"""Tensors over `MpiCommunicator` beside raw mpi4py buffers and beside pickled objects: ping-pong between two ranks.

    PYTHONPATH=. python benchmarks/communicators.py [--rounds 31]

One run of two ranks under the mpirun beside this Python, one torch thread each. The three ways take turns, some hundred
messages at a time; medians over the rounds of half the time there and back. Raw is `comm.Send` and `comm.Recv` of the
tensor's memory, as a program without checks would write it; pickled is `comm.send` and `comm.recv` of the tensor. To be
met: latency at 4 KB at most 1.6 times raw, bandwidth from 1 MB up at least 0.95 of raw, and at 1 MB at least 20 times that of
a pickled send. Ratios are medians of the rounds' ratios, because what disturbs a round disturbs all three ways.
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

    from ttlaunch.runtime.comm.mpi import MpiCommunicator
    from ttlaunch.runtime.world import Rank, World

    torch.set_num_threads(1)
    comm = MPI.COMM_WORLD
    me, other = comm.rank, 1 - comm.rank
    world = World(Path(), "", ("peer",) * 2, ("here",) * 2, (0, 1), {}, None, None)
    socket = MpiCommunicator(comm, world=world, rank=Rank(me))
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
        seconds = _seconds(ways, rounds=rounds, repeats=max(4, min(100, 2**23 // size)), first=me == 0)
        if me == 0:
            _show(size, seconds)
    if me == 0:
        print(f"load of this machine before: {load:.1f} on {os.cpu_count()} cores")
    MPI.Finalize()


def _show(size: int, seconds: dict[str, list[float]]) -> None:
    raw, ours, pickled = (statistics.median(found) * 1e6 for found in seconds.values())
    to_raw = statistics.median(one / other for one, other in zip(seconds["socket"], seconds["raw"], strict=True))
    to_ours = statistics.median(one / other for one, other in zip(seconds["pickled"], seconds["socket"], strict=True))
    verdicts = [_verdict(to_raw <= 1.6, "at most 1.6 × raw")] if size == 4096 else []
    verdicts += [_verdict(1 / to_raw >= 0.95, f"{1 / to_raw:.2f} of raw, at least 0.95")] if size >= 2**20 else []
    verdicts += [_verdict(to_ours >= 20, "at least 20 × pickled")] if size == 2**20 else []
    print(f"{size:>10}{raw:>11.2f}{ours:>11.2f}{pickled:>11.2f}{to_raw:>13.2f}{to_ours:>17.1f}   {'; '.join(verdicts)}")


def _verdict(is_met: bool, limit: str) -> str:  # noqa: FBT001
    return f"{'met' if is_met else 'NOT MET'}: {limit}"


def _seconds(
    ways: dict[str, tuple[Callable[[], object], Callable[[], object]]], *, rounds: int, repeats: int, first: bool
) -> dict[str, list[float]]:
    """Seconds of one message each way in each round, the ways taking turns; the first round does not count."""
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(rounds + 1):
        for name, (send, receive) in ways.items():
            one, two = (send, receive) if first else (receive, send)
            began = time.perf_counter()
            for _ in range(repeats):
                one()
                two()
            seconds[name].append((time.perf_counter() - began) / repeats / 2)
    return {name: found[1:] for name, found in seconds.items()}


if __name__ == "__main__":
    main()
