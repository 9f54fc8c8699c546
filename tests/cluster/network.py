"""The switch of a test cluster and the cables to its hosts: plugging, pulling, slowing down and cutting connections.

Everything lies in network namespaces of the cluster; no packet reaches the network of the machine that runs the tests.
"""

import ctypes
import os
import socket
import subprocess
import sys
import threading
from dataclasses import dataclass
from pathlib import Path

CABLE = Path(__file__).with_name("cable.py")
NEW_NET = 0x40000000
MTU = 1500
_BURST_BYTES = 8000
"""What a throttled cable carries at full speed after it was idle: little, or short messages would meet no limit."""


@dataclass(frozen=True)
class Cable:
    """One connection of a host: its interface and address at one end, its port in a switch at the other."""

    port: str
    switch: str
    interface: str
    address: str
    hardware_address: str

    @property
    def slow_ends(self):
        """The pair of interfaces that leads back into the switch when frames take the slow way round."""
        return f"out-{self.port}", f"in-{self.port}"


class Network:
    """Switches in the rack's namespace, named br0 and br1, and what is plugged into them."""

    def __init__(self, rack, *, switches):
        self._rack = rack
        self._relays = {}
        self._listeners = {}
        self._ip(
            rack,
            *(f"link add {name} type bridge forward_delay 0" for name in switches),
            *(f"link set {name} up" for name in switches),
        )

    def _ip(self, keeper, *lines):
        """Run many `ip` commands in one process, in a machine's network."""
        _in_network(keeper, "ip", "-batch", "-", input="\n".join(lines) + "\n")

    def plug(self, keeper, cables, *, mtu):
        for cable in cables:
            self._ip(
                self._rack,
                f"link add {cable.port} type veth peer name {cable.interface} netns {keeper.pid}",
                f"link set {cable.port} master {cable.switch} up",
            )
        lines = ["link set lo up"]
        for cable in cables:
            lines.append(f"link set {cable.interface} address {cable.hardware_address} mtu {mtu} up")
            lines.append(f"addr add {cable.address}/24 dev {cable.interface}")
        self._ip(keeper, *lines)

    def unplug(self, cables):
        """Take away the cables of a machine that is gone for now."""
        for cable in cables:
            self._remove_relay(cable)
            _in_network(self._rack, "ip", "link", "del", cable.port, check=False)

    def link(self, cables, *, up):
        self._ip(self._rack, *(f"link set {cable.port} {'up' if up else 'down'}" for cable in cables))

    def delay(self, cables, milliseconds):
        """Make frames take this long each way; 0 ends it."""
        for cable in cables:
            self._remove_relay(cable)
            if milliseconds:
                self._add_relay(cable, milliseconds)
            else:
                self._ip(self._rack, f"link set {cable.port} master {cable.switch}")

    def throttle(self, keeper, cables, mbit):
        """Let cables carry so many megabits a second each way; 0 ends it."""
        for cable in cables:
            for machine, end in ((keeper, cable.interface), (self._rack, cable.port)):
                _in_network(machine, "tc", "qdisc", "del", "dev", end, "root", check=False)
                if mbit:
                    limits = ("rate", f"{mbit}mbit", "burst", f"{_BURST_BYTES}", "latency", "400ms")
                    _in_network(machine, "tc", "qdisc", "add", "dev", end, "root", "tbf", *limits)

    def _add_relay(self, cable, milliseconds):
        outer, inner = cable.slow_ends
        self._ip(
            self._rack,
            f"link add {outer} type veth peer name {inner}",
            f"link set {cable.port} nomaster",
            f"link set {outer} up",
            f"link set {inner} master {cable.switch} up",
        )
        relay = subprocess.Popen(
            [*_enter(self._rack), sys.executable, "-I", "-S", str(CABLE), cable.port, outer, str(milliseconds / 1000)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        self._relays[cable] = relay
        if relay.stdout.readline() != "ready\n":
            raise RuntimeError(f"no slow cable for {cable.interface} of {cable.address}")

    def _remove_relay(self, cable):
        relay = self._relays.pop(cable, None)
        if relay:
            relay.stdin.close()
            relay.wait(10)
            relay.stdout.close()
            self._ip(self._rack, f"link del {cable.slow_ends[0]}")

    def separate(self, keeper, cables):
        """Let this machine drop every packet to and from the other ends of these cables, without a word."""
        for cable in cables:
            for chain, side in (("INPUT", "-s"), ("OUTPUT", "-d")):
                _in_network(keeper, "iptables", "-w", "-A", chain, side, cable.address, "-j", "DROP")

    def deafen(self, keeper, cables):
        """Let this machine drop every packet from the other ends of these cables, without a word."""
        for cable in cables:
            _in_network(keeper, "iptables", "-w", "-A", "INPUT", "-s", cable.address, "-j", "DROP")

    def heal(self, keeper):
        _in_network(keeper, "iptables", "-w", "-F")

    def add_interface(self, keeper, name, address):
        """Add a bridge with nothing attached, which is what docker0 is on most machines."""
        self._ip(keeper, f"link add {name} type bridge", f"link set {name} up", f"addr add {address} dev {name}")

    def set_mtu(self, keeper, cables, mtu):
        self._ip(keeper, *(f"link set {cable.interface} mtu {mtu}" for cable in cables))

    def listen_in_silence(self, name, keeper, port):
        """Let connections to this port succeed, and never answer."""
        self._listeners.setdefault(name, []).append(_listener(keeper, port))

    def stop_listening(self, name):
        for listener in self._listeners.pop(name, ()):
            listener.close()

    def close(self):
        for cable in list(self._relays):
            self._remove_relay(cable)
        for name in list(self._listeners):
            self.stop_listening(name)


def _enter(keeper):
    return ["nsenter", f"--target={keeper.pid}", "--net", "--"]


def _in_network(keeper, *command, check=True, **options):
    """Run a program of this machine in the network of a test machine."""
    ended = subprocess.run(
        [*_enter(keeper), *command], capture_output=True, text=True, timeout=30, check=False, **options
    )
    if check and ended.returncode != 0:
        raise RuntimeError(f"{' '.join(command)}: {ended.stderr.strip()}\n{options.get('input', '')}")
    return ended


def connect_inside(keeper, port):
    """A connection that a program on a machine makes to a port of that machine itself."""
    return _made_inside(keeper, lambda: socket.create_connection(("127.0.0.1", port), timeout=60))


def _listener(keeper, port):
    return _made_inside(keeper, lambda: socket.create_server(("", port), backlog=128))


def _made_inside(keeper, make_socket):
    """A socket in another network: made by a thread that moves there and ends, so that nobody else moves."""
    found = []

    def make():
        libc = ctypes.CDLL(None, use_errno=True)
        with Path(f"/proc/{keeper.pid}/ns/net").open("rb") as namespace:
            if libc.setns(namespace.fileno(), NEW_NET) != 0:
                raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
        found.append(make_socket())

    thread = threading.Thread(target=make)
    thread.start()
    thread.join()
    return found[0]
