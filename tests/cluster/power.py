"""Switches the machines of a test cluster on and off; what tests decided about a machine holds again after it boots."""

import os
import shutil
import signal

from tests.cluster import mounts, sshd
from tests.cluster.keeper import Keeper, start_time

STOP, GO_ON = signal.SIGSTOP, signal.SIGCONT


def boot(machines, *, network, state):
    """Start machines side by side and return when each can be reached."""
    for machine in machines:
        machine.keeper = Keeper(machine.spec, state=state)
    for machine in machines:
        machine.keeper.wait_until_ready()
        network.plug(machine.keeper, machine.cables, mtu=machine.mtu)
        _apply_decisions(machine, network=network)
    for machine in machines:
        listen(machine, network=network)


def listen(machine, *, network):
    """Let port 22 of a machine be what the tests want it to be."""
    if machine.listens == "silence":
        network.listen_in_silence(machine.name, machine.keeper, sshd.PORT)
    elif machine.listens == "sshd":
        sshd.start(machine.keeper)


def _apply_decisions(machine, *, network):
    if machine.delay_ms:
        network.delay(machine.cables, machine.delay_ms)
    if machine.separated_from:
        network.separate(machine.keeper, machine.separated_from)
    for name, address in machine.extra_interfaces.items():
        network.add_interface(machine.keeper, name, address)
    for path, (text, mode) in machine.replaced.items():
        mounts.cover(machine.keeper, path, text=text, mode=mode)
    for path in machine.read_only:
        mounts.set_read_only(machine.keeper, path, read_only=True)


def cut(machine, *, network):
    """End every process of a machine whose cables are down, and forget the cables."""
    network.stop_listening(machine.name)
    machine.keeper.cut_power()
    network.unplug(machine.cables)


def signal_all(machine, number):
    """Send a signal to each process of a machine, also to those that start meanwhile."""
    done = set()
    while new := {(pid, start_time(pid)) for pid in machine.keeper.pids()} - done:
        for pid, _ in new:
            try:
                os.kill(pid, number)
            except ProcessLookupError:
                continue
        done |= new


def remove(machines, *, rack, network, state):
    """End all machines and remove every file of the cluster."""
    if network:
        network.close()
    for keeper in [*(machine.keeper for machine in machines), rack]:
        if keeper:
            keeper.close()
    shutil.rmtree(state, ignore_errors=True)


def let_go(processes):
    """Leave nothing of programs whose machines are gone: a test that failed has neither read their pipes nor waited."""
    while processes:
        with processes.pop() as process:
            process.kill()
