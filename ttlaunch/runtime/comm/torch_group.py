"""Sets up torch's own process group between some ranks of a run, for torch's collectives.

The ranks need no variables such as `MASTER_ADDR`. Over their communicator, every rank sends the name of its host, and
the first rank answers with the address on which it listens.
"""

import fcntl
import ipaddress
import os
import socket
import struct
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from ttlaunch import contract
from ttlaunch.flight_recorder_writer import FlightRecorder
from ttlaunch.runtime.comm.collectives import broadcast, gather
from ttlaunch.runtime.comm.protocol import Communicator
from ttlaunch.runtime.world import Rank

_NAME_BYTES = 256
_ONE_HOST = "one host"
_SIOCGIFADDR = 0x8915  # of Linux: the IPv4 address of an interface
_SET_UP_TIMEOUT = timedelta(seconds=60)
_COLLECTIVE_TIMEOUT = timedelta(days=30)
"""A rank may wait as long as its peers compute; it is the launcher that notices when a rank has died."""


@contextmanager
def process_group(ctx: Communicator, *, among: Sequence[Rank], device: torch.device) -> Iterator[None]:
    """Make torch's default group of the ranks in `among`, in this order, for as long as the block runs.

    Args:
        ctx: Every rank of `among` must call.
        among: The ranks.
        device: NCCL carries tensors of CUDA devices, gloo those in host memory.

    Raises:
        ValueError: The ranks are threads of one process, as in `ttlaunch simulate`, or two of them share a CUDA device.

    Cost: a `gather` and a `broadcast` of 256 bytes; the store and the group then open connections of their own.
    Order: the first rank listens before it sends its address. Torch decides the order of its own sums.
    """
    if dist.is_initialized() and dist.get_world_size() == len(among):  # the fabric communicator has made it
        yield
        return
    with _recorded_set_up(ctx, among):
        _set_up(ctx, among=among, device=device)
    try:
        yield
    finally:
        dist.destroy_process_group()


def _recorded_set_up(ctx: Communicator, among: Sequence[Rank]) -> AbstractContextManager[None]:
    """Record, where there is a flight recorder, that the rank waits for the others while they set up the group."""
    recorder: FlightRecorder | None = getattr(getattr(ctx, "traffic", None), "recorder", None)
    return (
        nullcontext()
        if recorder is None
        else recorder.meeting("set-up of torch's group", tag=recorder.join_group(among))
    )


def _set_up(ctx: Communicator, *, among: Sequence[Rank], device: torch.device) -> None:
    place = among.index(ctx.rank)
    me = _padded(f"{socket.gethostname()}\n{os.getpid()}\n{_identity(device)}")
    processes = [_text(row) for row in gather(ctx, me, root=among[0], among=among)]
    listener, reply = _listen(processes, among) if place == 0 else (None, "")
    answer = _padded(reply)
    broadcast(ctx, answer, root=among[0], among=among)
    address, port, where = _text(answer).split("\n")
    if not port:
        raise ValueError(f"torch's process group needs {where}")
    os.environ.setdefault("GLOO_SOCKET_IFNAME", _own_network(is_one_host=where == _ONE_HOST)[0])
    store = dist.TCPStore(  # type: ignore[attr-defined]  # torch re-exports it without saying so
        address,
        int(port),
        len(among),
        is_master=place == 0,
        timeout=_SET_UP_TIMEOUT,
        wait_for_workers=False,
        master_listen_fd=listener.detach() if listener else None,
    )
    backend = "nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, store=store, rank=place, world_size=len(among), timeout=_COLLECTIVE_TIMEOUT)


def _identity(device: torch.device) -> str:
    """What distinguishes a CUDA device from the others of its host; empty for a CPU."""
    return str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else ""


def _listen(rows: list[str], among: Sequence[Rank]) -> tuple[socket.socket | None, str]:
    """Open a socket for the ranks' hosts; return it with the lines address, port, and `_ONE_HOST` if they share a host.

    If ranks share a process or a CUDA device there is no socket; the first two lines are empty, and the third says what is needed.
    """
    processes, devices = (
        [tuple(row.split("\n")[place] for place in places) for row in rows] for places in ((0, 1), (0, 2))
    )
    if len(set(processes)) < len(processes):
        return None, "\n\na process for each rank, and these ranks share one"
    shared = [rank for rank, one in zip(among, devices, strict=True) if one[1] and devices.count(one) > 1]
    if shared:
        return None, f"\n\na CUDA device for each rank, and ranks {shared[0]} and {shared[1]} share one"
    where = _ONE_HOST if len({host for host, _ in processes}) == 1 else ""
    _, address = _own_network(is_one_host=where == _ONE_HOST)
    listener = socket.create_server((address, 0), backlog=len(processes))
    return listener, f"{address}\n{listener.getsockname()[1]}\n{where}"


def _own_network(*, is_one_host: bool) -> tuple[str, str]:
    """Return the interface and the address that this rank uses: one in the networks that the engine names, if any.

    Raises:
        OSError: No interface has a suitable address.
    """
    if is_one_host:
        return "lo", "127.0.0.1"
    given = [part for part in os.environ.get(contract.ENV_NETWORKS, "").split(",") if "/" in part]
    networks = [ipaddress.ip_network(part, strict=False) for part in given]
    for _, name in socket.if_nameindex():
        address = _address_of(name)
        if address is not None and (any(address in network for network in networks) or _is_outward(address, networks)):
            return name, str(address)
    raise OSError(f"no interface of this host has an address in {', '.join(given) or 'any network'}")


def _is_outward(address: ipaddress.IPv4Address, networks: Sequence[object]) -> bool:
    return not networks and not address.is_loopback


def _address_of(interface: str) -> ipaddress.IPv4Address | None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            answer = fcntl.ioctl(probe, _SIOCGIFADDR, struct.pack("256s", interface.encode()[:15]))
        except OSError:
            return None  # it has no IPv4 address
    return ipaddress.IPv4Address(answer[20:24])


def _padded(text: str) -> Tensor:
    data = text.encode()[:_NAME_BYTES]
    return torch.tensor([*data, *[0] * (_NAME_BYTES - len(data))], dtype=torch.uint8)


def _text(row: Tensor) -> str:
    return bytes(row.tolist()).rstrip(b"\0").decode()
