"""Where the ranks of a run listen for gRPC, and how they know each other."""

import json
from collections.abc import MutableMapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from ttlaunch import contract
from ttlaunch.runtime.world import Rank, World


class Peer(NamedTuple):
    """One life of a worker.

    Attributes:
        worker: The number that the worker keeps while ranks change; its certificate is for `contract.peer_name(worker)`.
        incarnation: How often the worker had started before.
    """

    worker: int
    incarnation: int = 0


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
    """The ranks of a run during one epoch, and how they reach each other.

    Attributes:
        world: What all ranks of the run know and no other: the run's id.
        names: How errors name each rank.
        hosts: The host of each rank.
        addresses: Where each rank listens.
        certificates: Needed as soon as ranks are on several hosts.
        epoch: How often the members of the run have changed.
        peers: The worker that each rank is; none: worker r is rank r in every epoch.
    """

    world: str
    names: Sequence[str]
    hosts: Sequence[str]
    addresses: Sequence[Address]
    certificates: Certificates | None = None
    epoch: int = 0
    peers: Sequence[Peer] = ()

    def peer(self, rank: Rank) -> Peer:
        return self.peers[rank] if self.peers else Peer(rank)

    @property
    def members(self) -> dict[Peer, Rank]:
        """The rank of each worker."""
        return {self.peer(Rank(rank)): Rank(rank) for rank in range(len(self.names))}


def read_directory(world: World, environment: MutableMapping[str, str]) -> Directory:
    """Return the directory of the run that the environment of a rank names, and remove the private key from the environment."""
    folder = Path(environment.get(contract.ENV_SCRATCH) or environment[contract.ENV_RUN_DIR])
    peers = json.loads(environment.get(contract.ENV_PEERS) or "null") or [None] * world.size
    proof = json.loads(environment.pop(contract.ENV_CERTIFICATES, "null"))
    return Directory(
        world=environment.get(contract.ENV_WORLD) or environment[contract.ENV_RUN_ID],
        names=[f"rank {rank} ({role})" for rank, role in enumerate(world.roles)],
        hosts=world.hosts,
        addresses=[Address(folder / f"rank-{rank}.sock", peer) for rank, peer in enumerate(peers)],
        certificates=proof and Certificates(**{name: text.encode() for name, text in proof.items()}),
    )
