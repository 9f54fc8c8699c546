"""`ttlaunch place`: propose an order of hosts and bindings in which communicating ranks are few links apart."""

import os
import shlex
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ttlaunch.app.resolve import resolve
from ttlaunch.app.run_spec import RunSpec
from ttlaunch.cli.console import print_json, print_lines, show_diagnostics, tabbed
from ttlaunch.cli.dialogue import TerminalDialogue
from ttlaunch.cli.options import OutputFormat, Verbose, asks_for, complete_recipes
from ttlaunch.cli.table import render_table
from ttlaunch.cli.virtual_options import LinkGbps, LinkUs
from ttlaunch.diagnostics import Diagnostic, Format, LaunchError, file_error, usage_error

if TYPE_CHECKING:
    from ttlaunch.app.resolve import ResolvedSpec
    from ttlaunch.lab.place import StepTimes
    from ttlaunch.planning.place import Proposal
    from ttlaunch.planning.roles import RoleLayout
    from ttlaunch.spec.topology.model import Topology

EXAMPLES = """\
[bold]ttlaunch place hierarchical_parallel --on 5loudboxes --set multihost_config.num_workers=3[/bold]   the proposed order, and how much traffic it saves

[bold]ttlaunch place hierarchical_parallel --on 5loudboxes --step-time --set multihost_config.num_workers=3[/bold]   by the bytes of a simulated step, and how long it takes in both orders

[bold]ttlaunch place fabric_minimal --on 5loudboxes --out configurations/placed[/bold]   write the proposal
"""


@asks_for("on", "config_file", "overrides", "naive", "hostfile", "rank_bindings")
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
    spec: RunSpec,
    write: Annotated[
        Path | None,
        typer.Option(
            "--out", "-o", metavar="DIR", help="Write hosts.txt and rank_bindings.yaml in the proposed order."
        ),
    ] = None,
    step_time: Annotated[
        bool,
        typer.Option(
            "--step-time", help="Weigh pairs by the bytes of a simulated step, and simulate the proposed order too."
        ),
    ] = False,
    link_us: LinkUs = None,
    link_gbps: LinkGbps = None,
    form: OutputFormat = Format.FULL,
    verbose: Verbose = False,
) -> None:
    """Propose an order of the hosts that puts ranks that talk to each other close together."""
    given: dict[str, Any] = {"link_us": link_us, "link_gbps": link_gbps}
    links = {name: value for name, value in given.items() if value is not None}
    if links and not step_time:
        option = "--" + next(iter(links)).replace("_", "-")
        raise usage_error(f"`{option}` was given without `--step-time`", "add `--step-time`, or leave it out")
    spec, dialogue = replace(spec, target=recipe), TerminalDialogue(form, verbose=verbose)
    found = resolve(spec, dialogue=dialogue)
    if found.command is not None:
        raise usage_error(f"{found.name} is a script; only a recipe declares which ranks talk to each other")
    if not found.ok or found.topology is None or found.layout is None:
        raise LaunchError(found.diagnostics)
    proposal, times = _propose(spec, found, links=links if step_time else None, dialogue=dialogue)
    show_diagnostics(found.diagnostics, form=form, verbose=verbose)
    if write is not None:
        _write(found, proposal, write)
    _show(found, proposal, form, times=times)
    if write is not None and form is not Format.JSON:
        command = f"ttlaunch validate {shlex.quote(str(write))} --recipe {shlex.quote(recipe)}"
        print_lines([f"wrote {write}/hosts.txt and {write}/rank_bindings.yaml; check them with: {command}"])


def _propose(
    spec: RunSpec,
    found: "ResolvedSpec",
    *,
    links: dict[str, Any] | None,
    dialogue: TerminalDialogue,
) -> "tuple[Proposal, StepTimes | None]":
    """Propose by the flows that are declared, or with the speed of links by a simulated step."""
    from ttlaunch.planning.place import propose_placement

    topology, layout = found.topology, found.layout
    assert topology is not None  # noqa: S101 - checked by the caller, like the layout
    assert layout is not None  # noqa: S101
    proposal = propose_placement(topology, layout)
    if links is None or isinstance(proposal, Diagnostic):
        if isinstance(proposal, Diagnostic):
            raise LaunchError([*found.diagnostics, proposal])
        return proposal, None
    from ttlaunch.lab.place import place_by_time
    from ttlaunch.lab.virtual import Conditions

    conditions = Conditions(**links)
    timed = place_by_time(spec, topology, layout, conditions=conditions, dialogue=dialogue)
    if isinstance(timed, Diagnostic):
        raise LaunchError([*found.diagnostics, timed])
    return timed


def _show(found: "ResolvedSpec", proposal: "Proposal", form: Format, *, times: "StepTimes | None") -> None:
    assert found.topology is not None  # noqa: S101 - checked by the caller, like the layout
    assert found.layout is not None  # noqa: S101
    roles, hosts = found.layout.roles, [slot.host.name for slot in proposal.slots]
    if form is Format.JSON:
        step = {"step": None if times is None else times.as_json()}
        print_json({**_as_json(found.name, found.topology, found.layout, proposal=proposal), **step}, schema="place")
        return
    if form is Format.CONCISE:
        print_lines(tabbed((rank, roles[rank], hosts[rank], one.mesh_id)) for rank, one in enumerate(proposal.bindings))
        return
    rows = [("rank", "role", "host", "mesh", "was")]
    for rank, one in enumerate(proposal.bindings):
        was = f"rank {one.rank}" if one.rank != rank else ""
        rows.append((str(rank), roles[rank], hosts[rank], str(one.mesh_id), was))
    title = f"{found.name} ({found.layout.layout.name}) on {found.topology.name}"
    distances = render_table(_distances(proposal), right={1, 2})
    steps = (
        [] if times is None else [f"a step on the virtual clock: {times.before_ms:.3f} ms → {times.after_ms:.3f} ms"]
    )
    print_lines([f"{title}: {_verdict(proposal)}", *steps, *render_table(rows, right={0, 3}), "", *distances])


def _verdict(proposal: "Proposal") -> str:
    from ttlaunch.planning.place import render_cost

    how = "the best of all orders" if proposal.exact else "the best order found"
    if not proposal.improves:
        return f"cost {render_cost(proposal.before)}, {how}; nothing to change"
    return f"cost {render_cost(proposal.before)} → {render_cost(proposal.after)}, {how}"


def _distances(proposal: "Proposal") -> list[tuple[str, str, str]]:
    """Count pairs of communicating ranks by distance, now and as proposed."""
    from ttlaunch.planning.place import render_hops

    now, proposed = Counter(pair.before for pair in proposal.pairs), Counter(pair.after for pair in proposal.pairs)
    ordered = sorted({*now, *proposed}, key=lambda hops: (hops is None, hops or 0))
    return [
        ("apart", "pairs now", "proposed"),
        *((render_hops(hops), str(now[hops]), str(proposed[hops])) for hops in ordered),
    ]


def _as_json(name: str, topology: "Topology", layout: "RoleLayout", *, proposal: "Proposal") -> dict[str, Any]:
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


def _write(found: "ResolvedSpec", proposal: "Proposal", folder: Path) -> None:
    from ttlaunch.planning.placed_files import render_placed_files

    assert found.topology is not None  # noqa: S101 - checked by the caller
    present = [name for name in ("hosts.txt", "rank_bindings.yaml") if os.path.lexists(folder / name)]
    if present:
        message = f"{folder / present[0]} already exists; nothing was written"
        raise usage_error(message, "choose another folder for `--out`")
    files = render_placed_files(found.topology, proposal, recipe=found.name, folder=Path.cwd() / folder)
    if isinstance(files, Diagnostic):
        raise LaunchError([files])
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in files.items():
            (folder / name).write_text(text, encoding="utf-8")
        _copy_cluster(found.topology, folder)
    except OSError as error:
        raise file_error(folder, error) from error


def _copy_cluster(topology: "Topology", folder: Path) -> None:
    """Copy cluster.yaml unchanged: its settings do not depend on the order of hosts."""
    cluster = topology.folder / "cluster.yaml" if topology.folder else None
    if cluster is not None and cluster.is_file() and not os.path.lexists(folder / "cluster.yaml"):
        (folder / "cluster.yaml").write_bytes(cluster.read_bytes())
