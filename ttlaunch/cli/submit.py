"""`ttlaunch submit`: check a run and hand it to Slurm, which starts it when it has hosts."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ttlaunch import contract
from ttlaunch.app.run_spec import RunSpec, short_name
from ttlaunch.cli.console import exit_with, print_json, print_lines, print_text
from ttlaunch.cli.dialogue import TerminalDialogue
from ttlaunch.cli.options import RUN, Execution, OutputFormat, Verbose, asks_for
from ttlaunch.diagnostics import Format

if TYPE_CHECKING:
    from ttlaunch.app.slurm_job import QueueState

EXAMPLES = """\
[bold]ttlaunch submit data_parallel --on slurm:gpu --nodes 2 --gres gpu:4 --time 8:00:00[/bold]   train for as long as it takes, eight hours at a time

[bold]ttlaunch submit train.py --on slurm:gpu --nproc-per-node 4 --time 60 --requeue[/bold]   a script that goes on from its own checkpoints

[bold]ttlaunch submit data_parallel --on slurm:gpu --dry-run[/bold]   show the plan and the whole job.sbatch
"""


@asks_for(*RUN)
def submit(
    *,
    spec: RunSpec,
    requeue: Annotated[
        bool | None,
        typer.Option(
            "--requeue/--no-requeue",
            help="Start the job again after its time limit or a lost host. Default: for recipes that keep checkpoints.",
            show_default=False,
        ),
    ] = None,
    execution: Execution,
    coordinator: Annotated[str | None, typer.Option("--coordinator", hidden=True)] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Show the plan and the batch script, and submit nothing.")
    ] = False,
    form: OutputFormat = Format.FULL,
    verbose: Verbose = False,
) -> None:
    """Hand a recipe or a script to Slurm, which starts it when it has hosts."""
    from ttlaunch.app.sinks import parse_sinks
    from ttlaunch.app.slurm_job import JOB_PREFIX, Job, ask_queue
    from ttlaunch.app.submit import check_submission
    from ttlaunch.app.submit import submit as hand_to_slurm
    from ttlaunch.cli.plan import show_plan

    if coordinator is not None:
        from ttlaunch.app.coordinator_network import refuse_in_job

        refuse_in_job()
    dialogue = TerminalDialogue(form, verbose=verbose)
    submission = check_submission(
        spec,
        execution.options(spec),
        dialogue,
        requeue=requeue,
        max_restarts=execution.max_restarts,
        sinks=parse_sinks(execution.sinks or (), option="--sink"),
    )
    prepared = submission.prepared
    if dry_run:
        script = submission.script(Path(spec.runs_dir).absolute() / f"{JOB_PREFIX}TIME")
        if form is Format.JSON:
            content = {"plan": prepared.plan.as_json(), "script": script, "diagnostics": dialogue.warnings_as_json()}
            print_json(content, schema="submit")
        else:
            show_plan(prepared.plan, form=form, remarks=prepared.description.remarks, diagnostics=())
            print_text(script)
        exit_with(contract.STATUS_DONE)
    folder, number = hand_to_slurm(submission, dialogue)
    if form is Format.JSON:
        diagnostics = dialogue.warnings_as_json()
        print_json({"job": number, "folder": str(folder), "diagnostics": diagnostics}, schema="submit")
    elif form is Format.CONCISE:
        print_lines([number])
    else:
        job = Job(folder, number, prepared.plan.program.name, 0.0)
        print_lines(_submitted(job.number, folder, ask_queue([job]).of(job), runs_dir=spec.runs_dir))


def _submitted(number: str, folder: Path, state: "QueueState", *, runs_dir: Path) -> list[str]:
    where = short_name(folder, Path.cwd())
    return [
        f"Slurm job {number} is {state.text}" if state.state else f"Slurm job {number} was submitted",
        f"  log              {where}/job.log",
        f"  run folders      in {runs_dir}, from its start on",
        f"  next             ttlaunch ps   {number} waits, or runs on these hosts",
        f"                   ttlaunch attach {number}",
        f"                   ttlaunch report {number}",
        f"                   ttlaunch stop {number}   save the step and end",
    ]
