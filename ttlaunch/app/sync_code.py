"""Send code and texts to every host of a cluster, for `ttlaunch sync`, and before a run on hosts starts."""

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from ttlaunch.app.dialogue import Dialogue
from ttlaunch.app.reach import in_background, open_transports, reach_hosts
from ttlaunch.app.resolve import ResolvedSpec
from ttlaunch.diagnostics import Blame, Diagnostic, LaunchError
from ttlaunch.errors import HostError, SyncError
from ttlaunch.hosts.doctor.troubles import explain_troubles
from ttlaunch.hosts.sync.data import DataItem, data_item
from ttlaunch.hosts.sync.release import Release, make_release
from ttlaunch.hosts.sync.report import LARGEST_UNASKED_BYTES, check_size, check_synced
from ttlaunch.hosts.sync.results import Outcome
from ttlaunch.hosts.sync.send import sync_release
from ttlaunch.hosts.sync.send_buffer import SourceChangedError
from ttlaunch.hosts.transport.pushed import start_interpreter
from ttlaunch.hosts.transport.transport import CONNECT_S, Process, Transport
from ttlaunch.spec.topology.model import Topology


def sync_project(
    found: ResolvedSpec, dialogue: Dialogue, *, folder: Path | None, keep: int, asks: bool, dry_run: bool
) -> tuple[Outcome, list[Diagnostic]]:
    """Copy a project, and the recipe and text that were named, to every host of a cluster.

    Args:
        found: The resolved cluster, with the recipe if one was named.
        dialogue: Shows progress, and asks the user before gigabytes are sent.
        folder: The project; None for the repository around the current folder.
        keep: How many releases stay on a host.
        asks: Whether to ask before gigabytes are sent.
        dry_run: Whether to ask hosts only what they lack.

    Raises:
        LaunchError: The description has errors, files cannot be read, or a host cannot be reached.
    """
    if not found.ok or found.topology is None:
        raise LaunchError(found.diagnostics)
    data = found.choice.data if found.choice is not None else None
    interpreters: dict[str, Future[Process]] = {}
    with _read_and_reach(found, found.topology, interpreters, folder=folder, dialogue=dialogue) as (
        release,
        transports,
        problems,
    ):
        return sync_code(
            transports,
            release,
            topology=found.topology,
            data=[data_item(data)] if data is not None else [],
            found=[*found.diagnostics, *problems],
            dialogue=dialogue,
            keep=keep,
            asks=asks,
            dry_run=dry_run,
            interpreters=interpreters,
        )


@contextmanager
def _read_and_reach(
    found: ResolvedSpec,
    topology: Topology,
    interpreters: dict[str, "Future[Process]"],
    *,
    folder: Path | None,
    dialogue: Dialogue,
) -> Iterator[tuple[Release, Sequence[Transport], list[Diagnostic]]]:
    """Read the files while connecting to the hosts, and start an interpreter on each host that is connected."""
    recipe = found.choice.folder if found.choice is not None else None
    read = [0, 0]

    def note(files: int, size: int) -> None:
        read[:] = files, size

    def prepare(host: Transport) -> None:
        interpreters[host.host] = in_background(
            lambda: start_interpreter(host, pythons=pythons_of(topology), timeout_s=CONNECT_S)
        )

    open_transports(topology)  # imports the SSH library now, because that takes longer while files are being read
    # Reading and hashing the project overlaps with connecting; neither needs the other.
    made = in_background(lambda: make_release(Path.cwd(), folder=folder, recipe=recipe, on_progress=note))
    transports = reach_hosts(topology, dialogue, then=prepare)
    try:
        dialogue.reading(made, read)
        release, problems = made.result()
        if release is None:
            raise LaunchError([*found.diagnostics, *problems])
        yield release, transports, problems
    finally:
        for transport in transports:
            transport.close()


def pythons_of(topology: Topology) -> Sequence[str]:
    """Return the interpreter that the cluster's file names in a list, or an empty list."""
    return [topology.cluster.python] if topology.cluster.python else []


def sync_code(
    transports: Sequence[Transport],
    release: Release,
    *,
    topology: Topology,
    data: Sequence[DataItem],
    found: Sequence[Diagnostic],
    dialogue: Dialogue,
    keep: int = 3,
    asks: bool = True,
    dry_run: bool = False,
    interpreters: Mapping[str, "Future[Process]"] | None = None,
) -> tuple[Outcome, list[Diagnostic]]:
    """Send a release and texts to all hosts.

    Args:
        transports: The hosts.
        release: The release to send.
        topology: The cluster's topology, with the folder for releases on the hosts.
        data: The texts and checkpoints to send.
        found: The diagnostics so far.
        dialogue: Shows progress, and asks the user before gigabytes are sent.
        keep: How many releases stay on a host.
        asks: Whether to ask before gigabytes are sent.
        dry_run: Whether to ask hosts only what they lack.
        interpreters: The interpreters that are already being started, by host.

    Returns:
        The result of each host, and `found` with a diagnostic for every host that could not receive the code.

    Raises:
        LaunchError: A file changes faster than it can be read, or the answer to the question was no.
    """
    pythons, remote_folder = pythons_of(topology), topology.cluster.remote_folder
    send = partial(sync_release, transports, release=release, data=data, keep=keep)
    send = partial(send, remote_folder=remote_folder, pythons=pythons)
    most = len(transports) * (release.bytes + sum(item.size for item in data))
    if asks and not dry_run and most > LARGEST_UNASKED_BYTES:
        _ask_about_size(send(dry_run=True), found, dialogue)  # hosts may have most of it already
    try:
        with dialogue.sending([transport.host for transport in transports]) as on_progress:
            outcome = send(on_progress=on_progress, dry_run=dry_run, interpreters=interpreters)
    except SourceChangedError as error:
        hints = (f"put `{error.name}` into .ttlaunchignore, or wait until it is written",)
        changed = Diagnostic("S005", f"{error.name} changes all the time", hints=hints, blame=Blame.CODE_SYNC)
        raise LaunchError([*found, changed]) from error
    lost = [one for one in outcome.hosts.values() if isinstance(one, HostError) and not isinstance(one, SyncError)]
    unreached = explain_troubles(lost, topology=topology) if lost else []
    synced = [one for one in check_synced(outcome) if one not in found]  # a release that was made again repeats some
    return outcome, [*found, *unreached, *synced]


def _ask_about_size(outcome: Outcome, found: Sequence[Diagnostic], dialogue: Dialogue) -> None:
    """Ask before gigabytes are sent.

    Raises:
        LaunchError: The answer was no, or nobody can be asked.
    """
    too_much = check_size(outcome)
    if too_much is None:
        return
    agrees = dialogue.agrees(too_much, ask="send it?")
    if agrees is None:
        raise LaunchError([*found, too_much])
    if not agrees:
        raise LaunchError([too_much], was_shown=True)
