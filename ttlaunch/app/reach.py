"""Connect to all hosts of a cluster: the first step of doctor, prepare, sync and runs over hosts."""

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import field
from pathlib import Path
from typing import TypeVar

from ttlaunch.app.dialogue import Dialogue
from ttlaunch.diagnostics import LaunchError
from ttlaunch.errors import HostError
from ttlaunch.hosts.transport.address import HostAddress
from ttlaunch.hosts.transport.fleet import on_each
from ttlaunch.hosts.transport.hosts import open_transport
from ttlaunch.hosts.transport.key_ring import KeyRing
from ttlaunch.hosts.transport.transport import CONNECT_S, Transport
from ttlaunch.quick_dataclass import dataclass
from ttlaunch.spec.topology.model import Topology


@dataclass(frozen=True)
class Reached:
    """The result of connecting to some hosts.

    Attributes:
        transports: The connected hosts, in the order of the hostfile.
        errors: By host, why it is not connected.
        seconds: By connected host, how long connecting took.
    """

    transports: list[Transport] = field(default_factory=list)
    errors: dict[str, HostError] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)


def reach_hosts(
    topology: Topology,
    dialogue: Dialogue,
    *,
    timeout_s: float = CONNECT_S,
    then: Callable[[Transport], None] | None = None,
) -> list[Transport]:
    """Connect to all hosts of a cluster at the same time; the caller closes the transports.

    Args:
        topology: The cluster's topology with its hosts and logins.
        dialogue: Shows which hosts have answered, and asks the user for passphrases.
        timeout_s: The time that each host has, from the first packet to the finished login.
        then: Called with each host as soon as it is connected, in a thread of its own; it must not block.

    Raises:
        LaunchError: A host cannot be reached; no connection is left open.
    """
    transports, keys = open_transports(topology)
    with dialogue.connecting([transport.host for transport in transports]) as advance:
        reached = connect_all(transports, keys, dialogue, timeout_s=timeout_s, answered=advance, then=then)
    if reached.errors:
        from ttlaunch.hosts.doctor.troubles import explain_troubles

        for transport in transports:
            transport.close()
        errors = list(reached.errors.values())
        found = explain_troubles(errors, topology=topology, answered=reached.seconds)
        raise LaunchError(found)
    return reached.transports


def open_transports(topology: Topology) -> tuple[list[Transport], KeyRing]:
    """Return an unconnected transport for each host of the hostfile, and the keys that the transports share."""
    cluster, keys = topology.cluster, KeyRing()
    identity_file = Path(cluster.identity_file).expanduser() if cluster.identity_file else None
    addresses = [
        HostAddress(host.name, host.user or cluster.user, cluster.port, identity_file) for host in topology.hosts
    ]
    return [open_transport(address, keys=keys, job=topology.job) for address in addresses], keys


def connect_all(
    transports: Sequence[Transport],
    keys: KeyRing,
    dialogue: Dialogue,
    *,
    timeout_s: float = CONNECT_S,
    answered: Callable[[str, HostError | None], None] | None = None,
    then: Callable[[Transport], None] | None = None,
) -> Reached:
    """Connect to all hosts. Hosts that need a locked key get a second attempt if the user unlocks it.

    Args:
        transports: The hosts.
        keys: The keys for the logins.
        dialogue: Asks the user for passphrases.
        timeout_s: The time that each host has, from the first packet to the finished login.
        answered: Called with each host that has answered, and why it cannot be used, or None.
        then: Called with each host as soon as it is connected, in a thread of its own; it must not block.
    """

    def connect(host: Transport) -> None:
        host.connect(timeout_s=timeout_s)
        if then is not None:
            then(host)

    reached = _connect(transports, connect, timeout_s=timeout_s, answered=answered)
    failed = [transport for transport in transports if transport.host in reached.errors]
    if failed and ask_for_passphrases(keys, dialogue):
        again = _connect(failed, connect, timeout_s=timeout_s, answered=answered)
        errors = again.errors
        ready = [transport for transport in transports if transport.host not in errors]
        return Reached(ready, errors, reached.seconds | again.seconds)
    return reached


def _connect(
    transports: Sequence[Transport],
    connect: Callable[[Transport], None],
    *,
    timeout_s: float,
    answered: Callable[[str, HostError | None], None] | None,
) -> Reached:
    began = time.monotonic()
    errors, seconds = {}, {}
    # Each transport has its own deadline, and its error says more. `on_each` has a later one, for a transport that blocks.
    for transport, answer in on_each(transports, connect, timeout_s=timeout_s + 1):
        if isinstance(answer, HostError):
            errors[transport.host] = answer
        else:
            seconds[transport.host] = time.monotonic() - began
        if answered is not None:
            answered(transport.host, answer)
    ordered = {transport.host: errors[transport.host] for transport in transports if transport.host in errors}
    return Reached([transport for transport in transports if transport.host in seconds], ordered, seconds)


def ask_for_passphrases(keys: KeyRing, dialogue: Dialogue) -> bool:
    """Ask the user, if there is one, for the passphrases of locked keys; return whether another key can be used now."""
    return bool(keys.locked) and keys.unlock(dialogue.passphrase)


_T = TypeVar("_T")


def in_background(work: Callable[[], _T]) -> Future[_T]:
    """Start work in a daemon thread, which does not keep the program from ending."""
    future: Future[_T] = Future()

    def attempt() -> None:
        try:
            future.set_result(work())
        except BaseException as error:  # noqa: BLE001 - `Future.result` raises it
            future.set_exception(error)

    threading.Thread(target=attempt, daemon=True).start()
    return future
