"""`ttlaunch place`: propose an order of hosts and bindings in which ranks that talk are few links apart."""

import os
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ttlaunch.app.resolve import resolve
from ttlaunch.app.run_spec import RunSpec
from ttlaunch.cli.console import print_json, refuse, refuse_file, show_diagnostics, use_colour
from ttlaunch.cli.dialogue import TerminalDialogue
from ttlaunch.cli.options import (
    ConfigFile,
    Hostfile,
    On,
    OutputFormat,
    Overrides,
    RankBindings,
    Verbose,
    complete_recipes,
)
from ttlaunch.diagnostics import Blame, Diagnostic, Format

if TYPE_CHECKING:
    from rich.console import Console

    from ttlaunch.app.resolve import ResolvedSpec
    from ttlaunch.planning.place import Proposal
    from ttlaunch.planning.roles import RoleLayout
    from ttlaunch.spec.topology.model import Topology

EXAMPLES = """\
[bold]ttlaunch place hierarchical_parallel --on 5loudboxes --set multihost_config.num_workers=3[/bold]   the proposed order, and how much traffic it saves

[bold]ttlaunch place fabric_minimal --on 5loudboxes --write configurations/placed[/bold]   write the proposal
"""


def place(
    recipe: Annotated[
        str,
        typer.Argument(
            metavar="RECIPE",
            help="The recipe whose ranks to place.",
            autocompletion=complete_recipes,
            show_default=False,
        ),
    ],
    *,
    on: On = "local",
    config_file: ConfigFile = None,
    overrides: Overrides = None,
    hostfile: Hostfile = None,
    rank_bindings: RankBindings = None,
    write: Annotated[
        Path | None,
        typer.Option("--write", metavar="DIR", help="Write hosts.txt and rank_bindings.yaml in the proposed order."),
    ] = None,
    form: OutputFormat = Format.FULL,
    verbose: Verbose = False,
) -> None:
    """Propose an order of the hosts that puts ranks that talk to each other close together."""
    from ttlaunch.planning.place import propose_placement

    request = RunSpec(
        target=recipe,
        on=on,
        config_file=config_file,
        overrides=overrides or (),
        hostfile=hostfile,
        rank_bindings=rank_bindings,
    )
    found = resolve(
        request, working_folder=Path.cwd(), shell=os.environ, dialogue=TerminalDialogue(form, verbose=verbose)
    )
    if found.command is not None:
        refuse(
            [
                Diagnostic(
                    "P009", f"{found.name} is a script; who talks to whom only a recipe says", blame=Blame.COMMAND_LINE
                )
            ],
            form=form,
        )
    if not found.ok or found.topology is None or found.layout is None:
        refuse(found.diagnostics, form=form, verbose=verbose)
    proposal = propose_placement(found.topology, found.layout)
    if isinstance(proposal, Diagnostic):
        refuse([*found.diagnostics, proposal], form=form, verbose=verbose)
    show_diagnostics(found.diagnostics, form=form, verbose=verbose)
    if write is not None:
        _write(found, proposal, write, form)
    _show(found, proposal, form)
    if write is not None and form is not Format.JSON:
        sys.stdout.write(f"wrote {write}/hosts.txt and {write}/rank_bindings.yaml; check them with: ")
        sys.stdout.write(f"ttlaunch validate {shlex.quote(str(write))} --recipe {shlex.quote(recipe)}\n")


def _show(found: "ResolvedSpec", proposal: "Proposal", form: Format) -> None:
    assert found.topology is not None  # noqa: S101 - checked by the caller, like the layout
    assert found.layout is not None  # noqa: S101
    if form is Format.JSON:
        print_json(_as_json(found.name, found.topology, found.layout, proposal))
    elif form is Format.CONCISE:
        for rank, binding in enumerate(proposal.bindings):
            role = found.layout.roles[rank]
            sys.stdout.write(f"{rank}\t{role}\t{proposal.slots[rank].host.name}\t{binding.mesh_id}\n")
    else:
        from rich.console import Console

        console = Console(file=sys.stdout, no_color=not use_colour(sys.stdout), highlight=False)
        _show_tables(console, found.name, found.topology, found.layout, proposal)


def _show_tables(
    console: "Console", name: str, topology: "Topology", layout: "RoleLayout", proposal: "Proposal"
) -> None:
    from rich.text import Text

    from ttlaunch.planning.place import render_cost, render_hops

    title = f"{name} ({layout.layout.name}) on {topology.name}"
    how = "the best of all orders" if proposal.exact else "the best order found"
    if not proposal.improves:
        sys.stdout.write(f"{title}: cost {render_cost(proposal.before)}, {how}; nothing to change\n")
    else:
        costs = f"cost {render_cost(proposal.before)} → {render_cost(proposal.after)}"
        sys.stdout.write(f"{title}: {costs}, {how}\n")
    table = _table("rank", "role", "host", "mesh", "was")
    for rank, binding in enumerate(proposal.bindings):
        was = f"rank {binding.rank}" if binding.rank != rank else ""
        host = proposal.slots[rank].host.name
        table.add_row(str(rank), Text(layout.roles[rank]), Text(host), str(binding.mesh_id), was)
    console.print(table)
    console.print()
    counts: dict[int | None, tuple[int, int]] = {}
    for pair in proposal.pairs:
        for hops, change in ((pair.before, (1, 0)), (pair.after, (0, 1))):
            now, then = counts.get(hops, (0, 0))
            counts[hops] = (now + change[0], then + change[1])
    table = _table("apart", "pairs now", "proposed")
    for hops in sorted(counts, key=lambda hops: (hops is None, hops or 0)):
        table.add_row(render_hops(hops), *map(str, counts[hops]))
    console.print(table)


def _table(*headings: str) -> Any:
    from rich.table import Table

    table = Table(box=None, pad_edge=False, padding=(0, 3, 0, 0))
    for heading in headings:
        table.add_column(heading, justify="right" if heading in {"rank", "mesh", "pairs now", "proposed"} else "left")
    return table


def _as_json(name: str, topology: "Topology", layout: "RoleLayout", proposal: "Proposal") -> dict[str, Any]:
    return {
        "recipe": name,
        "layout": layout.layout.name,
        "topology": topology.name,
        "exact": proposal.exact,
        "cost": {"before": proposal.before._asdict(), "after": proposal.after._asdict()},
        "hosts": [str(host.name) for host in proposal.hosts],
        "ranks": [
            {
                "rank": rank,
                "role": layout.roles[rank],
                "host": str(proposal.slots[rank].host.name),
                "slot": proposal.slots[rank].index,
                "mesh_id": binding.mesh_id,
                "was_rank": binding.rank,
            }
            for rank, binding in enumerate(proposal.bindings)
        ],
        "pairs": [pair._asdict() for pair in proposal.pairs],
    }


def _write(found: "ResolvedSpec", proposal: "Proposal", folder: Path, form: Format) -> None:
    from ttlaunch.planning.placed_files import render_placed_files

    assert found.topology is not None  # noqa: S101 - checked by the caller
    present = [name for name in ("hosts.txt", "rank_bindings.yaml") if os.path.lexists(folder / name)]
    if present:
        message = f"{folder / present[0]} exists already; nothing was written"
        refuse(
            [Diagnostic("P009", message, hints=("choose another folder for `--write`",), blame=Blame.COMMAND_LINE)],
            form=form,
        )
    files = render_placed_files(found.topology, proposal, recipe=found.name, folder=Path.cwd() / folder)
    if isinstance(files, Diagnostic):
        refuse([files], form=form)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in files.items():
            (folder / name).write_text(text, encoding="utf-8")
        _copy_cluster(found.topology, folder)
    except OSError as error:
        refuse_file(folder, error, form=form)


def _copy_cluster(topology: "Topology", folder: Path) -> None:
    """How hosts are reached doesn't depend on their order."""
    cluster = topology.folder / "cluster.yaml" if topology.folder else None
    if cluster is not None and cluster.is_file() and not os.path.lexists(folder / "cluster.yaml"):
        (folder / "cluster.yaml").write_bytes(cluster.read_bytes())
