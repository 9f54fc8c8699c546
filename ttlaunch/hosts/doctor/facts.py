"""What a host said about itself: the answer of `agent/probe.py` as frozen values, checked once, here.

Sections that a host could not answer in time, or that do not exist there, are None; `unanswered` names the former.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from ipaddress import IPv4Interface
from typing import Any

from pydantic import TypeAdapter, ValidationError

Limit = tuple[int | None, int | None]
"""Soft and hard; None is unlimited."""


@dataclass(frozen=True)
class Cpu:
    """Processors.

    Attributes:
        count: Of the machine.
        usable: That this login may use: affinity and control group.
        flags: The instruction sets among those that decide which kernels PyTorch takes.
    """

    model: str
    architecture: str
    count: int
    usable: float
    flags: tuple[str, ...]

    @property
    def capability(self) -> str:
        """What PyTorch calls it: the kernels that it chooses on such a processor."""
        flags = set(self.flags)
        if {"avx512f", "avx512bw", "avx512dq", "avx512vl", "avx2", "fma"} <= flags:
            return "AVX512"
        if {"avx2", "fma"} <= flags:
            return "AVX2"
        return "SVE" if "sve" in flags else "DEFAULT"


@dataclass(frozen=True)
class Memory:
    total_bytes: int
    available_bytes: int


@dataclass(frozen=True)
class Disk:
    """The file system of the remote folder.

    Attributes:
        path: The remote folder, absolute.
        nearest: The deepest folder on the way to it that exists.
        free_inodes: None where the file system does not count them.
        problem: Why nothing can be written there; None: a test file could be.
    """

    path: str
    nearest: str
    file_system: str
    total_bytes: int
    free_bytes: int
    free_inodes: int | None
    problem: str | None


@dataclass(frozen=True)
class Shm:
    """`/dev/shm`."""

    total_bytes: int
    free_bytes: int
    noexec: bool
    writable: bool


@dataclass(frozen=True)
class Devices:
    """Accelerators.

    Attributes:
        nvidia: Name, memory and driver of each, as `nvidia-smi` prints them.
        nvidia_problem: Why `nvidia-smi` gave no answer, where there is one.
        tenstorrent: Device files.
        gpu_files: Device files without which torch finds no CUDA device.
    """

    nvidia: tuple[str, ...]
    nvidia_problem: str | None
    tenstorrent: tuple[str, ...]
    gpu_files: tuple[str, ...] = ()


@dataclass(frozen=True)
class Interface:
    """One IPv4 address of a network interface.

    Attributes:
        address: With the length of its prefix, such as `10.0.0.5/24`.
        speed_mbit: As the driver says; None where it does not.
    """

    name: str
    address: IPv4Interface
    mtu: int
    up: bool
    speed_mbit: int | None
    bridge: bool


@dataclass(frozen=True)
class Interpreter:
    """The Python that ranks would run with.

    Attributes:
        tried: Those that were looked for, in order, up to this one.
        packages: Versions by name, from metadata.
    """

    executable: str
    version: tuple[int, int, int]
    prefix: str
    packages: Mapping[str, str]
    tried: tuple[str, ...]


@dataclass(frozen=True)
class Mpi:
    """The engine that belongs to the interpreter, and the library that its mpi4py would load.

    Attributes:
        mpirun: Path of its command; None where there is none.
        prefix: Folder whose `bin` has it.
        says: First line of what it answers to `--version`; None where there is no answer.
        abi: `openmpi` or `mpich`; None where no library is found.
    """

    mpirun: str | None
    prefix: str | None
    says: str | None
    library: str | None
    abi: str | None


@dataclass(frozen=True)
class Leftover:
    """A process of an earlier run."""

    pid: int
    run_id: str
    age_s: float
    command: str


@dataclass(frozen=True)
class Clock:
    """How far the host's clock is ahead of ours, in seconds; the truth lies between both."""

    least_s: float
    most_s: float

    @property
    def surely_off_s(self) -> float:
        """The offset that cannot be explained by the time the answer took."""
        return self.least_s if self.least_s > 0 else min(self.most_s, 0.0)


@dataclass(frozen=True)
class HostFacts:
    """Everything one host said.

    Attributes:
        machine: Equal for two names of one machine.
        names: Addresses that the names of the hostfile have on this host; empty: none; missing: no answer in time.
        folders: Of earlier runs in shared memory, without a process that uses them.
        tried: Interpreters for ranks that were looked for.
        default_interface: The one with the default route.
    """

    hostname: str
    user: str
    uid: int
    home: str
    machine: str
    kernel: str
    cpu: Cpu | None = None
    memory: Memory | None = None
    disk: Disk | None = None
    limits: Mapping[str, Limit] = field(default_factory=dict)
    shm: Shm | None = None
    rdma: tuple[str, ...] = ()
    devices: Devices | None = None
    interfaces: tuple[Interface, ...] = ()
    default_interface: str | None = None
    python: Interpreter | None = None
    tried: tuple[str, ...] = ()
    mpi: Mpi | None = None
    names: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    leftovers: tuple[Leftover, ...] = ()
    folders: tuple[str, ...] = ()
    unanswered: tuple[str, ...] = ()
    clock: Clock = Clock(0.0, 0.0)

    @cached_property
    def addresses(self) -> frozenset[str]:
        """All its IPv4 addresses but those of the loopback interface."""
        return frozenset(str(i.address.ip) for i in self.interfaces if not i.address.ip.is_loopback)


_ADAPTER = TypeAdapter(HostFacts)


def parse_facts(answer: Mapping[str, Any], *, clock: Clock) -> HostFacts:
    """The facts in a probe's answer.

    Raises:
        ValueError: If it is none; the message names the first value that is wrong.
    """
    try:
        return _ADAPTER.validate_python({**answer, "clock": clock})
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        place = ".".join(str(part) for part in first["loc"])
        raise ValueError(f"its answer has a wrong `{place}`: {first['msg'].lower()}") from error


def facts_of_launcher(program: str, says: str) -> HostFacts:
    """This machine as far as a run on other hosts depends on it: the engine that starts their daemons.

    Args:
        program: Path of its command.
        says: What that answers to `--version`.
    """
    mpi = Mpi(program, prefix=None, says=says, library=None, abi=None)
    return HostFacts(hostname="", user="", uid=-1, home="", machine="", kernel="", mpi=mpi)


def facts_as_json(facts: HostFacts) -> dict[str, Any]:
    """The facts for other programs."""
    dumped: dict[str, Any] = _ADAPTER.dump_python(facts, mode="json")
    return dumped
