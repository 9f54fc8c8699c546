"""`ttlaunch doctor`: ask every host of a cluster at once what it has, and say which one is not ready for a run, and why."""

import os
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ttlaunch.cli.console import leave, print_json, refuse, show_diagnostics
from ttlaunch.cli.options import Hostfile, On, OutputFormat, Verbose
from ttlaunch.diagnostics import Diagnostic, Format, did_you_mean, exit_status, has_errors

if TYPE_CHECKING:
    from ttlaunch.cli.doctor_view import Shown, View
    from ttlaunch.errors import HostError
    from ttlaunch.hosts.doctor.facts import HostFacts
    from ttlaunch.hosts.doctor.network import NetworkChoice
    from ttlaunch.hosts.doctor.pairs import Pair
    from ttlaunch.hosts.transport.key_ring import KeyRing
    from ttlaunch.hosts.transport.transport import Transport
    from ttlaunch.spec.topology.model import Topology

EXAMPLES = """\
[bold]ttlaunch doctor --on my_cluster[/bold]   every host, and every way between two of them

[bold]ttlaunch doctor --on my_cluster --bandwidth[/bold]   and how fast those are

[bold]ttlaunch doctor --on my_cluster --hosts metal-03,metal-04[/bold]   some of its hosts

[bold]ttlaunch doctor[/bold]   this machine
"""


def doctor(
    *,
    on: On = "local",
    hostfile: Hostfile = None,
    hosts: Annotated[
        str | None, typer.Option("--hosts", metavar="A,B", help="Only these hosts, separated by commas.")
    ] = None,
    bandwidth: Annotated[
        bool, typer.Option("--bandwidth", help="Also measure latency and bandwidth of each pair of hosts.")
    ] = False,
    form: OutputFormat = Format.FULL,
    verbose: Verbose = False,
) -> None:
    """Check the hosts of a cluster: can a run start there, and if not, why? Changes nothing and starts nothing."""
    from ttlaunch.cli.doctor_view import Shown, judge, make_view, render_lines, render_pairs

    topology = _chosen_hosts(_load(on, hostfile, form=form, verbose=verbose), hosts)
    shown = Shown([str(host.name) for host in topology.hosts])
    with make_view(quiet=form is Format.JSON) as view:
        examined = _examine(topology, shown, view, bandwidth=bandwidth)
        shown.states = judge(topology, examined.diagnostics)
        shown.step = ""
        view.draw(shown)
    if form is Format.JSON:
        print_json(_as_json(examined, shown))
    else:
        if not sys.stdout.isatty():
            sys.stdout.write(render_lines(shown))
        if examined.choice is not None and len(shown.hosts) > 1:
            sys.stdout.write(f"network: {examined.choice.why}\n")
        sys.stdout.write(render_pairs(examined.pairs))
        sys.stdout.flush()
        show_diagnostics(examined.diagnostics, form=form, verbose=verbose)
        sys.stdout.write(_verdict(topology, examined.diagnostics, shown.states))
    leave(exit_status(examined.diagnostics))


@dataclass
class _Examined:
    """Everything that was found out."""

    diagnostics: list[Diagnostic]
    seconds: Mapping[str, float] = field(default_factory=dict)
    choice: "NetworkChoice | None" = None
    pairs: "Sequence[Pair]" = ()


def _load(on: str, hostfile: Path | None, *, form: Format, verbose: bool) -> "Topology":
    from ttlaunch.app.resolve import ResolvedSpec, load_topology_into
    from ttlaunch.app.run_spec import RunSpec

    description = ResolvedSpec()
    request = RunSpec(target=None, on=on, hostfile=hostfile)
    load_topology_into(description, request, working_folder=Path.cwd(), shell=os.environ)
    if description.topology is None or not description.ok:
        refuse(description.diagnostics, form=form, verbose=verbose)
    show_diagnostics(description.diagnostics, form=form, verbose=verbose)
    return description.topology


def _chosen_hosts(topology: "Topology", names: str | None) -> "Topology":
    """The cluster with only these hosts; the meshes of others do not count."""
    if names is None:
        return topology
    known = [str(host.name) for host in topology.hosts]
    wanted = [name.strip() for name in names.split(",") if name.strip()]
    for name in wanted:
        if name not in known:
            hint = did_you_mean(name, known)
            meant = f"; {hint[0]}" if hint else ""
            raise typer.BadParameter(f"there is no host `{name}` in {topology.name}{meant}", param_hint="--hosts")
    if not wanted:
        raise typer.BadParameter("no host is named", param_hint="--hosts")
    return replace(topology, hosts=tuple(host for host in topology.hosts if host.name in wanted), bindings=())


def _examine(topology: "Topology", shown: "Shown", view: "View", *, bandwidth: bool) -> _Examined:
    from ttlaunch.app.reach import open_transports
    from ttlaunch.hosts.doctor.checks import check_everything
    from ttlaunch.hosts.doctor.troubles import explain_troubles
    from ttlaunch.hosts.transport.local import LocalTransport

    transports, keys = open_transports(topology)
    launcher = LocalTransport("this machine")
    try:
        asked = _Asking(topology, shown, view, keys)
        asked.ask([*transports, launcher])
        connections = {transport.host: transport.addresses for transport in transports}
        examined = _Examined([], seconds=asked.seconds)
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

    def __init__(self, topology: "Topology", shown: "Shown", view: "View", keys: "KeyRing") -> None:
        from ttlaunch.engines import ENGINES
        from ttlaunch.hosts.doctor.probe_hosts import question_for

        self.question = question_for(topology, launcher_python=sys.executable, engine=ENGINES[0].signature)
        self.seconds: dict[str, float] = {}
        self.launcher: HostFacts | None = None
        self._shown, self._view, self._keys = shown, view, keys

    def ask(self, transports: "Sequence[Transport]") -> None:
        """Ask all, and once more those that wanted a key which has been unlocked meanwhile."""
        from ttlaunch.app.reach import ask_for_passphrases
        from ttlaunch.cli.dialogue import TerminalDialogue

        self._ask_once(transports)
        failed = [transport for transport in transports if transport.host in self._shown.errors]
        if failed and self._keys.locked:
            with self._view.paused():
                unlocked = ask_for_passphrases(self._keys, TerminalDialogue(Format.FULL))
            if unlocked:
                for transport in failed:
                    del self._shown.errors[transport.host]
                self._ask_once(failed)
        order = {host: number for number, host in enumerate(self._shown.hosts)}
        self._shown.facts = dict(sorted(self._shown.facts.items(), key=lambda item: order[item[0]]))

    def _ask_once(self, transports: "Sequence[Transport]") -> None:
        from ttlaunch.hosts.doctor.probe_hosts import PROBE_S
        from ttlaunch.hosts.transport.fleet import on_each
        from ttlaunch.hosts.transport.transport import CONNECT_S

        self._shown.states |= {t.host: "connecting" for t in transports if t.host in self._shown.hosts}
        self._view.draw(self._shown)
        for transport, answer in on_each(transports, self._ask_one, timeout_s=CONNECT_S + PROBE_S + 1):
            self._take(transport.host, answer)
            self._view.draw(self._shown)

    def _ask_one(self, transport: "Transport") -> "HostFacts":
        from ttlaunch.hosts.doctor.probe_hosts import probe
        from ttlaunch.hosts.transport.transport import CONNECT_S

        began = time.monotonic()
        transport.connect(timeout_s=CONNECT_S)
        if transport.host in self._shown.states:
            self.seconds[transport.host] = time.monotonic() - began
            self._shown.states[transport.host] = "asking"
            return probe(transport, self.question)
        return probe(transport, replace(self.question, pythons=(sys.executable,), names=(), mpi_prefix=None))

    def _take(self, host: str, answer: "HostFacts | HostError") -> None:
        from ttlaunch.errors import HostError

        if host not in self._shown.states:
            self.launcher = None if isinstance(answer, HostError) else answer
        elif isinstance(answer, HostError):
            self._shown.errors[host] = answer
            self._shown.states[host] = "not ready"
        else:
            self._shown.facts[host] = answer
            self._shown.states[host] = "answered"


def _examine_network(
    examined: _Examined,
    topology: "Topology",
    transports: "Sequence[Transport]",
    shown: "Shown",
    view: "View",
    *,
    bandwidth: bool,
) -> None:
    """Choose the network among the hosts that answered, and let them try each other on it."""
    from ttlaunch.hosts.doctor.network import choose_network
    from ttlaunch.hosts.doctor.pair_checks import check_mtu, check_pairs
    from ttlaunch.hosts.doctor.pairs import measure_pairs
    from ttlaunch.hosts.doctor.probe_hosts import SYSTEM_PYTHON

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


def _verdict(topology: "Topology", diagnostics: list[Diagnostic], states: Mapping[str, str]) -> str:
    from ttlaunch.diagnostics.count import counted

    hosts = counted(len(states), "host")
    if not has_errors(diagnostics):
        return f"{topology.name} is ready: {hosts}, {counted(len(topology.slots), 'slot')}\n"
    bad = sum(state == "not ready" for state in states.values())
    return f"{topology.name} is not ready: {bad} of {hosts} not ready\n" if bad else f"{topology.name} is not ready\n"


def _as_json(examined: _Examined, shown: "Shown") -> dict[str, object]:
    from ttlaunch.cli.doctor_view import pairs_as_json
    from ttlaunch.hosts.doctor.facts import facts_as_json

    choice = examined.choice
    return {
        "ready": not has_errors(examined.diagnostics),
        "hosts": [
            {
                "name": host,
                "state": shown.states[host],
                "connect_s": examined.seconds.get(host),
                "facts": facts_as_json(shown.facts[host]) if host in shown.facts else None,
                "error": str(shown.errors[host].evidence) if host in shown.errors else None,
            }
            for host in shown.hosts
        ],
        "network": None
        if choice is None
        else {
            "ranks": list(choice.ranks),
            "control": list(choice.control),
            "addresses": dict(choice.addresses),
            "has_rdma": choice.has_rdma,
            "why": choice.why,
        },
        "pairs": pairs_as_json(examined.pairs),
        "diagnostics": [diagnostic.as_json() for diagnostic in examined.diagnostics],
    }
