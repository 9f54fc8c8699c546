"""How one worker reaches another one over gRPC, and how each proves who it is."""

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

# Python's child processes of a rank must not run gRPC's fork handlers, which wait for its threads.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "false")
os.environ.setdefault("GRPC_VERBOSITY", "NONE")

import grpc

from ttlaunch import contract
from ttlaunch.runtime.comm.grpc.directory import Address, Directory, Peer
from ttlaunch.runtime.comm.grpc.frames import CHUNK_BYTES
from ttlaunch.runtime.comm.grpc.pieces import MOST_HEADER_BYTES, MOST_UNARY_BYTES
from ttlaunch.runtime.world import Rank

SERVICE = "ttlaunch.v1.Peer"
WORKER, INCARNATION, WORLD = "ttlaunch-worker", "ttlaunch-incarnation", "ttlaunch-world"
"""The metadata of a call: who makes it, and in which run."""

MOST_REQUEST_BYTES = CHUNK_BYTES + MOST_HEADER_BYTES
"""The longest message that a rank takes: a piece."""

Options = list[tuple[str, int | str]]

_MOST_ANSWER_BYTES = MOST_UNARY_BYTES + MOST_HEADER_BYTES
_BOTH: Options = [
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    # A server closes connections that send pings more often than this; its own default is 300 s.
    ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
    ("grpc.enable_retries", 0),
    # A fixed window: gRPC's own estimate of a fast network's makes it receive tens of megabytes ahead.
    ("grpc.http2.bdp_probe", 0),
    ("grpc.http2.lookahead_bytes", 2 * 2**20),
    ("grpc.so_reuseport", 0),  # another process must not be able to listen on the same port
    ("grpc.min_reconnect_backoff_ms", 100),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1_000),
    ("grpc.enable_http_proxy", 0),  # a user's proxy is no way to a peer
    ("grpc.max_send_message_length", _MOST_ANSWER_BYTES),
]
SERVER_OPTIONS: Options = [
    *_BOTH,
    ("grpc.max_concurrent_streams", 64),
    ("grpc.max_receive_message_length", MOST_REQUEST_BYTES),
]
_CLIENT_OPTIONS: Options = [*_BOTH, ("grpc.max_receive_message_length", _MOST_ANSWER_BYTES)]
_MOST_NUMBER = 2**32 - 1
_MOST_WORDS = 300


@dataclass(frozen=True)
class Route:
    """How one worker reaches another one, as long as both live."""

    own: Peer
    peer: Peer
    name: str
    address: Address
    is_same_host: bool


@dataclass(frozen=True)
class Target:
    """What gRPC needs to connect to a worker; without credentials over a Unix socket."""

    address: str
    credentials: grpc.ChannelCredentials | None
    options: Options


def route_between(directory: Directory, own: Rank, other: Rank) -> Route:
    is_same_host = directory.hosts[own] == directory.hosts[other]
    own_peer, peer = directory.peer(own), directory.peer(other)
    return Route(own_peer, peer, directory.names[other], directory.addresses[other], is_same_host)


def is_encrypted(route: Route, directory: Directory) -> bool:
    """Whether what is sent between two workers leaves their host."""
    return not route.is_same_host and route.address.network is not None and directory.certificates is not None


def host_of(network: str) -> str:
    """Return the address of a place on the network, without its port.

    >>> host_of("[fe80::1]:17000")
    'fe80::1'
    """
    return network.rpartition(":")[0].removeprefix("[").removesuffix("]")


def target_of(route: Route, directory: Directory) -> Target:
    """Return where a worker is reached: over its Unix socket within a host, and between hosts with certificates only."""
    certificates = directory.certificates
    if not is_encrypted(route, directory) or route.address.network is None or certificates is None:
        return Target(f"unix:{route.address.socket}", None, _CLIENT_OPTIONS)
    credentials = grpc.ssl_channel_credentials(certificates.authority, certificates.key, certificates.own)
    name = ("grpc.ssl_target_name_override", contract.peer_name(route.peer.worker))
    return Target(route.address.network, credentials, [*_CLIENT_OPTIONS, name])


def metadata_of(own: Peer, world: str) -> tuple[tuple[str, str], ...]:
    return (WORKER, str(own.worker)), (INCARNATION, str(own.incarnation)), (WORLD, world)


class StrangerError(Exception):
    """Whoever calls proves not to be who they say, or may not make this call; has the status and the words of the refusal."""


def recognise(
    metadata: Iterable[tuple[str, str | bytes]],
    proven: Sequence[bytes] | None,
    *,
    world: str,
    members: Mapping[Peer, Rank],
) -> Peer:
    """Return which worker makes a call.

    Args:
        metadata: The call's.
        proven: The names in the certificate of the caller; None for a caller on the same host.
        world: The run's.
        members: The workers of this epoch. A worker that is none of them, because it joins, is recognised all the same.

    Raises:
        StrangerError: It is of another run, is another worker, or is an earlier life of a member.
    """
    found = dict(metadata)
    worker, incarnation = _number(found.get(WORKER)), _number(found.get(INCARNATION))
    if found.get(WORLD) != world or worker is None or incarnation is None:
        raise StrangerError(grpc.StatusCode.PERMISSION_DENIED, "this is another run")
    if proven is not None and contract.peer_name(worker).encode() not in proven:
        raise StrangerError(grpc.StatusCode.PERMISSION_DENIED, f"this is not rank {worker}")
    if any(peer.worker == worker and peer.incarnation > incarnation for peer in members):
        raise StrangerError(grpc.StatusCode.FAILED_PRECONDITION, f"worker {worker} has started again since")
    return Peer(worker, incarnation)


def _number(text: str | bytes | None) -> int | None:
    """Return the number that a text is; None if it is none that fits a field of a frame."""
    if not isinstance(text, str) or not (text.isascii() and text.isdecimal()) or len(text) > len(str(_MOST_NUMBER)):
        return None
    return int(text) if int(text) <= _MOST_NUMBER else None


def words_of(details: object) -> str:
    """Return what a peer says of the end of a call, for an error: at most 300 characters, none of which a terminal obeys."""
    return "".join(sign if sign.isprintable() else "\N{REPLACEMENT CHARACTER}" for sign in str(details)[:_MOST_WORDS])
