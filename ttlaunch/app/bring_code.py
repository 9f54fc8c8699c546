"""What `sync` and `run` share: ask before sending gigabytes, send, and say which host could not take the code."""

from collections.abc import Sequence
from typing import Any

from ttlaunch.app.dialogue import Dialogue
from ttlaunch.diagnostics import Blame, Diagnostic
from ttlaunch.diagnostics.launch_error import LaunchError
from ttlaunch.errors import HostError, SyncError
from ttlaunch.hosts.doctor.troubles import explain_troubles
from ttlaunch.hosts.sync.release import Release
from ttlaunch.hosts.sync.report import LARGEST_UNASKED_BYTES, check_size, check_synced
from ttlaunch.hosts.sync.results import Outcome
from ttlaunch.hosts.sync.send import sync_release
from ttlaunch.hosts.sync.send_buffer import SourceChangedError
from ttlaunch.hosts.transport.transport import Transport
from ttlaunch.spec.topology.model import Topology


def guard_size(
    release: Release,
    transports: Sequence[Transport],
    options: dict[str, Any],
    said: list[Diagnostic],
    dialogue: Dialogue,
) -> None:
    """Ask before sending gigabytes. `options` are those of `sync_release`.

    Raises:
        LaunchError: The answer was no, or nobody can be asked.
    """
    most = len(transports) * (release.bytes + sum(item.size for item in options["data"]))
    if most <= LARGEST_UNASKED_BYTES:
        return
    too_much = check_size(sync_release(transports, release=release, dry_run=True, **options))
    if too_much is None:
        return
    agrees = dialogue.agrees(too_much, ask="send it?")
    if agrees is None:
        raise LaunchError([*said, too_much])
    if not agrees:
        raise LaunchError([too_much], was_shown=True)


def bring_code(
    transports: Sequence[Transport],
    release: Release,
    said: list[Diagnostic],
    options: dict[str, Any],
    dialogue: Dialogue,
) -> Outcome:
    """Send the release to all hosts.

    Raises:
        LaunchError: A file changes faster than it can be read.
    """
    try:
        with dialogue.sending([transport.host for transport in transports]) as on_progress:
            return sync_release(transports, release=release, on_progress=on_progress, **options)
    except SourceChangedError as error:
        hints = (f"put `{error.name}` into .ttlaunchignore, or wait until it is written",)
        raise LaunchError(
            [*said, Diagnostic("S005", f"{error.name} changes all the time", hints=hints, blame=Blame.CODE_SYNC)]
        ) from error


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
