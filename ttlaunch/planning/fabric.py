"""Rules of `socket_type: fabric`: ranks that communicate need a path of links between their meshes, and equal mesh shapes.

Fabric sockets run from device to device along the links of the mesh graph, device d of one mesh to device d of the
other. The length of the path does not affect correctness; `ttlaunch place` shortens it.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice

from ttlaunch.diagnostics import Diagnostic, Label
from ttlaunch.diagnostics.count import counted
from ttlaunch.planning.graph import Node, hops_between, node_of, traffic
from ttlaunch.planning.roles import RoleLayout
from ttlaunch.spec.recipe.config import LoadedConfig
from ttlaunch.spec.topology.model import Mesh, Rank, Switch, Topology

_KEY = "multihost_config.socket_type"
_MPI = f"`--set {_KEY}=mpi` sends through host memory"
_Pair = tuple[Rank, Rank]
_Hops = Mapping[Node, Mapping[Node, int]]


@dataclass(frozen=True)
class _FabricPairs:
    """The ranks that communicate over fabric, each pair once, and the mesh or switch that each rank drives."""

    loaded: LoadedConfig
    roles: Sequence[str]
    pairs: Sequence[_Pair]
    drives: Mapping[Rank, Mesh | Switch]

    def name(self, rank: Rank) -> str:
        return f"rank {rank} ({self.roles[rank].replace('_', ' ')})"


def sends_over_links(loaded: LoadedConfig) -> bool:
    """Whether ranks send along the links of the mesh graph; other sockets use the network between the hosts."""
    return loaded.checked.multihost_config.socket_type == "fabric"


def check_fabric(loaded: LoadedConfig, topology: Topology, layout: RoleLayout) -> Iterator[Diagnostic]:
    """Yield what keeps fabric sockets from working between the ranks of this layout; nothing for other sockets."""
    if not sends_over_links(loaded):
        return
    drives = {Rank(binding.rank): topology.driven(binding) for binding in topology.bindings}
    pairs = [pair for pair in traffic(layout) if drives and drives[pair[0]] != drives[pair[1]]]
    if not topology.bindings or (pairs and not topology.links and not topology.switch_links):
        message = f"`socket_type` is `fabric` but configuration `{topology.name}` has no links between meshes"
        place = loaded.label(_KEY, "fabric sockets run along the links of `mgd.yaml`")
        yield Diagnostic("P007", message, place, hints=(_MPI,))
        return
    fabric = _FabricPairs(loaded, layout.roles, pairs, drives)
    yield from _no_path(fabric, hops_between(topology))
    yield from _different_shapes(fabric)


def _no_path(fabric: _FabricPairs, hops: _Hops) -> Iterator[Diagnostic]:
    drives = fabric.drives
    apart = [(a, b) for a, b in fabric.pairs if node_of(drives[b]) not in hops[node_of(drives[a])]]
    if not apart:
        return
    a, b = apart[0]
    near, far = drives[a], drives[b]
    reached = sum(not node.is_switch for node in hops[node_of(near)] if node != node_of(near))
    others = f"{reached} other mesh{'' if reached == 1 else 'es'}"
    yield Diagnostic(
        "P010",
        f"{fabric.name(a)} and {fabric.name(b)} talk over fabric, but no path joins {near} and {far}",
        fabric.loaded.label(_KEY, "needs a path of links between ranks that talk"),
        (
            Label(near.span, f"{near} of rank {a} reaches {others}"),
            Label(far.span, f"{far} of rank {b} is not among them"),
        ),
        notes=_other_pairs(fabric, apart, hops),
        hints=("add the missing link to the mesh graph if the cable is there", _MPI),
    )


def _other_pairs(fabric: _FabricPairs, apart: Sequence[_Pair], hops: _Hops) -> tuple[str, ...]:
    notes = []
    if len(apart) > 1:
        notes.append(f"{len(apart)} of {len(fabric.pairs)} pairs of ranks that talk have no path")
    nodes = {rank: node_of(driven) for rank, driven in fabric.drives.items()}
    lengths = sorted(hops[nodes[a]][nodes[b]] for a, b in fabric.pairs if (a, b) not in apart)
    if lengths:
        spread = counted(lengths[0], "hop") if lengths[0] == lengths[-1] else f"{lengths[0]} to {lengths[-1]} hops"
        which = "the other pair that talks is" if len(lengths) == 1 else f"the {len(lengths)} other pairs that talk are"
        notes.append(f"{which} {spread} apart")
    return tuple(notes)


def _different_shapes(fabric: _FabricPairs) -> Iterator[Diagnostic]:
    unlike = ((a, b) for a, b in fabric.pairs if _shape(fabric.drives[a]) != _shape(fabric.drives[b]))
    for a, b in islice(unlike, 1):
        meshes = fabric.drives[a], fabric.drives[b]
        here, there = (_shape(mesh) for mesh in meshes)
        yield Diagnostic(
            "P011",
            f"{fabric.name(a)} drives {here} devices but {fabric.name(b)}, which it talks to over fabric, {there}",
            fabric.loaded.label(_KEY, "joins each device with the one at the same place of the other mesh"),
            tuple(Label(mesh.span, f"{mesh}: {_shape(mesh)} for each rank") for mesh in meshes),
            hints=(_MPI,),
        )


def _shape(mesh: Mesh | Switch) -> str:
    """Return as text the rows and columns of devices that one rank of the mesh drives."""
    return f"{mesh.device_shape[0] // mesh.host_shape[0]} × {mesh.device_shape[1] // mesh.host_shape[1]}"
