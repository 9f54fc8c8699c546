"""`ttlaunch serve`: answer over HTTP with the model of a run, and have a page to talk to it."""

import sys
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, NoReturn

import typer

from ttlaunch import contract
from ttlaunch.app.execute import RunOptions, make_ready, marks_of_command
from ttlaunch.cli.console import exit_with, print_lines
from ttlaunch.cli.dialogue import TerminalDialogue
from ttlaunch.cli.options import Exact, MaxContext, On, OutputFormat, Overrides, RunsDir, SharingRanks, Verbose
from ttlaunch.diagnostics import Format, shown, usage_error

if TYPE_CHECKING:
    from collections.abc import Callable

    from ttlaunch.app.door import OpenPorts
    from ttlaunch.app.newer_weights import NewerWeights
    from ttlaunch.app.outcome import Outcome
    from ttlaunch.app.prepare_run import PreparedRun
    from ttlaunch.app.run_spec import RunSpec
    from ttlaunch.app.serve import ServeOptions
    from ttlaunch.app.served_memory import ServedMemory
    from ttlaunch.app.supervisor_process import Begun

EXAMPLES = """\
[bold]ttlaunch serve latest[/bold]   talk to the newest checkpoint of all runs at http://127.0.0.1:5050

[bold]ttlaunch serve SmolLM2-135M-Instruct[/bold]   a folder that transformers saved, with its tokenizer and chat template

[bold]ttlaunch serve latest --ranks 2 --split columns[/bold]   two ranks share every matrix; the texts are the same

[bold]ttlaunch serve latest --follow[/bold]   talk to a run while it trains: new texts get its newest weights

[bold]ttlaunch serve 8f3a --restart 3[/bold]   open texts go on after a rank was killed

[bold]ttlaunch serve latest --api-port 0 --port 0 -d[/bold]   at any free ports, in the background; `stop` ends it

[bold]ttlaunch serve latest --max-streams 32 --dry-run[/bold]   how much memory it would take

[bold]ttlaunch serve latest --host 10.0.0.5 --key-file key[/bold]   for others, who need the key
"""


def serve(
    run: Annotated[
        str,
        typer.Argument(
            metavar="latest|RUN|PATH|FOLDER", help="A run, one of its checkpoints, or a folder of transformers."
        ),
    ] = "latest",
    *,
    ranks: SharingRanks = 1,
    split: Annotated[
        Literal["auto", "stages", "columns"],
        typer.Option(
            "--split", help="What each rank has: blocks, or columns of matrices; auto: blocks, if they suffice."
        ),
    ] = "auto",
    exact: Exact = "auto",
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
    max_context: MaxContext = None,
    restart: Annotated[
        int, typer.Option("--restart", min=0, metavar="N", help="Start ranks again up to N times; open texts go on.")
    ] = 0,
    follow: Annotated[
        bool, typer.Option("--follow", help="Load newer checkpoints of the run while it trains; open texts end before.")
    ] = False,
    private: Annotated[
        bool, typer.Option("--private", help="Receipts have a hash of the prompt instead of the prompt.")
    ] = False,
    on: On = "local",
    overrides: Overrides = None,
    runs_dir: RunsDir = Path("runs"),
    detach: Annotated[
        bool, typer.Option("--detach", "-d", help="Serve in the background and return; `stop` ends it.")
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Show the plan and its memory, and start nothing.")
    ] = False,
    form: OutputFormat = Format.FULL,
    verbose: Verbose = False,
) -> None:
    """Answer over HTTP with the model of a run, as it was trained, and have a page to talk to it.

    The model computes the same logits as in training, to the bit, alone or beside others, so equal seeds give equal texts with any
    number of ranks.
    """
    from ttlaunch.app.door import DoorOptions, check_door, described, open_ports
    from ttlaunch.app.serve import HANG_TIMEOUT_S, ServeOptions

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
    marks = marks_of_command()
    prepared, memory, newer = _prepared(run, how, runs_dir=runs_dir, dialogue=dialogue)
    if follow and newer is None:
        raise usage_error(f"`--follow` waits for checkpoints of a run, and {shown(run)} is a folder that nobody trains")
    if dry_run:
        check_door(door)
        _show(prepared, memory.described(follows=follow), form=form, dialogue=dialogue)
    ports = open_ports(door)
    options = RunOptions(runs_dir, hang_timeout_s=HANG_TIMEOUT_S, marks=marks)
    work = _work(prepared, ports, options, dialogue=dialogue, restart=restart, newer=newer, follow=follow)
    from ttlaunch.cli.run import start_and_watch

    def announce() -> None:
        lines = described(ports.urls)
        ports.close()
        print_lines(lines, to=sys.stdout if form is Format.FULL else sys.stderr)

    chosen = range(prepared.plan.world_size)
    exit_with(start_and_watch(work, chosen, detach=detach, form=form, verbose=verbose, announce=announce))


def _prepared(
    run: str, how: "ServeOptions", *, runs_dir: Path, dialogue: TerminalDialogue
) -> "tuple[PreparedRun, ServedMemory, NewerWeights | None]":
    """Check everything but the ports, and return the plan, what it takes, and what looks for newer weights of a run."""
    from ttlaunch.app.newer_weights import NewerWeights
    from ttlaunch.app.prepare_run import prepare
    from ttlaunch.app.serve import find_served
    from ttlaunch.app.served_memory import predict_memory, refuse_too_large

    spec, found = find_served(run, how, runs_dir=runs_dir, working_folder=Path.cwd())
    dialogue.warn(found)
    memory = predict_memory(spec)
    prepared = prepare(spec, dialogue)
    if prepared.is_here:  # other hosts are asked when the supervisor has reached them
        refuse_too_large(memory)

    def spec_of(folder: Path) -> "RunSpec":
        return find_served(str(folder), how, runs_dir=runs_dir, working_folder=Path.cwd())[0]

    return prepared, memory, NewerWeights(Path(spec.resume), spec_of) if spec.resume else None


def _show(prepared: "PreparedRun", remarks: list[str], *, form: Format, dialogue: TerminalDialogue) -> NoReturn:
    from ttlaunch.cli.plan import show_plan

    found = dialogue.warnings_as_json()
    show_plan(prepared.plan, form=form, remarks=remarks, diagnostics=found)
    exit_with(contract.STATUS_DONE)


def _work(
    prepared: "PreparedRun",
    ports: "OpenPorts",
    options: RunOptions,
    *,
    dialogue: TerminalDialogue,
    restart: int,
    newer: "NewerWeights | None",
    follow: bool,
) -> "Callable[[Begun], list[Outcome]]":
    """Return what a supervisor does."""
    from ttlaunch.app.door import serving_door, telling
    from ttlaunch.app.restarts import run_with_restarts

    ready = make_ready(prepared, options, dialogue) if prepared.is_here else None  # hosts are reached by the supervisor

    def work(begun: "Begun") -> "list[Outcome]":
        with serving_door(ports, options) as (door, answering):
            told = telling(door, begun, served=lambda: newer.served if newer else None)
            with newer.watched(door.retire) if newer and follow else nullcontext():
                return run_with_restarts(
                    prepared,
                    answering,
                    dialogue,
                    most=restart,
                    ready=ready,
                    begun=told,
                    ended=door.ended,
                    onward=newer.following if newer else lambda _: None,
                )

    return work
