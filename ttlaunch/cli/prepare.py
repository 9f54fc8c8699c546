"""`ttlaunch prepare`: make the Python environment that ranks need on every host of a cluster, and print its path."""

import os
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ttlaunch.cli.console import exit_with, print_json, print_lines, show_diagnostics
from ttlaunch.cli.options import Hostfile, On, OutputFormat, Verbose
from ttlaunch.diagnostics import Format, counted, exit_status, render_size

if TYPE_CHECKING:
    from ttlaunch.hosts.prepare.cluster import Outcome
    from ttlaunch.hosts.prepare.locking import Locksmith
    from ttlaunch.records.host_scripts import EnvironmentAnswer
    from ttlaunch.spec.topology.model import Topology

EXAMPLES = """\
[bold]ttlaunch prepare --on my_cluster[/bold]   set up bare hosts

[bold]ttlaunch prepare --on my_cluster --requirements requirements.txt[/bold]   with the packages that your recipes import

[bold]ttlaunch prepare --on my_cluster --check[/bold]   only check; the exit status is 4 if something is missing
"""
Constraints = Annotated[
    Path | None,
    typer.Option(
        "--constraints",
        metavar="FILE",
        exists=True,
        dir_okay=False,
        readable=True,
        help="Package versions. Default: those of ./constraints.txt, or else those installed on this machine.",
    ),
]
Requirements = Annotated[
    Path | None,
    typer.Option(
        "--requirements",
        "-r",
        metavar="FILE",
        exists=True,
        dir_okay=False,
        readable=True,
        help="Additional packages, in pip's format.",
    ),
]
FromIndex = Annotated[
    bool,
    typer.Option(
        "--from-index",
        help="Let hosts that reach a package index download from it; the others get the packages from here.",
    ),
]
Check = Annotated[bool, typer.Option("--check", help="Only report which hosts are prepared; change nothing.")]


def prepare(
    *,
    on: On = "local",
    hostfile: Hostfile = None,
    constraints: Constraints = None,
    requirements: Requirements = None,
    from_index: FromIndex = False,
    check: Check = False,
    form: OutputFormat = Format.FULL,
    verbose: Verbose = False,
) -> None:
    """Install the packages that ranks import on every host, in the same versions.

    This machine downloads the packages and sends them over SSH, leaving out what a host already has. A host needs Python 3.11
    or newer, but neither pip nor a package index.
    """
    from ttlaunch.app.reach import reach_hosts
    from ttlaunch.app.resolve_cluster import load_cluster
    from ttlaunch.cli.dialogue import TerminalDialogue
    from ttlaunch.cli.prepare_view import make_view
    from ttlaunch.engines.choose import ENGINES, engine_of_hosts
    from ttlaunch.hosts.prepare.cluster import prepare_hosts
    from ttlaunch.hosts.prepare.one_host import Job
    from ttlaunch.hosts.prepare.requirements import rank_requirements

    dialogue = TerminalDialogue(form, verbose=verbose)
    topology = load_cluster(on, hostfile, dialogue)
    # Hosts get the engine of this machine, because it starts the daemons of the hosts' engines.
    engine = engine_of_hosts(python=sys.executable, search_path=os.environ.get("PATH"))
    packages = rank_requirements(instead={ENGINES[0].signature.package: engine.package})
    locksmith = _locksmith(packages, constraints, requirements)
    # pip takes half a second to answer, so it is asked while the hosts are being connected to.
    threading.Thread(target=locksmith.ask_configuration, daemon=True).start()
    transports = reach_hosts(topology, dialogue)
    folder = topology.cluster.remote_folder
    try:
        with make_view([str(host.name) for host in topology.hosts], quiet=form is Format.JSON) as view:
            locksmith.report = view.here
            job = Job(folder, engine, check=check, from_index=from_index, locksmith=locksmith, progress=view)
            outcome = prepare_hosts(topology, transports, job)
    finally:
        for transport in transports:
            transport.close()
    if form is Format.JSON:
        print_json(_as_json(outcome, topology, locksmith), schema="prepare")
    else:
        show_diagnostics(outcome.diagnostics, form=form, verbose=verbose)
        _show(outcome, topology)
    exit_with(exit_status(outcome.diagnostics))


def _locksmith(packages: tuple[str, ...], constraints: Path | None, requirements: Path | None) -> "Locksmith":
    from ttlaunch.hosts.prepare.lock import Store
    from ttlaunch.hosts.prepare.locking import Locksmith
    from ttlaunch.hosts.prepare.pip import Pip
    from ttlaunch.hosts.prepare.requirements import Requirements, find_constraints

    text, origin = find_constraints(constraints, working_folder=Path.cwd())
    wanted = Requirements(packages, text, origin, requirements.resolve() if requirements else None)
    cache = os.environ.get("XDG_CACHE_HOME") or Path("~/.cache").expanduser()
    return Locksmith(wanted, Store(Path(cache) / "ttlaunch"), Pip())


def _show(outcome: "Outcome", topology: "Topology") -> None:
    """Print a line for each host that is ready, and whether runs use its environment."""
    ready = {host: result for host, result in outcome.results.items() if result.answer.kind == "ready"}
    width = max((len(host) for host in ready), default=0)
    for host in [str(host.name) for host in topology.hosts if str(host.name) in ready]:
        print_lines([f"{host:<{width}}  {_words(ready[host].answer, ready[host].sent, ready[host].seconds)}"])
    if ready:
        lock = max(outcome.locks.values(), key=lambda lock: len(lock.installed))
        hosts = counted(len(ready), "host")
        rest = f" of {len(topology.hosts)}" if len(ready) < len(topology.hosts) else ""
        print_lines([f"{hosts}{rest} ready: {counted(len(lock.installed), 'package')}"])
    if ready and topology.cluster.python:
        named = f"cluster.yaml names `python: {topology.cluster.python}`, so runs use that one"
        print_lines([f"{named}; without the key they use the environment made here"])


def _words(answer: "EnvironmentAnswer", sent: int, seconds: float) -> str:
    mpi = f", {answer.mpi}" if answer.mpi else ""
    if not answer.made:
        return f"was ready: Python {answer.python}{mpi} in {answer.environment}"
    carried = f"{render_size(sent)} sent" if sent else "from wheels that the host already had"
    origin = "fetched from its index" if answer.from_index else carried
    return f"made in {seconds:.1f} s, {origin}: Python {answer.python}{mpi} in {answer.environment}"


def _as_json(outcome: "Outcome", topology: "Topology", locksmith: "Locksmith") -> dict[str, Any]:
    """Return every host with its state, and each lock with its packages, as JSON."""
    from ttlaunch.records.host_scripts import EnvironmentAnswer

    hosts = []
    for name in (str(host.name) for host in topology.hosts):
        result, base = outcome.results.get(name), outcome.bases.get(name)
        answer = result.answer if result else EnvironmentAnswer(kind="failed")
        hosts.append(
            {
                "host": name,
                "state": "made" if answer.kind == "ready" and answer.made else answer.kind,
                "environment": answer.environment,
                "base": base.path if base else None,
                "kind": str(base.kind) if base else None,
                "mpi": answer.mpi,
                "sent_bytes": result.sent if result else 0,
                "from_index": answer.from_index,
                "seconds": round(result.seconds, 3) if result else None,
            }
        )
    locks = [
        {"kind": str(kind), "packages": {wheel.name: wheel.version for wheel in lock.installed}}
        for kind, lock in outcome.locks.items()
    ]
    found = [diagnostic.as_json() for diagnostic in outcome.diagnostics]
    return {"hosts": hosts, "locks": locks, "constraints": locksmith.wanted.constraints_origin, "diagnostics": found}
