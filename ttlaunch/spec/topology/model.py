"""What the files of a cluster mean: hosts with slots, meshes with links, and which rank drives which mesh.

Frozen and complete: a `Topology` has unique, contiguous ranks, existing meshes and at least as many slots as ranks,
so no code after `load.py` checks that again. Every part has its place in its file, for rules that are checked later.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import field, replace
from functools import cached_property
from pathlib import Path
from typing import NewType

from ttlaunch.diagnostics import Span
from ttlaunch.quick_dataclass import dataclass

HostName = NewType("HostName", str)
Rank = NewType("Rank", int)
MeshId = NewType("MeshId", int)


@dataclass(frozen=True)
class Host:
    """A machine that is reached over SSH, and the number of ranks that may run on it.

    Attributes:
        user: The login name before the `@` of its line; None without one.
        slots: The number of ranks that may run on it; repeated lines of a host have been added up.
        span: The place of the host's name in its first line.
        slots_span: The place of its number of slots; without a number, the place of the name.
    """

    name: HostName
    slots: int
    span: Span = field(compare=False)
    slots_span: Span = field(compare=False)
    max_slots: int | None = None
    user: str | None = None


@dataclass(frozen=True)
class Mesh:
    """A grid of devices. One rank drives it; if several hosts share it, one rank on each of them drives a block.

    Attributes:
        device_shape: Rows and columns of devices of the whole mesh.
        host_shape: Rows and columns of hosts that share the mesh; each owns one block of the devices.
        board: The descriptor's name for this kind of mesh; descriptors of one machine may use different names.
        dim_types: Whether the devices form a LINE or a RING, for rows and for columns.
        channels: Ethernet channels between neighbours: in version 1 the ports of the chip, in version 2 the number that the
            runtime requires. Comparisons ignore it, because the vendor's own files of one machine differ in it.
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

    def __str__(self) -> str:
        return f"mesh {self.id}"

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
        devices: If the descriptor names the joined devices: device of `a`, device of `b`, and channels, in ascending order.
        policy: STRICT: exactly so many channels; RELAXED: as many as there are.
        uses_z: Whether the link uses the Z ports of the devices.
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
    """Devices of one host that pass data on between meshes. A rank may drive it, as it would drive a mesh of one host."""

    id: int
    name: str = field(compare=False)
    device_shape: tuple[int, int]
    span: Span = field(compare=False)
    dim_types: tuple[str, str] = ("LINE", "LINE")
    channels: int = 1
    policy: str = "STRICT"

    def __str__(self) -> str:
        return f"switch {self.id}"

    @property
    def host_shape(self) -> tuple[int, int]:
        return (1, 1)

    @property
    def hosts(self) -> int:
        return 1

    @property
    def devices_per_host(self) -> int:
        return self.device_shape[0] * self.device_shape[1]


@dataclass(frozen=True)
class SwitchLink:
    """A connection between a switch and a mesh, or between two switches.

    Attributes:
        other: The id of the mesh or switch at the other end.
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
    """Which mesh or switch a rank drives, and the variables of this rank alone (`$VAR` already expanded).

    Attributes:
        mesh_id: The id of the mesh or switch in the topology; with several descriptors it may differ from the id in the
            rank's own descriptor.
        drives_switch: Whether `mesh_id` is the id of a switch. To the vendor's runtime a switch is one of the meshes.
        local_mesh_id: The id in the rank's own descriptor; None if it is the same.
        subcontext_id: The sub-context that the rank belongs to; None in a run without sub-contexts.
        mesh_graph_path: The absolute path of the rank's own descriptor; None if all ranks have the same one.
    """

    rank: Rank
    mesh_id: MeshId
    span: Span = field(compare=False)
    mesh_host_rank: int | None = None
    environment: Mapping[str, str] = field(default_factory=dict)
    drives_switch: bool = False
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
        user: Login name on the hosts; None for the one that ssh would use.
        port: TCP port of sshd; None for the one that ssh would use.
        identity_file: Private key; None for those that ssh would use.
        remote_folder: The folder for ttlaunch's code and run data on a host.
        python: Interpreter on the hosts; None for the one that `ttlaunch prepare` made there, or else the path of the
            launching machine's interpreter.
        mpi_prefix: Folder of Open MPI on the hosts; None for the one in the interpreter's environment.
        network: The network between ranks, as interface name or in CIDR notation; None if ttlaunch chooses it.
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
    """A cluster whose parts have been checked against each other.

    Attributes:
        name: The configuration's name, which is that of its folder.
        folder: The folder of its files; None if the user named single files.
        arch: Architecture of the devices; None without a mesh graph, or if sub-contexts have different ones.
        bindings: One per rank, in rank order; empty if the files leave the world size open.
        global_environment: The environment that `rank_bindings.yaml` sets for every rank (`$VAR` already expanded).
        mesh_graph_path: The absolute path of the descriptor that the bindings name; if there are several, of the first one.
        job: The number of the Slurm job whose steps reach the hosts; None if they are reached over SSH.
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
    job: str | None = None

    @property
    def world_size(self) -> int | None:
        """Return how many ranks the bindings have; None if the files leave the number open."""
        return len(self.bindings) or None

    def with_variables(self, variables: Mapping[str, str]) -> "Topology":
        """Return the cluster with these variables for every rank, in place of what its files set for all or for one."""
        others = (
            {name: value for name, value in binding.environment.items() if name not in variables}
            for binding in self.bindings
        )
        bindings = tuple(replace(one, environment=rest) for one, rest in zip(self.bindings, others, strict=True))
        return replace(self, bindings=bindings, global_environment={**self.global_environment, **variables})

    @cached_property
    def subcontext_sizes(self) -> tuple[int, ...]:
        """Return how many ranks each sub-context has; empty in a run without them."""
        sizes = Counter(binding.subcontext_id for binding in self.bindings if binding.subcontext_id is not None)
        return tuple(sizes[number] for number in sorted(sizes))

    @cached_property
    def slots(self) -> tuple[Slot, ...]:
        """Return all slots in the order in which ranks take them: rank r takes the r-th."""
        return tuple(Slot(host, index) for host in self.hosts for index in range(host.slots))

    def driven(self, binding: Binding) -> Mesh | Switch:
        """Return the mesh or switch that a rank of this topology drives."""
        return self._by_id[binding.drives_switch, binding.mesh_id]

    @cached_property
    def _by_id(self) -> dict[tuple[bool, int], Mesh | Switch]:
        meshes: dict[tuple[bool, int], Mesh | Switch] = {(False, mesh.id): mesh for mesh in self.meshes}
        return meshes | {(True, switch.id): switch for switch in self.switches}
