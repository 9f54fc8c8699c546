"""The `ttlaunch` command: its subcommands, its version, and the promise that no user ever sees a traceback."""

import io
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer

from ttlaunch import __version__
from ttlaunch.cli import (
    attach,
    chaos,
    compare,
    configs,
    convert,
    data,
    diff,
    doctor,
    explain,
    init,
    logs,
    metrics,
    parity,
    place,
    plan,
    prepare,
    ps,
    recipes,
    report,
    repro,
    run,
    runs,
    schema,
    show,
    simulate,
    stop,
    sync,
    validate,
    weights,
)
from ttlaunch.cli.after_dashes import CommandAfterDashes
from ttlaunch.cli.console import shows_refusals
from ttlaunch.cli.last_resort import status_of


def _paragraphs(function: Callable[..., None]) -> str:
    """A docstring whose paragraphs are a line each, so that the terminal's width alone decides where lines end."""
    return "\n\n".join(" ".join(part.split()) for part in (function.__doc__ or "").split("\n\n"))


app = typer.Typer(
    name="ttlaunch",
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Start and supervise distributed training from a description of the hardware.",
    epilog="First run: [bold]ttlaunch run hierarchical_parallel[/bold]   What would happen: [bold]ttlaunch plan …[/bold]",
)
app.command("run", epilog=run.EXAMPLES, cls=CommandAfterDashes)(shows_refusals(run.run))
app.command("repro", epilog=repro.EXAMPLES)(shows_refusals(repro.repro))
app.command("chaos", epilog=chaos.EXAMPLES, cls=CommandAfterDashes)(shows_refusals(chaos.chaos))
app.command("plan", epilog=plan.EXAMPLES, cls=CommandAfterDashes)(shows_refusals(plan.plan))
app.command("simulate", epilog=simulate.EXAMPLES)(shows_refusals(simulate.simulate))
app.command("parity", epilog=parity.EXAMPLES, help=_paragraphs(parity.parity))(shows_refusals(parity.parity))
app.command("compare", epilog=compare.EXAMPLES, help=_paragraphs(compare.compare))(shows_refusals(compare.compare))
app.command("attach", epilog=attach.EXAMPLES)(shows_refusals(attach.attach))
app.command("ps", epilog=ps.EXAMPLES)(shows_refusals(ps.ps))
app.command("logs", epilog=logs.EXAMPLES)(shows_refusals(logs.logs))
app.command("stop", epilog=stop.EXAMPLES)(shows_refusals(stop.stop))
app.command("metrics", epilog=metrics.EXAMPLES)(shows_refusals(metrics.metrics))
app.command("diff", epilog=diff.EXAMPLES)(shows_refusals(diff.diff))
app.command("report", epilog=report.EXAMPLES)(shows_refusals(report.report))
app.command("show", epilog=show.EXAMPLES)(shows_refusals(show.show))
app.command("place", epilog=place.EXAMPLES)(shows_refusals(place.place))
app.command("doctor", epilog=doctor.EXAMPLES)(shows_refusals(doctor.doctor))
app.command("prepare", epilog=prepare.EXAMPLES)(shows_refusals(prepare.prepare))
app.command("validate", epilog=validate.EXAMPLES)(shows_refusals(validate.validate))
app.command("sync", epilog=sync.EXAMPLES)(shows_refusals(sync.sync))
app.command("explain", epilog=explain.EXAMPLES)(shows_refusals(explain.explain))
app.command("schema", epilog=schema.EXAMPLES)(shows_refusals(schema.schema))
app.command("convert", epilog=convert.EXAMPLES)(shows_refusals(convert.convert))
app.command("data", epilog=data.EXAMPLES)(shows_refusals(data.data))
app.command("init", epilog=init.EXAMPLES)(shows_refusals(init.init))
app.add_typer(weights.app, name="weights")
app.add_typer(recipes.app, name="recipes")
app.add_typer(runs.app, name="runs")
app.add_typer(configs.app, name="configs")


def _print_version(value: bool) -> None:
    if value:
        sys.stdout.write(f"ttlaunch {__version__}\n")
        raise typer.Exit


@app.callback()
def _root(
    _version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Options of the command itself; the text is the app's help."""


def main() -> None:
    """Run the command line."""
    _make_streams_usable()
    sys.exit(status_of(_run_app))


def _run_app() -> int:
    app()  # leaves by SystemExit
    return 0


def _make_streams_usable() -> None:
    """Print to whatever there is: a closed stream swallows, and one that is not UTF-8 replaces what it cannot show."""
    sys.stdout = sys.stdout or Path(os.devnull).open("w", encoding="utf-8")  # noqa: SIM115 - for the whole process
    sys.stderr = sys.stderr or Path(os.devnull).open("w", encoding="utf-8")  # noqa: SIM115 - for the whole process
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")
