"""`ttlaunch dashboard`: show runs in a browser."""

from pathlib import Path
from typing import Annotated

import typer

from ttlaunch.cli.console import print_lines
from ttlaunch.cli.options import RunsDir

EXAMPLES = """\
[bold]ttlaunch dashboard[/bold]   all runs in `runs/` at http://127.0.0.1:8765, with a link that has the key

[bold]ttlaunch dashboard --runs-dir /data/runs --port 0[/bold]   another folder, at any free port
"""


def dashboard(
    *,
    runs_dir: RunsDir = Path("runs"),
    port: Annotated[
        int, typer.Option("--port", min=0, max=65535, metavar="N", help="Port of the page; 0: any free one.")
    ] = 8765,
) -> None:
    """Show runs in a browser: metrics, logs, traffic, failures, while they run and afterwards.

    The page is read from run folders, so it costs a run nothing, and works on a copied folder. Only this machine can reach it, and only
    who has the printed link can read it; nothing can be changed there.
    """
    from ttlaunch.dashboard.opening import open_dashboard

    opened = open_dashboard(runs_dir, port=port)
    print_lines([f"runs in {opened.runs_folder}", f"open {opened.link}", "Ctrl-C ends the page; runs go on"])
    opened.serve()
