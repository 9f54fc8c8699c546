"""`ttlaunch sync`: copy the project, the recipe and ttlaunch itself to every host, and say what went where."""

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ttlaunch.app.dialogue import Dialogue
from ttlaunch.app.resolve import ResolvedSpec, resolve
from ttlaunch.app.run_spec import RunSpec
from ttlaunch.cli.console import leave, print_json, show_diagnostics
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
from ttlaunch.diagnostics import Diagnostic, Format, exit_status
from ttlaunch.diagnostics.launch_error import LaunchError

if TYPE_CHECKING:
    from concurrent.futures import Future

    from ttlaunch.hosts.sync.data import DataItem
    from ttlaunch.hosts.sync.release import Release
    from ttlaunch.hosts.sync.results import Outcome
    from ttlaunch.hosts.transport.transport import Process, Transport

EXAMPLES = """\
[bold]ttlaunch sync --on my_cluster[/bold]   the project around the current folder

[bold]ttlaunch sync pipeline_parallel --on my_cluster[/bold]   also the recipe and its text

[bold]ttlaunch sync --on my_cluster --dry-run[/bold]   list what would be copied
"""


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
    on: On = "local",
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
    config_file: ConfigFile = None,
    overrides: Overrides = None,
    hostfile: Hostfile = None,
    rank_bindings: RankBindings = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Report what each host lacks, and send nothing.")] = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Send more than 1.1 GB in total without asking.")] = False,
    keep: Annotated[int, typer.Option("--keep", min=1, metavar="N", help="Number of releases to keep on a host.")] = 3,
    form: OutputFormat = Format.FULL,
    verbose: Verbose = False,
) -> None:
    """Copy the code to every host. Only changed files are sent; a failed copy leaves the old code in place."""
    request = RunSpec(
        target=recipe,
        on=on,
        config_file=config_file,
        overrides=overrides or (),
        hostfile=hostfile,
        rank_bindings=rank_bindings,
    )
    dialogue = TerminalDialogue(form, verbose=verbose)
    found = resolve(request, working_folder=Path.cwd(), shell=os.environ, dialogue=dialogue)
    if not found.ok or found.topology is None:
        raise LaunchError(found.diagnostics)
    from ttlaunch.app.bring_code import bring_code, explain_outcome, guard_size

    cluster = found.topology.cluster
    options = {"remote_folder": cluster.remote_folder, "keep": keep, "data": _texts(found)}
    options["pythons"] = [cluster.python] if cluster.python else []
    interpreters: dict[str, Future[Process]] = {}
    release, transports, said = _read_and_reach(found, folder, interpreters, dialogue)
    try:
        if not dry_run and not yes:
            guard_size(release, transports, options, said, dialogue)
        requests = {**options, "dry_run": dry_run, "interpreters": interpreters}
        outcome = bring_code(transports, release, said, requests, dialogue)
    finally:
        for transport in transports:
            transport.close()
    said = said + explain_outcome(outcome, found.topology)
    show_diagnostics(said, form=form, verbose=verbose)
    _show(outcome, said, form=form)
    leave(exit_status(said))


def _read_and_reach(
    found: ResolvedSpec, folder: Path | None, interpreters: dict[str, "Future[Process]"], dialogue: Dialogue
) -> tuple["Release", list["Transport"], list[Diagnostic]]:
    """Read the files while the hosts are being reached, and have an interpreter wait on each that has been."""
    from ttlaunch.app.reach import open_transports, reach_hosts

    assert found.topology is not None  # noqa: S101 - checked by the caller
    open_transports(found.topology)  # imports what SSH needs before files are read, which is for the time of waiting
    from ttlaunch.app.background import in_background
    from ttlaunch.hosts.sync.release import make_release
    from ttlaunch.hosts.transport.pushed import start_interpreter
    from ttlaunch.hosts.transport.transport import CONNECT_S

    recipe = found.choice.folder if found.choice is not None else None
    pythons = [found.topology.cluster.python] if found.topology.cluster.python else []
    read = [0, 0]

    def note(files: int, size: int) -> None:
        read[:] = files, size

    def prepare(host: "Transport") -> None:
        interpreters[host.host] = in_background(lambda: start_interpreter(host, pythons=pythons, timeout_s=CONNECT_S))

    made = in_background(lambda: make_release(Path.cwd(), folder=folder, recipe=recipe, on_progress=note))
    transports = reach_hosts(found.topology, dialogue, then=prepare)
    dialogue.reading(made, read)
    release, problems = made.result()
    if release is None:
        for transport in transports:
            transport.close()
        raise LaunchError([*found.diagnostics, *problems])
    return release, transports, [*found.diagnostics, *problems]


def _texts(found: ResolvedSpec) -> list["DataItem"]:
    from ttlaunch.hosts.sync.data import data_item

    data = found.choice.data if found.choice is not None else None
    return [data_item(data)] if data is not None else []


def _show(outcome: "Outcome", said: Sequence[Diagnostic], *, form: Format) -> None:
    from ttlaunch.cli.sync_result import as_json, as_lines, as_table

    if form is Format.JSON:
        print_json({**as_json(outcome), "diagnostics": [diagnostic.as_json() for diagnostic in said]})
    else:
        lines = as_lines(outcome) if form is Format.CONCISE else as_table(outcome)
        sys.stdout.writelines(f"{line}\n" for line in lines)
