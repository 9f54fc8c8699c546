"""Ask every host of a cluster what it has, and judge whether a run can start there: what `ttlaunch doctor` shows."""

import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import Protocol

from ttlaunch.app.dialogue import Dialogue
from ttlaunch.app.reach import ask_for_passphrases, open_transports
from ttlaunch.diagnostics import Diagnostic, Severity
from ttlaunch.engines.choose import ENGINES
from ttlaunch.errors import HostError
from ttlaunch.hosts.doctor.checks import check_everything
from ttlaunch.hosts.doctor.facts import HostFacts
from ttlaunch.hosts.doctor.network import NetworkChoice, choose_network
from ttlaunch.hosts.doctor.pair_checks import check_mtu, check_pairs
from ttlaunch.hosts.doctor.pairs import Pair, measure_pairs
from ttlaunch.hosts.doctor.probe_hosts import PROBE_S, SYSTEM_PYTHON, probe, question_for
from ttlaunch.hosts.doctor.troubles import explain_troubles
from ttlaunch.hosts.transport.fleet import on_each
from ttlaunch.hosts.transport.key_ring import KeyRing
from ttlaunch.hosts.transport.local import LocalTransport
from ttlaunch.hosts.transport.transport import CONNECT_S, Transport
from ttlaunch.spec.topology.model import Topology


@dataclass
class Shown:
    """What is known so far.

    Attributes:
        states: By host: `connecting`, `asking`, and in the end `ready`, `warning` or `not ready`.
        step: What is being done now, for all hosts.
    """

    hosts: list[str]
    states: dict[str, str] = field(default_factory=dict)
    facts: dict[str, HostFacts] = field(default_factory=dict)
    errors: dict[str, HostError] = field(default_factory=dict)
    choice: NetworkChoice | None = None
    step: str = ""


class View(Protocol):
    """Draws what is known while hosts are being asked."""

    def draw(self, shown: Shown) -> None:
        """Show what is known by now."""

    def paused(self) -> AbstractContextManager[None]:
        """Draw nothing while somebody types a passphrase."""


@dataclass
class Examined:
    """Everything that was found out."""

    diagnostics: list[Diagnostic]
    seconds: Mapping[str, float] = field(default_factory=dict)
    choice: NetworkChoice | None = None
    pairs: Sequence[Pair] = ()


def examine(topology: Topology, shown: Shown, view: View, dialogue: Dialogue, *, bandwidth: bool) -> Examined:
    """Ask, choose the network, let the hosts try each other, and check everything that they said; nothing is changed there.

    Args:
        topology: Names the hosts.
        shown: What is known, filled as hosts answer.
        view: Draws it.
        dialogue: Is asked for passphrases.
        bandwidth: Also measure each pair of hosts.
    """
    transports, keys = open_transports(topology)
    launcher = LocalTransport("this machine")
    try:
        asked = _Asking(topology, shown, view, keys, dialogue)
        asked.ask([*transports, launcher])
        connections = {transport.host: transport.addresses for transport in transports}
        examined = Examined([], seconds=asked.seconds)
        if len(shown.facts) > 1 or (shown.facts and len(transports) == 1):
            _examine_network(examined, topology, transports, shown, view, bandwidth=bandwidth)
    finally:
        for transport in [*transports, launcher]:
            transport.close()
    answered = {host: s for host, s in asked.seconds.items() if host in shown.facts and host not in shown.errors}
    examined.diagnostics = [
        *explain_troubles(list(shown.errors.values()), topology=topology, answered=answered),
        *check_everything(
            shown.facts,
            topology=topology,
            engine=asked.question.engine,
            launcher=asked.launcher,
            connections=connections,
        ),
        *examined.diagnostics,
    ]
    return examined


class _Asking:
    """Connects to hosts and probes each as soon as it is connected, so that nobody waits for the slowest twice."""

    def __init__(self, topology: Topology, shown: Shown, view: View, keys: KeyRing, dialogue: Dialogue) -> None:
        self.question = question_for(topology, launcher_python=sys.executable, engine=ENGINES[0].signature)
        self.seconds: dict[str, float] = {}
        self.launcher: HostFacts | None = None
        self._shown, self._view, self._keys, self._dialogue = shown, view, keys, dialogue

    def ask(self, transports: Sequence[Transport]) -> None:
        """Ask all, and once more those that wanted a key which has been unlocked meanwhile."""
        self._ask_once(transports)
        failed = [transport for transport in transports if transport.host in self._shown.errors]
        if failed and self._keys.locked:
            with self._view.paused():
                unlocked = ask_for_passphrases(self._keys, self._dialogue)
            if unlocked:
                for transport in failed:
                    del self._shown.errors[transport.host]
                self._ask_once(failed)
        order = {host: number for number, host in enumerate(self._shown.hosts)}
        self._shown.facts = dict(sorted(self._shown.facts.items(), key=lambda item: order[item[0]]))

    def _ask_once(self, transports: Sequence[Transport]) -> None:
        self._shown.states |= {t.host: "connecting" for t in transports if t.host in self._shown.hosts}
        self._view.draw(self._shown)
        for transport, answer in on_each(transports, self._ask_one, timeout_s=CONNECT_S + PROBE_S + 1):
            self._take(transport.host, answer)
            self._view.draw(self._shown)

    def _ask_one(self, transport: Transport) -> HostFacts:
        began = time.monotonic()
        transport.connect(timeout_s=CONNECT_S)
        if transport.host in self._shown.states:
            self.seconds[transport.host] = time.monotonic() - began
            self._shown.states[transport.host] = "asking"
            return probe(transport, self.question)
        return probe(transport, replace(self.question, pythons=(sys.executable,), names=(), mpi_prefix=None))

    def _take(self, host: str, answer: HostFacts | HostError) -> None:
        if host not in self._shown.states:
            self.launcher = None if isinstance(answer, HostError) else answer
        elif isinstance(answer, HostError):
            self._shown.errors[host] = answer
            self._shown.states[host] = "not ready"
        else:
            self._shown.facts[host] = answer
            self._shown.states[host] = "answered"


def _examine_network(
    examined: Examined,
    topology: Topology,
    transports: Sequence[Transport],
    shown: Shown,
    view: View,
    *,
    bandwidth: bool,
) -> None:
    """Choose the network among the hosts that answered, and let them try each other on it."""
    connections = {transport.host: transport.addresses for transport in transports}
    choice = choose_network(shown.facts, wanted=topology.cluster.network, connections=connections)
    if isinstance(choice, Diagnostic):
        examined.diagnostics.append(choice)
        return
    shown.choice = examined.choice = choice
    if len(shown.facts) < 2:  # noqa: PLR2004 - nobody to talk to
        return

    def say(done: int, total: int) -> None:
        shown.step = f"measuring, round {done + 1} of {total}"
        view.draw(shown)

    shown.step = "hosts try to reach each other"
    view.draw(shown)
    ready = [transport for transport in transports if transport.host in shown.facts]
    pythons = [known.python.executable for known in shown.facts.values() if known.python]
    pythons = [SYSTEM_PYTHON, *dict.fromkeys(pythons)]
    found = measure_pairs(ready, choice.addresses, pythons=pythons, bandwidth=bandwidth, progress=say)
    shown.errors |= found.errors
    examined.pairs = found.pairs
    examined.diagnostics += check_pairs(found.pairs, choice, topology=topology)
    examined.diagnostics += check_mtu(choice, topology=topology)


def judge(topology: Topology, diagnostics: Iterable[Diagnostic]) -> dict[str, str]:
    """Each host's state by the worst diagnostic that points at its line."""
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
