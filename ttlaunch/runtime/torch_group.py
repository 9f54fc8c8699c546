"""Torch's own process group between some ranks of a run, set up over their sockets: for the library's collectives.

Nothing is taken from variables such as `MASTER_ADDR`: ranks say over the socket on which host they are, and the first of
them where it listens.
"""

import os
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from ttlaunch.runtime.collectives import broadcast, gather
from ttlaunch.runtime.sockets import Socket
from ttlaunch.runtime.world import Rank

_NAME_BYTES = 256
_DEADLINE = timedelta(seconds=60)


@contextmanager
def process_group(ctx: Socket, *, among: Sequence[Rank], device: torch.device) -> Iterator[None]:
    """Make torch's default group of some ranks, in their order, for as long as the block runs.

    Args:
        ctx: Every rank of `among` must call.
        among: The ranks.
        device: NCCL carries tensors of CUDA devices, gloo those in host memory.

    Raises:
        ValueError: The ranks are threads of one process, as in `ttlaunch simulate`.

    Cost: two rounds of small messages; the store and the group then open connections of their own.
    """
    place = among.index(ctx.rank)
    me = _padded(f"{socket.gethostname()}\n{os.getpid()}")
    known = [_text(row) for row in gather(ctx, me, root=among[0], among=among)]
    listener, said = _listen(known) if place == 0 else (None, "")
    answer = _padded(said)
    broadcast(ctx, answer, root=among[0], among=among)
    address, port, interface = _text(answer).split("\n")
    if not port:
        raise ValueError("torch's process group needs a process for each rank, and these ranks share one")
    if interface:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
    store = dist.TCPStore(  # type: ignore[attr-defined]  # torch re-exports it without saying so
        address,
        int(port),
        len(among),
        is_master=place == 0,
        timeout=_DEADLINE,
        wait_for_workers=False,
        master_listen_fd=listener.detach() if listener else None,
    )
    backend = "nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, store=store, rank=place, world_size=len(among), timeout=_DEADLINE)
    try:
        yield
    finally:
        dist.destroy_process_group()


def _listen(known: list[str]) -> tuple[socket.socket | None, str]:
    """A listening socket that only the ranks' hosts need to reach, and the words that tell them where it is."""
    if len(set(known)) < len(known):
        return None, "\n\n"
    one_host = len({row.split("\n")[0] for row in known}) == 1
    address = "127.0.0.1" if one_host else socket.gethostbyname(socket.gethostname())
    listener = socket.create_server((address, 0), backlog=len(known))
    return listener, f"{address}\n{listener.getsockname()[1]}\n{'lo' if one_host else ''}"


def _padded(text: str) -> Tensor:
    data = text.encode()[:_NAME_BYTES]
    return torch.tensor([*data, *[0] * (_NAME_BYTES - len(data))], dtype=torch.uint8)


def _text(row: Tensor) -> str:
    return bytes(row.tolist()).rstrip(b"\0").decode()
