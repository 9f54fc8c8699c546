"""`ttlaunch runs clean`: list the folders of ended runs with their sizes, and remove them."""

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ttlaunch.cli.console import exit_with, print_json, print_lines, show_diagnostics
from ttlaunch.cli.options import OutputFormat, RunsDir
from ttlaunch.diagnostics import Diagnostic, Format, counted, render_size, shown, usage_error, usage_mistake
from ttlaunch.system_reason import system_reason

if TYPE_CHECKING:
    from ttlaunch.running.runs.clean import Removable

app = typer.Typer(no_args_is_help=True, help="Manage run folders.")
EXAMPLES = """\
[bold]ttlaunch runs clean --older-than 7d --dry-run[/bold]   list what would be removed

[bold]ttlaunch runs clean --keep 10[/bold]   all ended runs except the ten newest, after a question

[bold]ttlaunch runs clean --older-than 4w --yes[/bold]   without a question, for scripts
"""


@app.command("clean", epilog=EXAMPLES)
def clean(
    *,
    older_than: Annotated[
        str | None,
        typer.Option(
            "--older-than", metavar="TIME", help="Only runs that ended longer ago than this: 90s, 30min, 12h, 7d, 2w."
        ),
    ] = None,
    keep: Annotated[int, typer.Option("--keep", min=0, metavar="N", help="Keep the N newest.")] = 0,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="List what would be removed, and remove nothing.")] = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    runs_dir: RunsDir = Path("runs"),
    form: OutputFormat = Format.FULL,
) -> None:
    """Remove the folders of ended runs, with their logs and checkpoints."""
    from ttlaunch.app.slurm_job import old_jobs
    from ttlaunch.running.runs.clean import measure, parse_age, plan_clean
    from ttlaunch.running.runs.kept_code import collect_unused
    from ttlaunch.running.runs.overview import list_runs

    age = None if older_than is None else parse_age(older_than)
    if older_than is not None and age is None:
        hint = "`--older-than 7d`; the units are s, min, h, d and w"
        raise usage_error(f"`--older-than {shown(older_than)}` is no time", hint, code="P042")
    place = (Path.cwd() / runs_dir).resolve()
    runs = [run for run in list_runs(place, None)[0] if run.folder.parent == place]  # not what links lead to
    chosen = plan_clean(runs, older_than_s=age, keep=keep)
    jobs = old_jobs(place, {run.folder for run in chosen})
    chosen = [run for run in chosen if run.folder not in jobs.held]
    chosen += plan_clean(jobs.removable, older_than_s=age, keep=0)
    going = [measure(run) for run in chosen]
    stay = sum(not run.is_over or run.folder in jobs.held for run in runs)
    _announce(going, num_running=stay, form=form)
    if going and not dry_run and not yes:
        _ask(len(going), form=form)
    removed, found = ([], []) if dry_run else _remove(going)
    unused_bytes = collect_unused(place) if removed else 0
    if form is Format.JSON:
        entries = [{"run_id": one.run.folder.name, "size_bytes": one.size_bytes} for one in going]
        names = [one.run.folder.name for one in removed]
        kept = [one.as_json() for one in found]
        print_json({"runs": entries, "removed": names, "diagnostics": kept}, schema="runs-clean")
    elif removed:
        code = f", and {render_size(unused_bytes)} of code that no other run uses" if unused_bytes else ""
        print_lines([f"removed {counted(len(removed), 'run')}, {render_size(_total(removed))}{code}"])
    show_diagnostics(found, form=form)
    exit_with(1 if found else 0)


def _announce(going: "list[Removable]", *, num_running: int, form: Format) -> None:
    if form is Format.JSON:
        return
    print_lines(
        f"{shown(one.run.folder.name)}   {one.run.state:12} {render_size(one.size_bytes):>12}   {shown(one.run.name)}"
        for one in going
    )
    running = f"; {counted(num_running, 'run')} that may be active stay" if num_running else ""
    print_lines([f"{counted(len(going), 'run')}, {render_size(_total(going))}{running}"])


def _ask(count: int, *, form: Format) -> None:
    """Exit unless the user agrees; without a terminal nobody can."""
    if not sys.stdin.isatty() or form is Format.JSON:
        hints = ("`--yes` removes without asking, `--dry-run` only lists what would be removed",)
        raise usage_error("nothing was removed: there is no terminal to ask on", *hints, code="P043")
    if not typer.confirm(f"Remove {counted(count, 'run')} with logs and checkpoints?"):
        print_lines(["nothing was removed"])
        exit_with(0)


def _remove(going: "list[Removable]") -> "tuple[list[Removable], list[Diagnostic]]":
    from ttlaunch.running.runs.clean import remove
    from ttlaunch.running.runs.registry import RegistryError, find_registry

    removed, found = [], []
    for one in going:
        try:
            if not remove(one.run):
                continue
            removed.append(one)
            find_registry(os.environ).forget(one.run.folder)
        except RegistryError:
            continue  # it only points at a folder that is no more, which nothing takes for a run
        except OSError as error:
            reason = system_reason(error)
            found.append(usage_mistake(f"{shown(one.run.folder)} cannot be removed: {reason}", code="P032"))
    return removed, found


def _total(going: "list[Removable]") -> int:
    return sum(one.size_bytes for one in going)
