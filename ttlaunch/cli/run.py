"""`ttlaunch run`: check everything, start the plan, show the run, and report its result."""

import sys
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

from ttlaunch import contract
from ttlaunch.app.execute import make_ready, marks_of_command
from ttlaunch.app.run_spec import RunSpec
from ttlaunch.cli.console import exit_with, print_json, print_lines
from ttlaunch.cli.dialogue import TerminalDialogue
from ttlaunch.cli.options import RUN, Execution, Only, OutputFormat, Verbose, asks_for
from ttlaunch.diagnostics import Format

if TYPE_CHECKING:
    from ttlaunch.app.outcome import Outcome
    from ttlaunch.app.prepare_run import PreparedRun
    from ttlaunch.app.supervisor_process import Begun
    from ttlaunch.cli.session import Session

EXAMPLES = """\
[bold]ttlaunch run hierarchical_parallel[/bold]   three tiers, on this machine

[bold]ttlaunch run hierarchical_parallel --ranks 1[/bold]   the same recipe in one process

[bold]ttlaunch run hierarchical_parallel --resume latest[/bold]   resume from the newest checkpoint

[bold]ttlaunch run pipeline_parallel --set training_config.data_path=book.txt[/bold]   train on your own text

[bold]ttlaunch run hierarchical_parallel --trace-steps 5[/bold]   record a timeline of the first five steps of all ranks

[bold]ttlaunch run data_parallel --profile-steps 5-7[/bold]   profile steps 5 to 7 on every rank

[bold]ttlaunch run hierarchical_parallel --max-restarts 3[/bold]   restart from the newest checkpoint when a rank fails

[bold]ttlaunch run hierarchical_parallel --only role=worker[/bold]   show only the output of the workers

[bold]ttlaunch run hierarchical_parallel --sink tensorboard=tb[/bold]   export metrics during the run, for `tensorboard --logdir tb`

[bold]ttlaunch run hierarchical_parallel -d[/bold]   run in the background; `attach` shows the run, `stop` ends it

[bold]ttlaunch run --hang-timeout 600 -- ./any_program[/bold]   end it when it prints nothing for ten minutes

[bold]ttlaunch run data_parallel --env OMP_NUM_THREADS=1[/bold]   set a variable for all ranks; `--env HF_TOKEN` passes on this shell's

[bold]ttlaunch run --nproc-per-node 2 train.py --lr 0.1[/bold]   a script for torchrun, with its own arguments

[bold]ttlaunch run --ranks 2 -- ./any_program --its-options[/bold]   any program instead of a recipe

[bold]ttlaunch run --rank-binding FILE --mpi-args="--host a,b" -- ./program[/bold]   a program written for tt-run

[bold]ttlaunch run train.py --on slurm:gpu --nodes 2 --gres gpu:4 --time 60[/bold]   on hosts that Slurm gives for an hour

[bold]ttlaunch run data_parallel --elastic 1:4 --coordinator 10.0.0.1:7000[/bold]   workers come and go, also from other machines

[bold]ttlaunch run my_recipe/ --on my_cluster -c train.yaml[/bold]   your own recipe on your own hosts
"""


_TRACED_STEPS = 20
_ENV = "--env="


@asks_for(*RUN)
def run(
    *,
    spec: RunSpec,
    trace: Annotated[
        bool, typer.Option("--trace", help="Record a timeline of all ranks, for ui.perfetto.dev.")
    ] = False,
    only: Only = None,
    execution: Execution,
    coordinator: Annotated[
        str | None,
        typer.Option(
            "--coordinator",
            metavar="HOST:PORT",
            help="With --elastic: take workers of other machines at this address; see `ttlaunch workers --invite`.",
        ),
    ] = None,
    detach: Annotated[
        bool, typer.Option("--detach", "-d", help="Start in the background and return; `attach` shows the run.")
    ] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show the plan and start nothing.")] = False,
    form: OutputFormat = Format.FULL,
    verbose: Verbose = False,
) -> None:
    """Start a recipe or a script on a cluster, and show it until it ends."""
    from ttlaunch.app.check_python import needs_torch
    from ttlaunch.app.prepare_run import prepare
    from ttlaunch.app.resolve import THREADS
    from ttlaunch.app.restarts import run_with_restarts
    from ttlaunch.app.sinks import parse_sinks, with_sinks

    marks = marks_of_command()
    spec = replace(spec, trace_steps=spec.trace_steps or (_TRACED_STEPS if trace else None))
    options = execution.options(spec)
    asked = parse_sinks(execution.sinks or (), option="--sink")
    dialogue = TerminalDialogue(form, verbose=verbose)
    if spec.resume is not None and not dry_run:
        from ttlaunch.app.collect_states import collect_states

        collect_states(spec, dialogue)
    prepared = prepare(spec, dialogue)
    if coordinator is not None:
        from ttlaunch.app.coordinator_network import check_coordinator

        check_coordinator(coordinator, prepared)
    chosen = _chosen_ranks(only or (), prepared)
    if dry_run:
        from ttlaunch.cli.plan import show_plan

        found = dialogue.warnings_as_json()
        show_plan(prepared.plan, form=form, remarks=prepared.description.remarks, diagnostics=found)
        exit_with(contract.STATUS_DONE)
    described = prepared.description
    if THREADS in described.remarks and described.python and needs_torch(described.python) and form is Format.FULL:
        print_lines([f"note: {THREADS}"], to=sys.stderr)
    typed = ("ttlaunch", *_without_secrets(sys.argv[1:]))
    options = replace(options, typed=typed, marks=marks, coordinator=coordinator)
    ready = make_ready(prepared, options, dialogue) if prepared.is_here else None  # hosts are reached by the supervisor

    def work(begun: "Begun") -> "list[Outcome]":
        told = with_sinks(asked, begun)
        return run_with_restarts(prepared, options, dialogue, most=execution.max_restarts, ready=ready, begun=told)

    exit_with(start_and_watch(work, chosen, detach=detach, form=form, verbose=verbose))


def _chosen_ranks(only: Sequence[str], prepared: "PreparedRun") -> Collection[int]:
    """Return the ranks whose output is shown; only `--only` needs the code that reads what ranks print."""
    if not only:
        return range(prepared.plan.world_size)
    from ttlaunch.app.logs import chosen_ranks

    return chosen_ranks(only, prepared.plan.ranks)


def _without_secrets(words: Sequence[str]) -> list[str]:
    """Mask secrets in what was typed, since it is printed, and what is printed is kept in the run's folder.

    A secret of `--env` is left out instead: without a value, the option takes that of the shell.
    """
    from ttlaunch.planning.secrets import mask_arguments

    masked = mask_arguments(words)
    end = words.index("--") if "--" in words else len(words)
    for number, word in enumerate(words[:end]):
        option = _ENV if word.startswith(_ENV) else ""
        if masked[number] != word and (option or words[number - 1 : number] == ["--env"]):
            masked[number] = option + word.removeprefix(option).partition("=")[0]
    return masked


def start_and_watch(
    work: "Callable[[Begun], list[Outcome]]",
    chosen: Collection[int],
    *,
    detach: bool,
    form: Format,
    verbose: bool,
    announce: "Callable[[], None]" = lambda: None,
) -> int:
    """Start a supervisor, show its run until it ends, or detach at once, and return the exit status.

    Args:
        work: Executes the plans in the supervisor.
        chosen: The ranks whose output is shown.
        detach: Whether to return as soon as the run has begun.
        form: The form of the output.
        verbose: Whether to show notes.
        announce: Called when the run has begun, before anything of it is shown.
    """
    from ttlaunch.app.restarts import exit_status_of
    from ttlaunch.cli.session import start_supervisor, wait_for_run

    session = start_supervisor(work, exit_status=exit_status_of, form=form, verbose=verbose)
    path = wait_for_run(session)
    from ttlaunch.app.sinks import judge_sinks
    from ttlaunch.cli.watching import report_end, status_without_run, watch  # has been imported while the run began

    if path is None:
        return status_without_run(session.exit_status(), form=form)
    announce()
    if detach:
        _leave_to_itself(session, path, form=form)
    return report_end(watch(session, path, form=form, only=chosen), form=form, judge=judge_sinks)


def _leave_to_itself(session: "Session", path: Path, *, form: Format) -> NoReturn:
    """Detach from a run, and print how to attach to it again."""
    session.set_free()
    if form is Format.JSON:
        print_json({"run_id": path.name, "folder": str(path), "supervisor_pid": session.pid}, schema="detached")
    elif form is Format.CONCISE:
        print_lines([path.name])
    else:
        name = path.name
        hint = f"`ttlaunch attach {name}` shows it, `ttlaunch stop {name}` ends it"
        print_lines([f"{name} runs in the background; {hint}"])
    exit_with(contract.STATUS_DONE)
