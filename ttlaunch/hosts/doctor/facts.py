"""The answer of `agent/probe.py` about a host, as frozen values that are checked once, here.

Sections that a host could not answer in time, or that do not exist there, are None; `unanswered` names the former.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, field, replace
from functools import cached_property
from ipaddress import IPv4Interface
from typing import Any

from ttlaunch.quick_dataclass import dataclass
from ttlaunch.records.parser import Amount, BadRecord, Count, Flag, Pid, Size, Text, Word, let_parse, parse

_MOST_INTERFACES = 512  # each is compared with those of all other hosts

Limit = tuple[int | None, int | None]
"""Soft and hard; None is unlimited."""


@dataclass(frozen=True)
class Cpu:
    """Processors.

    Attributes:
        count: The number of cores of the machine.
        usable: The number of cores that this login may use, given its affinity and control group.
        flags: The instruction sets among those that decide which kernels PyTorch takes.
    """

    model: Text
    architecture: Word
    count: Count
    usable: Amount
    flags: tuple[Word, ...]

    @property
    def capability(self) -> str:
        """PyTorch's name for the kernels that it chooses on such a processor."""
        flags = set(self.flags)
        if {"avx512f", "avx512bw", "avx512dq", "avx512vl", "avx2", "fma"} <= flags:
            return "AVX512"
        if {"avx2", "fma"} <= flags:
            return "AVX2"
        return "SVE" if "sve" in flags else "DEFAULT"


@dataclass(frozen=True)
class Memory:
    total_bytes: Size
    available_bytes: Size


@dataclass(frozen=True)
class Disk:
    """The file system of the remote folder.

    Attributes:
        path: The remote folder, absolute.
        nearest: The deepest existing folder of that path.
        free_inodes: How many files can still be made; None if the file system does not count them.
        problem: Why nothing can be written there; None if a test file could be.
    """

    path: Word
    nearest: Word
    file_system: Word
    total_bytes: Size
    free_bytes: Size
    free_inodes: Size | None
    problem: Text | None


@dataclass(frozen=True)
class Shm:
    """`/dev/shm`."""

    total_bytes: Size
    free_bytes: Size
    noexec: Flag
    writable: Flag


@dataclass(frozen=True)
class Devices:
    """Accelerators.

    Attributes:
        nvidia: Name, memory and driver of each, as `nvidia-smi` prints them.
        nvidia_problem: Why `nvidia-smi` failed; None if it did not, or the host has none.
        tenstorrent: Device files.
        gpu_files: Device files without which torch finds no CUDA device.
    """

    nvidia: tuple[Text, ...]
    nvidia_problem: Text | None
    tenstorrent: tuple[Word, ...]
    gpu_files: tuple[Word, ...] = ()


@dataclass(frozen=True)
class Interface:
    """One IPv4 address of a network interface.

    Attributes:
        address: The address with the length of its prefix, such as `10.0.0.5/24`.
        speed_mbit: The speed in Mbit/s that the driver reports; None if it reports none.
    """

    name: Word
    address: IPv4Interface
    mtu: Count
    up: Flag
    speed_mbit: Count | None
    bridge: Flag


@dataclass(frozen=True)
class Interpreter:
    """The Python that ranks would run with.

    Attributes:
        tried: The interpreters that the probe looked for, in order, up to this one.
        packages: The version of each package, by name, from metadata.
    """

    executable: Word
    version: tuple[Count, Count, Count]
    prefix: Word
    packages: dict[str, Word]
    tried: tuple[Word, ...]


@dataclass(frozen=True)
class Mpi:
    """The engine that belongs to the interpreter, and the library that its mpi4py would load.

    Attributes:
        mpirun: The path of the engine's command; None if the host has none.
        prefix: The folder whose `bin` has the command.
        says: The first line of the command's answer to `--version`; None if it did not answer.
        abi: `openmpi` or `mpich`; None if no library was found.
    """

    mpirun: Word | None
    prefix: Word | None
    says: Text | None
    library: Word | None
    abi: Word | None


@dataclass(frozen=True)
class Leftover:
    """A process of an earlier run."""

    pid: Pid
    run_id: Text
    age_s: Amount
    command: Text


@dataclass(frozen=True)
class Clock:
    """How far the host's clock is ahead of ours, in seconds: the true offset lies between the two values."""

    least_s: Amount
    most_s: Amount

    @property
    def surely_off_s(self) -> float:
        """The offset that cannot be explained by the time the answer took."""
        return self.least_s if self.least_s > 0 else min(self.most_s, 0.0)


@dataclass(frozen=True)
class HostFacts:
    """Everything that one host answered.

    Attributes:
        machine: Equal for two names of one machine.
        names: The addresses that each name of the hostfile has on this host, possibly none; lacks names without an
            answer in time.
        moves_listeners: Whether processes there may move the sockets on which their children listen.
        folders: The folders of earlier runs in shared memory that no process uses.
        tried: The interpreters for ranks that the probe looked for.
        default_interface: The name of the interface with the default route.
    """

    hostname: Word
    user: Word
    uid: Count
    home: Word
    machine: Word
    kernel: Word
    cpu: Cpu | None = None
    memory: Memory | None = None
    disk: Disk | None = None
    limits: dict[str, tuple[Size | None, Size | None]] = field(default_factory=dict)
    shm: Shm | None = None
    moves_listeners: Flag | None = None
    rdma: tuple[Word, ...] = ()
    devices: Devices | None = None
    interfaces: tuple[Interface, ...] = ()
    default_interface: Word | None = None
    python: Interpreter | None = None
    tried: tuple[Word, ...] = ()
    mpi: Mpi | None = None
    names: dict[str, tuple[Word, ...]] = field(default_factory=dict)
    leftovers: tuple[Leftover, ...] = ()
    folders: tuple[Word, ...] = ()
    unanswered: tuple[Word, ...] = ()
    clock: Clock = Clock(0.0, 0.0)

    @cached_property
    def addresses(self) -> frozenset[str]:
        """All its IPv4 addresses but those of the loopback interface."""
        return frozenset(str(i.address.ip) for i in self.interfaces if not i.address.ip.is_loopback)


for _cls in (Cpu, Memory, Disk, Shm, Devices, Interface, Interpreter, Mpi, Leftover, Clock, HostFacts):
    let_parse(_cls, IPv4Interface=IPv4Interface)


def parse_facts(answer: Mapping[str, Any], *, clock: Clock) -> HostFacts:
    """Parse a probe's answer into facts.

    Raises:
        ValueError: If the answer is not one of the probe; the message names the first wrong value.
    """
    facts = parse(HostFacts, {name: value for name, value in answer.items() if name != "clock"})
    if isinstance(facts, BadRecord):
        raise ValueError(f"its answer is wrong: {facts.reason}")  # noqa: TRY004 - the answer is wrong, not the caller
    if len(facts.interfaces) > _MOST_INTERFACES:
        raise ValueError(
            f"its answer is wrong: it has {len(facts.interfaces)} addresses, expected {_MOST_INTERFACES} at most"
        )
    return replace(facts, clock=clock)


def facts_of_launcher(program: str, says: str) -> HostFacts:
    """Return the facts about this machine that a run on other hosts depends on: the engine that starts their daemons.

    Args:
        program: The path of the engine's command.
        says: The command's answer to `--version`.
    """
    mpi = Mpi(program, prefix=None, says=says, library=None, abi=None)
    return HostFacts(hostname="", user="", uid=-1, home="", machine="", kernel="", mpi=mpi)


def facts_as_json(facts: HostFacts) -> dict[str, Any]:
    """The facts for other programs; addresses become texts."""
    dumped: dict[str, Any] = json.loads(json.dumps(asdict(facts), default=str))
    return dumped
