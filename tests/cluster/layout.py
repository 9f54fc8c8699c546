"""What a test cluster consists of before anything runs: its machines with their cables, and the files on their disks."""

import os
import pwd
from dataclasses import dataclass, field
from pathlib import Path

from tests.cluster import accounts, sshd
from tests.cluster.inside import KEPT
from tests.cluster.keeper import Keeper
from tests.cluster.network import MTU, Cable

LAUNCHER = "launcher"
SUBNETS = ("10.77.0", "10.78.0")


@dataclass
class Machine:
    """What the tests decided about one machine; survives a power cut, which its processes do not."""

    name: str
    cables: list
    spec: dict
    keeper: Keeper | None = None
    mtu: int = MTU
    delay_ms: float = 0
    linked: bool = True
    listens: str = "sshd"  # or "nothing" or "silence"
    separated_from: set = field(default_factory=set)
    replaced: dict = field(default_factory=dict)
    extra_interfaces: dict = field(default_factory=dict)
    read_only: set = field(default_factory=set)

    @property
    def is_launcher(self):
        return self.name == LAUNCHER


def plan_cables(number, *, interface, networks):
    """The connections of the machine with this number; 0 is the launcher."""
    return [
        Cable(
            port=f"port{number}-{switch}",
            switch=f"br{switch}",
            interface=interface if switch == 0 else f"eth{switch}",
            address=f"{subnet}.{number + 9 if number else 1}",
            hardware_address=f"02:77:00:{switch:02x}:{number >> 8:02x}:{number & 255:02x}",
        )
        for switch, subnet in enumerate(SUBNETS[:networks])
    ]


def plan_launcher(state, cables, *, shared_folder):
    spec = {"kind": "launcher", "name": LAUNCHER, "etc": str(state / "etc" / LAUNCHER)}
    own = {"home": launcher_home(), "view": str(state / "home"), "ssh": str(state / "ssh")}
    shared = {"shared_folder": shared_folder, "shared_files": str(state / "shared")}
    return Machine(LAUNCHER, cables, spec | own | shared, listens="nothing")


def plan_host(name, state, cables, *, rack, share, shared_folder):
    spec = {
        "kind": "host",
        "name": name,
        "rack": rack.pid,
        "etc": str(state / "etc" / name),
        "root": str(state / "roots" / name),
        "disk": str(state / "disks" / name),
        "share": share,
        "shared_folder": shared_folder,
        "shared_files": str(state / "shared"),
    }
    return Machine(name, cables, spec)


def launcher_home():
    """The home that OpenSSH looks into, whatever HOME says."""
    return pwd.getpwuid(os.getuid()).pw_dir


def fill(state, machines, *, disk):
    """Write what every machine has from the start, and return the known hosts.

    Args:
        state: The folder of the cluster.
        machines: All of them, the launcher too.
        disk: `disk(name)` is the folder that holds a host's files.
    """
    key = state / accounts.KEY
    accounts.make_key(key, comment="test cluster")
    hosts = [machine for machine in machines if not machine.is_launcher]
    for machine in hosts:
        _fill_disk(disk(machine.name), machine.name)
    known_hosts = "".join(
        f"{machine.name},{','.join(cable.address for cable in machine.cables)} "
        f"{accounts.public_key(Path(f'{disk(machine.name)}{sshd.HOST_KEY}'))}\n"
        for machine in hosts
    )
    addresses = {machine.name: machine.cables[0].address for machine in machines}
    for machine in machines:
        etc = Path(machine.spec["etc"])
        accounts.write_etc(etc, name=machine.name)
        accounts.write(etc / "hosts", accounts.render_hosts(addresses))
        folder = state / "ssh" if machine.is_launcher else disk(machine.name) / "root/.ssh"
        accounts.write_ssh_folder(folder, key=key, known_hosts=known_hosts)
    return known_hosts


def _fill_disk(folder, name):
    for top in KEPT:
        (folder / top).mkdir(parents=True)
    for below in ("tmp", "ssh", "log", "lib"):
        (folder / "var" / below).mkdir()
    (folder / "var/run").symlink_to("../run")
    (folder / "var/tmp").chmod(0o1777)
    (folder / "root").chmod(0o700)
    accounts.make_key(Path(f"{folder}{sshd.HOST_KEY}"), comment=name)
    accounts.write(Path(f"{folder}{sshd.CONFIG}"), accounts.render_sshd_config({}))
