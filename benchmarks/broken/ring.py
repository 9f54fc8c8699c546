"""A program without torch for `benchmarks/attribution.py`: its ranks wait for each other in every step, over MPI or sockets.

    mpirun -n 4 python ring.py        over MPI
    mpirun -n 4 python ring.py sockets

Sockets are named by files in the working folder, or are ports where `fault.json` names several hosts; so the same program
runs where there is no MPI.
"""

import json
import os
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path

from faults import break_if_due, clean_up

_STEPS = 200
_STEP_S = 0.005
_MEET_S = 30.0
_FIRST_PORT = 47000


def main() -> None:
    """Take steps, and break where it was ordered."""
    variables = (
        ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE")
        if "OMPI_COMM_WORLD_RANK" in os.environ
        else ("RANK", "WORLD_SIZE")
    )
    rank, size = (int(os.environ[name]) for name in variables)
    is_over_mpi = variables[0] != "RANK" and "sockets" not in sys.argv
    meet, close = over_mpi() if is_over_mpi else over_sockets(rank, size)
    try:
        for step in range(1, _STEPS + 1):
            break_if_due(rank=rank, role="rank", step=step)
            time.sleep(_STEP_S)
            meet()
    finally:
        close()
        clean_up()


def over_mpi() -> tuple[Callable[[], None], Callable[[], None]]:
    """How to wait for all ranks in an all-reduce, and how to part, which MPI does itself."""
    from mpi4py import MPI

    def meet() -> None:
        MPI.COMM_WORLD.allreduce(1)

    return meet, lambda: None


def over_sockets(rank: int, size: int) -> tuple[Callable[[], None], Callable[[], None]]:
    """How to wait for all ranks by a byte from each, and how to close these connections, which all others notice at once."""
    hosts = json.loads(Path("fault.json").read_text())["hosts"]
    is_spread = len(set(hosts)) > 1
    listener = socket.create_server(("", _FIRST_PORT + rank)) if is_spread else _listening(rank)
    listener.listen(size)
    peers = [_connected(other, hosts[other] if is_spread else None) for other in range(rank)]
    peers += [listener.accept()[0] for _ in range(rank + 1, size)]

    def meet() -> None:
        for peer in peers:
            peer.sendall(b".")
        for peer in peers:
            if not peer.recv(1):
                raise ConnectionResetError("a peer has closed its connection")

    def close() -> None:
        for peer in peers:
            peer.close()

    return meet, close


def _listening(rank: int) -> socket.socket:
    """A socket that has its name once it can be connected to."""
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(f"socket-{rank}.part")
    listener.listen()
    Path(f"socket-{rank}.part").rename(f"socket-{rank}")
    return listener


def _connected(other: int, host: str | None) -> socket.socket:
    deadline = time.monotonic() + _MEET_S
    while True:
        try:
            if host is not None:
                return socket.create_connection((host, _FIRST_PORT + other))
            peer = socket.socket(socket.AF_UNIX)
            peer.connect(f"socket-{other}")
        except OSError as error:
            if time.monotonic() > deadline:
                raise TimeoutError(f"rank {other} does not come") from error
            time.sleep(0.01)
        else:
            return peer


if __name__ == "__main__":
    main()
