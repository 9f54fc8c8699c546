"""The mesh graph descriptor of version 2 as it is written: the messages of release 0.81 and their fields.

A `list` is a field that may stand several times, a `Literal` a word without quotes. What the values mean for each other
is in `mgd_textproto.py` and `mgd_rules.py`.
"""

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from ttlaunch.spec.located.schema import Section

Positive = Annotated[int, Field(ge=1, le=2**31 - 1)]
NonNegative = Annotated[int, Field(ge=0, le=2**31 - 1)]
Name = Annotated[str, Field(min_length=1)]
Dims = Annotated[list[Positive], Field(min_length=2, max_length=2)]
DimType = Literal["LINE", "RING"]
Policy = Literal["STRICT", "RELAXED"]
Direction = Literal["NONE", "N", "E", "S", "W", "Z", "C"]


class Channels(Section):
    """How many ethernet channels a neighbour, or a connection, has."""

    count: Positive = Field(description="number of ethernet channels")
    policy: Policy = Field("STRICT", description="STRICT: exactly so many; RELAXED: as many as there are")


class DeviceTopology(Section):
    """The grid of devices."""

    dims: Dims = Field(description="rows and columns of devices")
    dim_types: list[DimType] = Field([], description="LINE or RING for each of `dims`; LINE if left out")


class HostTopology(Section):
    """The grid of hosts that share a mesh."""

    dims: Dims = Field(description="rows and columns of hosts")


class ExpressConnection(Section):
    """A direct link between two devices of one mesh."""

    noun: ClassVar[str] = "an express connection"

    src: NonNegative = Field(0, description="device")
    dst: NonNegative = Field(0, description="device")


class ExpressPattern(Section):
    """Which devices along a dimension have an express link."""

    noun: ClassVar[str] = "the `pattern` of express links"

    start: NonNegative = Field(0, description="first device")
    step: NonNegative = Field(0, description="devices from one to the next")


class ExpressLinks(Section):
    """Express links along one dimension."""

    dim_idx: NonNegative = Field(0, description="dimension, from 0")
    pattern: ExpressPattern | None = Field(None, description="where they begin")
    wrap: DimType = Field("LINE", description="RING: they go around the end; LINE if left out")


class MeshDescriptor(Section):
    """A kind of mesh."""

    noun: ClassVar[str] = "a mesh descriptor"

    name: Name = Field(description="what instances call it")
    arch: Literal["WORMHOLE_B0", "BLACKHOLE", "QUASAR", "CPU", "CUDA"] = Field(description="the chip")
    device_topology: DeviceTopology = Field(description="the devices")
    host_topology: HostTopology = Field(description="the hosts")
    channels: Channels = Field(description="ethernet channels between neighbours")
    express_connections: list[ExpressConnection] = Field([], description="direct links; the runtime takes none")
    express_links: list[ExpressLinks] = Field([], description="direct links along a dimension")


class SwitchDescriptor(Section):
    """A kind of switch: devices of one host that only pass data on."""

    noun: ClassVar[str] = "a switch descriptor"

    name: Name = Field(description="what instances call it")
    arch: Literal["WORMHOLE_B0", "BLACKHOLE", "QUASAR", "CPU", "CUDA"] = Field(description="the chip")
    device_topology: DeviceTopology = Field(description="the devices")
    channels: Channels = Field(description="ethernet channels between neighbours")
    express_connections: list[ExpressConnection] = Field([], description="direct links; the runtime takes none")
    express_links: list[ExpressLinks] = Field([], description="direct links along a dimension")


class MeshRef(Section):
    """One mesh, or a device of it."""

    noun: ClassVar[str] = "a reference to a mesh"

    mesh_descriptor: Name = Field(description="`name` of its descriptor")
    mesh_id: NonNegative = Field(0, description="number of the mesh, from 0")
    device_id: NonNegative | None = Field(None, description="device of it, counted row by row from 0")


class SwitchRef(Section):
    """One switch, or a device of it."""

    noun: ClassVar[str] = "a reference to a switch"

    switch_descriptor: Name = Field(description="`name` of its descriptor")
    switch_id: NonNegative = Field(0, description="number of the switch")
    device_id: NonNegative | None = Field(None, description="device of it, counted row by row from 0")


class GraphRef(Section):
    """One graph, or a part of it."""

    noun: ClassVar[str] = "a reference to a graph"

    graph_descriptor: Name = Field(description="`name` of its descriptor")
    graph_id: NonNegative = Field(0, description="number of the graph")
    sub_ref: "NodeRef | None" = Field(None, description="a part of it")


class NodeRef(Section):
    """A mesh, a switch or a graph."""

    noun: ClassVar[str] = "a reference"

    mesh: MeshRef | None = Field(None, description="a mesh")
    graph: GraphRef | None = Field(None, description="a graph")
    switch: SwitchRef | None = Field(None, description="a switch")


class GraphTopology(Section):
    """Connections by a rule."""

    layout_type: Literal["ALL_TO_ALL", "RING"] = Field(description="which instances are connected")
    channels: Channels = Field(description="ethernet channels of each connection")
    assign_z_direction: bool = Field(default=False, description="use the Z ports")


class Connection(Section):
    """A connection of two nodes."""

    noun: ClassVar[str] = "a connection"

    nodes: list[NodeRef] = Field(description="its two ends")
    channels: Channels = Field(description="its ethernet channels")
    directional: bool = Field(default=False, description="one way only; the runtime takes false")
    routing_direction: list[Direction] = Field([], description="side of the mesh, of each node")
    assign_z_direction: bool = Field(default=False, description="use the Z ports")


class GraphDescriptor(Section):
    """A graph: its instances and how they are connected."""

    noun: ClassVar[str] = "a graph descriptor"

    name: Name = Field(description="what references call it")
    type: Name = Field(description='kind of graph; the runtime takes "FABRIC"')
    instances: Annotated[list[NodeRef], Field(min_length=1)] = Field(description="its meshes and switches")
    graph_topology: GraphTopology | None = Field(None, description="connections by a rule")
    connections: list[Connection] = Field([], description="connections one by one")


class LogicalNode(Section):
    """A device of the descriptor."""

    mesh_id: NonNegative | None = Field(None, description="mesh")
    mesh_id_regex: str | None = Field(None, description="meshes, such as `0-3,8`")
    chip_id: NonNegative | None = Field(None, description="device of the mesh")
    chip_id_regex: str | None = Field(None, description="devices, such as `0-3`")


class PhysicalPosition(Section):
    """A place for a chip in a host."""

    tray_id: NonNegative | None = Field(None, description="tray")
    tray_id_regex: str | None = Field(None, description="trays")
    asic_location: NonNegative | None = Field(None, description="place in the tray")
    asic_location_regex: str | None = Field(None, description="places in the tray")


class Pinning(Section):
    """Devices that may lie at any of the given places."""

    noun: ClassVar[str] = "a pinning"

    logical_fabric_node_id: Annotated[list[LogicalNode], Field(min_length=1)] = Field(description="devices")
    physical_asic_position: Annotated[list[PhysicalPosition], Field(min_length=1)] = Field(description="places")
    board_revision: Name | None = Field(None, description="only on boards of this revision")


class DescriptorFile(Section):
    """`mgd.textproto`."""

    noun: ClassVar[str] = "a mesh graph descriptor"

    mesh_descriptors: list[MeshDescriptor] = Field([], description="kinds of meshes")
    switch_descriptors: list[SwitchDescriptor] = Field([], description="kinds of switches")
    graph_descriptors: list[GraphDescriptor] = Field([], description="the graph that connects them")
    top_level_instance: NodeRef = Field(description="the mesh or graph that the file describes")
    pinnings: list[Pinning] = Field([], description="devices at fixed places")
