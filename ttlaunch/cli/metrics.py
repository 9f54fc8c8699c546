"""`ttlaunch metrics`: show what a run has measured, or export it to a sink, as `ttlaunch logs` does with lines."""

import json
import math
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ttlaunch import contract
from ttlaunch.app.named_run import find_named_run, unreadable_run
from ttlaunch.app.signals import interruptible
from ttlaunch.app.sinks import parse_sinks, sink_diagnostics
from ttlaunch.cli.console import (
    discarding_unwritable,
    exit_with,
    print_json,
    print_lines,
    show_diagnostics,
    tabbed,
    with_schema,
)
from ttlaunch.cli.options import NamedRun, OutputFormat, RunsDir
from ttlaunch.cli.table import render_table
from ttlaunch.diagnostics import Format, usage_error

if TYPE_CHECKING:
    from ttlaunch.running.metrics.event_log import EventLog
    from ttlaunch.running.metrics.export import SinkRecord
    from ttlaunch.running.metrics.sinks import SinkChoice

EXAMPLES = """\
[bold]ttlaunch metrics[/bold]   every number that the newest run measured: first, last, lowest and highest value by rank

[bold]ttlaunch metrics latest --format json[/bold]   all events, one JSON object per line

[bold]ttlaunch metrics 3fa1 --to tensorboard=tb[/bold]   event files in `tb/`, for `tensorboard --logdir tb`

[bold]ttlaunch metrics latest --to wandb[/bold]   offline W&B runs, one per rank; `wandb sync` uploads them

[bold]ttlaunch metrics latest --to prometheus=/var/lib/node_exporter/ttlaunch.prom --follow[/bold]   update the file until the run ends
"""
_NICE = 10


def metrics(
    run: NamedRun = "latest",
    *,
    to: Annotated[
        list[str] | None,
        typer.Option(
            "--to",
            metavar="SINK[=PLACE]",
            help="Export them to tensorboard=DIR, wandb[=DIR], mlflow=DIR, prometheus=FILE, loki=URL, loki-file=DIR or otlp=URL. "
            "Repeatable.",
        ),
    ] = None,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Continue until the run ends.")] = False,
    beside: Annotated[bool, typer.Option("--beside", hidden=True)] = False,
    runs_dir: RunsDir = Path("runs"),
    form: OutputFormat = Format.FULL,
) -> None:
    """Show everything that a run measured, or export it (TensorBoard, W&B, MLflow, Prometheus).

    The command works during the run and afterwards. When a run ends, the same events are written to its `metrics.jsonl`.
    """
    from ttlaunch.running.metrics.event_log import EventLog

    choices = parse_sinks(to or (), option="--to")
    path = find_named_run(run, runs_dir=runs_dir)
    try:
        with interruptible(signal.SIGINT):
            log = EventLog(path)
            if choices:
                export_run(path, choices, follow=follow, beside=beside, form=form)
            elif form is Format.JSON:
                _print_events(log, path, follow=follow)
            else:
                _print_table(log, form=form)
    except KeyboardInterrupt:  # the user ends `--follow` by Ctrl-C
        exit_with(contract.STATUS_INTERRUPTED if choices else contract.STATUS_DONE)
    except (OSError, ValueError) as error:
        raise unreadable_run(path, error) from error


def export_run(path: Path, choices: "Sequence[SinkChoice]", *, follow: bool, beside: bool, form: Format) -> None:
    """Export a run to sinks, report it, and exit."""
    from ttlaunch.running.metrics.export import SinkState, export, report_failure

    if beside:
        umask = int(os.environ.pop(contract.ENV_UMASK, "22"), 8)
        # In the run's folder, keep the umask of the supervisor that started this process; elsewhere, use the user's.
        if not all(Path(choice.place_in(path)).is_relative_to(path) for choice in choices):
            os.umask(umask)
        os.nice(_NICE)  # a sink must not take processor time from ranks
    if follow and len(choices) > 1:
        message = f"`--follow` was given with {len(choices)} sinks, and each needs a separate process"
        raise usage_error(message, "start one command for each")
    records = [export(path, choice, follow=follow) for choice in choices]
    failed = [record for record in records if record.state is SinkState.FAILED]
    if beside:
        for record in failed:
            report_failure(path, record)
    if form is Format.JSON:
        found = sink_diagnostics(records, path)
        print_json(
            {"sinks": [vars(one) for one in records], "diagnostics": [one.as_json() for one in found]},
            schema="metrics-export",
        )
    else:
        _report(records, path, form=form)
    exit_with(contract.STATUS_RANK_FAILED if failed else contract.STATUS_DONE)


def _report(records: "Sequence[SinkRecord]", path: Path, *, form: Format) -> None:
    from ttlaunch.running.metrics.export import SinkState
    from ttlaunch.running.metrics.sinks import LOG_SINKS, ONLY_LINES

    for record in records:
        if record.state is SinkState.DONE:
            lines = [f"{record.lines} lines"] if record.kind in LOG_SINKS else []
            events = [] if record.kind in ONLY_LINES else [f"{record.events} events"]
            what = " and ".join([*events, *lines])
            print_lines([f"{record.kind}: {what} of {path.name} in {record.place}"])
    show_diagnostics(sink_diagnostics(records, path), form=form)


def _print_events(log: "EventLog", path: Path, *, follow: bool) -> None:
    import time

    from ttlaunch.running.runs.launcher import read_launcher

    launcher = read_launcher(path) if follow else None
    schema = json.dumps(with_schema({}, "metric-event")).removesuffix("}")
    with discarding_unwritable(sys.stdout):
        while True:
            # Asked before the events are read, so that the last ones of a launcher that was killed are printed.
            is_gone = not path.is_dir() or (launcher is not None and launcher.is_here and not launcher.is_alive)
            print_lines(f"{schema}, {line.removesuffix(chr(10)).removeprefix('{')}" for line in log.lines())
            if not follow or log.has_ended or is_gone:
                return
            time.sleep(0.2)


def _print_table(log: "EventLog", *, form: Format) -> None:
    from ttlaunch.running.metrics.names import summarise

    found = summarise(log.events())
    cells = [
        (one.name, str(one.rank), log.run.ranks[one.rank].role, str(one.count), *map(_number, one.values))
        for one in found
    ]
    with discarding_unwritable(sys.stdout):
        if form is Format.CONCISE:
            print_lines(map(tabbed, cells))
            return
        heading = ("metric", "rank", "role", "times", "first", "last", "least", "most")
        print_lines(render_table([heading, *cells], right={1, 3, 4, 5, 6, 7}))
        if not cells:
            print_lines(["nothing was measured yet"])


def _number(value: float) -> str:
    is_whole = math.isfinite(value) and value == int(value) and abs(value) >= 1
    return f"{value:,.0f}" if is_whole else f"{value:.4g}"
