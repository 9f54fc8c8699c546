"""Remove lost hosts from the description of a cluster.

A host is cabled to the meshes that its ranks drive, so the bindings of its ranks are removed with it. The remaining
ranks keep their meshes and are renumbered from 0. A host that had no bound rank does not get one, because no file says
which mesh is cabled to it.
"""

from collections.abc import Collection
from dataclasses import replace

from ttlaunch.diagnostics.suggest import listed
from ttlaunch.spec.topology.model import Binding, Rank, Topology


def leave_out(topology: Topology, hosts: Collection[str], *, max_ranks: int | None = None) -> Topology:
    """Return the cluster without the given hosts.

    Args:
        topology: The whole cluster.
        hosts: Names of the lost hosts.
        max_ranks: The largest number of bound ranks to keep; None keeps every rank whose host remains.
    """
    kept = tuple(host for host in topology.hosts if host.name not in hosts)
    return replace(topology, hosts=kept, bindings=_kept_bindings(topology, hosts)[:max_ranks])


def why_not_without(topology: Topology, hosts: Collection[str]) -> str | None:
    """Return the reason why the bindings allow no run without these hosts; None if they allow one."""
    lost = [binding for binding in topology.bindings if topology.slots[binding.rank].host.name in hosts]
    if not lost:
        return None
    if len(lost) == len(topology.bindings):
        return f"all {len(lost)} bound ranks ran there" if len(lost) > 1 else "the only bound rank ran there"
    first = lost[0]
    if any(binding.subcontext_id is not None for binding in topology.bindings):
        return f"rank {first.rank} belongs to sub-context {first.subcontext_id}, and the bindings fix the number of ranks in each sub-context"
    shared = sorted({binding.mesh_id for binding in lost if topology.driven(binding).hosts > 1})
    left = [mesh for mesh in shared if any(row.mesh_id == mesh for row in topology.bindings if row not in lost)]
    if left:
        names = listed(left, last="and", quote="")
        what = f"mesh {names} spans" if len(left) == 1 else f"meshes {names} span"
        return f"{what} several hosts and cannot be driven without one of them"
    return None


def _kept_bindings(topology: Topology, hosts: Collection[str]) -> tuple[Binding, ...]:
    kept = [binding for binding in topology.bindings if topology.slots[binding.rank].host.name not in hosts]
    return tuple(replace(binding, rank=Rank(rank)) for rank, binding in enumerate(kept))
