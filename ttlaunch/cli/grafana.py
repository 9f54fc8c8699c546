"""`ttlaunch grafana`: write what shows runs in Grafana."""

from pathlib import Path
from typing import Annotated

import typer

from ttlaunch.cli.console import print_json, print_lines
from ttlaunch.cli.options import PlainFormat
from ttlaunch.diagnostics import Format, file_error, shown, usage_error

app = typer.Typer(help="Show runs in Grafana.", no_args_is_help=True)


@app.callback()
def _group() -> None:
    """Keep `export` a subcommand although it is the only one."""


@app.command("export")
def export(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Folder for the files.", show_default=False)],
    *,
    job: Annotated[
        str, typer.Option("--job", metavar="NAME", help="The name after `?job=` in the address of the sink `loki`.")
    ] = "ttlaunch",
    force: Annotated[bool, typer.Option("--force", help="Overwrite files of these names.")] = False,
    form: PlainFormat = Format.FULL,
) -> None:
    """Write dashboards, data sources for Prometheus and Loki, and a docker-compose.yml that starts all of it."""
    from ttlaunch.running.metrics.addresses import is_job
    from ttlaunch.running.metrics.grafana_dashboards import TEXTFILES, render_files
    from ttlaunch.running.runs.files import write_whole

    if not is_job(job):
        raise usage_error(f"`--job {shown(job)}` needs 1 to 100 letters, digits or `_.:-`")
    files = render_files(job=job)
    there = [name for name in files if (folder / name).exists()]
    if there and not force:
        raise usage_error(f"{shown(folder / there[0])} exists already; nothing was written", "`--force` overwrites it")
    try:
        (folder / TEXTFILES).mkdir(parents=True, exist_ok=True)
        for name, text in files.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            write_whole(folder / name, text)
    except OSError as error:
        raise file_error(folder, error) from error
    if form is Format.JSON:
        print_json({"files": [str(folder / name) for name in files]}, schema="grafana-export")
        return
    print_lines([*(f"wrote {folder / name}" for name in files), f"docker compose -f {folder}/docker-compose.yml up -d"])
