"""A tensor of 200 MB over `GrpcCommunicator`, on Unix sockets and by mutual TLS, beside a plain TCP loop; time and memory.

    python benchmarks/grpc_stream.py [--rounds 7] [--megabytes 200]

For each way, two new processes on this machine, one torch thread each, take turns between it and plain TCP, which is `sendall` and
`recv_into` over loopback. To be met, as medians of the rounds' ratios to plain TCP: at most 1.3 over Unix sockets and 2.2 by
TLS over loopback. Memory is the largest resident size of a process during a transfer above that before it, when its tensor was
in memory and the streams were open: at most 16 MB on both sides. Then 10,000 tensors of one value are sent in one step, which may
open at most one call to the peer. Ends with 1 if a limit is missed.
"""

import argparse
import multiprocessing
import os
import socket
import statistics
import sys
import tempfile
import time
from contextlib import ExitStack
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

LIMITS = {"unix": 1.3, "tls": 2.2}
MOST_MB = 16.0
SCALARS = 10_000
_CHUNK = 2**20
_WORDS = {"unix": "gRPC, Unix", "tls": "gRPC, TLS"}


def main() -> int:
    """Start the two processes and let them take turns."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--megabytes", type=int, default=200)
    options = parser.parse_args()
    load = os.getloadavg()[0]
    missed = 0
    for way in LIMITS:
        with tempfile.TemporaryDirectory() as place:
            missed += _compare(way, Path(place), rounds=options.rounds, size=options.megabytes * 10**6)
    print(f"{missed} missed (at most 0); load of this machine before: {load:.1f} on {os.cpu_count()} cores")
    return int(missed > 0)


def _compare(way: str, place: Path, *, rounds: int, size: int) -> int:
    """Let two new processes take turns between plain TCP and one way of gRPC; returns how many limits it misses."""
    spawn = multiprocessing.get_context("spawn")
    ends, processes = [], []
    for rank, where in enumerate(_places(way, place)):
        end, other = spawn.Pipe()
        processes.append(spawn.Process(target=_be_rank, args=(rank, where, size, other), daemon=True))
        processes[-1].start()
        other.close()  # so that the end of a process is noticed
        ends.append(end)
    # Memory counts from the first round on, time from the second.
    plain, own = zip(*[(_round(ends, "tcp"), _round(ends, way)) for _ in range(rounds + 1)], strict=True)
    scalars_s, calls, _ = _round(ends, "scalars")
    for end in ends:
        end.send(None)
    for process in processes:
        process.join(30)
    ratio = statistics.median(one[0] / other[0] for one, other in zip(own[1:], plain[1:], strict=True))
    seconds = statistics.median(one[0] for one in own[1:])
    memory = [max(one[side] for one in own) for side in (1, 2)]
    print(f"{_WORDS[way]:12}{seconds:6.3f} s, {ratio:.2f} times plain TCP (at most {LIMITS[way]})")
    print(f"{'':12}{memory[0]:.1f} MB at the sender, {memory[1]:.1f} MB at the receiver (at most {MOST_MB:g})")
    print(f"{'':12}{SCALARS} values in a step: {calls:.0f} more calls (at most 1), {scalars_s:.2f} s")
    return (ratio > LIMITS[way]) + (max(memory) > MOST_MB) + (calls > 1)


def _round(ends: list[Connection], way: str) -> tuple[float, float, float]:
    """Return seconds, and what each side measured; the receiver begins first, and both are ready before."""
    for end in reversed(ends):
        end.send(way)
        end.recv()
    began = time.monotonic()
    for end in reversed(ends):
        end.send("go")
    sides = [end.recv() for end in ends]
    return time.monotonic() - began, sides[0], sides[1]


def _places(way: str, place: Path) -> list[dict[str, Any]]:
    """Return what each rank knows of both."""
    from ttlaunch.agent.held_port import hold_port
    from ttlaunch.contract import peer_name
    from ttlaunch.running.agents.certificates import make_certificates

    with ExitStack() as held:
        ports = [held.enter_context(hold_port()).getsockname()[1] for _ in range(2)]
    certificates = make_certificates({str(rank): [peer_name(rank)] for rank in range(2)})
    common = {"way": way, "place": str(place), "ports": ports}
    return [{**common, "certificates": certificates[str(rank)]} for rank in range(2)]


def _be_rank(rank: int, where: dict[str, Any], size: int, orders: Connection) -> None:
    """Send (rank 0) or receive (rank 1) whenever it is told to."""
    import torch

    from ttlaunch.runtime.comm.grpc.communicator import GrpcCommunicator
    from ttlaunch.runtime.comm.grpc.directory import Address, Certificates, Directory
    from ttlaunch.runtime.world import Rank

    torch.set_num_threads(1)
    own = where["certificates"]
    found = Certificates(own.authority.encode(), own.own.encode(), own.key.encode())
    ports = where["ports"] if where["way"] == "tls" else None
    addresses = [
        Address(Path(where["place"]) / f"{one}.sock", f"127.0.0.1:{ports[one]}" if ports else None) for one in range(2)
    ]
    hosts = ("here", "there" if ports else "here")
    link = GrpcCommunicator(Directory("run 1", ("sender", "receiver"), hosts, addresses, found), rank=Rank(rank))
    connection = _plain(rank, Path(where["place"]))
    tensor = torch.ones(size // 4)
    memory = memoryview(tensor.numpy()).cast("B")
    scalars = [torch.zeros(1) for _ in range(SCALARS)]
    other = Rank(1 - rank)

    link.barrier()  # opens the streams

    def plain() -> None:
        if rank == 0:
            connection.sendall(memory)
            return
        done = 0
        while done < len(memory):
            done += connection.recv_into(memory[done : done + _CHUNK])

    def many() -> None:
        begin = link.isend if rank == 0 else link.irecv
        peer: dict[str, Any] = {"dest": other} if rank == 0 else {"source": other}
        for message in [begin(scalar, **peer) for scalar in scalars]:
            message.wait()

    def whole() -> None:
        link.send(tensor, dest=other) if rank == 0 else link.recv(tensor, source=other)

    ways = {"tcp": plain, "scalars": many, where["way"]: whole}
    while (way := orders.recv()) is not None:
        calls = len(link._links._calls)  # noqa: SLF001 - what nobody needs but this
        before = _resident_mb("VmRSS")
        Path("/proc/self/clear_refs").write_text("5")  # the largest size counts anew
        orders.send("ready")
        orders.recv()
        ways[way]()
        opened = len(link._links._calls) - calls  # noqa: SLF001
        orders.send(float(opened) if way == "scalars" else _resident_mb("VmHWM") - before)
    link.close()


def _plain(rank: int, place: Path) -> socket.socket:
    """Return a TCP connection to the other process."""
    known = place / "port"
    if rank:
        with socket.create_server(("127.0.0.1", 0)) as server:
            partial = known.with_suffix(".part")
            partial.write_text(str(server.getsockname()[1]))
            partial.rename(known)
            return server.accept()[0]
    while not known.exists():
        time.sleep(0.01)
    return socket.create_connection(("127.0.0.1", int(known.read_text())))


def _resident_mb(name: str) -> float:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(name))
    return int(line.split()[1]) * 1024 / 1e6


if __name__ == "__main__":
    sys.exit(main())
