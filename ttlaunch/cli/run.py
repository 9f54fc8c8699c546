"""`ttlaunch run`: check everything, start the plan, show it while it runs, say what came out or what broke."""

import os
import sys
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ttlaunch.cli.after_dashes import is_command
from ttlaunch.cli.console import leave, print_json, refuse, show_diagnostics
from ttlaunch.cli.describe import Request
from ttlaunch.cli.options import (
    Arguments,
    ConfigFile,
    GraceSeconds,
    HangTimeout,
    Hostfile,
    MpiArgs,
    On,
    Only,
    OutputFormat,
    Overrides,
    RankBindings,
    Ranks,
    Resume,
    Target,
    Verbose,
)
from ttlaunch.diagnostics import Diagnostic, Format

if TYPE_CHECKING:
    from ttlaunch.cli.planning import Prepared
    from ttlaunch.cli.ready_here import Ready
    from ttlaunch.launch.report import Report
    from ttlaunch.launch.run_folder import RunFolder
    from ttlaunch.plan.launch_plan import LaunchPlan

EXAMPLES = """\
[bold]ttlaunch run hierarchical_parallel[/bold]   three tiers on this machine

[bold]ttlaunch run hierarchical_parallel --ranks 1[/bold]   the same in one process

[bold]ttlaunch run hierarchical_parallel --resume latest[/bold]   go on from the newest checkpoint

[bold]ttlaunch run pipeline_parallel --set training_config.data_path=book.txt[/bold]   your own text

[bold]ttlaunch run hierarchical_parallel --trace-steps 5[/bold]   and a timeline of all ranks' first five steps

[bold]ttlaunch run hierarchical_parallel --only role=worker[/bold]   show what the workers print; files keep everything

[bold]ttlaunch run --hang-timeout 600 -- ./simulation[/bold]   end it when it has printed nothing for ten minutes

[bold]ttlaunch run --ranks 2 -- ./any_program --its-options[/bold]   any program under the same plan

[bold]ttlaunch run --rank-binding FILE --mpi-args="--host a,b" -- ./program[/bold]   a program written for tt-run

[bold]ttlaunch run my_recipe/ --on my_cluster -c train.yaml[/bold]   your own recipe on your own hosts
"""


_TRACED_STEPS = 20
_ELSEWHERE = "`--runs-dir DIR` makes run folders somewhere else"


def run(
    ctx: typer.Context,
    target: Target,
    arguments: Arguments = None,
    *,
    on: On = "local",
    config_file: ConfigFile = None,
    overrides: Overrides = None,
    ranks: Ranks = None,
    hostfile: Hostfile = None,
    rank_bindings: RankBindings = None,
    mpi_args: MpiArgs = None,
    runs_dir: Annotated[Path, typer.Option("--runs-dir", metavar="DIR", help="Where run folders are made.")] = Path(
        "runs"
    ),
    resume: Resume = None,
    trace: Annotated[bool, typer.Option("--trace", help="Write a timeline of all ranks, for ui.perfetto.dev.")] = False,
    trace_steps: Annotated[
        int | None,
        typer.Option("--trace-steps", min=1, metavar="N", help="First steps to trace; 20 with `--trace` alone."),
    ] = None,
    grace: GraceSeconds = 30.0,
    only: Only = None,
    hang_timeout: HangTimeout = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show the plan and start nothing.")] = False,
    form: OutputFormat = Format.FULL,
    verbose: Verbose = False,
) -> None:
    """Start a recipe or a script on a cluster and watch it to its end."""
    from ttlaunch.cli.logs import choose_ranks
    from ttlaunch.cli.planning import prepare

    request = Request(
        target=target,
        on=on,
        config_file=config_file,
        overrides=overrides or (),
        ranks=ranks,
        hostfile=hostfile,
        rank_bindings=rank_bindings,
        mpi_args=mpi_args,
        arguments=arguments or (),
        resume=resume,
        runs_dir=runs_dir,
        is_command=is_command(ctx, target, arguments),
        trace_steps=trace_steps or (_TRACED_STEPS if trace else None),
    )
    prepared = prepare(request, form=form, verbose=verbose)
    chosen = choose_ranks(only or (), prepared.plan.ranks, form=form)
    if dry_run:
        from ttlaunch.cli.plan import show_plan

        show_plan(prepared.plan, form=form)
        return
    report = carry_out(
        prepared,
        runs_dir=runs_dir,
        form=form,
        verbose=verbose,
        grace_s=grace,
        typed=("ttlaunch", *sys.argv[1:]),
        only=chosen,
        hang_timeout_s=hang_timeout,
    )
    leave(report.exit_status)


def carry_out(
    prepared: "Prepared",
    *,
    runs_dir: Path,
    form: Format,
    verbose: bool,
    grace_s: float = 30.0,
    typed: Sequence[str] = (),
    only: Collection[int] | None = None,
    hang_timeout_s: float | None = None,
    judge: "Callable[[Report], Sequence[Diagnostic]]" = lambda _: (),
) -> "Report":
    """Start a plan, show it until it has ended, and say what came out; leaves if a host is not ready.

    Args:
        prepared: The checked plan.
        runs_dir: Where run folders are made.
        form: Of what is printed; with notes if `verbose`.
        grace_s: What ranks have to leave when the end is ordered.
        typed: The command line, if it can be typed again with `--resume`.
        only: Ranks whose output is shown; None: of all.
        hang_timeout_s: How long no rank may move; None: it follows from the steps.
        judge: What else is to be said of the result.
    """
    from ttlaunch.cli.live import make_view
    from ttlaunch.cli.registering import registered
    from ttlaunch.launch.ending import Grace
    from ttlaunch.launch.run_folder import scratch_folder
    from ttlaunch.launch.supervise import supervise
    from ttlaunch.launch.watch import Watch

    ready = _make_ready(prepared, form=form, verbose=verbose)
    plan, folder = ready.plan, _make_folder(ready, prepared, runs_dir=runs_dir, form=form)
    watch = Watch(plan, folder)
    with (
        scratch_folder() as scratch,
        ready.crew(folder, watch, scratch) as crew,
        registered(plan, folder, form=form),
        make_view(plan, folder, quiet=form is Format.JSON, only=only) as view,
    ):
        report = supervise(
            plan,
            folder,
            environment=os.environ,
            view=view,
            watch=watch,
            crew=crew,
            scratch=scratch,
            grace=Grace(grace_s, tuple(typed)),
            hang_timeout_s=hang_timeout_s,
        )
    return _say_what_came_out(report, plan, folder, form=form, judge=judge)


def _make_folder(ready: "Ready", prepared: "Prepared", *, runs_dir: Path, form: Format) -> "RunFolder":
    """The run's folder with all that is decided; leaves if it cannot be made."""
    from ttlaunch.errors import RunFolderError
    from ttlaunch.launch.record_inputs import write_inputs
    from ttlaunch.launch.run_folder import create_run_folder

    try:
        folder = create_run_folder(runs_dir)
        resolved = prepared.resolved_config
        write_inputs(ready.plan, folder, resolved_config=resolved, shell=os.environ, release=ready.release)
    except RunFolderError as error:
        refuse([Diagnostic("H008", str(error), hints=(_ELSEWHERE,))], form=form)
    return folder


def _say_what_came_out(
    report: "Report",
    plan: "LaunchPlan",
    folder: "RunFolder",
    *,
    form: Format,
    judge: "Callable[[Report], Sequence[Diagnostic]]",
) -> "Report":
    from ttlaunch.cli.checkpoint_view import checkpoint_diagnostics
    from ttlaunch.cli.ending_view import outstayed_diagnostics
    from ttlaunch.cli.summary import failure_diagnostic, show_summary
    from ttlaunch.cli.traffic_view import traffic_diagnostics
    from ttlaunch.launch.trace import write_trace

    timeline = write_trace(folder.path, plan.ranks)
    failure, lost = failure_diagnostic(report, folder), checkpoint_diagnostics(report)
    is_done = report.status == "done"  # else the first thing named is what broke
    differences = traffic_diagnostics(report.traffic, [row.role for row in plan.ranks]) if is_done else []
    found = [
        *([failure] if failure else []),
        *outstayed_diagnostics(report, folder),
        *lost,
        *differences,
        *judge(report),
    ]
    if form is Format.JSON:
        print_json({**report.as_json(), "diagnostics": [diagnostic.as_json() for diagnostic in found]})
    else:
        show_summary(report, plan, folder, timeline=timeline, stream=sys.stdout)
        show_diagnostics(found, form=form)
    return report


def _make_ready(prepared: "Prepared", *, form: Format, verbose: bool) -> "Ready":
    """Check everything where the ranks will run, and bring the code there; leaves if a host is not ready."""
    if prepared.is_here:
        from ttlaunch.cli.ready_here import ready_here

        return ready_here(prepared, form=form, verbose=verbose)
    from ttlaunch.cli.ready_hosts import ready_hosts

    return ready_hosts(prepared, form=form, verbose=verbose)
