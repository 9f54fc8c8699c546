"""`ttlaunch plan`: show what would be started, rank by rank, and write the files that start it by hand."""

import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ttlaunch.app.run_spec import RunSpec
from ttlaunch.cli.after_dashes import is_command
from ttlaunch.cli.console import print_json, refuse_file, use_colour
from ttlaunch.cli.options import (
    Arguments,
    ConfigFile,
    Hostfile,
    MpiArgs,
    Naive,
    On,
    OutputFormat,
    Overrides,
    RankBindings,
    Ranks,
    Target,
    Verbose,
)
from ttlaunch.diagnostics import Format

if TYPE_CHECKING:
    from rich.table import Table

    from ttlaunch.planning.launch_plan import LaunchPlan

_FLOWS = {
    "chain": "{} → next {}",
    "ends": "first {} ↔ last {} of a row",
    "row": "{} ↔ every other {} of its row",
    "column": "{} ↔ {} at its place in other rows",
}
EXAMPLES = """\
[bold]ttlaunch plan hierarchical_parallel[/bold]   which rank does what, and where

[bold]ttlaunch plan fabric_minimal --on 5loudboxes --write launch/[/bold]   write the files and a command.sh to start by hand
"""


def plan(
    ctx: typer.Context,
    target: Target,
    arguments: Arguments = None,
    *,
    on: On = "local",
    config_file: ConfigFile = None,
    overrides: Overrides = None,
    ranks: Ranks = None,
    naive: Naive = False,
    hostfile: Hostfile = None,
    rank_bindings: RankBindings = None,
    mpi_args: MpiArgs = None,
    write: Annotated[
        Path | None, typer.Option("--write", metavar="DIR", help="Write plan.json, the engine's files and command.sh.")
    ] = None,
    form: OutputFormat = Format.FULL,
    verbose: Verbose = False,
) -> None:
    """Show a run's hosts, slots, meshes, roles and flows, without starting it."""
    from ttlaunch.app.prepare_run import prepare
    from ttlaunch.cli.dialogue import TerminalDialogue

    request = RunSpec(
        target=target,
        on=on,
        config_file=config_file,
        overrides=overrides or (),
        ranks=ranks,
        naive=naive,
        hostfile=hostfile,
        rank_bindings=rank_bindings,
        mpi_args=mpi_args,
        arguments=arguments or (),
        is_command=is_command(ctx, target, arguments),
    )
    prepared = prepare(request, TerminalDialogue(form, verbose=verbose))
    show_plan(prepared.plan, form=form)
    if write is not None:
        _write(prepared.plan, write, form)


def show_plan(plan: "LaunchPlan", *, form: Format) -> None:
    """Print the plan: a table, one line per rank, or JSON."""
    if form is Format.JSON:
        print_json(plan.as_json())
        return
    if form is Format.CONCISE:
        for row in plan.ranks:
            mesh = "-" if row.mesh_id is None else str(row.mesh_id)
            sys.stdout.write(f"{row.rank}\t{row.role}\t{row.host}\t{row.slot}\t{mesh}\n")
        return
    from rich.console import Console

    from ttlaunch.diagnostics.count import counted

    console = Console(file=sys.stdout, no_color=not use_colour(sys.stdout), highlight=False)
    layout = getattr(plan.program, "layout", None)
    title = f"{plan.program.name} ({layout})" if layout else plan.program.name
    ranks = counted(plan.world_size, "rank")
    console.print(
        f"{title} on {plan.topology}: {ranks} on {counted(len(plan.hosts), 'host')}, {plan.engine.name}",
        markup=False,
    )
    console.print(_table(plan))
    for source, target, pattern in plan.flows:
        console.print(f"flow  {_FLOWS.get(pattern, '{} ↔ {}').format(source, target)}", markup=False)
    for a, b, channels in plan.links:
        console.print(f"link  mesh {a} — mesh {b}, {counted(channels, 'channel')}", markup=False)
    console.print(f"plan  {plan.hash[:16]}", markup=False)


def _table(plan: "LaunchPlan") -> "Table":
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, padding=(0, 3, 0, 0))
    for heading in ("rank", "role", "host", "slot", "mesh", "devices"):
        table.add_column(heading, justify="right" if heading in {"rank", "slot", "mesh"} else "left")
    for row in plan.ranks:
        mesh = "–" if row.mesh_id is None else str(row.mesh_id)
        devices = "–" if row.device_shape is None else f"{row.device_shape[0]} × {row.device_shape[1]}"
        table.add_row(str(row.rank), Text(row.role), Text(row.host), str(row.slot), mesh, devices)
    return table


def _write(plan: "LaunchPlan", folder: Path, form: Format) -> None:
    from ttlaunch.running.runs.run_folder import write_plan

    try:
        paths = write_plan(plan, folder)
    except OSError as error:
        refuse_file(folder, error, form=form)
    if form is not Format.JSON:
        where = "" if plan.engine.by_hand is None else ", on hosts that all see this folder under the same path"
        sys.stdout.write(f"wrote {len(paths)} files; start it with: sh {shlex.quote(str(paths[-1]))}{where}\n")
