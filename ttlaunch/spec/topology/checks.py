"""Check the rules between files: ranks against slots, bindings against meshes, devices against hosts.

Each function gets what could be read, so that one broken file does not hide mistakes between the others.
"""

import re
from collections.abc import Iterator, Mapping, Sequence

from ttlaunch.diagnostics.count import counted
from ttlaunch.diagnostics.diagnostic import Diagnostic, Label, Severity, mistake_at
from ttlaunch.diagnostics.suggest import listed, shown
from ttlaunch.spec.topology import codes
from ttlaunch.spec.topology.mesh_graph import NOT_TENSTORRENT, MeshGraph
from ttlaunch.spec.topology.model import Host, HostName, Mesh, Rank, Slot, Switch
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
    """Check that every rank drives its own block of an existing mesh or switch, and warn of blocks without a rank."""
    taken: dict[tuple[int, int], BoundRank] = {}
    is_valid = bindings.complete
    by_mesh: dict[int, list[BoundRank]] = {}
    for row in bindings.rows:
        by_mesh.setdefault(row.binding.mesh_id, []).append(row)
    for row in bindings.rows:
        rows, driven = by_mesh[row.binding.mesh_id], graph.driven(row.binding.mesh_id)
        is_unsaid = driven is not None and driven.hosts > 1 and row.binding.mesh_host_rank is None
        mistake: Diagnostic | None = None
        if driven is None:
            # A link names it too: then the mesh is missing in the descriptor, where that has been reported.
            mistake = (
                _missing_mesh(rows, graph) if row is rows[0] and row.binding.mesh_id not in graph.missing else None
            )
            is_valid = False
        elif is_unsaid:
            unsaid = [each for each in rows if each.binding.mesh_host_rank is None]
            mistake = _unsaid_hosts(unsaid, driven, is_whole=len(rows) == len(unsaid)) if row is unsaid[0] else None
        else:
            mistake = _host_rank_problem(row, driven)
            block = (row.binding.mesh_id, row.binding.mesh_host_rank or 0)
            if mistake is None and block in taken:
                mistake = _same_block(row, taken[block], driven)
            # The first one stays: a third rank on the same block is compared with it too.
            taken.setdefault(block, row)
        if mistake is not None:
            is_valid = is_valid and mistake.severity is not Severity.ERROR
            yield mistake
    if is_valid:
        yield from _idle_meshes(bindings, graph)


def check_hosts(
    bindings: Bindings, hosts: Sequence[Host], graphs: Mapping[Rank, MeshGraph], *, is_valid: bool
) -> Iterator[Diagnostic]:
    """Check the ranks that share a host: the devices that they see, and that they do not drive both meshes and switches.

    Args:
        bindings: The ranks of the whole run.
        hosts: The hosts, in the order in which ranks take their slots; empty if they are not known.
        graphs: The descriptor of each rank, as far as it could be read.
        is_valid: Whether there is no error, and nothing to report about slots, whose consequence it could be that ranks share
            a host.
    """
    slots = [Slot(host, index) for host in hosts for index in range(host.slots)]
    rows = sorted(bindings.rows, key=lambda row: row.binding.rank)
    yield from _check_devices(bindings, slots, graphs)
    on_host: dict[HostName, list[BoundRank]] = {}
    for row in rows:
        if row.binding.rank < len(slots) and row.binding.rank in graphs:
            on_host.setdefault(slots[row.binding.rank].host.name, []).append(row)
    mixed = list(_mixed_hosts(on_host, graphs))
    yield from mixed
    if is_valid and not mixed:
        yield from _shared_devices(on_host, bindings, graphs)


def _check_devices(bindings: Bindings, slots: Sequence[Slot], graphs: Mapping[Rank, MeshGraph]) -> Iterator[Diagnostic]:
    """Check that no two ranks of a host see the same device, and that no rank sees more devices than its block has."""
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


def _mixed_hosts(
    on_host: Mapping[HostName, Sequence[BoundRank]], graphs: Mapping[Rank, MeshGraph]
) -> Iterator[Diagnostic]:
    """Report hosts of which one rank drives a mesh and another one a switch."""
    for host, rows in on_host.items():
        driven = {row.binding.rank: graphs[row.binding.rank].driven(row.binding.mesh_id) for row in rows}
        mesh = next((row for row in rows if isinstance(driven[row.binding.rank], Mesh)), None)
        switch = next((row for row in rows if isinstance(driven[row.binding.rank], Switch)), None)
        if mesh and switch:
            message = f"rank {switch.binding.rank} drives {driven[switch.binding.rank]} on host `{shown(host)}`, where rank {mesh.binding.rank} drives {driven[mesh.binding.rank]}"
            other = (mesh.mesh_span, "a mesh of the same host")
            hint = "bind the switch to a rank of another host: rank r takes the r-th slot of the hostfile"
            yield mistake_at(codes.SWITCH_AND_MESH, message, switch.mesh_span, label="a switch", other=other, hint=hint)


def _shared_devices(
    on_host: Mapping[HostName, Sequence[BoundRank]], bindings: Bindings, graphs: Mapping[Rank, MeshGraph]
) -> Iterator[Diagnostic]:
    """Warn once of ranks that share a host and do not say which of its devices are theirs."""
    if _VISIBLE in bindings.global_environment:
        return
    bare = {
        host: [row for row in rows if _VISIBLE not in row.binding.environment]
        for host, rows in on_host.items()
        if len(rows) > 1 and graphs[rows[0].binding.rank].arch not in NOT_TENSTORRENT
    }
    bare = {host: rows for host, rows in bare.items() if rows}
    for host, rows in list(bare.items())[:1]:
        beside = next(row for row in on_host[host] if row is not rows[0])
        others = f", and so on {counted(len(bare) - 1, 'other host')}" if len(bare) > 1 else ""
        message = (
            f"{_ranks(rows)} {'has' if len(rows) == 1 else 'have'} no `{_VISIBLE}` on host `{shown(host)}`, which they share"
            + others
        )
        if len(rows) == 1:
            message = (
                f"rank {rows[0].binding.rank} has no `{_VISIBLE}`, and shares host `{shown(host)}` with rank {beside.binding.rank}"
                + others
            )
        hint = f'name the devices of each rank in its `env_overrides`: `{_VISIBLE}: "0,1"`'
        label, other = "sees all devices of the host", (beside.binding.span, "runs there too")
        severity = Severity.WARNING
        yield mistake_at(
            codes.SHARED_DEVICES, message, rows[0].binding.span, label=label, other=other, hint=hint, severity=severity
        )


def _missing_mesh(rows: Sequence[BoundRank], graph: MeshGraph) -> Diagnostic:
    """Report a mesh that does not exist once, for all ranks that are bound to it."""
    mesh_id, first = rows[0].binding.mesh_id, rows[0].mesh_span
    message = f"{_ranks(rows)} {'is' if len(rows) == 1 else 'are'} bound to mesh {mesh_id}, which does not exist"
    other = (graph.span, f"this graph defines {graph.ids_as_text}")
    label = f"no mesh has id {mesh_id}" if not graph.switches else f"no mesh or switch has id {mesh_id}"
    return mistake_at(codes.MISSING_MESH, message, first, label=label, other=other)


def _ranks(rows: Sequence[BoundRank]) -> str:
    names = listed([row.binding.rank for row in rows], last="and", quote="")
    return f"rank{'s' if len(rows) > 1 else ''} {names}"


def _unsaid_hosts(rows: Sequence[BoundRank], mesh: Mesh | Switch, *, is_whole: bool) -> Diagnostic:
    """Report ranks without a `mesh_host_rank`; only a warning if none of the mesh's ranks has one, and each host has a rank."""
    does, it = ("does not say which host", "it is") if len(rows) == 1 else ("do not say which hosts", "they are")
    message = f"{_ranks(rows)} {does} of {mesh} {it}; the mesh has {mesh.hosts}"
    label, hint = "has no `mesh_host_rank`", f"add `mesh_host_rank:` with a number from 0 to {mesh.hosts - 1}"
    other = (mesh.span, f"{mesh.host_shape[0]} × {mesh.host_shape[1]} = {counted(mesh.hosts, 'host')}")
    is_left_open = is_whole and len(rows) == mesh.hosts
    note = (
        "there are as many ranks as hosts; some of the vendor's own bindings leave it open like this"
        if is_left_open
        else ""
    )
    severity = Severity.WARNING if is_left_open else Severity.ERROR
    place = rows[0].mesh_span
    return mistake_at(
        codes.MESH_HOST_RANK, message, place, label=label, other=other, note=note, hint=hint, severity=severity
    )


def _host_rank_problem(row: BoundRank, mesh: Mesh | Switch) -> Diagnostic | None:
    binding, hosts = row.binding, counted(mesh.hosts, "host")
    if binding.mesh_host_rank is None or binding.mesh_host_rank < mesh.hosts:
        return None
    message = f"rank {binding.rank} is host {binding.mesh_host_rank} of {mesh}, which has {hosts}"
    expected = f"expected 0 to {mesh.hosts - 1}" if mesh.hosts > 1 else "expected 0"
    other = (mesh.span, f"{mesh.host_shape[0]} × {mesh.host_shape[1]} = {hosts}")
    return mistake_at(codes.MESH_HOST_RANK, message, row.host_rank_span, label=expected, other=other)


def _same_block(row: BoundRank, other: BoundRank, mesh: Mesh | Switch) -> Diagnostic:
    first, rank = other.binding.rank, row.binding.rank
    block = f"host {row.binding.mesh_host_rank} of {mesh}" if mesh.hosts > 1 else str(mesh)
    message, second = (
        f"ranks {first} and {rank} both drive {block}",
        (other.host_rank_span, f"rank {first} drives it too"),
    )
    return mistake_at(codes.SAME_BLOCK, message, row.host_rank_span, label=f"rank {rank}", other=second)


def _idle_meshes(bindings: Bindings, graph: MeshGraph) -> Iterator[Diagnostic]:
    driven = {(row.binding.mesh_id, row.binding.mesh_host_rank) for row in bindings.rows}
    bound = {mesh_id for mesh_id, _ in driven}
    idle = [mesh for mesh in graph.meshes if mesh.id not in bound]
    other = (bindings.span, f"these bind {counted(len(bindings.rows), 'rank')}")
    severity = Severity.WARNING
    if idle:
        names = listed([mesh.id for mesh in idle], last="and", quote="")
        message = f"no rank drives mesh{'es' if len(idle) > 1 else ''} {names}"
        yield mistake_at(codes.IDLE_MESH, message, idle[0].span, label="idle", other=other, severity=severity)
    for mesh in graph.meshes:
        # A mesh whose ranks do not say which host they are has one for each.
        is_known = mesh.id in bound and (mesh.id, None) not in driven
        missing = [host for host in range(mesh.hosts) if (mesh.id, host) not in driven] if is_known else []
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
    mesh = graph.driven(row.binding.mesh_id) if graph else None
    if mesh is None or not mesh.hosts or len(devices) <= mesh.devices_per_host:
        return None
    seen, (rows, columns) = counted(len(devices), "device"), mesh.device_shape
    message = f"rank {rank} sees {seen}, but its part of {mesh} has {mesh.devices_per_host}"
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
