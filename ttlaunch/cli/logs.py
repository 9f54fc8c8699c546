"""`ttlaunch logs`: show what the ranks of a run have printed, also while it runs, or send it to a log server."""

import json
import signal
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ttlaunch import contract
from ttlaunch.app.named_run import find_named_run, unreadable_run
from ttlaunch.app.signals import interruptible
from ttlaunch.cli.console import exit_with, print_lines, print_output, with_schema
from ttlaunch.cli.options import NamedRun, Only, OutputFormat, RunsDir
from ttlaunch.diagnostics import Format, shown, usage_error

if TYPE_CHECKING:
    from collections.abc import Iterable

    from ttlaunch.planning.launch_plan import RankRow
    from ttlaunch.running.logs.fold import ShownOutput
    from ttlaunch.running.logs.merged import Line

EXAMPLES = """\
[bold]ttlaunch logs[/bold]   the output of the newest run

[bold]ttlaunch logs latest -f[/bold]   follow the output until the run ends

[bold]ttlaunch logs 3fa1 --only rank=3 --stream stderr[/bold]   one stream of one rank of the run whose id ends with 3fa1

[bold]ttlaunch logs latest --only role=worker --format json[/bold]   one JSON object per line

[bold]ttlaunch logs latest --raw[/bold]   also what moves the cursor or sets the title of the terminal

[bold]ttlaunch logs latest --to loki=http://loki:3100[/bold]   send the output to Loki; what is sent twice is there once
"""
_TICK_S = 0.1


def logs(
    run: NamedRun = "latest",
    *,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Continue until the run ends.")] = False,
    only: Only = None,
    stream: Annotated[
        str | None, typer.Option("--stream", metavar="stdout|stderr", help="Show only this stream.")
    ] = None,
    raw: Annotated[
        bool, typer.Option("--raw", help="Send control characters to a terminal too, as to a file or a pipe.")
    ] = False,
    to: Annotated[
        list[str] | None,
        typer.Option(
            "--to",
            metavar="SINK=PLACE",
            help="Send all lines to loki=URL, loki-file=DIR or, with metrics, otlp=URL. Repeatable.",
        ),
    ] = None,
    runs_dir: RunsDir = Path("runs"),
    form: OutputFormat = Format.FULL,
) -> None:
    """Show the output of all ranks in order of time, with equal lines of several ranks shown once.

    On a terminal, lines keep their colours, and characters that could do more are dropped or shown, unless `--raw` is given.
    All bytes of a rank are in `runs/RUN/logs/rank-N.stdout` and `rank-N.stderr`.
    """
    from ttlaunch.app.logs import chosen_ranks, chosen_streams, read_lines
    from ttlaunch.running.logs.fold import ShownOutput
    from ttlaunch.running.runs.facts import read_facts, with_joined

    if to:
        _send(run, to, is_chosen=bool(only or stream or raw), follow=follow, runs_dir=runs_dir, form=form)
        return
    streams = chosen_streams(stream)
    path = find_named_run(run, runs_dir=runs_dir)
    try:
        facts = read_facts(path)
        rows = list(with_joined(facts, path).ranks)
    except (OSError, ValueError) as error:
        raise unreadable_run(path, error) from error
    wanted: dict[str, Any] = {"only": chosen_ranks(only or (), rows), "streams": streams}
    _say_whose_output_is_elsewhere(row for row in rows[len(facts.ranks) :] if row.rank in wanted["only"])
    try:
        with interruptible(signal.SIGINT):
            if form is Format.JSON:
                for lines in read_lines(path, rows, **wanted, follow=follow):
                    print_lines(_json_line(line, rows) for line in lines)
            else:
                _show(ShownOutput(path, rows, **wanted), path, follow=follow, raw=raw)
    except KeyboardInterrupt:  # the user ends `--follow` by Ctrl-C
        return


def _say_whose_output_is_elsewhere(joined: "Iterable[RankRow]") -> None:
    """Say it of workers that have joined from other machines: a run gets their reports, but not what they print."""
    for row in joined:
        name = f"{contract.worker_name(row.rank)} ({shown(row.host)})"
        print_lines(
            [f"note: what {name} printed is where its `ttlaunch join` ran: `ttlaunch logs` there shows it"],
            to=sys.stderr,
        )


def _send(run: str, to: list[str], *, is_chosen: bool, follow: bool, runs_dir: Path, form: Format) -> None:
    from ttlaunch.app.sinks import parse_log_sinks
    from ttlaunch.cli.metrics import export_run

    if is_chosen:
        raise usage_error("`--to` sends all lines, and a choice of lines was given", "choose lines by a query instead")
    choices = parse_log_sinks(to, option="--to")
    path = find_named_run(run, runs_dir=runs_dir)
    try:
        with interruptible(signal.SIGINT):
            export_run(path, choices, follow=follow, beside=False, form=form)
    except KeyboardInterrupt:
        exit_with(contract.STATUS_INTERRUPTED)
    except (OSError, ValueError) as error:
        raise unreadable_run(path, error) from error


def _show(output: "ShownOutput", path: Path, *, follow: bool, raw: bool) -> None:
    from ttlaunch.running.runs.launcher import is_running

    while follow and is_running(path):
        print_output((line for _, line in output.poll()), to=sys.stdout, raw=raw)
        time.sleep(_TICK_S)
    print_output((line for _, line in output.finish(rest=not is_running(path))), to=sys.stdout, raw=raw)


def _json_line(line: "Line", rows: "list[RankRow]") -> str:
    row = rows[line.rank]
    record = {
        "rank": line.rank,
        "role": row.role,
        "host": row.host,
        "stream": line.stream,
        "time": line.time,
        "text": line.text.decode("utf-8", "replace"),
        "offset": line.offset,
        "length": line.length,
    }
    return json.dumps(with_schema(record, "log-line"))
