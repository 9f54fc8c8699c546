"""Probe every host of a cluster, and judge whether a run can start there; `ttlaunch doctor` shows the result."""

import os
import sys
import time
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import field, replace
from typing import Protocol

from ttlaunch.app.dialogue import Dialogue
from ttlaunch.app.reach import ask_for_passphrases, open_transports
from ttlaunch.diagnostics import Diagnostic, Severity
from ttlaunch.engines.choose import engine_of_hosts
from ttlaunch.errors import HostError
from ttlaunch.hosts.doctor.checks import check_everything
from ttlaunch.hosts.doctor.facts import HostFacts
from ttlaunch.hosts.doctor.network import NetworkChoice, choose_network
from ttlaunch.hosts.doctor.pair_checks import check_mtu, check_pairs
from ttlaunch.hosts.doctor.pairs import Pair, measure_pairs
from ttlaunch.hosts.doctor.probe_hosts import PROBE_S, SYSTEM_PYTHON, probe, question_for
from ttlaunch.hosts.doctor.troubles import explain_troubles
from ttlaunch.hosts.transport.fleet import on_each
from ttlaunch.hosts.transport.local import LocalTransport
from ttlaunch.hosts.transport.transport import CONNECT_S, Transport
from ttlaunch.planning.engine import EngineSignature
from ttlaunch.quick_dataclass import dataclass
from ttlaunch.spec.topology.model import Topology


@dataclass
class Examination:
    """What is known of the hosts of a cluster; updated while they answer.

    Attributes:
        hosts: The names of all hosts.
        engine: The engine for which they are checked.
        states: By host, `connecting`, `asking`, `answered`, and finally `ready`, `warning` or `not ready`.
        facts: By host, what the probe found.
        errors: By host, why it could not be probed.
        seconds: By host, how long connecting took.
        launcher: The facts about this machine; None if it could not be probed.
        choice: The network that a run would use; None if it is not known.
        pairs: The connections between hosts.
        step: A text for the user about the present step, while it concerns all hosts.
    """

    hosts: list[str]
    engine: EngineSignature
    states: dict[str, str] = field(default_factory=dict)
    facts: dict[str, HostFacts] = field(default_factory=dict)
    errors: dict[str, HostError] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    launcher: HostFacts | None = None
    choice: NetworkChoice | None = None
    pairs: Sequence[Pair] = ()
    diagnostics: list[Diagnostic] = field(default_factory=list)
    step: str = ""


class View(Protocol):
    """Shows the state of an examination while it runs."""

    def draw(self, known: Examination) -> None:
        """Show what is known so far."""

    def paused(self) -> AbstractContextManager[None]:
        """Draw nothing within this context, in which the user types a passphrase."""


def examine(topology: Topology, view: View, dialogue: Dialogue, *, bandwidth: bool) -> Examination:
    """Probe all hosts, choose the network, let the hosts connect to each other, and check the results.

    Nothing is changed on the hosts.

    Args:
        topology: The cluster's topology with its hosts.
        view: Shows the state of the examination.
        dialogue: Asks the user for passphrases.
        bandwidth: Whether to measure latency and bandwidth between each pair of hosts too.
    """
    examiner = _Examiner(topology, view, dialogue)
    try:
        return examiner.examine(bandwidth=bandwidth)
    finally:
        examiner.close()


class _Examiner:
    """Connects to hosts and probes each as soon as it is connected, so that a slow host does not delay a fast one."""

    def __init__(self, topology: Topology, view: View, dialogue: Dialogue) -> None:
        self._topology, self._view, self._dialogue = topology, view, dialogue
        engine = engine_of_hosts(python=sys.executable, search_path=os.environ.get("PATH"))
        self._known = Examination([str(host.name) for host in topology.hosts], engine)
        self._question = question_for(topology, launcher_python=sys.executable, engine=engine)
        self._transports, self._keys = open_transports(topology)
        self._launcher = LocalTransport("this machine")

    def close(self) -> None:
        for transport in [*self._transports, self._launcher]:
            transport.close()

    def examine(self, *, bandwidth: bool) -> Examination:
        known, topology = self._known, self._topology
        self._ask_all()
        connections = {transport.host: transport.addresses for transport in self._transports}
        found: list[Diagnostic] = []
        if len(known.facts) > 1 or (known.facts and len(self._transports) == 1):
            choice = choose_network(known.facts, wanted=topology.cluster.network, connections=connections)
            found = [choice] if isinstance(choice, Diagnostic) else self._measure(choice, bandwidth=bandwidth)
        answered = {host: s for host, s in known.seconds.items() if host in known.facts and host not in known.errors}
        known.diagnostics = [
            *explain_troubles(list(known.errors.values()), topology=topology, answered=answered),
            *check_everything(
                known.facts,
                topology=topology,
                engine=self._question.engine,
                launcher=known.launcher,
                connections=connections,
            ),
            *found,
        ]
        known.states, known.step = _judge(topology, known.diagnostics), ""
        self._view.draw(known)
        return known

    def _ask_all(self) -> None:
        """Probe all hosts and this machine; try failed hosts again if the user has unlocked another key."""
        known = self._known
        self._ask([*self._transports, self._launcher])
        failed = [transport for transport in self._transports if transport.host in known.errors]
        if failed and self._keys.locked:
            with self._view.paused():
                unlocked = ask_for_passphrases(self._keys, self._dialogue)
            if unlocked:
                for transport in failed:
                    del known.errors[transport.host]
                self._ask(failed)
        known.facts = {host: known.facts[host] for host in known.hosts if host in known.facts}

    def _ask(self, transports: Sequence[Transport]) -> None:
        known = self._known
        known.states |= {one.host: "connecting" for one in transports if one.host in known.hosts}
        self._view.draw(known)
        for transport, answer in on_each(transports, self._ask_one, timeout_s=CONNECT_S + PROBE_S + 1):
            host = transport.host
            if host not in known.states:
                known.launcher = None if isinstance(answer, HostError) else answer
            elif isinstance(answer, HostError):
                known.errors[host], known.states[host] = answer, "not ready"
            else:
                known.facts[host], known.states[host] = answer, "answered"
            self._view.draw(known)

    def _ask_one(self, transport: Transport) -> HostFacts:
        began = time.monotonic()
        transport.connect(timeout_s=CONNECT_S)
        if transport.host in self._known.states:
            self._known.seconds[transport.host] = time.monotonic() - began
            self._known.states[transport.host] = "asking"
            return probe(transport, self._question)
        return probe(transport, replace(self._question, pythons=(sys.executable,), names=(), mpi_prefix=None))

    def _measure(self, choice: NetworkChoice, *, bandwidth: bool) -> list[Diagnostic]:
        """Let the hosts that answered connect to each other over the network."""
        known, topology = self._known, self._topology
        known.choice = choice
        if len(known.facts) < 2:  # noqa: PLR2004 - a single host has no other one to connect to
            return []

        def show_round(done: int, total: int) -> None:
            known.step = f"measuring, round {done + 1} of {total}"
            self._view.draw(known)

        known.step = "hosts try to reach each other"
        self._view.draw(known)
        ready = [transport for transport in self._transports if transport.host in known.facts]
        # The path that a host reports is tried on that host only: on another one, somebody else may have put a program there.
        pythons = {
            host: [SYSTEM_PYTHON, facts.python.executable] for host, facts in known.facts.items() if facts.python
        }
        found = measure_pairs(ready, choice.addresses, pythons=pythons, bandwidth=bandwidth, progress=show_round)
        known.errors |= found.errors
        known.pairs = found.pairs
        return [*check_pairs(found.pairs, choice, topology=topology), *check_mtu(choice, topology=topology)]


def _judge(topology: Topology, diagnostics: Iterable[Diagnostic]) -> dict[str, str]:
    """Return each host's state: the worst diagnostic that points at the host's line decides."""
    states = {str(host.name): "ready" for host in topology.hosts}
    spans = {host.span: str(host.name) for host in topology.hosts}
    for diagnostic in diagnostics:
        labels = [*([diagnostic.primary] if diagnostic.primary else []), *diagnostic.secondary]
        for host in {spans[label.span] for label in labels if label.span in spans}:
            if diagnostic.severity is Severity.ERROR:
                states[host] = "not ready"
            elif diagnostic.severity is Severity.WARNING and states[host] == "ready":
                states[host] = "warning"
    return states
