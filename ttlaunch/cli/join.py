"""`ttlaunch join`: take part in a run that was started on another machine, with one worker on this one."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ttlaunch import contract
from ttlaunch.cli.console import exit_with, print_json, print_lines, show_diagnostics
from ttlaunch.cli.dialogue import TerminalDialogue
from ttlaunch.cli.options import OutputFormat, RunsDir
from ttlaunch.diagnostics import Diagnostic, Format, LaunchError, file_error, usage_error

if TYPE_CHECKING:
    from ttlaunch.app.join import Joined

EXAMPLES = """\
[bold]ttlaunch join 'https://10.0.0.1:7000#5f3a…'[/bold]   join the run of this invitation; asks for its token

[bold]ttlaunch join URL --token-file token --name alice[/bold]   with the token in a file, under a name for views

[bold]ttlaunch join URL --recipe my_recipe/ --data book.txt < token[/bold]   recipe and text lie elsewhere on this machine
"""
_LONGEST_TOKEN = 4096


def join(
    url: Annotated[
        str, typer.Argument(metavar="URL", help="The address that `ttlaunch workers RUN --invite` has printed.")
    ],
    *,
    token_file: Annotated[
        Path | None, typer.Option("--token-file", metavar="FILE", help="The file with the token; else standard input.")
    ] = None,
    name: Annotated[str, typer.Option("--name", metavar="NAME", help="What to call the worker in views.")] = "",
    recipe: Annotated[
        str | None,
        typer.Option(
            "--recipe", metavar="RECIPE", help="The run's recipe on this machine, if it is not found by its name."
        ),
    ] = None,
    data: Annotated[
        str | None, typer.Option("--data", metavar="FILE", help="The run's training text, if it lies elsewhere here.")
    ] = None,
    address: Annotated[
        str | None,
        typer.Option("--address", metavar="IP", help="Where other workers reach this machine; found by itself."),
    ] = None,
    again: Annotated[
        str | None,
        typer.Option(
            "--again",
            metavar="WORKER",
            help="Take part again as this worker, with its own token, RUN/worker.token, or with a new one if it has ended.",
        ),
    ] = None,
    runs_dir: RunsDir = Path("runs"),
    form: OutputFormat = Format.FULL,
) -> None:
    """Take part in a run of another machine with one worker on this machine, until the run ends or Ctrl-C."""
    token = _read_token(token_file)
    from ttlaunch.app.join import JoinRequest, join_run

    def report_progress(text: str) -> None:
        if form is not Format.JSON:
            print_lines([text], to=sys.stderr)

    request = JoinRequest(
        url, token, name=name, recipe=recipe, data=data, address=address, runs_dir=runs_dir, again=again
    )
    joined = join_run(request, TerminalDialogue(form), report_progress=report_progress)
    exit_with(_report(joined, form=form))


def _read_token(path: Path | None) -> str:
    """Read the token: it is on no command line, which other users of the machine can see."""
    try:
        if path is not None:
            with path.open("rb") as file:
                data = file.read(_LONGEST_TOKEN + 1)
        elif sys.stdin.isatty():
            from getpass import getpass

            data = getpass("token: ").encode()
        else:
            data = sys.stdin.buffer.read(_LONGEST_TOKEN + 1)
    except OSError as error:
        raise file_error(path or "standard input", error, verb="read") from error
    except EOFError:
        data = b""
    if len(data) > _LONGEST_TOKEN:
        where = path or "standard input"
        raise usage_error(f"{where} has more than {_LONGEST_TOKEN} bytes, which is no token", code="P080")
    return data.decode("utf-8", "replace").strip()


def _report(joined: "Joined", *, form: Format) -> int:
    """Print how the worker took part, and return the exit status."""
    from ttlaunch.app.run_diagnostics import run_diagnostics
    from ttlaunch.running.membership.taking_part import Outcome

    part, outcome = joined.participation, joined.outcome
    if part.outcome is Outcome.CUT_OFF:
        message = f"{joined.worker_id} does not take part in the run {joined.run_id} any more: {part.text}"
        hint = "the run goes on without it; `ttlaunch join` with a new token takes part again"
        raise LaunchError([Diagnostic("R084", message, hints=(hint,))], status=contract.STATUS_RANK_FAILED)
    found = run_diagnostics(outcome.report, outcome.facts, outcome.folder) if part.outcome is Outcome.FAILED else []
    status = {Outcome.FAILED: contract.STATUS_RANK_FAILED, Outcome.ENDED: contract.STATUS_INTERRUPTED}.get(
        part.outcome, contract.STATUS_DONE
    )
    if form is Format.JSON:
        content = {
            "run_id": joined.run_id,
            "worker_id": joined.worker_id,
            "outcome": str(part.outcome),
            "reason": part.text,
            "folder": str(outcome.folder.path),
            "diagnostics": [one.as_json() for one in found],
        }
        print_json(content, schema="join")
        return status
    show_diagnostics(found, form=form)
    said = {Outcome.DONE: "has finished with the run", Outcome.LEFT: "has left", Outcome.ENDED: "was ended here"}
    text = said.get(part.outcome, "has failed")
    reason = f" {part.text}" if part.text.startswith("after") else f": {part.text}" if part.text else ""
    print_lines([f"{joined.worker_id} {text}{reason}; its logs are in {outcome.folder.path}"])
    return status
