"""Look at the workers of an elastic run from another process of the same user, invite further ones, and have workers leave."""

import re
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import TypeVar

from ttlaunch import contract
from ttlaunch.app.coordinator_problems import no_answer, refused
from ttlaunch.app.named_run import read_launcher_here, unreadable_run
from ttlaunch.diagnostics import Diagnostic, LaunchError, shown, usage_error
from ttlaunch.records.coordinator import (
    CoordinatorPlace,
    GivenInvitation,
    Invitations,
    KnownInvitation,
    Leaving,
    ListedWorker,
    RevokedInvitation,
    Workers,
)
from ttlaunch.records.parser import BadRecord, read
from ttlaunch.running.membership.client import CoordinatorClient, NoAnswerError, RefusedError, client_on_unix_socket
from ttlaunch.running.runs.files import read_file

T = TypeVar("T")
_WORKER, _INVITATION = re.compile(r"worker-[0-9]{1,9}"), re.compile(r"[0-9a-f]{4,64}")
_LISTENS = (
    "`ttlaunch run RECIPE --elastic MIN:MAX --coordinator HOST:PORT` starts a run that takes workers of other machines"
)


def list_workers(path: Path) -> tuple[ListedWorker, ...]:
    """Return all workers that a run has, or has had; `path` is its folder.

    Raises:
        LaunchError: The run has no coordinator that answers.
    """
    return _ask(path, lambda client: client.ask(Workers, "GET", "/workers")).workers


def remove_worker(path: Path, worker: str) -> int:
    """Have a worker leave at the next boundary of a step; returns the last step in which it takes part.

    Raises:
        LaunchError: There is no such worker, or it cannot leave now.
    """
    name = contract.worker_name(int(worker)) if worker.isascii() and worker.isdecimal() and len(worker) <= 4 else worker  # noqa: PLR2004 - digits of a number
    if not _WORKER.fullmatch(name):
        hint = "`ttlaunch workers RUN` lists the workers, such as `worker-0003`, or `3`"
        raise usage_error(f"`{shown(worker)}` is no worker", hint)
    return _ask(path, lambda client: client.ask(Leaving, "DELETE", f"/workers/{name}")).leaves_after_step


def invite_worker(path: Path, valid_s: float) -> GivenInvitation:
    """Make a token by which one worker of another machine may join within so many seconds, at most an hour.

    Raises:
        LaunchError: The run takes no workers of other machines.
    """
    if _place(path).url is None:
        message = f"the run {path.name} takes no workers of other machines: it listens on no network"
        raise LaunchError([Diagnostic("R086", message, hints=(_LISTENS,))])
    body = {"valid_s": valid_s}
    return _ask(path, lambda client: client.ask(GivenInvitation, "POST", "/invitations", body=body))


def list_invitations(path: Path) -> tuple[KnownInvitation, ...]:
    """Return all invitations of a run, without their tokens.

    Raises:
        LaunchError: The run has no coordinator that answers.
    """
    return _ask(path, lambda client: client.ask(Invitations, "GET", "/invitations")).invitations


def revoke_invitation(path: Path, identifier: str) -> RevokedInvitation:
    """Make the token of an invitation useless; a worker that has joined with it stays.

    Raises:
        LaunchError: There is no such invitation.
    """
    if not _INVITATION.fullmatch(identifier):
        hint = "`ttlaunch workers RUN --format json` lists them"
        raise usage_error(f"`{shown(identifier)}` is no invitation", hint)
    return _ask(path, lambda client: client.ask(RevokedInvitation, "DELETE", f"/invitations/{identifier}"))


def _ask(path: Path, question: Callable[[CoordinatorClient], T]) -> T:
    place = _place(path)
    with closing(client_on_unix_socket(place.socket)) as client:
        try:
            return question(client)
        except NoAnswerError as error:
            if not Path(place.socket).exists():
                raise LaunchError([_ended(path)]) from error
            raise LaunchError([no_answer(error, place.socket)]) from error
        except RefusedError as error:
            raise LaunchError([refused(error)]) from error


def _place(path: Path) -> CoordinatorPlace:
    """Read where a run's coordinator listens."""
    read_launcher_here(path, "workers")
    data = read_file(path / contract.COORDINATOR_FILE)
    if data is None:
        over = (path / contract.REPORT_FILE).is_file()
        message = f"the run {path.name} has no coordinator: only elastic runs have workers that come and go"
        raise LaunchError([_ended(path) if over else Diagnostic("R086", message, hints=(_LISTENS,))])
    place = read(CoordinatorPlace, data)
    if isinstance(place, BadRecord):
        raise unreadable_run(path, ValueError(f"{contract.COORDINATOR_FILE}: {place.reason}"))
    return place


def _ended(path: Path) -> Diagnostic:
    hint = f"`ttlaunch report {path.name}` says how"
    return Diagnostic("R086", f"the run {path.name} has ended, and has no workers any more", hints=(hint,))
