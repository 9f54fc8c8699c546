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


@dataclass(frozen=True)
class Way:
    """How workers of a run whose members change reach each other.

    Attributes:
        world: The run's id.
        folder: The run's private folder on this host, with the Unix sockets of its workers.
        certificates: Of this worker; None if all are on one host.
    """

    world: str
    folder: Path
    certificates: Certificates | None = None

    def directory(self, members: Sequence[tuple[Peer, str, str | None]], *, epoch: int) -> Directory:
        """Return the directory of an epoch; of each member in order who it is, its host, and `address:port` or None."""
        return Directory(
            world=self.world,
            names=[contract.worker_name(peer.worker) for peer, _, _ in members],
            hosts=[host for _, host, _ in members],
            addresses=[Address(self.folder / f"rank-{peer.worker}.sock", network) for peer, _, network in members],
            certificates=self.certificates,
            epoch=epoch,
            peers=[peer for peer, _, _ in members],
        )


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
