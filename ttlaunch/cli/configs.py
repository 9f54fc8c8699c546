"""`ttlaunch configs`: list the clusters that `--on` can name."""

import os
from pathlib import Path

import typer

from ttlaunch.cli.listing import print_listing
from ttlaunch.cli.options import PlainFormat
from ttlaunch.diagnostics import Format, counted

app = typer.Typer(help="List configurations.", no_args_is_help=True)


@app.callback()
def _group() -> None:
    """Keep `list` a subcommand although it is the only one."""


@app.command("list")
def list_(*, form: PlainFormat = Format.FULL) -> None:
    """List every configuration with its size. One in ./configurations hides a built-in one of the same name."""
    from ttlaunch.spec.topology.discovery import list_configurations
    from ttlaunch.spec.topology.load import load_topology

    rows = []
    for found in list_configurations(Path.cwd()):
        loaded = load_topology(found.folder, name=found.name, environment=os.environ, working_folder=Path.cwd())
        topology = loaded.topology
        size = "has mistakes; see `ttlaunch validate`"
        if topology is not None:
            world = counted(topology.world_size, "rank") if topology.world_size else "world size open"
            size = f"{counted(len(topology.hosts), 'host')}, {counted(len(topology.slots), 'slot')}, {world}"
        rows.append({"name": found.name, "size": size, "folder": str(found.folder), "built_in": found.built_in})
    print_listing(rows, about="size", schema="configs", form=form)
