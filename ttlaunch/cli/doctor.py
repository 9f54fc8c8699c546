"""`ttlaunch doctor`: check all hosts of a cluster at once, and report which are not ready for a run, and why."""

import sys
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated

import typer

from ttlaunch.cli.console import exit_with, print_json, print_lines, show_diagnostics
from ttlaunch.cli.options import Hostfile, On, OutputFormat, Verbose
from ttlaunch.diagnostics import (
    Diagnostic,
    Format,
    counted,
    did_you_mean,
    exit_status,
    has_errors,
    listed,
    shown,
    usage_error,
)

if TYPE_CHECKING:
    from ttlaunch.app.examine import Examination
    from ttlaunch.spec.topology.model import Topology

EXAMPLES = """\
[bold]ttlaunch doctor --on my_cluster[/bold]   every host, and the network between each pair of them

[bold]ttlaunch doctor --on my_cluster --bandwidth[/bold]   also the speed of that network

[bold]ttlaunch doctor --on my_cluster --hosts metal-03,metal-04[/bold]   some of the hosts

[bold]ttlaunch doctor[/bold]   this machine
"""


def doctor(
    *,
    on: On = "local",
    hostfile: Hostfile = None,
    hosts: Annotated[
        str | None, typer.Option("--hosts", metavar="A,B", help="Check only these hosts, separated by commas.")
    ] = None,
    bandwidth: Annotated[
        bool, typer.Option("--bandwidth", help="Also measure latency and bandwidth of each pair of hosts.")
    ] = False,
    form: OutputFormat = Format.FULL,
    verbose: Verbose = False,
) -> None:
    """Check whether a run can start on the hosts of a cluster. Changes nothing."""
    from ttlaunch.app.examine import examine
    from ttlaunch.app.resolve_cluster import load_cluster
    from ttlaunch.cli.dialogue import TerminalDialogue
    from ttlaunch.cli.doctor_view import make_view, render_lines, render_pairs

    dialogue = TerminalDialogue(form, verbose=verbose)
    topology = _chosen_hosts(load_cluster(on, hostfile, dialogue), hosts)
    with make_view(quiet=form is Format.JSON) as view:
        known = examine(topology, view, dialogue, bandwidth=bandwidth)
    if form is Format.JSON:
        print_json(_as_json(known), schema="doctor")
    else:
        if not sys.stdout.isatty():
            print_lines(render_lines(known))
        if known.choice is not None and len(known.hosts) > 1:
            print_lines([f"network: {known.choice.why}"])
        print_lines(render_pairs(known.pairs))
        show_diagnostics(known.diagnostics, form=form, verbose=verbose)
        print_lines([_verdict(topology, known.diagnostics, known.states)])
    exit_with(exit_status(known.diagnostics))


def _chosen_hosts(topology: "Topology", names: str | None) -> "Topology":
    """Return the cluster with only these hosts, without bindings."""
    if names is None:
        return topology
    known = [str(host.name) for host in topology.hosts]
    wanted = [name.strip() for name in names.split(",") if name.strip()]
    for name in wanted:
        if name not in known:
            hints = did_you_mean(name, known) or (f"{topology.name} has {listed(known, last='and')}",)
            raise usage_error(f"`--hosts`: there is no host `{shown(name)}` in {topology.name}", *hints)
    if not wanted:
        raise usage_error(f"`--hosts {shown(names)}` names no host")
    return replace(topology, hosts=tuple(host for host in topology.hosts if host.name in wanted), bindings=())


def _verdict(topology: "Topology", diagnostics: list[Diagnostic], states: Mapping[str, str]) -> str:

    hosts = counted(len(states), "host")
    if not has_errors(diagnostics):
        return f"{topology.name} is ready: {hosts}, {counted(len(topology.slots), 'slot')}"
    bad = sum(state == "not ready" for state in states.values())
    return f"{topology.name} is not ready: {bad} of {hosts} not ready" if bad else f"{topology.name} is not ready"


def _as_json(known: "Examination") -> dict[str, object]:
    from ttlaunch.cli.doctor_view import pairs_as_json
    from ttlaunch.hosts.doctor.facts import facts_as_json

    choice = known.choice
    return {
        "ready": not has_errors(known.diagnostics),
        "hosts": [
            {
                "name": host,
                "state": known.states[host],
                "connect_s": known.seconds.get(host),
                "facts": facts_as_json(known.facts[host]) if host in known.facts else None,
                "error": str(known.errors[host].evidence) if host in known.errors else None,
            }
            for host in known.hosts
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
        "pairs": pairs_as_json(known.pairs),
        "diagnostics": [diagnostic.as_json() for diagnostic in known.diagnostics],
    }
