"""Serve the coordinator of one run: on a Unix socket for the user's own processes and, if the user asked for it, on a network with TLS."""

import contextlib
import ipaddress
import json
import re
import socket
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ttlaunch import contract
from ttlaunch.diagnostics.suggest import shown
from ttlaunch.records.coordinator import Fingerprint
from ttlaunch.running.agents.certificates import Authority, serving_context
from ttlaunch.running.membership.answers import Answer, Coordinator, Request, answer
from ttlaunch.running.membership.client import InvitationUrl, without_brackets
from ttlaunch.running.membership.http_service import HttpService, listen_on_unix_socket
from ttlaunch.running.membership.measure import MeasureError
from ttlaunch.running.membership.members import Members
from ttlaunch.running.runs.run_folder import RunFolder

_SOCKET = "coordinator.sock"
_PLACE = re.compile(r"(?:\[([0-9A-Fa-f:.]+)\]|([^\s:\[\]/]+)):([0-9]{1,5})\Z", re.ASCII)
_LAST_PORT = 65535


@dataclass(frozen=True)
class ListenAddress:
    """Where a run takes workers of other machines, as `--coordinator HOST:PORT` names it; port 0 is any free one."""

    host: str
    port: int


def parse_listen_address(text: str) -> ListenAddress | str:
    """Read the value of `--coordinator`; returns what is wrong with it, in one clause."""
    found = _PLACE.match(text)
    if found is None:
        return without_brackets(text) or "it is not HOST:PORT"
    if int(found[3]) > _LAST_PORT:
        return f"{found[3]} is no port"
    return ListenAddress(found[1] or found[2], int(found[3]))


def listen_on_network(address: ListenAddress) -> socket.socket:
    """Return a socket that is bound to this address and no other; `HttpService` lets it listen.

    Raises:
        OSError: The host has no address on this machine, or the port is taken.
    """
    family, kind, _, _, place = socket.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM)[0]
    listener = socket.socket(family, kind)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(place)
    except OSError:
        listener.close()
        raise
    return listener


class MeasuredOnce:
    """The fingerprint of this machine, measured in a thread from the start on: it takes seconds, and a run does not wait for it."""

    def __init__(self, measure: Callable[[], Fingerprint]) -> None:
        self._measure = measure
        self._found: Fingerprint | MeasureError | None = None
        self._thread = threading.Thread(target=self._work, name="fingerprint", daemon=True)
        self._thread.start()

    def _work(self) -> None:
        try:
            self._found = self._measure()
        except MeasureError as error:
            self._found = error

    def __call__(self) -> Fingerprint:
        """Return the fingerprint, after waiting for it.

        Raises:
            MeasureError: This machine cannot say.
        """
        self._thread.join()
        if self._found is None:
            raise MeasureError("it could not be measured")
        if isinstance(self._found, MeasureError):
            raise self._found
        return self._found


class _NoAuthority:
    """That of a run which no worker of another machine can join."""

    certificate = ""

    def sign(self, request: str, name: str) -> str:
        raise ValueError(f"this run makes no certificate for {name}, and none of {len(request)} characters")


@contextlib.contextmanager
def serving(
    members: Members,
    *,
    described: Mapping[str, Any],
    fingerprint: Callable[[], Fingerprint],
    authority: Authority | None,
    folder: RunFolder,
    scratch: Path,
    network: tuple[ListenAddress, socket.socket] | None = None,
    lease_s: float = contract.LEASE_S,
) -> Iterator[Coordinator]:
    """Answer requests about a run's workers for the time of the context.

    Args:
        members: The membership of the run.
        described: What joiners learn of the run: `recipe`, `layout`, `role`, `config` and `elastic` of `RunDescription`.
        fingerprint: Returns this machine's; may wait, and may raise `MeasureError`.
        authority: Signs the certificates of workers, and that of the service; None if there is no network.
        folder: The run's folder, in which a file says where the service listens.
        scratch: The run's private folder, in which the Unix socket is.
        network: Where workers of other machines join, and the socket that `listen_on_network` returned; None: they cannot.
        lease_s: How long workers may hear nothing.
    """
    assert network is None or authority is not None, "a network needs TLS"  # noqa: S101 - the caller has both
    url = None if network is None or authority is None else _url(network, authority)
    run = {"run_id": folder.run_id, **described, "url": url}
    coordinator = Coordinator(members, run, fingerprint, authority or _NoAuthority(), lease_s=lease_s)

    def answered(request: Request) -> Answer:
        try:
            return answer(request, coordinator)
        except MeasureError as error:
            return Answer(
                503, {"error": f"the run's machine cannot say what a worker must have in common with it: {error}"}
            )

    path = scratch / _SOCKET
    with contextlib.ExitStack() as open_services:
        open_services.enter_context(HttpService(listen_on_unix_socket(str(path)), answered))
        if network is not None and authority is not None:
            names = _names(*network)
            tls = serving_context(authority.issue(names))
            open_services.enter_context(HttpService(network[1], answered, tls=tls))
        place = {"socket": str(path), "url": url}
        folder.file(contract.COORDINATOR_FILE).write_text(json.dumps(place) + "\n", encoding="utf-8")
        yield coordinator


def _url(network: tuple[ListenAddress, socket.socket], authority: Authority) -> str:
    address, listener = network
    return str(InvitationUrl(_reachable(address.host), listener.getsockname()[1], authority.sha256))


def _reachable(host: str) -> str:
    """Return the host of an invitation: this machine's name where the user listens on all of its addresses."""
    with contextlib.suppress(ValueError):
        if ipaddress.ip_address(host).is_unspecified:
            return socket.gethostname()
    return host


def _names(address: ListenAddress, listener: socket.socket) -> list[str]:
    """Return the names of the service's certificate: workers check the first, and other clients the address that they use."""
    own = str(listener.getsockname()[0]).partition("%")[0]
    return list(dict.fromkeys([contract.COORDINATOR_NAME, shown(_reachable(address.host), longest=250), own]))
