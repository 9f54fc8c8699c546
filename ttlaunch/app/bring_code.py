"""What `sync` and `run` share: wait for the files to be read, ask before sending gigabytes, send, show how far it is."""

import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, wait
from contextlib import contextmanager
from typing import Any

import typer

from ttlaunch.cli.console import exit_status, leave, refuse, show_diagnostics, use_colour
from ttlaunch.diagnostics import Diagnostic, Format
from ttlaunch.errors import HostError, SyncError
from ttlaunch.hosts.doctor.troubles import explain_troubles
from ttlaunch.hosts.sync.release import Release
from ttlaunch.hosts.sync.report import LARGEST_UNASKED_BYTES, check_size, check_synced
from ttlaunch.hosts.sync.send import Outcome, Progress, SourceChangedError, sync_release
from ttlaunch.hosts.sync.sizes import render_size
from ttlaunch.hosts.transport.transport import Transport
from ttlaunch.spec.topology.model import Topology

_SHOW_AFTER_S = 1.0


def wait_for_files(made: Future[Any], read: Sequence[int], *, form: Format) -> None:
    """Wait for the files to be read; after a second a terminal shows how far that is."""
    if wait([made], timeout=_SHOW_AFTER_S).done or form is Format.JSON or not sys.stderr.isatty():
        return
    from rich.console import Console

    with Console(stderr=True).status("reading files") as status:
        while not wait([made], timeout=0.2).done:
            status.update(f"reading files: {read[0]}, {render_size(read[1])}")


def guard_size(
    release: Release,
    transports: Sequence[Transport],
    options: dict[str, Any],
    said: list[Diagnostic],
    *,
    form: Format,
    verbose: bool,
) -> None:
    """Ask before sending gigabytes, or refuse where nobody can be asked. `options` are those of `sync_release`."""
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


def bring_code(
    transports: Sequence[Transport],
    release: Release,
    said: list[Diagnostic],
    options: dict[str, Any],
    *,
    form: Format,
) -> Outcome:
    """Send the release to all hosts, with progress; leaves if a file changes faster than it can be read."""
    try:
        with show_progress(transports, form=form) as on_progress:
            return sync_release(transports, release=release, on_progress=on_progress, **options)
    except SourceChangedError as error:
        hints = (f"put `{error.name}` into .ttlaunchignore, or wait until it is written",)
        refuse([*said, Diagnostic("S005", f"{error.name} changes all the time", hints=hints)], form=form)


def explain_outcome(outcome: Outcome, topology: Topology) -> list[Diagnostic]:
    """Every host that could not take the code in, whatever kept it."""
    lost = [
        answer
        for answer in outcome.hosts.values()
        if isinstance(answer, HostError) and not isinstance(answer, SyncError)
    ]
    if not lost:
        return check_synced(outcome)
    return [*explain_troubles(lost, topology=topology), *check_synced(outcome)]


@contextmanager
def show_progress(transports: Sequence[Transport], *, form: Format) -> Iterator[Callable[[Progress], None] | None]:
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

        def advance(progress: Progress) -> None:
            visible = progress.total > 0
            bars.update(tasks[progress.host], completed=progress.sent, total=progress.total, visible=visible)

        yield advance
