"""`ttlaunch sync`: copy the project, the recipe and ttlaunch itself to every host."""

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from ttlaunch.app.resolve import resolve
from ttlaunch.app.run_spec import RunSpec
from ttlaunch.cli.console import exit_with, print_json, print_lines, show_diagnostics
from ttlaunch.cli.dialogue import TerminalDialogue
from ttlaunch.cli.options import OutputFormat, Verbose, asks_for, complete_recipes
from ttlaunch.diagnostics import Format, exit_status

EXAMPLES = """\
[bold]ttlaunch sync --on my_cluster[/bold]   the project around the current folder

[bold]ttlaunch sync pipeline_parallel --on my_cluster[/bold]   also the recipe and its text

[bold]ttlaunch sync --on my_cluster --dry-run[/bold]   list what would be copied
"""


@asks_for("on", "config_file", "overrides", "hostfile", "rank_bindings")
def sync(
    recipe: Annotated[
        str | None,
        typer.Argument(
            metavar="[RECIPE]",
            help="Also copy this recipe and its training text.",
            autocompletion=complete_recipes,
            show_default=False,
        ),
    ] = None,
    *,
    spec: RunSpec,
    folder: Annotated[
        Path | None,
        typer.Option(
            "--folder",
            metavar="DIR",
            help="The project. Default: the git repository around the current folder, or else that folder.",
            exists=True,
            file_okay=False,
        ),
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Report what each host lacks, and send nothing.")] = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Send more than 1.1 GB in total without asking.")] = False,
    keep: Annotated[int, typer.Option("--keep", min=1, metavar="N", help="Number of releases to keep on a host.")] = 3,
    form: OutputFormat = Format.FULL,
    verbose: Verbose = False,
) -> None:
    """Copy the code to every host. Only changed files are sent; a failed copy leaves the old code in place."""
    from ttlaunch.app.sync_code import sync_project
    from ttlaunch.cli.sync_result import as_json, as_lines, as_table

    dialogue = TerminalDialogue(form, verbose=verbose)
    resolved = resolve(replace(spec, target=recipe), dialogue=dialogue)
    outcome, found = sync_project(resolved, dialogue, folder=folder, keep=keep, asks=not yes, dry_run=dry_run)
    show_diagnostics(found, form=form, verbose=verbose)
    if form is Format.JSON:
        print_json({**as_json(outcome), "diagnostics": [one.as_json() for one in found]}, schema="sync")
    else:
        print_lines(as_lines(outcome) if form is Format.CONCISE else as_table(outcome))
    exit_with(exit_status(found))
