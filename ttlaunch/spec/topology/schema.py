"""The YAML files of a configuration as they are written: bindings, mesh graph descriptor, cluster settings.

`checks.py` has the rules between values. The reference pages of the files are generated from the descriptions.
"""

from typing import Annotated, Any, ClassVar

from pydantic import Field, JsonValue

from ttlaunch.spec.located.schema import Section

Positive = Annotated[int, Field(ge=1)]
NonNegative = Annotated[int, Field(ge=0)]
Shape = Annotated[list[Positive], Field(min_length=2, max_length=2)]
Text = Annotated[str, Field(min_length=1)]

# The JSON Schema of links, for editors only: `mesh_links.py` reads links, with better messages than a schema gives.
_MESH_END: dict[str, JsonValue] = {"type": "string", "pattern": "^[Mm][0-9]+$"}
_DEVICE_END: dict[str, JsonValue] = {
    "type": "array",
    "prefixItems": [_MESH_END, {"type": "string", "pattern": "^[Dd][0-9]+$"}],
    "items": False,
    "minItems": 2,
}
_CHANNELS: dict[str, JsonValue] = {"type": "integer", "minimum": 1}
_THREE: dict[str, JsonValue] = {"type": "array", "items": False, "minItems": 3}


class BindingRow(Section):
    """One rank."""

    noun: ClassVar[str] = "a rank binding"

    rank: NonNegative = Field(description="rank in the world communicator, from 0")
    mesh_id: NonNegative = Field(description="`id` of the mesh it drives, in the mesh graph descriptor")
    mesh_host_rank: NonNegative | None = Field(
        None, description="if the mesh spans several hosts: which of them this rank runs on, counted row by row"
    )
    env_overrides: dict[str, str] = Field(
        {}, description="variables of this rank alone; `$VAR` is expanded here, `$$` is a dollar sign"
    )
    subcontext_id: NonNegative | None = Field(None, description="sub-context it belongs to, from 0")
    subcontext_size: Positive | None = Field(None, description="how many ranks that sub-context has")
    mesh_graph_desc_path: Text | None = Field(
        None, description="another descriptor for this binding's `mesh_id`; null: that of the whole file"
    )


class BindingsFile(Section):
    """`rank_bindings.yaml`."""

    noun: ClassVar[str] = "a rank bindings file"

    rank_bindings: Annotated[list[BindingRow], Field(min_length=1)] = Field(description="one entry per rank")
    global_env: dict[str, str] = Field(
        {}, description="variables of every rank; `$VAR` is expanded here, `$$` is a dollar sign"
    )
    mesh_graph_desc_path: Text = Field(
        description="the descriptor: absolute, or looked for beside this file, in its parents, in the current folder"
    )


class SubContextBindingsFile(BindingsFile):
    """`rank_bindings.yaml` where each sub-context has a descriptor of its own."""

    mesh_graph_desc_path: Text | None = Field(None, description="the descriptor of ranks without a sub-context")  # type: ignore[assignment] # need not stand here
    subcontext_id_to_mesh_graph_descriptor: Annotated[dict[NonNegative, Text], Field(min_length=1)] = Field(
        description="the descriptor of each sub-context, from 0"
    )


class SubContextFilesFile(Section):
    """A bindings file that is made of others, one per sub-context."""

    noun: ClassVar[str] = "a mapping of sub-contexts"

    subcontext_id_to_rank_bindings: Annotated[dict[NonNegative, Text], Field(min_length=1)] = Field(
        description="the bindings file of each sub-context, from 0; looked for beside this file first"
    )


class DescriptorMappingFile(Section):
    """A file that names the descriptor of each sub-context, and no ranks."""

    noun: ClassVar[str] = "a mapping of descriptors"

    subcontext_id_to_mesh_graph_descriptor: Annotated[dict[NonNegative, Text], Field(min_length=1)] = Field(
        description="the descriptor of each sub-context, from 0; looked for beside this file first"
    )


class MockMappingFile(Section):
    """A file that names the description of a cluster that each rank takes for its own, for tests without devices."""

    noun: ClassVar[str] = "a mapping of mock clusters"

    rank_to_cluster_mock_cluster_desc: Annotated[dict[NonNegative, Text], Field(min_length=1)] = Field(
        description="the file of each rank; looked for beside this file first"
    )


class EthernetPorts(Section):
    """Ethernet ports of a chip, per direction."""

    north: NonNegative = Field(alias="N", description="ports to the north")
    east: NonNegative = Field(alias="E", description="ports to the east")
    south: NonNegative = Field(alias="S", description="ports to the south")
    west: NonNegative = Field(alias="W", description="ports to the west")
    z: NonNegative | None = Field(None, alias="Z", description="ports to another plane of chips")


class ChipSpec(Section):
    """The chip that all boards carry."""

    arch: Text = Field(description="wormhole_b0, blackhole, quasar, cpu or cuda, in any letter case")
    ethernet_ports: EthernetPorts = Field(description="ports per direction; the same number in N, E, S and W")


class BoardRow(Section):
    """A kind of board."""

    noun: ClassVar[str] = "a board"

    name: Text | int = Field(description="name by which a mesh refers to it in `board`")
    type: Text = Field(description="Mesh, TORUS_X, TORUS_Y or TORUS_XY, in any letter case")
    topology: Shape = Field(description="rows and columns of devices on one board")


class MeshRow(Section):
    """A mesh."""

    noun: ClassVar[str] = "a mesh"

    id: NonNegative = Field(description="number by which bindings and links refer to it, from 0")
    board: Text | int = Field(description="name of its board")
    device_topology: Shape = Field(description="rows and columns of devices: host_topology × the board's topology")
    host_topology: Shape = Field(description="rows and columns of hosts that share the mesh")


class MeshGraphFile(Section):
    """`mgd.yaml`, version 1, in the shape of release 0.64."""

    noun: ClassVar[str] = "a mesh graph descriptor"

    chip_spec: ChipSpec = Field(alias="ChipSpec", description="the chip")
    boards: Annotated[list[BoardRow], Field(min_length=1)] = Field(alias="Board", description="kinds of boards")
    meshes: Annotated[list[MeshRow], Field(min_length=1)] = Field(alias="Mesh", description="the meshes")
    relaxed_graph: list[Any] | None = Field(
        None,
        alias="RelaxedGraph",
        description="links as `[M0, M1, channels]`; instead of `Graph`",
        json_schema_extra={"items": {"prefixItems": [*[_MESH_END] * 2, _CHANNELS], **_THREE}},
    )
    graph: list[Any] | None = Field(
        None,
        alias="Graph",
        description="links of devices as `[[M0, D1], [M1, D1], channels]`; not with `RelaxedGraph`",
        json_schema_extra={"items": {"prefixItems": [*[_DEVICE_END] * 2, _CHANNELS], **_THREE}},
    )


class ClusterFile(Section):
    """`cluster.yaml`: how to reach the hosts and what they have. Every key may be left out."""

    noun: ClassVar[str] = "a cluster file"

    user: Text | None = Field(None, description="login name on the hosts; null: what ssh would use")
    port: Annotated[int, Field(ge=1, le=65535)] | None = Field(
        None, description="TCP port of sshd; null: what ssh would use"
    )
    identity_file: Text | None = Field(None, description="private key; null: what ssh would use")
    remote_folder: Text = Field("~/.ttlaunch", description="where code and run data lie on a host")
    python: Text | None = Field(
        None, description="interpreter on the hosts; null: what `ttlaunch prepare` made, else this machine's path"
    )
    mpi_prefix: Text | None = Field(
        None, description="folder of Open MPI on the hosts; null: that of the interpreter's environment"
    )
    network: Text | None = Field(
        None,
        description="interface name or CIDR of the network between ranks; null: ttlaunch chooses one that all hosts share",
    )
    environment: dict[str, str] = Field(
        {}, description="variables of every rank; `$VAR` is expanded here, `$$` is a dollar sign"
    )
