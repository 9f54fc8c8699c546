"""`ttlaunch simulate`: all roles of a recipe in one process; finds messages that do not fit before a cluster hangs on them."""

import contextlib
import os
import secrets
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ttlaunch import contract
from ttlaunch.app.resolve import is_script, resolve
from ttlaunch.app.run_spec import RunSpec
from ttlaunch.cli.console import leave, print_json, refuse, refuse_file, show_diagnostics, stop_on_errors
from ttlaunch.cli.interrupt import interruptible
from ttlaunch.cli.options import ConfigFile, On, OutputFormat, Overrides, Ranks, Verbose, complete_recipes
from ttlaunch.diagnostics import Blame, Diagnostic, Format, Label, Source

if TYPE_CHECKING:
    from ttlaunch.lab.simulate import Simulation
    from ttlaunch.planning.launch_plan import LaunchPlan

EXAMPLES = """\
[bold]ttlaunch simulate pipeline_parallel[/bold]   the roles, sizes and number of ranks that its training file says

[bold]ttlaunch simulate hierarchical_parallel --ranks 5 --set multihost_config.num_workers=3[/bold]   three tiers

[bold]ttlaunch simulate my_recipe/ --set training_config.steps=3[/bold]   your own recipe, before it has a cluster
"""


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
    on: On = "local",
    config_file: ConfigFile = None,
    overrides: Overrides = None,
    ranks: Ranks = None,
    keep: Annotated[
        Path | None,
        typer.Option("--keep", metavar="DIR", help="Keep records and checkpoints in this folder; must not exist."),
    ] = None,
    form: OutputFormat = Format.FULL,
    verbose: Verbose = False,
) -> None:
    """Run all ranks of a recipe in one process: same bits as a run, and messages that do not fit are named."""
    request = RunSpec(target=target, on=on, config_file=config_file, overrides=overrides or (), ranks=ranks)
    if keep is not None and os.path.lexists(keep):  # never raises
        refuse([Diagnostic("P009", f"{keep} exists already", blame=Blame.COMMAND_LINE)], form=form)
    plan, python = _plan(request, form=form, verbose=verbose)
    try:
        simulation = _carry_out(plan, python, keep=keep, form=form)
    except KeyboardInterrupt:
        sys.stderr.write("\ninterrupted\n")
        leave(contract.STATUS_INTERRUPTED)
    found = _diagnostics(simulation)
    if form is Format.JSON:
        print_json({**simulation.as_json(), "diagnostics": [diagnostic.as_json() for diagnostic in found]})
    else:
        sys.stdout.write(_summary(simulation, plan))
        sys.stdout.flush()
        show_diagnostics(found, form=form)
    leave(simulation.report.exit_status)


def _plan(request: RunSpec, *, form: Format, verbose: bool) -> tuple["LaunchPlan", str]:
    """The plan of a run on these hosts, none of which is asked: their ranks are played here, and no MPI is needed."""
    from ttlaunch.agent import SHIM
    from ttlaunch.engines import ENGINES
    from ttlaunch.planning.launch_plan import RecipeProgram
    from ttlaunch.planning.make import Surroundings
    from ttlaunch.planning.recipe_plan import plan_recipe
    from ttlaunch.running.preflight import check_packages
    from ttlaunch.spec.recipe.config import check_one_process

    working_folder = Path.cwd()
    if is_script(str(request.target), working_folder):
        message = f"`simulate` plays recipes; {request.target} is a program"
        refuse(
            [Diagnostic("P009", message, hints=(f"`ttlaunch run {request.target}`",), blame=Blame.COMMAND_LINE)],
            form=form,
        )
    description = resolve(request, working_folder=working_folder, shell=os.environ)
    choice, layout, topology = description.choice, description.layout, description.topology
    if choice is not None and layout is not None:
        description.diagnostics += check_one_process(choice.recipe, choice.loaded, world_size=layout.world_size)
    if not description.ok or choice is None or layout is None or topology is None:
        refuse(description.diagnostics, form=form, verbose=verbose)
    surroundings = Surroundings(working_folder, dict(os.environ), sys.executable, str(SHIM), ENGINES[0].unused())
    plan = plan_recipe(choice, layout, topology, surroundings)
    assert isinstance(plan.program, RecipeProgram)  # noqa: S101 - it was made from a recipe
    missing = check_packages(plan.program, without=["mpi4py"])
    stop_on_errors([*description.diagnostics, *missing], form=form, verbose=verbose)
    return plan, sys.executable


def _carry_out(plan: "LaunchPlan", python: str, *, keep: Path | None, form: Format) -> "Simulation":
    from ttlaunch.cli.live import make_following_view
    from ttlaunch.lab.simulate import simulate
    from ttlaunch.running.runs.recorded import facts_of
    from ttlaunch.running.runs.run_folder import RunFolder

    run_id = f"simulation-{secrets.token_hex(2)}"
    with contextlib.ExitStack() as stack:
        try:
            if keep is None:
                path = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="ttl-simulation-")))
            else:
                path = keep.resolve()
                path.mkdir(parents=True)
        except OSError as error:
            refuse_file(_named(keep), error, form=form)
        view = stack.enter_context(
            make_following_view(facts_of(plan), RunFolder(run_id, path), quiet=form is Format.JSON)
        )
        stack.enter_context(interruptible())
        saves = keep is not None
        try:
            return simulate(plan, path, python=python, environment=os.environ, view=view, run_id=run_id, saves=saves)
        except OSError as error:
            refuse_file(_named(keep), error, form=form)


def _named(keep: Path | None) -> str:
    """The folder of the records as the user knows it."""
    return str(keep) if keep is not None else "the folder for temporary files (`TMPDIR`)"


def _diagnostics(simulation: "Simulation") -> list[Diagnostic]:
    from ttlaunch.app.run_diagnostics import checkpoint_diagnostics, failure_diagnostic, traffic_diagnostics
    from ttlaunch.running.runs.run_folder import RunFolder

    found = [_diagnostic(finding) for finding in simulation.findings]
    if simulation.report.status == "done":  # else the first thing named is what broke
        found += traffic_diagnostics(simulation.report.traffic, [rank["role"] for rank in simulation.report.ranks])
    found += checkpoint_diagnostics(simulation.report)
    failure = failure_diagnostic(simulation.report, RunFolder(simulation.report.run_id, Path()))
    return found + ([replace(failure, hints=())] if failure else [])


def _diagnostic(finding: Mapping[str, Any]) -> Diagnostic:
    labels = [_label(side) for side in finding["sides"]]
    seen = [label for label in labels if label is not None]
    unseen = [side["text"] for side, label in zip(finding["sides"], labels, strict=True) if label is None]
    return Diagnostic(
        finding["code"],
        finding["message"],
        seen[0] if seen else None,
        tuple(seen[1:]),
        notes=(*unseen, *finding["notes"]),
        hints=(finding["hint"],),
    )


def _label(side: Mapping[str, Any]) -> Label | None:
    """The line that asked for one end of the message."""
    from ttlaunch.app.run_spec import short_name

    path, number = Path(side["place"]["file"]), int(side["place"]["line"])
    try:
        source = Source(short_name(path, Path.cwd()), path.read_text(encoding="utf-8", errors="replace"))
    except OSError:
        return None
    line = source.line(number)
    span = source.span(number, len(line) - len(line.lstrip()) + 1, max(1, len(line.strip())))
    return Label(span, side["text"])


def _summary(simulation: "Simulation", plan: "LaunchPlan") -> str:
    from ttlaunch.diagnostics.count import counted

    report = simulation.report
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
    return "\n".join(lines) + "\n"
