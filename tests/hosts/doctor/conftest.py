"""Facts of healthy hosts for rules about ill ones, and a way to read diagnostics as users do."""

from dataclasses import replace
from ipaddress import IPv4Interface
from pathlib import Path
from textwrap import dedent

import pytest

from ttlaunch.diagnostics import Source, render
from ttlaunch.hosts.doctor.facts import (
    Clock,
    Cpu,
    Devices,
    Disk,
    HostFacts,
    Interface,
    Interpreter,
    Memory,
    Mpi,
    Shm,
)
from ttlaunch.spec.topology.model import ClusterSettings, Host, HostName, Topology

GIB = 1024**3
PACKAGES = {"torch": "2.6.0", "mpi4py": "4.1.0", "numpy": "2.2.1", "pydantic": "2.10.4"}
FLAGS = ("avx2", "avx512bw", "avx512dq", "avx512f", "avx512vl", "fma")


def _interface(address, *, name="eth0", mtu=1500, up=True, speed_mbit=10_000, bridge=False):
    return Interface(name, IPv4Interface(address), mtu, up, speed_mbit, bridge)


def _facts(number, **changes):
    """The facts of the host metal-0<number>, which lacks nothing, but for what is changed."""
    python = Interpreter("/env/bin/python", (3, 11, 9), "/env", PACKAGES, ("/env/bin/python",))
    healthy = HostFacts(
        hostname=f"metal-0{number}",
        user="ttuser",
        uid=1000,
        home="/home/ttuser",
        machine=f"boot-{number}",
        kernel="6.8.0",
        cpu=Cpu("EPYC", "x86_64", 8, 8.0, FLAGS),
        memory=Memory(64 * GIB, 60 * GIB),
        disk=Disk("/home/ttuser/.ttlaunch", "/home/ttuser/.ttlaunch", "ext4", 900 * GIB, 500 * GIB, 10**8, None),
        limits={"nofile": (65536, 65536), "nproc": (96000, 96000), "memlock": (None, None), "core": (0, None)},
        shm=Shm(32 * GIB, 32 * GIB, noexec=False, writable=True),
        devices=Devices((), None, ("/dev/tenstorrent/0",)),
        interfaces=(_interface("127.0.0.1/8", name="lo"), _interface(f"10.0.0.{number}/24")),
        default_interface="eth0",
        python=python,
        tried=("/env/bin/python",),
        mpi=Mpi("/env/bin/mpirun", "/env", "mpirun (Open MPI) 5.0.11", "/env/lib/libmpi.so.40", "openmpi"),
        clock=Clock(-0.05, 0.05),
    )
    return replace(healthy, **changes)


@pytest.fixture(scope="session")
def interface():
    """`interface("10.0.0.1/24", name="eth0", …)`."""
    return _interface


@pytest.fixture(scope="session")
def facts():
    """`facts(1, clock=…)`: the host metal-01 without a fault but for what is changed."""
    return _facts


@pytest.fixture(scope="session")
def healthy():
    """`healthy(3, {2: {"shm": None}})`: three hosts, of which metal-02 is changed, by name."""

    def make(count, changes=None):
        return {f"metal-0{n}": _facts(n, **(changes or {}).get(n, {})) for n in range(1, count + 1)}

    return make


@pytest.fixture(scope="session")
def topology():
    """`topology(3, slots=1, cluster=…)`: metal-01 and so on, as in a file hosts.txt."""

    def make(count, *, slots=1, **settings):
        names = [f"metal-0{n}" for n in range(1, count + 1)]
        source = Source("hosts.txt", "".join(f"{name} slots={slots}\n" for name in names))
        hosts = [
            Host(HostName(name), slots, source.span(n, 1, len(name)), source.span(n, len(name) + 2, 7))
            for n, name in enumerate(names, start=1)
        ]
        return Topology("metal", Path("metal"), tuple(hosts), cluster=ClusterSettings(**settings))

    return make


@pytest.fixture(scope="session")
def check():
    """`check(diagnostics, text)`: they read exactly so."""

    def compare(diagnostics, text):
        assert dedent(text).strip("\n") == render(diagnostics)

    return compare
