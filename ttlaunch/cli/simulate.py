"""`ttlaunch simulate`: run all roles of a recipe in one process, which finds messages that do not match."""

import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ttlaunch import contract
from ttlaunch.app.run_spec import RunSpec
from ttlaunch.app.signals import interruptible
from ttlaunch.cli.console import check_picture, exit_with, print_json, print_lines, show_diagnostics, write_picture
from ttlaunch.cli.options import HangTimeout, OutputFormat, Verbose, asks_for, complete_recipes
from ttlaunch.cli.virtual_options import ComputeMs, LinkGbps, LinkUs, Slow, SlowLink
from ttlaunch.diagnostics import Format, counted, usage_error

if TYPE_CHECKING:
    from ttlaunch.app.dialogue import Dialogue
    from ttlaunch.lab.simulate import Simulation
    from ttlaunch.lab.virtual import Conditions
    from ttlaunch.planning.launch_plan import LaunchPlan

EXAMPLES = """\
[bold]ttlaunch simulate pipeline_parallel[/bold]   with the roles, sizes and number of ranks of its training file

[bold]ttlaunch simulate hierarchical_parallel --ranks 5 --set multihost_config.num_workers=3[/bold]   three tiers

[bold]ttlaunch simulate data_parallel --virtual --ranks 64 --slow 3=1.5 --set training_config.batch_size=128[/bold]   a step

[bold]ttlaunch simulate data_parallel --virtual --what-if --out what-if.svg[/bold]   and what would change it

[bold]ttlaunch simulate hierarchical_parallel --virtual --plan "kill rank=2 at step=2"[/bold]   what the report of such a run would name

[bold]ttlaunch simulate data_parallel --virtual -n 4 --elastic 1:6 --steps 60 --plan "kill rank=1 at step=5; join at step=9"[/bold]   workers come and go

[bold]ttlaunch simulate my_recipe/ --set training_config.steps=3[/bold]   your own recipe, before it has a cluster
"""


_USUAL_STEPS, _MOST_STEPS = 3, 1000


@asks_for("on", "config_file", "overrides", "ranks", "elastic", "naive", "env")
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
            "--out",
            "-o",
            metavar="DIR|FILE.svg",
            help="Keep records and checkpoints in this folder, which must not exist; with --what-if, draw a picture.",
        ),
    ] = None,
    virtual: Annotated[
        bool,
        typer.Option("--virtual", help="On a virtual clock, without values: what a step would take, and why."),
    ] = False,
    steps: Annotated[
        int | None,
        typer.Option(
            "--steps",
            min=1,
            max=_MOST_STEPS,
            help="With --virtual: how many steps.",
            show_default="3; with --elastic as in the training file",
        ),
    ] = None,
    compute_ms: ComputeMs = None,
    link_us: LinkUs = None,
    link_gbps: LinkGbps = None,
    slow: Slow = None,
    slow_link: SlowLink = None,
    jitter: Annotated[
        float | None,
        typer.Option(
            "--jitter",
            min=0.001,
            max=99,
            metavar="PERCENT",
            help="With --virtual: how much faster or slower each rank computes in a step, drawn anew for each.",
        ),
    ] = None,
    seed: Annotated[
        int | None,
        typer.Option("--seed", min=0, max=2**53, metavar="N", help="Seed of --jitter.", show_default="0"),
    ] = None,
    faults: Annotated[
        str | None,
        typer.Option(
            "--plan",
            metavar="FAULTS|@FILE",
            help='With --virtual: faults as `ttlaunch chaos` takes them, e.g. "kill rank=2 at step=2", and how the run would end.',
        ),
    ] = None,
    hang_timeout: HangTimeout = None,
    lease: Annotated[
        float | None,
        typer.Option(
            "--lease",
            min=2,
            metavar="SECONDS",
            help="With --plan: how long a host may be silent.",
            show_default=f"{contract.LEASE_S:g}",
        ),
    ] = None,
    start_s: Annotated[
        float | None,
        typer.Option(
            "--start-s",
            min=0,
            max=1e6,
            metavar="SECONDS",
            help="With --elastic: how long a worker takes from its start until it can get the state.",
            show_default="5",
        ),
    ] = None,
    what_if: Annotated[
        bool,
        typer.Option("--what-if", help="With --virtual: also with slower links, and with fewer and more ranks."),
    ] = False,
    fold: Annotated[
        bool | None,
        typer.Option(
            "--fold/--no-fold",
            help="With --virtual: run one of several ranks that do the same, and let it stand for all.",
            show_default="--fold",
        ),
    ] = None,
    form: OutputFormat = Format.FULL,
    verbose: Verbose = False,
) -> None:
    """Run all ranks of a recipe in one process, with the same bits as a run, and report messages that do not match."""
    given: dict[str, Any] = {"steps": steps, "compute_ms": compute_ms, "link_us": link_us, "link_gbps": link_gbps}
    given |= {"slow": slow, "slow_link": slow_link, "fold": fold, "jitter": jitter, "seed": seed, "plan": faults}
    given |= {"hang_timeout": hang_timeout, "lease": lease, "what_if": what_if or None}
    given |= {"elastic": spec.elastic, "start_s": start_s}
    conditions = {name: value for name, value in given.items() if value not in (None, [])}
    if virtual:
        kept = replace(spec, target=target)
        _simulate_virtually(kept, conditions, keep=keep, form=form, verbose=verbose)
        return
    if conditions:
        option = "--" + next(iter(conditions)).replace("_", "-")
        raise usage_error(f"`{option}` was given without `--virtual`", "add `--virtual`, or leave it out")
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


def _simulate_virtually(
    spec: RunSpec, given: dict[str, Any], *, keep: Path | None, form: Format, verbose: bool
) -> None:
    from ttlaunch.cli.dialogue import TerminalDialogue
    from ttlaunch.cli.virtual_view import draw_variants, parse_slow, render_variants
    from ttlaunch.lab.virtual import Conditions
    from ttlaunch.lab.what_if import what_if

    asks = given.pop("what_if", False)
    of_elastic = _of_elastic(given, asks=asks)
    given |= _events(given, asks=asks, is_elastic=of_elastic is not None)
    if keep is not None and not asks:
        hint = "leave it out, or draw what would change with `--what-if`"
        raise usage_error("`--out` was given with `--virtual`, which has no values to keep", hint)
    if keep is not None:
        check_picture(keep)
    for name in ("slow", "slow_link"):
        given[name] = parse_slow(given.get(name, ()), option="--" + name.replace("_", "-"))
    if of_elastic is not None:
        of_elastic["steps"] = given.pop("steps", None)
    conditions, dialogue = Conditions(**given), TerminalDialogue(form, verbose=verbose)
    if of_elastic is not None:
        _simulate_elastic(spec, conditions, dialogue, form=form, **of_elastic)
        return
    if not asks:
        _simulate_once(spec, conditions, dialogue, form=form)
        return
    variants = what_if(spec, conditions, dialogue)
    if form is Format.JSON:
        print_json({"variants": [one.as_json() for one in variants]}, schema="simulate-what-if")
    else:
        print_lines(render_variants(variants))
    if keep is not None:
        write_picture(keep, draw_variants(variants))


def _of_elastic(given: dict[str, Any], *, asks: bool) -> dict[str, Any] | None:
    """Take what only an elastic run has out of what was given; None if it is none."""
    found: dict[str, Any] = {name: given.pop(name) for name in ("elastic", "start_s") if name in given}
    if "elastic" not in found:
        if found:
            raise usage_error("`--start-s` was given without `--elastic`", "add `--elastic MIN:MAX`, or leave it out")
        return None
    if asks:
        raise usage_error("`--elastic` was given with `--what-if`, whose runs have ranks that stay")
    if "hang_timeout" in given:
        reason = "where a worker that makes no progress is killed after 5 s or four median steps"
        raise usage_error(f"`--hang-timeout` was given with `--elastic`, {reason}", "leave it out")
    del found["elastic"]  # it is a part of the specification
    return found


def _simulate_once(spec: RunSpec, conditions: "Conditions", dialogue: "Dialogue", *, form: Format) -> None:
    from ttlaunch.cli.virtual_view import render_virtual
    from ttlaunch.lab.simulate import plan_simulation
    from ttlaunch.lab.virtual import run_virtually

    found = run_virtually(plan_simulation(spec, dialogue, has_room=True), conditions)
    if form is Format.JSON:
        print_json(found.as_json(), schema="simulate-virtual")
    else:
        print_lines(render_virtual(found))
    if found.verdict is not None and not found.verdict.is_right:
        exit_with(contract.STATUS_RANK_FAILED)


def _simulate_elastic(
    spec: RunSpec, conditions: "Conditions", dialogue: "Dialogue", *, form: Format, **given: Any
) -> None:
    from ttlaunch.cli.virtual_elastic_view import render_elastic
    from ttlaunch.lab.virtual_elastic import run_elastic_virtually

    found = run_elastic_virtually(spec, conditions, dialogue, **given)
    if form is Format.JSON:
        print_json(found.as_json(), schema="simulate-virtual-elastic")
    else:
        print_lines(render_elastic(found))
    if not found.verdict.is_right:
        exit_with(contract.STATUS_RANK_FAILED)


def _events(given: dict[str, Any], *, asks: bool, is_elastic: bool) -> dict[str, Any]:
    """Take jitter, faults and how long a run waits out of what was given, and return them as `Conditions` has them."""
    from ttlaunch.diagnostics import LaunchError, has_errors
    from ttlaunch.lab.chaos.experiment import fault_source
    from ttlaunch.lab.virtual_faults import Patience
    from ttlaunch.planning.fault_parser import parse_faults
    from ttlaunch.planning.faults import AtStep

    text, waits = given.pop("plan", None), {name: given.pop(name, None) for name in ("hang_timeout", "lease")}
    for needed, names in (("plan", ("hang_timeout", "lease")), ("jitter", ("seed",))):
        extra = [name for name in names if (waits | given).get(name) is not None]
        if extra and (text if needed == "plan" else given.get(needed)) is None:
            option = "--" + extra[0].replace("_", "-")
            raise usage_error(f"`{option}` was given without `--{needed}`", f"add `--{needed}`, or leave it out")
    found: dict[str, Any] = {"jitter": given.pop("jitter", 0.0) / 100}
    if text is None:
        return found
    if asks:
        raise usage_error("`--plan` was given with `--what-if`, which compares runs that come to their end")
    source = fault_source(text, None)
    assert source is not None  # noqa: S101 - there is a text
    faults, mistakes = parse_faults(source)
    if has_errors(mistakes):
        raise LaunchError(mistakes)
    if "steps" not in given and not is_elastic:  # so many that the moments come
        steps = [one.moment.step + 1 for one in faults if isinstance(one.moment, AtStep)]
        found["steps"] = min(_MOST_STEPS, max([_USUAL_STEPS, *steps]))
    lease_s = waits["lease"] or contract.LEASE_S
    return found | {"faults": tuple(faults), "patience": Patience(lease_s, waits["hang_timeout"])}


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
