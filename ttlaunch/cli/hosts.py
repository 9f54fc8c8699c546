"""`ttlaunch hosts`: write the hosts of an allocation as a hostfile."""

import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from ttlaunch.cli.console import print_json, print_lines, print_text, show_diagnostics, write_file
from ttlaunch.cli.options import PlainFormat
from ttlaunch.diagnostics import (
    Blame,
    Diagnostic,
    Format,
    LaunchError,
    Source,
    did_you_mean,
    listed,
    shown,
    usage_error,
)

EXAMPLES = """\
[bold]ttlaunch hosts --from slurm --out hosts.txt[/bold]   inside `sbatch` or `salloc`; then `run --hostfile hosts.txt`

[bold]ttlaunch hosts --from skypilot --slots 2[/bold]   two ranks a host

[bold]ttlaunch hosts --from k8s --slots 4 /etc/mpi/hostfile[/bold]   in the launcher pod of an MPIJob

[bold]ttlaunch hosts --from ray nodes.json[/bold]   after `ray list nodes --format json > nodes.json`
"""


def hosts(
    file: Annotated[
        str | None,
        typer.Argument(
            metavar="[FILE]",
            help="k8s: a hostfile of the MPI Operator other than /etc/mpi/hostfile. ray: what `ray list nodes --format json` printed; - is standard input.",
            show_default=False,
        ),
    ] = None,
    *,
    system: Annotated[
        str, typer.Option("--from", metavar="slurm|skypilot|dstack|k8s|ray", help="What allocated the hosts.")
    ],
    slots: Annotated[
        int | None,
        typer.Option(
            "--slots",
            min=1,
            max=65_536,
            metavar="N",
            help="Slots of every host, instead of its number of tasks or devices.",
        ),
    ] = None,
    write: Annotated[
        Path | None, typer.Option("--out", "-o", metavar="FILE", help="Output file; without it, standard output.")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Overwrite a file.")] = False,
    form: PlainFormat = Format.FULL,
) -> None:
    """Read the hosts of an allocation by Slurm, SkyPilot, dstack, Kubernetes or Ray, and write them as a hostfile."""
    from ttlaunch.spec.topology.allocation import SYSTEMS, read_allocation

    if system not in SYSTEMS:
        message = f"`--from {shown(system)}` is not known; {listed(SYSTEMS)} was expected"
        raise usage_error(message, *did_you_mean(system, SYSTEMS))
    source, found = _source(system, file)
    allocation, mistakes = read_allocation(system, environment=os.environ, file=source, slots=slots)
    if allocation is None:
        raise LaunchError([*found, *mistakes])
    show_diagnostics([*found, *mistakes], form=form)
    if write is not None:
        write_file(write, allocation.as_hostfile().encode(), force=force)
    if form is Format.JSON:
        content = {
            "from": system,
            "file": str(write) if write else None,
            "hosts": [{"host": host.name, "user": host.user, "slots": host.slots} for host in allocation.hosts],
            "devices": list(allocation.devices),
            "diagnostics": [one.as_json() for one in (*found, *mistakes)],
        }
        print_json(content, schema="hosts")
    elif write is None:
        print_text(allocation.as_hostfile())
    else:
        print_lines([f"wrote {write}"])


def _source(system: str, name: str | None) -> "tuple[Source | None, list[Diagnostic]]":
    """Read the file that a system's hosts come from; nothing if they come from variables, or no file is known."""
    from ttlaunch.spec.located.codes import TOPOLOGY
    from ttlaunch.spec.located.source import read_source, source_from_bytes
    from ttlaunch.spec.topology.allocation import OPERATORS_HOSTFILE

    if system not in {"k8s", "ray"}:
        if name is not None:
            message = f"`--from {system}` reads variables, and {shown(name)} is a file"
            raise usage_error(message, "leave the file out, or give `--hostfile` to the command that needs hosts")
        return None, []
    what = "a hostfile" if system == "k8s" else "a list of Ray nodes"
    if name == "-":
        source, found = source_from_bytes(sys.stdin.buffer.read(), codes=TOPOLOGY, what=what, name="standard input")
    else:
        if name is None and system == "k8s" and Path(OPERATORS_HOSTFILE).exists():
            name = OPERATORS_HOSTFILE
        if name is None:
            return None, []
        source, found = read_source(Path(name), codes=TOPOLOGY, what=what, blame=Blame.COMMAND_LINE)
    if source is None:
        raise LaunchError(found)
    return source, found
