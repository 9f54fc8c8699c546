"""Rules of `socket_type: fabric`: ranks that talk need a path of links between their meshes, and meshes of one shape.

Fabric sockets run from device to device along the links of the mesh graph, device d of one mesh to device d of the
other. Through how many meshes a message goes on its way doesn't matter for being right; `ttlaunch place` looks at that.
"""

from collections.abc import Iterator, Mapping

from ttlaunch.diagnostics import Diagnostic, Label
from ttlaunch.diagnostics.count import counted
from ttlaunch.planning.graph import mesh_hops, traffic
from ttlaunch.planning.roles import RoleLayout
from ttlaunch.spec.recipe.config import LoadedConfig
from ttlaunch.spec.topology.model import Mesh, MeshId, Rank, Topology

_KEY = "multihost_config.socket_type"
_MPI = f"`--set {_KEY}=mpi` sends through host memory"
_Pair = tuple[Rank, Rank]


def check_fabric(loaded: LoadedConfig, topology: Topology, layout: RoleLayout) -> Iterator[Diagnostic]:
    """What keeps fabric sockets from working between the ranks of this layout; nothing for other sockets."""
    if loaded.checked.multihost_config.socket_type != "fabric":
        return
    if not topology.bindings:
        yield _no_links(loaded, topology)
        return
    drives = {Rank(binding.rank): topology.mesh(binding.mesh_id) for binding in topology.bindings}
    pairs = [pair for pair in traffic(layout) if drives[pair[0]] != drives[pair[1]]]
    if pairs and not topology.links and not topology.switch_links:
        yield _no_links(loaded, topology)
        return
    hops = mesh_hops(topology)
    yield from _no_path(loaded, layout, pairs, drives, hops)
    yield from _other_shape(loaded, layout, pairs, drives)


def _no_links(loaded: LoadedConfig, topology: Topology) -> Diagnostic:
    return Diagnostic(
        "P007",
        f"`socket_type` is `fabric` but configuration `{topology.name}` has no links between meshes",
        _at_key(loaded, "fabric sockets run along the links of `mgd.yaml`"),
        hints=(_MPI,),
    )


def _no_path(
    loaded: LoadedConfig,
    layout: RoleLayout,
    pairs: list[_Pair],
    drives: Mapping[Rank, Mesh],
    hops: Mapping[MeshId, Mapping[MeshId, int]],
) -> Iterator[Diagnostic]:
    apart = [(a, b) for a, b in pairs if drives[b].id not in hops[drives[a].id]]
    if not apart:
        return
    a, b = apart[0]
    near, far = drives[a], drives[b]
    reached = len(hops[near.id]) - 1
    labels = (
        Label(
            near.span, f"mesh {near.id} of rank {a} reaches {counted(reached, 'other mesh').replace('meshs', 'meshes')}"
        ),
        Label(far.span, f"mesh {far.id} of rank {b} is not among them"),
    )
    yield Diagnostic(
        "P010",
        f"{_rank(a, layout)} and {_rank(b, layout)} talk over fabric, but no path joins mesh {near.id} and mesh {far.id}",
        _at_key(loaded, "needs a path of links between ranks that talk"),
        labels,
        notes=_other_pairs(pairs, apart, drives, hops),
        hints=("add the missing link to the mesh graph if the cable is there", _MPI),
    )


def _other_pairs(
    pairs: list[_Pair], apart: list[_Pair], drives: Mapping[Rank, Mesh], hops: Mapping[MeshId, Mapping[MeshId, int]]
) -> tuple[str, ...]:
    notes = []
    if len(apart) > 1:
        notes.append(f"{len(apart)} of {len(pairs)} pairs of ranks that talk have no path")
    lengths = sorted(hops[drives[a].id][drives[b].id] for a, b in pairs if (a, b) not in apart)
    if lengths:
        spread = counted(lengths[0], "hop") if lengths[0] == lengths[-1] else f"{lengths[0]} to {lengths[-1]} hops"
        which = "the other pair that talks is" if len(lengths) == 1 else f"the {len(lengths)} other pairs that talk are"
        notes.append(f"{which} {spread} apart")
    return tuple(notes)


def _other_shape(
    loaded: LoadedConfig, layout: RoleLayout, pairs: list[_Pair], drives: Mapping[Rank, Mesh]
) -> Iterator[Diagnostic]:
    for a, b in pairs:
        if _shape(drives[a]) != _shape(drives[b]):
            one, other = drives[a], drives[b]
            yield Diagnostic(
                "P011",
                f"{_rank(a, layout)} drives {_shape(one)} devices but {_rank(b, layout)}, which it talks to over fabric, {_shape(other)}",
                _at_key(loaded, "joins each device with the one at the same place of the other mesh"),
                (
                    Label(one.span, f"mesh {one.id}: {_shape(one)} for each rank"),
                    Label(other.span, f"mesh {other.id}: {_shape(other)} for each rank"),
                ),
                hints=(_MPI,),
            )
            return


def _shape(mesh: Mesh) -> str:
    """Rows and columns of devices that one rank drives."""
    return f"{mesh.device_shape[0] // mesh.host_shape[0]} × {mesh.device_shape[1] // mesh.host_shape[1]}"


def _rank(rank: Rank, layout: RoleLayout) -> str:
    return f"rank {rank} ({layout.roles[rank].replace('_', ' ')})"


def _at_key(loaded: LoadedConfig, text: str) -> Label | None:
    span = loaded.span(_KEY)
    return Label(span, text) if span else None
