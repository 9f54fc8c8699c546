"""What the files of a cluster mean: hosts with slots, meshes with links, and which rank drives which mesh.

Frozen and complete: a `Topology` has unique, contiguous ranks, existing meshes and at least as many slots as ranks,
so nobody past `load.py` checks that again. Every part remembers where it stands in its file, for rules that come later.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import NewType

from ttlaunch.diagnostics import Span

HostName = NewType("HostName", str)
Rank = NewType("Rank", int)
MeshId = NewType("MeshId", int)


@dataclass(frozen=True)
class Host:
    """A machine we reach over SSH, and how many ranks it has room for.

    Attributes:
        user: The `user@` of its line, if there is one.
        slots: Room for this many ranks; repeated lines of a host have been added up.
        span: Its name, where it first stands.
        slots_span: Its number of slots, or its name where no number is given.
    """

    name: HostName
    slots: int
    span: Span = field(compare=False)
    slots_span: Span = field(compare=False)
    max_slots: int | None = None
    user: str | None = None


@dataclass(frozen=True)
class Mesh:
    """The grid of devices that one rank, or one rank per host of it, drives.

    Attributes:
        device_shape: Rows and columns of devices of the whole mesh.
        host_shape: Rows and columns of hosts that share it; each owns one block of the devices.
        board: What the descriptor calls its kind; two descriptors of one machine may use other names.
        dim_types: Whether the devices form a LINE or a RING, for rows and for columns.
        channels: Ethernet channels between neighbours: the ports of the chip in version 1, the count that the runtime
            asks for in version 2. The vendor's own pairs of files differ in it, so meshes are compared without it.
        policy: STRICT: exactly so many channels; RELAXED: as many as there are.
    """

    id: MeshId
    board: str = field(compare=False)
    device_shape: tuple[int, int]
    host_shape: tuple[int, int]
    span: Span = field(compare=False)
    dim_types: tuple[str, str] = ("LINE", "LINE")
    channels: int = field(default=1, compare=False)
    policy: str = "STRICT"

    @property
    def hosts(self) -> int:
        return self.host_shape[0] * self.host_shape[1]

    @property
    def devices_per_host(self) -> int:
        return self.device_shape[0] * self.device_shape[1] // self.hosts


@dataclass(frozen=True)
class Link:
    """A physical connection between two meshes; undirected, `a < b`.

    Attributes:
        devices: Where the descriptor says so, the devices it joins: of `a`, of `b`, and channels, in ascending order.
        policy: STRICT: exactly so many channels; RELAXED: as many as there are.
        uses_z: Whether it takes the Z ports of the devices.
    """

    a: MeshId
    b: MeshId
    channels: int
    span: Span = field(compare=False)
    devices: tuple[tuple[int, int, int], ...] = ()
    policy: str = "RELAXED"
    uses_z: bool = False


@dataclass(frozen=True)
class Switch:
    """Devices of one host that pass data on between meshes and that no rank drives."""

    id: int
    name: str = field(compare=False)
    device_shape: tuple[int, int]
    span: Span = field(compare=False)
    dim_types: tuple[str, str] = ("LINE", "LINE")
    channels: int = 1
    policy: str = "STRICT"


@dataclass(frozen=True)
class SwitchLink:
    """A connection between a switch and a mesh, or between two switches.

    Attributes:
        other: Mesh or switch at the other end.
        devices: The device of the switch and of the other end, if the descriptor names them.
    """

    switch: int
    other: int
    other_is_switch: bool
    channels: int
    span: Span = field(compare=False)
    devices: tuple[int | None, int | None] = (None, None)
    policy: str = "STRICT"


@dataclass(frozen=True)
class Binding:
    """Which mesh a rank drives, and the environment it alone gets (`$VAR` already expanded).

    Attributes:
        mesh_id: The mesh's id in the topology; with several descriptors it may differ from the id in the rank's own
            descriptor.
        local_mesh_id: The mesh's id in the rank's own descriptor; None if it is the same.
        subcontext_id: The sub-context it belongs to; None in a run without them.
        mesh_graph_path: Its own descriptor, absolute; None where all ranks have the same.
    """

    rank: Rank
    mesh_id: MeshId
    span: Span = field(compare=False)
    mesh_host_rank: int | None = None
    environment: Mapping[str, str] = field(default_factory=dict)
    local_mesh_id: MeshId | None = None
    subcontext_id: int | None = None
    mesh_graph_path: Path | None = None


@dataclass(frozen=True)
class Slot:
    """Room for one rank: the `index`-th slot of its host."""

    host: Host
    index: int


@dataclass(frozen=True)
class ClusterSettings:
    """How to reach the hosts and what they have; everything has a default (`cluster.yaml`).

    Attributes:
        user: Login name on the hosts; None: what ssh would use.
        port: TCP port of sshd; None: what ssh would use.
        identity_file: Private key; None: what ssh would use.
        remote_folder: Where ttlaunch keeps code and run data on a host.
        python: Interpreter on the hosts; None: what `prepare` made there, else the launching machine's path.
        mpi_prefix: Folder of Open MPI on the hosts; None: that of the interpreter's environment.
        network: Interface name or CIDR that ranks talk over; None: found.
        environment: Variables for every rank on every host.
    """

    user: str | None = None
    port: int | None = None
    identity_file: str | None = None
    remote_folder: str = "~/.ttlaunch"
    python: str | None = None
    mpi_prefix: str | None = None
    network: str | None = None
    environment: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Topology:
    """A cluster, proven consistent.

    Attributes:
        name: The configuration's name: that of its folder.
        folder: Where its files lie; None when single files were named.
        arch: Architecture of the devices; None without a mesh graph, or where sub-contexts have several.
        bindings: One per rank, in rank order; empty if the files leave the world size open.
        global_environment: The environment that `rank_bindings.yaml` sets for every rank (`$VAR` already expanded).
        mesh_graph_path: The descriptor that the bindings name, absolute; of several, that of the first rank.
    """

    name: str
    folder: Path | None
    hosts: tuple[Host, ...]
    arch: str | None = None
    meshes: tuple[Mesh, ...] = ()
    links: tuple[Link, ...] = ()
    switches: tuple[Switch, ...] = ()
    switch_links: tuple[SwitchLink, ...] = ()
    bindings: tuple[Binding, ...] = ()
    global_environment: Mapping[str, str] = field(default_factory=dict)
    mesh_graph_path: Path | None = None
    cluster: ClusterSettings = field(default_factory=ClusterSettings)

    @property
    def world_size(self) -> int | None:
        """Return how many ranks the bindings ask for; None if the files leave it open."""
        return len(self.bindings) or None

    @cached_property
    def subcontext_sizes(self) -> tuple[int, ...]:
        """Return how many ranks each sub-context has; empty in a run without them."""
        sizes = Counter(binding.subcontext_id for binding in self.bindings if binding.subcontext_id is not None)
        return tuple(sizes[number] for number in sorted(sizes))

    @cached_property
    def slots(self) -> tuple[Slot, ...]:
        """Return all slots in the order in which ranks take them: rank r takes the r-th."""
        return tuple(Slot(host, index) for host in self.hosts for index in range(host.slots))

    def mesh(self, mesh_id: MeshId) -> Mesh:
        """Return the mesh with this id.

        Raises:
            KeyError: If there is none; a checked topology never asks for one.
        """
        return self._mesh_by_id[mesh_id]

    @cached_property
    def _mesh_by_id(self) -> dict[MeshId, Mesh]:
        return {mesh.id: mesh for mesh in self.meshes}
