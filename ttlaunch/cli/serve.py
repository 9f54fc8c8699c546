"""`ttlaunch serve`: answer over HTTP with the model of a run, and have a page to talk to it."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from ttlaunch.app.execute import RunOptions, make_ready, marks_of_command
from ttlaunch.cli.console import exit_with, print_lines
from ttlaunch.cli.dialogue import TerminalDialogue
from ttlaunch.cli.options import On, OutputFormat, Overrides, RunsDir, Verbose
from ttlaunch.diagnostics import Format

if TYPE_CHECKING:
    from collections.abc import Callable

    from ttlaunch.app.door import DoorOptions, OpenPorts
    from ttlaunch.app.outcome import Outcome
    from ttlaunch.app.serve import ServeOptions
    from ttlaunch.app.supervisor_process import Begun

EXAMPLES = """\
[bold]ttlaunch serve latest[/bold]   talk to the newest checkpoint of all runs at http://127.0.0.1:5050

[bold]ttlaunch serve latest --ranks 2 --split columns[/bold]   two ranks share every matrix; the texts are the same

[bold]ttlaunch serve 8f3a --restart 3[/bold]   open texts go on after a rank was killed

[bold]ttlaunch serve latest --api-port 0 --port 0 -d[/bold]   at any free ports, in the background; `stop` ends it

[bold]ttlaunch serve latest --host 10.0.0.5 --key-file key[/bold]   for others, who need the key
"""


def serve(
    run: Annotated[str, typer.Argument(metavar="latest|RUN|PATH", help="A run, or one of its checkpoints.")] = "latest",
    *,
    ranks: Annotated[int, typer.Option("--ranks", min=1, metavar="N", help="Ranks that share the model.")] = 1,
    split: Annotated[
        Literal["auto", "stages", "columns"],
        typer.Option(
            "--split", help="What each rank has: blocks, or columns of matrices; auto: blocks, if they suffice."
        ),
    ] = "auto",
    exact: Annotated[
        Literal["auto", "on", "off"],
        typer.Option(
            "--exact", help="The bits of training: auto: where possible; on: or refuse; off: faster, without."
        ),
    ] = "auto",
    port: Annotated[
        int, typer.Option("--port", min=0, max=65535, metavar="N", help="Port of the chat page; 0: any free one.")
    ] = 5050,
    api_port: Annotated[
        int, typer.Option("--api-port", min=0, max=65535, metavar="N", help="Port of the API; 0: any free one.")
    ] = 8080,
    host: Annotated[
        str, typer.Option("--host", metavar="ADDRESS", help="Where to listen; others than this machine need a key.")
    ] = "127.0.0.1",
    allow_host: Annotated[
        list[str] | None,
        typer.Option("--allow-host", metavar="NAME", help="A further name by which clients call. Repeatable."),
    ] = None,
    key_file: Annotated[
        Path | None,
        typer.Option("--key-file", metavar="FILE", help="The clients' key (mode 0600); else $TTLAUNCH_SERVE_KEY."),
    ] = None,
    max_streams: Annotated[
        int, typer.Option("--max-streams", min=1, max=64, metavar="N", help="Texts that are computed at once.")
    ] = 8,
    max_waiting: Annotated[
        int, typer.Option("--max-waiting", min=0, max=4096, metavar="N", help="Texts that may wait for that.")
    ] = 32,
    max_context: Annotated[
        int | None,
        typer.Option("--max-context", min=2, metavar="N", help="Most tokens of a text; unless given, as in training."),
    ] = None,
    restart: Annotated[
        int, typer.Option("--restart", min=0, metavar="N", help="Start ranks again up to N times; open texts go on.")
    ] = 0,
    private: Annotated[
        bool, typer.Option("--private", help="Receipts have a hash of the prompt instead of the prompt.")
    ] = False,
    on: On = "local",
    overrides: Overrides = None,
    runs_dir: RunsDir = Path("runs"),
    detach: Annotated[
        bool, typer.Option("--detach", "-d", help="Serve in the background and return; `stop` ends it.")
    ] = False,
    form: OutputFormat = Format.FULL,
    verbose: Verbose = False,
) -> None:
    """Answer over HTTP with the model of a run, as it was trained, and have a page to talk to it.

    The model computes the same logits as in training, to the bit, alone or beside others, so equal seeds give equal texts with any
    number of ranks.
    """
    from ttlaunch.app.door import DoorOptions, described
    from ttlaunch.app.serve import ServeOptions

    how = ServeOptions(
        on=on,
        ranks=ranks,
        split=None if split == "auto" else split,
        max_streams=max_streams,
        max_waiting=max_waiting,
        max_context=max_context,
        exact=exact,
        overrides=tuple(overrides or ()),
    )
    door = DoorOptions(host, api_port, port, key_file, tuple(allow_host or ()), is_private=private)
    dialogue = TerminalDialogue(form, verbose=verbose)
    work, ports, world_size = _prepared(run, how, door, runs_dir=runs_dir, restart=restart, dialogue=dialogue)
    from ttlaunch.cli.run import start_and_watch

    def announce() -> None:
        lines = described(ports.urls)
        ports.close()
        print_lines(lines, to=sys.stdout if form is Format.FULL else sys.stderr)

    chosen = range(world_size)
    exit_with(start_and_watch(work, chosen, detach=detach, form=form, verbose=verbose, announce=announce))


def _prepared(
    run: str,
    how: "ServeOptions",
    door_options: "DoorOptions",
    *,
    runs_dir: Path,
    restart: int,
    dialogue: TerminalDialogue,
) -> "tuple[Callable[[Begun], list[Outcome]], OpenPorts, int]":
    """Check everything, and return what a supervisor does, the door's ports, and the number of ranks."""
    from ttlaunch.app.door import open_ports, serving_door, telling
    from ttlaunch.app.prepare_run import prepare
    from ttlaunch.app.restarts import run_with_restarts
    from ttlaunch.app.serve import HANG_TIMEOUT_S, find_served, refuse_other_hosts

    marks = marks_of_command()
    spec, found = find_served(run, how, runs_dir=runs_dir, working_folder=Path.cwd())
    dialogue.warn(found)
    prepared = prepare(spec, dialogue)
    refuse_other_hosts(prepared)
    ports = open_ports(door_options)
    options = RunOptions(spec.runs_dir, hang_timeout_s=HANG_TIMEOUT_S, marks=marks)
    ready = make_ready(prepared, options, dialogue)

    def work(begun: "Begun") -> "list[Outcome]":
        with serving_door(ports, options) as (door, answering):
            told = telling(door, begun)
            return run_with_restarts(
                prepared, answering, dialogue, most=restart, ready=ready, begun=told, ended=door.ended
            )

    return work, ports, prepared.plan.world_size
