"""What a host's machine offers: disk, shared memory, limits, processors, devices, and what earlier runs left there."""

from collections import Counter
from collections.abc import Mapping

from ttlaunch.diagnostics import Diagnostic, Severity, listed, shown
from ttlaunch.diagnostics.count import counted
from ttlaunch.hosts.doctor.facts import Disk, HostFacts
from ttlaunch.hosts.doctor.grouping import of_hosts
from ttlaunch.spec.topology.model import Topology

MEBIBYTE = 1024 * 1024
LEAST_DISK_BYTES = 256 * MEBIBYTE
LEAST_INODES = 10_000
SHM_BYTES_PER_SLOT = 16 * MEBIBYTE
_FILES, _FILES_PER_SLOT = 256, 4
_PROCESSES, _PROCESSES_PER_SLOT = 256, 64
_MOST_SHOWN = 6

Facts = Mapping[str, HostFacts]


def check_answers(facts: Facts, *, topology: Topology) -> list[Diagnostic]:
    """Report sections of the probe that were not answered in time."""
    late = {host: known.unanswered for host, known in facts.items() if known.unanswered}
    evidence = {host: f"no answer about its {listed(parts, last='and', quote='')}" for host, parts in late.items()}
    needed = any({"disk", "software", "network"} & set(parts) for parts in late.values())
    return of_hosts(
        "H013",
        evidence,
        topology=topology,
        says=("did not answer everything within 3 s", "did not answer everything within 3 s"),
        hints=(f"`ssh {next(iter(evidence), '')} df`: does a network file system hang?",),
        severity=Severity.ERROR if needed else Severity.WARNING,
    )


def check_disk(facts: Facts, *, topology: Topology) -> list[Diagnostic]:
    """Report a remote folder that cannot be written or has little room."""
    disks = {host: known.disk for host, known in facts.items() if known.disk}
    broken = {host: f"{_place(disk)}: {disk.problem}" for host, disk in disks.items() if disk.problem}
    small = {host: text for host, disk in disks.items() if not disk.problem and (text := _short_of(disk))}
    first, short = next(iter(broken.values()), ""), next(iter(small.values()), "")
    elsewhere = "`remote_folder:` in cluster.yaml chooses another place"
    return [
        *of_hosts(
            "H016",
            broken,
            topology=topology,
            says=(f"does not allow writing in {first}", "do not allow writing in ttlaunch's folder"),
            hints=(f"`ssh {next(iter(broken), '')} df -h '{topology.cluster.remote_folder}'`", elsewhere),
        ),
        *of_hosts(
            "H016",
            small,
            topology=topology,
            says=(f"has little room: {short}", "have little room"),
            hints=(elsewhere,),
            severity=Severity.WARNING,
        ),
    ]


def _place(disk: Disk) -> str:
    return disk.path if disk.nearest == disk.path else f"{disk.path} (below {disk.nearest})"


def _short_of(disk: Disk) -> str:
    if disk.free_bytes < LEAST_DISK_BYTES:
        return f"{disk.free_bytes // MEBIBYTE} MiB free in {_place(disk)}, {LEAST_DISK_BYTES // MEBIBYTE} MiB wanted"
    if disk.free_inodes is not None and disk.free_inodes < LEAST_INODES:
        return f"{disk.free_inodes:,} inodes free in {_place(disk)}, {LEAST_INODES:,} wanted"
    return ""


def check_shared_memory(facts: Facts, *, topology: Topology) -> list[Diagnostic]:
    """Report missing or small shared memory, in which ranks of one host exchange messages."""
    missing, small = {}, {}
    slots = {str(host.name): host.slots for host in topology.hosts}
    for host, known in facts.items():
        if known.shm is None:
            if "shm" not in known.unanswered:
                missing[host] = "there is no /dev/shm"
        elif not known.shm.writable:
            missing[host] = f"{known.user} may not write in /dev/shm"
        elif known.shm.free_bytes < (need := slots.get(host, 1) * SHM_BYTES_PER_SLOT):
            small[host] = (
                f"{known.shm.free_bytes // MEBIBYTE} MiB free, {need // MEBIBYTE} MiB wanted for {counted(slots.get(host, 1), 'slot')}"
            )
    return [
        *of_hosts(
            "H024",
            missing,
            topology=topology,
            says=("has no shared memory for ranks", "have no shared memory for ranks"),
            hints=("`mount -t tmpfs tmpfs /dev/shm`",),
        ),
        *of_hosts(
            "H024",
            small,
            topology=topology,
            says=("has little shared memory", "have little shared memory"),
            notes=("a rank that meets its end dies of a bus error",),
            hints=("`sudo mount -o remount,size=50% /dev/shm`; for a container `docker run --shm-size=8g`",),
            severity=Severity.WARNING,
        ),
    ]


def check_listeners(facts: Facts, *, topology: Topology) -> list[Diagnostic]:
    """Report hosts on which MPI keeps listening on all interfaces, because its sockets cannot be moved."""
    return of_hosts(
        "H041",
        {
            host: "does not let a process trace its children"
            for host, known in facts.items()
            if known.moves_listeners is False
        },
        topology=topology,
        says=("lets MPI listen on all networks", "let MPI listen on all networks"),
        hints=("in a container, `docker run --cap-add SYS_PTRACE`; elsewhere, a firewall around the chosen network",),
        severity=Severity.WARNING,
    )


def check_limits(facts: Facts, *, topology: Topology) -> list[Diagnostic]:
    """Report limits of the login that ranks may reach."""
    evidence = {}
    slots = {str(host.name): host.slots for host in topology.hosts}
    for host, known in facts.items():
        least = {
            "nofile": _FILES + _FILES_PER_SLOT * len(topology.slots),
            "nproc": _PROCESSES + _PROCESSES_PER_SLOT * slots.get(host, 1),
        }
        low = []
        for name, need in least.items():
            soft = known.limits.get(name, (None, None))[0]
            if soft is not None and soft < need:
                low.append(f"{name} {soft:,}, {need:,} wanted")
        if known.rdma and (soft := known.limits.get("memlock", (None, None))[0]) is not None:
            low.append(f"memlock {soft // 1024:,} KiB, unlimited wanted for {known.rdma[0]}")
        if low:
            evidence[host] = "; ".join(low)
    return of_hosts(
        "H023",
        evidence,
        topology=topology,
        says=(f"has limits too low for ranks: {next(iter(evidence.values()), '')}", "have limits too low for ranks"),
        hints=(
            "in /etc/security/limits.d/ of the host: `* - nofile 65536`, `* - nproc unlimited`, `* - memlock unlimited`",
        ),
        severity=Severity.WARNING,
    )


def check_processors(facts: Facts, *, topology: Topology) -> list[Diagnostic]:
    """Report hosts with other instruction sets than the rest, and with more slots than processors."""
    kinds = {host: f"{known.cpu.architecture} {known.cpu.capability}" for host, known in facts.items() if known.cpu}
    usual = Counter(kinds.values()).most_common(1)[0][0] if kinds else ""
    other = {host: f"{kind} ({usual} elsewhere)" for host, kind in kinds.items() if kind != usual}
    crowded = {}
    for host in topology.hosts:
        cpu = facts[host.name].cpu if host.name in facts else None
        if cpu and host.slots > cpu.usable:
            crowded[str(host.name)] = (
                f"{counted(host.slots, 'slot')}, {cpu.usable:g} of {cpu.count} processors for this login"
            )
    return [
        *of_hosts(
            "H021",
            other,
            topology=topology,
            says=(f"has another kind of processor: {next(iter(other.values()), '')}", "have another kind of processor"),
            notes=(
                "PyTorch chooses other kernels there, so the last bits of results depend on which host computes them",
            ),
            hints=("`environment: {ATEN_CPU_CAPABILITY: avx2}` in cluster.yaml, or `default`: what all of them have",),
            severity=Severity.WARNING,
        ),
        *of_hosts(
            "H025",
            crowded,
            topology=topology,
            says=("has more slots than processors", "have more slots than processors"),
            severity=Severity.NOTE,
        ),
    ]


def check_devices(facts: Facts, *, topology: Topology) -> list[Diagnostic]:
    """Report hosts whose ranks drive meshes and that have no device file; one file may stand for several chips."""
    needs: Counter[str] = Counter()
    for slot, binding in zip(topology.slots, topology.bindings, strict=False):
        needs[str(slot.host.name)] += topology.driven(binding).devices_per_host
    evidence = {}
    for host, count in needs.items():
        devices = facts[host].devices if host in facts else None
        if count and devices is not None and not devices.tenstorrent:
            evidence[host] = f"no /dev/tenstorrent, but its meshes have {counted(count, 'device')}"
    return of_hosts(
        "H022",
        evidence,
        topology=topology,
        says=("has no Tenstorrent devices", "have no Tenstorrent devices"),
        notes=("recipes that use host memory only run without",),
        hints=(f"`ssh {next(iter(evidence), '')} 'ls /dev/tenstorrent; lsmod | grep tenstorrent'`",),
        severity=Severity.WARNING,
    )


def check_gpus(facts: Facts, *, topology: Topology) -> list[Diagnostic]:
    """Report hosts with an `nvidia-smi` that shows no GPU."""
    broken = {
        host: shown(known.devices.nvidia_problem, longest=120)
        for host, known in facts.items()
        if known.devices and known.devices.nvidia_problem
    }
    return of_hosts(
        "H022",
        broken,
        topology=topology,
        says=("has nvidia-smi, which shows no GPU", "have nvidia-smi, which shows no GPU"),
        hints=(f"`ssh {next(iter(broken), '')} nvidia-smi`",),
        severity=Severity.WARNING,
    )


def check_leftovers(facts: Facts, *, topology: Topology) -> list[Diagnostic]:
    """Report processes and folders that earlier runs left."""
    evidence, hints = {}, []
    for host, known in facts.items():
        parts = []
        if known.leftovers:
            runs = listed(dict.fromkeys(one.run_id for one in known.leftovers), last="and", quote="")
            count = len(known.leftovers)
            parts.append(f"{count} process{'' if count == 1 else 'es'} of run {runs}")
            hints.append(f"`ssh {host} kill {' '.join(str(one.pid) for one in known.leftovers)}`")
        if known.folders:
            parts.append(f"{counted(len(known.folders), 'folder')} in /dev/shm")
            hints.append(f"`ssh {host} rm -r {' '.join(known.folders)}`")
        if parts:
            evidence[host] = ", ".join(parts)
    if len(hints) > _MOST_SHOWN:
        hints = [*hints[:_MOST_SHOWN], f"and on {len(hints) - _MOST_SHOWN} more hosts"]
    return of_hosts(
        "H026",
        evidence,
        topology=topology,
        says=(f"has leftovers: {next(iter(evidence.values()), '')}", "have leftovers of earlier runs"),
        hints=hints,
        severity=Severity.WARNING,
    )
