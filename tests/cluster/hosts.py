"""A throw-away cluster on this machine: hosts with their own network, files and processes, reached through real sshd.

    with Cluster(hosts=2) as cluster:
        cluster.run("launcher", ["ssh", "node0", "hostname"])
        cluster.kill("node1")

Each host is a set of namespaces. It has its own address on a switch that exists only for the cluster, its own process
table, and of the real file system only the programs, read-only; `share` adds windows to more of it. The machine
`launcher` sees the real files instead, so that it runs the code under test, but has its own ~/.ssh and ~/.ttlaunch.
"""

import os
import subprocess
import sys
from pathlib import Path

from tests.cluster import accounts, layout, mounts, power, sshd
from tests.cluster.inside import KEPT
from tests.cluster.keeper import Keeper, new_state_folder
from tests.cluster.layout import LAUNCHER
from tests.cluster.network import Network, connect_inside

ROOT = Path(__file__).parents[2]
CODE = tuple(dict.fromkeys((sys.prefix, sys.base_prefix, str(ROOT))))
"""What hosts need to run the code under test from where the launcher has it."""

PROGRAMS = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_ALWAYS_THERE = ("/", "/usr")


class Cluster:
    """Hosts `node0`, `node1`, … or those in `names`, and the machine `launcher`.

    Args:
        hosts: How many hosts, unless `names` says it.
        names: The names of the hosts.
        share: Folders that hosts see read-only at the same path; by default the checkout and the Python environment.
        shared_folder: A folder that all hosts see and may write, as over NFS. The launcher sees it where it can be
            shown without a change to the real files: below the home, or where a folder of that name exists.
        interfaces: Names of the network interface of some hosts, where it is not eth0.
        networks: 2 adds eth1 in 10.78.0.0/24 to every machine.
        disk: "tmpfs" puts the disks of the hosts in memory, each of at most `size_mb`, where they need no time to be removed;
            "real" on the disk of this machine.
        size_mb: See `disk`.
    """

    def __init__(
        self,
        *,
        hosts=4,
        names=None,
        share=CODE,
        shared_folder=None,
        interfaces=None,
        networks=1,
        disk="tmpfs",
        size_mb=4096,
    ):
        self.hosts = list(names or [f"node{number}" for number in range(hosts)])
        self._share = [str(folder) for folder in share if str(folder) not in _ALWAYS_THERE]
        self._shared_folder = shared_folder
        self._interfaces = interfaces or {}
        self._networks = networks
        self._in_memory, self._size_mb = disk == "tmpfs", size_mb
        self._machines = {}
        self._started = []
        self._rack = self._network = None

    def __enter__(self):
        self.state = new_state_folder()
        try:
            self._start()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_):
        self.close()

    def _start(self):
        disks = [str(self.state / "disks" / name) for name in self.hosts] if self._in_memory else []
        spec = {"kind": "rack", "name": "rack", "tmpfs_disks": disks, "size_mb": self._size_mb}
        self._rack = Keeper(spec, state=self.state)
        self._rack.wait_until_ready()
        self._network = Network(self._rack, switches=[f"br{number}" for number in range(self._networks)])
        for number, name in enumerate([LAUNCHER, *self.hosts]):
            interface = self._interfaces.get(name, "eth0")
            cables = layout.plan_cables(number, interface=interface, networks=self._networks)
            self._machines[name] = self._plan(name, cables)
        self.known_hosts = layout.fill(self.state, list(self._machines.values()), disk=self._disk)
        power.boot(list(self._machines.values()), network=self._network, state=self.state)

    def _plan(self, name, cables):
        if name == LAUNCHER:
            return layout.plan_launcher(self.state, cables, shared_folder=self._shared_folder)
        given = {"share": self._share, "shared_folder": self._shared_folder}
        return layout.plan_host(name, self.state, cables, rack=self._rack, **given)

    def close(self):
        """End every process of the cluster and remove all it made. Safe to call again."""
        power.remove(list(self._machines.values()), rack=self._rack, network=self._network, state=self.state)
        power.let_go(self._started)
        self._network = self._rack = None
        self._machines = {}

    # Looking and running

    def ip(self, host, *, network=0):
        return self._machines[host].cables[network].address

    def hostfile(self, *, slots=1):
        return "".join(f"{name} slots={slots}\n" for name in self.hosts)

    def path(self, host, path):
        """Where a test finds a machine's file; ask again after `revive`. A host without power shows only its disk."""
        keeper = self._machines[host].keeper
        if keeper.alive:
            return Path(f"{keeper.root()}{path}")
        if Path(path).parts[1] not in KEPT:
            raise ValueError(f"{path} of {host} was not on its disk, and {host} is off")
        return Path(f"{self._disk(host)}{path}")

    def pids(self, host):
        """The host's processes as this machine numbers them, with their command lines."""
        return self._machines[host].keeper.pids()

    def run(self, host, argv, *, cwd=None, **options):
        """Run to the end, as at that machine's console; captures text and gives up after a minute unless told otherwise."""
        if not {"stdout", "stderr", "capture_output"} & options.keys():
            options["capture_output"] = True
        if not {"stdin", "input"} & options.keys():
            options["stdin"] = subprocess.DEVNULL
        defaults = {"text": True, "timeout": 60, "check": False, "env": self.environment(host)}
        return subprocess.run(self.argv(host, *argv, cwd=cwd), **defaults | options)  # noqa: PLW1510 - in `defaults`

    def popen(self, host, argv, *, cwd=None, **options):
        """Start a program, until the cluster ends. On the launcher the process is the program; on a host it waits for it."""
        defaults = {"text": True, "env": self.environment(host)}
        self._started.append(subprocess.Popen(self.argv(host, *argv, cwd=cwd), **defaults | options))
        return self._started[-1]

    def argv(self, host, *command, cwd=None):
        """The words that run a command on a machine from outside."""
        return self._machines[host].keeper.argv(*command, cwd=cwd or (Path.cwd() if host == LAUNCHER else "/root"))

    def environment(self, host):
        """What a console session has: on hosts no path to any Python environment, on the launcher what the tests have."""
        if host == LAUNCHER:
            return os.environ | {"HOME": layout.launcher_home()}
        return {
            "PATH": PROGRAMS,
            "HOME": "/root",
            "USER": "root",
            "LOGNAME": "root",
            "LANG": "C.UTF-8",
            "SHELL": accounts.SHELL,
        }

    def connect(self, host, port):
        """A connection from a machine to a port on which one of its own programs listens."""
        return connect_inside(self._machines[host].keeper, port)

    def _disk(self, host):
        return Path(f"{self._rack.root()}{self.state}/disks/{host}")

    # Power

    def kill(self, host):
        """Cut the power: the cable goes first, so that no last word gets out and peers meet silence."""
        self.link(host, up=False)
        power.cut(self._machines[host], network=self._network)

    def revive(self, host):
        """Boot again after `kill`: the disk is as it was, /tmp, /run and /dev/shm are empty."""
        self._machines[host].linked = True
        power.boot([self._machines[host]], network=self._network, state=self.state)

    def pause(self, host):
        """Stop every process, so that the host's kernel answers and nobody else does."""
        power.signal_all(self._machines[host], power.STOP)

    def resume(self, host):
        power.signal_all(self._machines[host], power.GO_ON)

    # The network

    def link(self, host, *, up):
        """Pull the host's cables, or put them back."""
        self._machines[host].linked = up
        self._network.link(self._machines[host].cables, up=up)

    def partition(self, one, other):
        """Let two machines drop what they send each other; everybody else still reaches both."""
        for name, peer in ((one, other), (other, one)):
            cables = self._machines[peer].cables
            self._machines[name].separated_from.update(cables)
            if self._machines[name].keeper.alive:
                self._network.separate(self._machines[name].keeper, cables)

    def cut_one_way(self, sender, receiver):
        """Let a machine drop what one other machine sends it; everything else still passes."""
        self._network.deafen(self._machines[receiver].keeper, self._machines[sender].cables)
        self._machines[receiver].separated_from.update(self._machines[sender].cables)

    def heal(self):
        """Undo every `partition`."""
        for machine in self._machines.values():
            if machine.separated_from and machine.keeper.alive:
                self._network.heal(machine.keeper)
            machine.separated_from.clear()

    def delay(self, host, milliseconds):
        """Delay the host's frames by this much each way; 0 makes the cable fast again."""
        self._machines[host].delay_ms = milliseconds
        self._network.delay(self._machines[host].cables, milliseconds)

    def throttle(self, host, *, mbit):
        """Let the host's cables carry so many megabits a second each way, until it boots again; 0 ends it."""
        self._network.throttle(self._machines[host].keeper, self._machines[host].cables, mbit)

    def set_mtu(self, host, mtu):
        self._machines[host].mtu = mtu
        self._network.set_mtu(self._machines[host].keeper, self._machines[host].cables, mtu)

    def add_interface(self, host, name, address):
        """Add an interface that leads nowhere, like docker0: `add_interface("node0", "docker0", "172.17.0.1/16")`."""
        self._machines[host].extra_interfaces[name] = address
        self._network.add_interface(self._machines[host].keeper, name, address)

    def set_hosts_file(self, host, text):
        accounts.write(Path(self._machines[host].spec["etc"], "hosts"), text)

    # What answers on port 22

    def stop_sshd(self, host):
        """Refuse new connections; open sessions go on."""
        self._listen(host, "nothing")

    def silent_port(self, host):
        """Accept connections on port 22 and never say a word."""
        self._listen(host, "silence")

    def start_sshd(self, host):
        """Undo `stop_sshd` and `silent_port`."""
        self._listen(host, "sshd")

    def _listen(self, host, what):
        machine = self._machines[host]
        sshd.stop(machine.keeper)
        self._network.stop_listening(host)
        machine.listens = what
        power.listen(machine, network=self._network)

    def configure_sshd(self, host, **changes):
        """Start sshd anew with some settings changed: `configure_sshd("node1", MaxSessions=1)`; with none, as at first."""
        sshd.configure(self._machines[host].keeper, changes)
        self.start_sshd(host)

    def password_only(self, host):
        """Accept no keys, only passwords, which nobody has."""
        self.configure_sshd(host, PubkeyAuthentication="no", PasswordAuthentication="yes")

    def new_host_key(self, host):
        """Give the host a key that is not the one in anybody's known_hosts."""
        sshd.new_key(self._machines[host].keeper)
        self.start_sshd(host)

    # Users and files

    def add_user(self, host, name):
        """Add a user with a home in /home who may log in with the cluster's key."""
        number = accounts.add_user(Path(self._machines[host].spec["etc"]), name)
        home = self.path(host, f"/home/{name}")
        home.mkdir()
        os.chown(home, number, number)
        key = self.state / accounts.KEY
        accounts.write_ssh_folder(home / ".ssh", key=key, known_hosts=self.known_hosts, owner=number)

    def set_login_shell(self, host, shell):
        """Give root on a host another login shell."""
        passwd = Path(self._machines[host].spec["etc"], "passwd")
        rows = [row.split(":") for row in passwd.read_text(encoding="utf-8").splitlines()]
        changed = [[*row[:-1], shell] if row[0] == "root" else row for row in rows]
        accounts.write(passwd, "".join(":".join(row) + "\n" for row in changed))

    def hide(self, host, path):
        """Put an empty file that cannot be run over a program."""
        self.replace(host, path, "", mode=0o644)

    def replace(self, host, path, text, *, mode=0o755):
        """Put a script over a program, on this host only."""
        if path in self._machines[host].replaced:
            self.restore(host, path)
        self._machines[host].replaced[path] = (text, mode)
        mounts.cover(self._machines[host].keeper, path, text=text, mode=mode)

    def restore(self, host, path):
        """Undo `hide` or `replace`."""
        del self._machines[host].replaced[path]
        mounts.uncover(self._machines[host].keeper, path)

    def make_read_only(self, host, path):
        self._machines[host].read_only.add(path)
        mounts.set_read_only(self._machines[host].keeper, path, read_only=True)

    def make_writable(self, host, path):
        """Undo `make_read_only`."""
        self._machines[host].read_only.discard(path)
        mounts.set_read_only(self._machines[host].keeper, path, read_only=False)

    def small_disk(self, host, path, *, size_mb=1):
        """Put an empty disk at a folder, until the host boots again; an .ssh in it is kept."""
        mounts.put_small_disk(self._machines[host].keeper, path, size_mb=size_mb)
