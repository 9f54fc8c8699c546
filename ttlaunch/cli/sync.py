"""`ttlaunch sync`: copy the project, the recipe and ttlaunch itself to every host, and say what went where."""

import os
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, wait
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from ttlaunch.cli.console import exit_status, leave, print_json, refuse, show_diagnostics, use_colour
from ttlaunch.cli.describe import Description, Request, describe
from ttlaunch.cli.options import (
    ConfigFile,
    Hostfile,
    On,
    OutputFormat,
    Overrides,
    RankBindings,
    Verbose,
    complete_recipes,
)
from ttlaunch.diagnostics import Diagnostic, Format

if TYPE_CHECKING:
    from ttlaunch.remote.transport import Transport
    from ttlaunch.sync.data import DataItem
    from ttlaunch.sync.release import Release
    from ttlaunch.sync.send import Outcome, Progress

EXAMPLES = """\
[bold]ttlaunch sync --on my_cluster[/bold]   the project around the current folder

[bold]ttlaunch sync pipeline_parallel --on my_cluster[/bold]   and the recipe, and its text

[bold]ttlaunch sync --on my_cluster --dry-run[/bold]   what would go where
"""

_SHOW_AFTER_S = 1.0
_T = TypeVar("_T")


def sync(
    recipe: Annotated[
        str | None,
        typer.Argument(
            metavar="[RECIPE]",
            help="Also copy this recipe and the text it trains on.",
            autocompletion=complete_recipes,
            show_default=False,
        ),
    ] = None,
    *,
    on: On = "local",
    folder: Annotated[
        Path | None,
        typer.Option(
            "--folder",
            metavar="DIR",
            help="The project; without it the git repository around the current folder, else that folder.",
            exists=True,
            file_okay=False,
        ),
    ] = None,
    config_file: ConfigFile = None,
    overrides: Overrides = None,
    hostfile: Hostfile = None,
    rank_bindings: RankBindings = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Ask the hosts what they lack and send nothing.")] = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Send more than 1.1 GB in all without asking.")] = False,
    keep: Annotated[int, typer.Option("--keep", min=1, metavar="N", help="Releases that stay on a host.")] = 3,
    form: OutputFormat = Format.FULL,
    verbose: Verbose = False,
) -> None:
    """Make the code equal on every host: only what changed travels, and a host has all of it or what it had before."""
    request = Request(
        target=recipe,
        on=on,
        config_file=config_file,
        overrides=overrides or (),
        hostfile=hostfile,
        rank_bindings=rank_bindings,
    )
    found = describe(request, working_folder=Path.cwd(), shell=os.environ)
    if not found.ok or found.topology is None:
        refuse(found.diagnostics, form=form, verbose=verbose)
    release, transports, said = _read_and_reach(found, folder, form=form, verbose=verbose)
    options = {"remote_folder": found.topology.cluster.remote_folder, "keep": keep, "data": _texts(found)}
    options["pythons"] = [found.topology.cluster.python] if found.topology.cluster.python else []
    try:
        if not dry_run and not yes:
            _guard(release, transports, options, said, form=form, verbose=verbose)
        outcome, said = _bring(transports, release, said, {**options, "dry_run": dry_run}, form=form)
    finally:
        for transport in transports:
            transport.close()
    said = said + _explained(outcome, found)
    show_diagnostics(said, form=form, verbose=verbose)
    _show(outcome, said, form=form)
    leave(exit_status(said))


def _read_and_reach(
    found: Description, folder: Path | None, *, form: Format, verbose: bool
) -> tuple["Release", list["Transport"], list[Diagnostic]]:
    """Read the files while the hosts are being reached."""
    from ttlaunch.cli.reach import reach_hosts
    from ttlaunch.remote.local import is_this_machine

    assert found.topology is not None  # noqa: S101 - checked by the caller
    if not all(is_this_machine(host.name) for host in found.topology.hosts):
        import ttlaunch.remote.ssh  # noqa: F401 - before files are read: while those wait for the disk, we connect

    from ttlaunch.sync.release import make_release

    recipe = found.choice.folder if found.choice is not None else None
    read = [0, 0]

    def note(files: int, size: int) -> None:
        read[:] = files, size

    made = _in_background(lambda: make_release(Path.cwd(), folder=folder, recipe=recipe, on_progress=note))
    transports = reach_hosts(found.topology, form=form, verbose=verbose)
    _wait(made, read, form=form)
    release, problems = made.result()
    if release is None:
        for transport in transports:
            transport.close()
        refuse([*found.diagnostics, *problems], form=form, verbose=verbose)
    return release, transports, [*found.diagnostics, *problems]


def _in_background(work: Callable[[], _T]) -> "Future[_T]":
    """Start some work whose thread cannot keep the program alive."""
    future: Future[_T] = Future()

    def attempt() -> None:
        try:
            future.set_result(work())
        except BaseException as error:  # noqa: BLE001 - raised where the result is asked for
            future.set_exception(error)

    threading.Thread(target=attempt, daemon=True).start()
    return future


def _wait(made: "Future[Any]", read: Sequence[int], *, form: Format) -> None:
    """Wait for the files to be read; after a second a terminal shows how far that is."""
    from ttlaunch.sync.sizes import render_size

    if wait([made], timeout=_SHOW_AFTER_S).done or form is Format.JSON or not sys.stderr.isatty():
        return
    from rich.console import Console

    with Console(stderr=True).status("reading files") as status:
        while not wait([made], timeout=0.2).done:
            status.update(f"reading files: {read[0]}, {render_size(read[1])}")


def _texts(found: Description) -> list["DataItem"]:
    from ttlaunch.sync.data import data_item

    data = found.choice.data if found.choice is not None else None
    return [data_item(data)] if data is not None else []


def _guard(
    release: "Release",
    transports: Sequence["Transport"],
    options: dict[str, Any],
    said: list[Diagnostic],
    *,
    form: Format,
    verbose: bool,
) -> None:
    """Ask before sending gigabytes, or refuse where nobody can be asked."""
    from ttlaunch.sync.report import LARGEST_UNASKED_BYTES, check_size
    from ttlaunch.sync.send import sync_release

    most = len(transports) * (release.bytes + sum(item.size for item in options["data"]))
    if most <= LARGEST_UNASKED_BYTES:
        return
    too_much = check_size(sync_release(transports, release=release, dry_run=True, **options))
    if too_much is None:
        return
    if form is Format.JSON or not (sys.stdin.isatty() and sys.stderr.isatty()):
        refuse([*said, too_much], form=form, verbose=verbose)
    show_diagnostics([too_much], form=form)
    if not typer.confirm("send it?", err=True):
        leave(exit_status([too_much]))


def _bring(
    transports: Sequence["Transport"],
    release: "Release",
    said: list[Diagnostic],
    options: dict[str, Any],
    *,
    form: Format,
) -> tuple["Outcome", list[Diagnostic]]:
    from ttlaunch.sync.send import SourceChangedError, sync_release

    try:
        with show_progress(transports, form=form) as on_progress:
            return sync_release(transports, release=release, on_progress=on_progress, **options), said
    except SourceChangedError as error:
        hints = (f"put `{error.name}` into .ttlaunchignore, or wait until it is written",)
        refuse([*said, Diagnostic("S005", f"{error.name} changes all the time", hints=hints)], form=form)


def _explained(outcome: "Outcome", found: Description) -> list[Diagnostic]:
    """Every host that could not take the code in, whatever kept it."""
    from ttlaunch.errors import HostError, SyncError
    from ttlaunch.sync.report import check_synced

    lost = [
        answer
        for answer in outcome.hosts.values()
        if isinstance(answer, HostError) and not isinstance(answer, SyncError)
    ]
    if not lost:
        return check_synced(outcome)
    from ttlaunch.doctor.troubles import explain_troubles

    assert found.topology is not None  # noqa: S101 - checked before
    return [*explain_troubles(lost, topology=found.topology), *check_synced(outcome)]


@contextmanager
def show_progress(transports: Sequence["Transport"], *, form: Format) -> Iterator[Callable[["Progress"], None] | None]:
    """What `sync_release` calls; on a terminal it draws a bar for each host that lacks something."""
    if form is Format.JSON or not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, TextColumn, TransferSpeedColumn
    from rich.progress import Progress as Bars

    columns = TextColumn("{task.description}"), BarColumn(bar_width=30), DownloadColumn(), TransferSpeedColumn()
    console = Console(stderr=True, no_color=not use_colour(sys.stderr))
    with Bars(*columns, console=console, transient=True) as bars:
        tasks = {transport.host: bars.add_task(transport.host, total=None, visible=False) for transport in transports}

        def advance(progress: "Progress") -> None:
            visible = progress.total > 0
            bars.update(tasks[progress.host], completed=progress.sent, total=progress.total, visible=visible)

        yield advance


def _show(outcome: "Outcome", said: Sequence[Diagnostic], *, form: Format) -> None:
    from ttlaunch.cli.sync_result import as_json, as_lines, as_table

    if form is Format.JSON:
        print_json({**as_json(outcome), "diagnostics": [diagnostic.as_json() for diagnostic in said]})
    else:
        lines = as_lines(outcome) if form is Format.CONCISE else as_table(outcome)
        sys.stdout.writelines(f"{line}\n" for line in lines)
