"""`ttlaunch simulate`: run all roles of a recipe in one process, which finds messages that do not match."""

import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ttlaunch import contract
from ttlaunch.app.run_spec import RunSpec
from ttlaunch.app.signals import interruptible
from ttlaunch.cli.console import exit_with, print_json, print_lines, show_diagnostics
from ttlaunch.cli.options import OutputFormat, Verbose, asks_for, complete_recipes
from ttlaunch.diagnostics import Format, counted, usage_error

if TYPE_CHECKING:
    from ttlaunch.lab.simulate import Simulation
    from ttlaunch.planning.launch_plan import LaunchPlan

EXAMPLES = """\
[bold]ttlaunch simulate pipeline_parallel[/bold]   with the roles, sizes and number of ranks of its training file

[bold]ttlaunch simulate hierarchical_parallel --ranks 5 --set multihost_config.num_workers=3[/bold]   three tiers

[bold]ttlaunch simulate my_recipe/ --set training_config.steps=3[/bold]   your own recipe, before it has a cluster
"""


@asks_for("on", "config_file", "overrides", "ranks", "naive", "env")
def simulate(
    target: Annotated[
        str,
        typer.Argument(
            metavar="RECIPE|FOLDER",
            help="A recipe's name or folder.",
            autocompletion=complete_recipes,
            show_default=False,
        ),
    ],
    *,
    spec: RunSpec,
    keep: Annotated[
        Path | None,
        typer.Option(
            "--out", "-o", metavar="DIR", help="Keep records and checkpoints in this folder, which must not exist."
        ),
    ] = None,
    form: OutputFormat = Format.FULL,
    verbose: Verbose = False,
) -> None:
    """Run all ranks of a recipe in one process, with the same bits as a run, and report messages that do not match."""
    from functools import partial

    from ttlaunch.cli.dialogue import TerminalDialogue
    from ttlaunch.cli.live import make_following_view
    from ttlaunch.lab.simulate import plan_simulation, run_simulation
    from ttlaunch.running.runs.facts import facts_of

    spec = replace(spec, target=target)
    if keep is not None and os.path.lexists(keep):  # never raises; said before anything else is checked
        raise usage_error(f"{keep} already exists", "name another folder")
    plan = plan_simulation(spec, TerminalDialogue(form, verbose=verbose))
    show = partial(make_following_view, quiet=form is Format.JSON)
    try:
        with interruptible():
            simulation = run_simulation(plan, keep=keep, show=lambda plan, folder: show(facts_of(plan), folder))
    except KeyboardInterrupt:
        print_lines(["", "interrupted"], to=sys.stderr)
        exit_with(contract.STATUS_INTERRUPTED)
    if form is Format.JSON:
        print_json(simulation.as_json(), schema="simulate")
    else:
        print_lines(_summary(simulation, plan))
        show_diagnostics(simulation.diagnostics, form=form)
    exit_with(simulation.exit_status)


def _summary(simulation: "Simulation", plan: "LaunchPlan") -> list[str]:

    report = simulation.played.report
    layout = f" ({report.layout})" if report.layout else ""
    ranks = counted(report.world_size, "rank")
    lines = [f"{report.status}: {report.name}{layout}, {ranks} in one process, {report.duration_s:.1f} s"]
    if report.steps:
        lines.append(f"  steps            {report.steps}")
    if report.last_validation is not None:
        lines.append(f"  validation loss  {report.first_validation:.4f} first, {report.last_validation:.4f} last")
    if report.last_perplexity is not None:
        lines.append(f"  perplexity       {report.last_perplexity:,.4g}")
    messages, sent = (sum(edge[key] for edge in simulation.edges) for key in ("messages", "bytes"))
    lines.append(f"  sent             {counted(messages, 'message')}, {sent / 1e6:.2f} MB")
    roles = [row.role for row in plan.ranks]
    for edge in simulation.edges:
        ends = f"{edge['source']} {roles[edge['source']]} → {edge['dest']} {roles[edge['dest']]}"
        lines.append(f"    {ends:44} {edge['messages']:7} {edge['bytes'] / 1e6:10.2f} MB")
    if report.parameters_sha256:
        lines.append(f"  parameters       sha256 {report.parameters_sha256}")
    return lines
