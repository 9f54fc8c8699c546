"""`ttlaunch workers`: the workers of an elastic run; invite others, and have workers leave."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ttlaunch.cli.console import print_json, print_lines, tabbed
from ttlaunch.cli.options import NamedRun, OutputFormat, RunsDir
from ttlaunch.cli.table import render_table
from ttlaunch.diagnostics import Format, render_duration, render_size, shown, usage_error

if TYPE_CHECKING:
    from ttlaunch.records.coordinator import GivenInvitation, ListedWorker

EXAMPLES = """\
[bold]ttlaunch workers latest[/bold]   who takes part in the newest run, and how far each worker is

[bold]ttlaunch workers latest --invite[/bold]   print the command and the token by which one worker of another machine joins

[bold]ttlaunch workers latest --remove worker-0003[/bold]   have a worker leave after its step

[bold]ttlaunch workers latest --revoke 5f3a9c01[/bold]   make a token useless that nobody has used yet
"""
_HEADINGS = ("worker", "rank", "state", "step", "loss", "tokens/s", "memory", "address", "name")
_RIGHT = {1, 3, 4, 5, 6}


def workers(
    run: NamedRun = "latest",
    *,
    remove: Annotated[
        str | None, typer.Option("--remove", metavar="WORKER", help="Have this worker leave after its step.")
    ] = None,
    invite: Annotated[
        bool, typer.Option("--invite", help="Print a token by which one worker of another machine may join.")
    ] = False,
    valid: Annotated[
        float | None, typer.Option("--valid", metavar="S", help="With --invite: for how many seconds; 600 by default.")
    ] = None,
    revoke: Annotated[
        str | None, typer.Option("--revoke", metavar="ID", help="Make the token of this invitation useless.")
    ] = None,
    runs_dir: RunsDir = Path("runs"),
    form: OutputFormat = Format.FULL,
) -> None:
    """List the workers of an elastic run, invite further ones, or have one leave."""
    from ttlaunch.app.named_run import find_named_run
    from ttlaunch.app.workers import invite_worker, list_invitations, list_workers, remove_worker, revoke_invitation

    if sum([remove is not None, invite, revoke is not None]) > 1:
        raise usage_error("`--remove`, `--invite` and `--revoke` exclude each other", "one command for each")
    if valid is not None and not invite:
        raise usage_error("`--valid` was given without `--invite`")
    if valid is not None and not 1 <= valid <= _LONGEST_VALID_S:
        raise usage_error(f"`--valid {valid:g}`: a token is valid for 1 to {_LONGEST_VALID_S} seconds")
    path = find_named_run(run, runs_dir=runs_dir)
    done: dict[str, Any] = {}
    if remove is not None:
        done["leaves_after_step"] = remove_worker(path, remove)
        lines = [f"{shown(remove)} leaves after step {done['leaves_after_step']}"]
    elif invite:
        made = invite_worker(path, _USUAL_VALID_S if valid is None else valid)
        done["invitation"] = vars(made)
        lines = _invitation(made, form=form)
    elif revoke is not None:
        used_by = revoke_invitation(path, revoke).used_by
        done["revoked"] = {"id": revoke, "used_by": used_by}
        lines = [f"invitation {revoke} is revoked" + ("" if used_by is None else "; its worker had joined, and stays")]
    else:
        found = list_workers(path)
        lines = _listed(found, form=form)
        done["workers"] = [_as_json(one) for one in found]
        if form is Format.JSON:
            done["invitations"] = [vars(one) for one in list_invitations(path)]
    if form is Format.JSON:
        print_json({"run_id": path.name, **done}, schema="workers")
    else:
        print_lines(lines)


_USUAL_VALID_S, _LONGEST_VALID_S = 600.0, 3600


def _invitation(made: "GivenInvitation", *, form: Format) -> list[str]:
    if form is Format.CONCISE:
        return [tabbed([made.id, made.url, made.token])]
    return [
        f"invitation {made.id}, for one worker within {render_duration(made.expires_in_s)}; on the other machine:",
        "",
        f"ttlaunch join '{made.url}'",
        "",
        f"It asks for the token: {made.token}",
    ]


def _listed(found: "tuple[ListedWorker, ...]", *, form: Format) -> list[str]:
    rows = [_row(one) for one in found]
    if form is Format.CONCISE:
        return [tabbed(row) for row in rows]
    return render_table([_HEADINGS, *rows], right=_RIGHT) if rows else ["the run has no worker yet"]


def _row(one: "ListedWorker") -> list[str]:
    place = "" if one.port is None else f"{one.ip_address}:{one.port}"
    return [
        shown(one.worker_id),
        "–" if one.rank is None else str(one.rank),
        shown(one.left or one.state),
        "" if one.step is None else str(one.step),
        "" if one.loss is None else f"{one.loss:.4f}",
        "" if one.tokens_per_s is None else f"{one.tokens_per_s:,.0f}",
        "" if one.memory_bytes is None else render_size(one.memory_bytes),
        shown(place),
        shown(one.name),
    ]


def _as_json(one: "ListedWorker") -> dict[str, Any]:
    return {name: getattr(one, name) for name in one.__annotations__}
