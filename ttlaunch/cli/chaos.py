"""`ttlaunch chaos`: inject faults into a run, and report whether each was detected and attributed correctly."""

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

from ttlaunch import contract
from ttlaunch.app.execute import RunOptions, marks_of_command
from ttlaunch.app.outcome import Outcome
from ttlaunch.app.run_spec import RunSpec
from ttlaunch.cli.console import exit_with, print_lines
from ttlaunch.cli.options import (
    CLUSTER,
    TORCHRUN,
    GraceSeconds,
    HangTimeout,
    LeaseSeconds,
    Only,
    OutputFormat,
    Verbose,
    asks_for,
)
from ttlaunch.diagnostics import Format, has_errors

if TYPE_CHECKING:
    from ttlaunch.app.prepare_run import PreparedRun
    from ttlaunch.planning.faults import Fault

EXAMPLES = """\
[bold]ttlaunch chaos hierarchical_parallel --plan "kill rank=2 at step=5"[/bold]   kill one rank with SIGKILL

[bold]ttlaunch chaos my_recipe --hang-timeout 5 --plan "stop rank=1 at step=9"[/bold]   stop a rank with SIGSTOP, so that the run hangs

[bold]ttlaunch chaos my_recipe --plan "stop rank=1 at 5s; continue rank=1 at 8s"[/bold]   a pause that the run must survive

[bold]ttlaunch chaos my_recipe --plan "segv role=worker at step=5; kill shim=0 at step=9; term rank=3 at 20s"[/bold]   several faults; the first one that ends the run counts

[bold]ttlaunch chaos my_recipe --plan "interrupt at step=5"[/bold]   Ctrl-C; write it twice to press it twice

[bold]ttlaunch chaos my_recipe --on my_cluster --plan "cut host=b at 10s"[/bold]   cut a host off the network

[bold]ttlaunch chaos my_recipe --plan @faults.txt --format json[/bold]   faults from a file, the verdict as JSON

[bold]ttlaunch chaos my_recipe --random 3 --seed 7[/bold]   three random faults, the same ones for the same seed

[bold]ttlaunch chaos --ranks 2 --plan "kill mpirun at 5s" -- ./any_program[/bold]   any program; its faults have times in seconds
"""
_FILE = "@"


@asks_for("target", "arguments", *CLUSTER, "elastic", "audit", "naive", "env", "runs_dir", "resume", *TORCHRUN, "warm")
def chaos(
    *,
    faults: Annotated[
        str | None,
        typer.Option("--plan", metavar="FAULTS|@FILE", help='Faults to inject and when, e.g. "kill rank=2 at step=5".'),
    ] = None,
    random: Annotated[
        int | None, typer.Option("--random", min=1, max=1000, metavar="K", help="Inject K random faults instead.")
    ] = None,
    seed: Annotated[int, typer.Option("--seed", metavar="N", help="Seed of --random.")] = 0,
    spec: RunSpec,
    grace: GraceSeconds = 30.0,
    only: Only = None,
    hang_timeout: HangTimeout = None,
    lease: LeaseSeconds = contract.LEASE_S,
    form: OutputFormat = Format.FULL,
    verbose: Verbose = False,
) -> None:
    """Inject faults into a run, and report whether each was detected and attributed correctly.

    The verdict also has the time to detection, the lost steps, and processes or files left behind. The exit status is 0 if the
    fault that ended the run was attributed correctly and nothing was left behind, and 1 otherwise.
    """
    from ttlaunch.app.logs import chosen_ranks
    from ttlaunch.app.prepare_run import prepare
    from ttlaunch.cli.dialogue import TerminalDialogue
    from ttlaunch.cli.live import make_following_view
    from ttlaunch.lab.chaos.experiment import break_run, fault_source, find_faults
    from ttlaunch.running.runs.facts import facts_of

    marks = marks_of_command()
    source = fault_source(faults, random)
    dialogue = TerminalDialogue(form, verbose=verbose)
    prepared = prepare(spec, dialogue)
    chosen = chosen_ranks(only or (), prepared.plan.ranks)
    orders = find_faults(source, prepared, count=random, seed=seed)
    _announce(orders, seed=None if random is None else seed, form=form)
    options = RunOptions(spec.runs_dir, grace_s=grace, hang_timeout_s=hang_timeout, lease_s=lease, marks=marks)
    show = partial(make_following_view, quiet=form is Format.JSON, only=chosen)
    outcome = break_run(
        prepared, options, orders, dialogue=dialogue, show=lambda plan, folder: show(facts_of(plan), folder)
    )
    _report(outcome, prepared, orders, lease_s=lease, form=form)


def _announce(orders: "Sequence[Fault]", *, seed: int | None, form: Format) -> None:
    from ttlaunch.planning.faults import render_faults

    if form is not Format.JSON:
        drawn = "" if seed is None else f" (drawn with --seed {seed})"
        print_lines([f"faults{drawn}: {render_faults(orders)}"])


def _report(
    outcome: Outcome, prepared: "PreparedRun", orders: "Sequence[Fault]", *, lease_s: float, form: Format
) -> NoReturn:
    """Judge the faults, look for leftovers, print both and exit."""
    from ttlaunch.cli.chaos_view import chaos_diagnostics, chaos_json, show_chaos
    from ttlaunch.cli.console import print_json, show_diagnostics
    from ttlaunch.lab.chaos.experiment import look_for_leftovers
    from ttlaunch.lab.chaos.verdict import judge_faults
    from ttlaunch.running.runs.run_folder import read_events

    events, report = read_events(outcome.folder.path), outcome.report.as_json()
    failure = outcome.report.failure
    engine_failed = failure is not None and failure.of_engine
    verdicts = judge_faults(orders, events, report, lease_s=lease_s, engine_failed=engine_failed)
    left = look_for_leftovers(outcome, prepared, began=events[0]["time"] if events else 0.0, lease_s=lease_s)
    found = chaos_diagnostics(verdicts, left, outcome)
    status = contract.STATUS_RANK_FAILED if has_errors(found) else contract.STATUS_DONE
    if form is Format.JSON:
        print_json(chaos_json(verdicts, left, outcome, faults=orders, found=found, status=status), schema="chaos")
    else:
        show_chaos(verdicts, left, outcome)
        show_diagnostics(found, form=form)
    exit_with(status)
