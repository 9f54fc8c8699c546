"""Where the ranks of a run listen for gRPC, and how they know each other."""

import json
from collections.abc import MutableMapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ttlaunch import contract
from ttlaunch.runtime.world import World


@dataclass(frozen=True)
class Certificates:
    """What the ranks of one run prove to each other who they are with, in PEM.

    Attributes:
        authority: The certificate of the run's own authority.
        own: The certificate of this rank, for `contract.peer_name(rank)`.
        key: Its private key.
    """

    authority: bytes
    own: bytes
    key: bytes = field(repr=False)


@dataclass(frozen=True)
class Address:
    """Where a rank listens.

    Attributes:
        socket: Its Unix socket, for ranks of the same host.
        network: `address:port`, for ranks of other hosts; None if there are none.
    """

    socket: Path
    network: str | None = None


@dataclass(frozen=True)
class Directory:
    """The ranks of a run, and how they reach each other.

    Attributes:
        world: What all ranks of the run know and no other: the run's id.
        names: How errors name each rank.
        hosts: The host of each rank.
        addresses: Where each rank listens.
        certificates: Needed as soon as ranks are on several hosts.
    """

    world: str
    names: Sequence[str]
    hosts: Sequence[str]
    addresses: Sequence[Address]
    certificates: Certificates | None = None


def read_directory(world: World, environment: MutableMapping[str, str]) -> Directory:
    """Return the directory of the run that the environment of a rank names, and remove the private key from the environment."""
    folder = Path(environment.get(contract.ENV_SCRATCH) or environment[contract.ENV_RUN_DIR])
    peers = json.loads(environment.get(contract.ENV_PEERS) or "null") or [None] * world.size
    proof = json.loads(environment.pop(contract.ENV_CERTIFICATES, "null"))
    return Directory(
        world=environment[contract.ENV_RUN_ID],
        names=[f"rank {rank} ({role})" for rank, role in enumerate(world.roles)],
        hosts=world.hosts,
        addresses=[Address(folder / f"rank-{rank}.sock", peer) for rank, peer in enumerate(peers)],
        certificates=proof and Certificates(**{name: text.encode() for name, text in proof.items()}),
    )
