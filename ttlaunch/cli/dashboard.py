"""`ttlaunch dashboard`: show runs in a browser."""

from pathlib import Path
from typing import Annotated

import typer

from ttlaunch.app.named_run import find_named_run, unreadable_run
from ttlaunch.cli.console import print_lines, write_file
from ttlaunch.cli.options import RunsDir
from ttlaunch.diagnostics import usage_error

EXAMPLES = """\
[bold]ttlaunch dashboard[/bold]   all runs in `runs/` at http://127.0.0.1:8765, with a link that has the key

[bold]ttlaunch dashboard --runs-dir /data/runs --port 0[/bold]   another folder, at any free port

[bold]ttlaunch dashboard --allow-actions[/bold]   the page can also launch, stop and resume runs

[bold]ttlaunch dashboard latest --export run.html[/bold]   one file with all views of a run that has ended, for an issue or a mail
"""


def dashboard(
    run: Annotated[
        str | None,
        typer.Argument(metavar="RUN", help="With `--export`: an id, its end, a folder, or latest, the default."),
    ] = None,
    *,
    runs_dir: RunsDir = Path("runs"),
    port: Annotated[
        int, typer.Option("--port", min=0, max=65535, metavar="N", help="Port of the page; 0: any free one.")
    ] = 8765,
    export: Annotated[
        Path | None,
        typer.Option(
            "--export", metavar="FILE", help="Write a run that has ended to one HTML file, and serve nothing."
        ),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Overwrite the file of `--export`.")] = False,
    allow_actions: Annotated[
        bool, typer.Option("--allow-actions", help="Let the page launch, stop and resume runs.")
    ] = False,
    actions_from: Annotated[
        Path | None,
        typer.Option(
            "--actions-from", metavar="DIR", help="With `--allow-actions`: also recipes in this folder can be launched."
        ),
    ] = None,
) -> None:
    """Show runs in a browser: metrics, logs, traffic, failures, while they run and afterwards.

    The page is read from run folders, so it costs a run nothing, and works on a copied folder. Only this machine can reach it, and only
    who has the printed link can read it; nothing can be changed there unless `--allow-actions` is given.
    """
    if actions_from is not None and not allow_actions:
        raise usage_error("`--actions-from` was given without `--allow-actions`", "add `--allow-actions`")
    if export is not None:
        _export(run or "latest", export, runs_dir=runs_dir, force=force)
        return
    if force:
        raise usage_error("`--force` was given without `--export`", "`--export FILE` writes a run to a file")
    if run is not None:
        raise usage_error("a run was named, and the page shows all runs", "`--export FILE` writes that run to a file")
    from ttlaunch.dashboard.opening import open_dashboard

    opened = open_dashboard(runs_dir, port=port, may_act=allow_actions, recipes=actions_from)
    acts = ["who has this link can launch, stop and resume runs"] if allow_actions else []
    print_lines([f"runs in {opened.runs_folder}", f"open {opened.link}", *acts, "Ctrl-C ends the page; runs go on"])
    opened.serve()


def _export(run: str, file: Path, *, runs_dir: Path, force: bool) -> None:
    from ttlaunch.dashboard.export import export_run
    from ttlaunch.running.runs.launcher import is_running

    path = find_named_run(run, runs_dir=runs_dir)
    if is_running(path):
        raise usage_error(f"{path.name} is still running", "`ttlaunch dashboard` shows it meanwhile")
    try:
        content = export_run(path)
    except (OSError, ValueError) as error:
        raise unreadable_run(path, error) from error
    write_file(file, content, force=force)
    print_lines([f"{path.name} is in {file}, {len(content) / 1e6:.1f} MB"])
