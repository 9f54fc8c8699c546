"""Check the rules between files: ranks against slots, bindings against meshes, devices against hosts.

Each function gets what could be read, so that one broken file does not hide mistakes between the others.
"""

import re
from collections.abc import Iterator, Mapping, Sequence

from ttlaunch.diagnostics.count import counted
from ttlaunch.diagnostics.diagnostic import Diagnostic, Label, Severity, mistake_at
from ttlaunch.diagnostics.suggest import listed, shown
from ttlaunch.spec.topology import codes
from ttlaunch.spec.topology.mesh_graph import MeshGraph
from ttlaunch.spec.topology.model import Host, Mesh, Rank, Slot
from ttlaunch.spec.topology.rank_bindings import Bindings, BoundRank

_DEVICE = re.compile(r"[0-9]{1,4}\Z|[0-9a-fA-F]{4}:[0-9a-fA-F]{2}:[0-9a-fA-F]{2}\.[0-7]\Z")
_VISIBLE = "TT_VISIBLE_DEVICES"
_MOST_SUMMED = 8


def check_slots(bindings: Bindings, hosts: Sequence[Host]) -> Iterator[Diagnostic]:
    """Check that every rank has a slot, and warn of hosts without a rank."""
    total = sum(host.slots for host in hosts)
    ranks = len({row.binding.rank for row in bindings.rows})
    if ranks <= total or not hosts:
        yield from _idle_hosts(bindings, hosts, ranks)
        return
    without_slot = min(
        (row for row in bindings.rows if row.binding.rank >= total), key=lambda row: row.binding.rank, default=None
    )
    if without_slot is None:
        return
    many = f"{counted(total, 'slot')} on {counted(len(hosts), 'host')}"
    sums = " + ".join(str(host.slots) for host in hosts)
    arithmetic = f"{sums} = {many}" if 1 < len(hosts) <= _MOST_SUMMED else many
    message = f"{counted(ranks, 'rank')} are bound but the hosts offer {counted(total, 'slot')}"
    label, other = f"rank {without_slot.binding.rank} has no slot", (hosts[-1].slots_span, arithmetic)
    yield mistake_at(codes.TOO_FEW_SLOTS, message, without_slot.binding.span, label=label, other=other)


def _idle_hosts(bindings: Bindings, hosts: Sequence[Host], ranks: int) -> Iterator[Diagnostic]:
    """Warn of hosts after the host of the last rank: ranks fill the slots in order, so these stay idle."""
    before = 0
    idle = []
    for host in hosts:
        idle += [host] if before >= ranks else []
        before += host.slots
    if not idle or not bindings.complete or ranks < len(bindings.rows):
        return
    names = listed([shown(host.name) for host in idle], last="and")
    first = idle[0]
    taken = hosts[: hosts.index(first)]
    sums = " + ".join(str(host.slots) for host in taken)
    many = f"{counted(sum(host.slots for host in taken), 'slot')} before it"
    message = f"no rank runs on host{'s' if len(idle) > 1 else ''} {names}"
    label = f"{sums} = {many}" if 1 < len(taken) <= _MOST_SUMMED else many
    other = (bindings.span, f"these bind {counted(ranks, 'rank')}")
    yield mistake_at(codes.IDLE_HOST, message, first.span, label=label, other=other, severity=Severity.WARNING)


def check_meshes(bindings: Bindings, graph: MeshGraph) -> Iterator[Diagnostic]:
    """Check that every rank drives its own block of an existing mesh, and warn of blocks without a rank."""
    taken: dict[tuple[int, int], BoundRank] = {}
    is_valid = bindings.complete
    for row in bindings.rows:
        mesh = graph.mesh(row.binding.mesh_id)
        mistake = _missing_mesh(row, graph) if mesh is None else _host_rank_problem(row, mesh)
        if mistake is not None:
            is_valid = False
            yield mistake
        block = (row.binding.mesh_id, row.binding.mesh_host_rank or 0)
        if mistake is None and block in taken:
            is_valid = False
            yield _same_block(row, taken[block], mesh)
        # The first one stays: a third rank on the same block is compared with it too.
        taken.setdefault(block, row)
    if is_valid:
        yield from _idle_meshes(bindings, graph)


def check_devices(bindings: Bindings, hosts: Sequence[Host], graphs: Mapping[Rank, MeshGraph]) -> Iterator[Diagnostic]:
    """Check that no two ranks of a host see the same device, and that no rank sees more devices than its block has."""
    slots = [Slot(host, index) for host in hosts for index in range(host.slots)]
    seen: dict[tuple[str, str], BoundRank] = {}
    for row in sorted(bindings.rows, key=lambda row: row.binding.rank):
        value = row.binding.environment.get(_VISIBLE, bindings.global_environment.get(_VISIBLE))
        if value is None or row.devices_span is None:
            continue
        rank, devices = row.binding.rank, _devices(value)
        mistake = _visible_problem(row, value, graphs.get(rank))
        if mistake:
            yield mistake
            continue
        if rank >= len(slots):
            continue
        host = slots[rank].host.name
        both = [(device, seen[host, device]) for device in devices if (host, device) in seen]
        if both:
            device, other = both[0]
            yield _seen_twice(row, other, device=device, host=host)
        for device in devices:
            seen.setdefault((host, device), row)


def _missing_mesh(row: BoundRank, graph: MeshGraph) -> Diagnostic:
    binding = row.binding
    message = f"rank {binding.rank} is bound to mesh {binding.mesh_id}, which does not exist"
    label, other = f"no mesh has id {binding.mesh_id}", (graph.span, f"this graph defines {graph.ids_as_text}")
    return mistake_at(codes.MISSING_MESH, message, row.mesh_span, label=label, other=other)


def _host_rank_problem(row: BoundRank, mesh: Mesh) -> Diagnostic | None:
    binding, hosts = row.binding, counted(mesh.hosts, "host")
    other = (mesh.span, f"{mesh.host_shape[0]} × {mesh.host_shape[1]} = {hosts}")
    if binding.mesh_host_rank is None and mesh.hosts > 1:
        message = f"rank {binding.rank} does not say which host of mesh {mesh.id} it is; the mesh has {mesh.hosts}"
        label, hint = "has no `mesh_host_rank`", f"add `mesh_host_rank:` with a number from 0 to {mesh.hosts - 1}"
        return mistake_at(codes.MESH_HOST_RANK, message, row.mesh_span, label=label, other=other, hint=hint)
    if binding.mesh_host_rank is not None and binding.mesh_host_rank >= mesh.hosts:
        message = f"rank {binding.rank} is host {binding.mesh_host_rank} of mesh {mesh.id}, which has {hosts}"
        expected = f"expected 0 to {mesh.hosts - 1}" if mesh.hosts > 1 else "expected 0"
        return mistake_at(codes.MESH_HOST_RANK, message, row.host_rank_span, label=expected, other=other)
    return None


def _same_block(row: BoundRank, other: BoundRank, mesh: Mesh | None) -> Diagnostic:
    first, rank = other.binding.rank, row.binding.rank
    block = f"mesh {row.binding.mesh_id}"
    if mesh is not None and mesh.hosts > 1:
        block = f"host {row.binding.mesh_host_rank} of {block}"
    message, second = (
        f"ranks {first} and {rank} both drive {block}",
        (other.host_rank_span, f"rank {first} drives it too"),
    )
    return mistake_at(codes.SAME_BLOCK, message, row.host_rank_span, label=f"rank {rank}", other=second)


def _idle_meshes(bindings: Bindings, graph: MeshGraph) -> Iterator[Diagnostic]:
    driven = {(row.binding.mesh_id, row.binding.mesh_host_rank or 0) for row in bindings.rows}
    bound = {mesh_id for mesh_id, _ in driven}
    idle = [mesh for mesh in graph.meshes if mesh.id not in bound]
    other = (bindings.span, f"these bind {counted(len(bindings.rows), 'rank')}")
    severity = Severity.WARNING
    if idle:
        names = listed([mesh.id for mesh in idle], last="and", quote="")
        message = f"no rank drives mesh{'es' if len(idle) > 1 else ''} {names}"
        yield mistake_at(codes.IDLE_MESH, message, idle[0].span, label="idle", other=other, severity=severity)
    for mesh in graph.meshes:
        missing = [host for host in range(mesh.hosts) if (mesh.id, host) not in driven] if mesh.id in bound else []
        if missing and mesh.hosts > 1:
            names = listed(missing, last="and", quote="")
            message = f"no rank drives host{'s' if len(missing) > 1 else ''} {names} of mesh {mesh.id}"
            label = f"a mesh of {mesh.hosts} hosts"
            yield mistake_at(codes.IDLE_MESH, message, mesh.span, label=label, other=other, severity=severity)


def _visible_problem(row: BoundRank, value: str, graph: MeshGraph | None) -> Diagnostic | None:
    span, rank, devices = row.devices_span, row.binding.rank, _devices(value)
    if span is None:
        return None
    if not all(_DEVICE.match(device) for device in devices):
        message = f"`{_VISIBLE}` of rank {rank} is `{shown(value)}`; device numbers with commas were expected"
        return mistake_at(codes.VISIBLE_DEVICES, message, span, label='expected a text such as "0,1,2,3"')
    repeated = next((device for index, device in enumerate(devices) if device in devices[:index]), None)
    if repeated is not None:
        return mistake_at(codes.VISIBLE_DEVICES, f"`{_VISIBLE}` of rank {rank} lists device {repeated} twice", span)
    mesh = graph.mesh(row.binding.mesh_id) if graph else None
    if mesh is None or not mesh.hosts or len(devices) <= mesh.devices_per_host:
        return None
    seen, (rows, columns) = counted(len(devices), "device"), mesh.device_shape
    message = f"rank {rank} sees {seen}, but its part of mesh {mesh.id} has {mesh.devices_per_host}"
    other = (mesh.span, f"{rows} × {columns} devices on {counted(mesh.hosts, 'host')}")
    return mistake_at(codes.VISIBLE_DEVICES, message, span, label=seen, other=other)


def _devices(value: str) -> list[str]:
    return [word.strip() for word in value.split(",")]


def _seen_twice(row: BoundRank, other: BoundRank, *, device: str, host: str) -> Diagnostic:
    first, rank = other.binding.rank, row.binding.rank
    message = f"ranks {first} and {rank} both see device {device} of host `{host}`"
    primary = Label(row.devices_span, f"rank {rank}") if row.devices_span else None
    if row.devices_span == other.devices_span or other.devices_span is None:
        hints = (f"give each rank its `{_VISIBLE}` in `env_overrides`",)
        return Diagnostic(codes.DEVICE_TWICE, message, primary, hints=hints)
    return Diagnostic(codes.DEVICE_TWICE, message, primary, (Label(other.devices_span, f"rank {first}"),))
