"""Let an elastic run answer questions about its workers and, where the user asked for it, take workers of other machines."""

import ipaddress
import json
import socket
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import asdict, field
from typing import TYPE_CHECKING, NoReturn

from ttlaunch import contract
from ttlaunch.diagnostics import Blame, Diagnostic, LaunchError, shown
from ttlaunch.planning.launch_plan import LaunchPlan, RecipeProgram
from ttlaunch.quick_dataclass import dataclass
from ttlaunch.running.membership.service import (
    ListenAddress,
    MeasuredOnce,
    listen_on_network,
    parse_listen_address,
    serving,
)

if TYPE_CHECKING:
    from pathlib import Path

    from ttlaunch.app.prepare_run import PreparedRun
    from ttlaunch.records.coordinator import Fingerprint
    from ttlaunch.running.agents.certificates import Authority
    from ttlaunch.running.membership.outside import OutsideWorkers
    from ttlaunch.running.runs.run_folder import RunFolder

_OPTION = "--coordinator"
_EXAMPLE = "`--coordinator 10.0.0.1:7000` takes workers at this address of this machine"
_GOODBYE_S = 5.0


@dataclass(frozen=True)
class OpenNetwork:
    """Where a run takes workers of other machines.

    Attributes:
        listener: Bound to the address; nobody listens on it yet.
        authority: That of the run.
        variables: What the run's own ranks need so that workers of other machines reach them: ports and certificates.
    """

    address: ListenAddress
    listener: socket.socket
    authority: "Authority"
    variables: Mapping[str, str] = field(repr=False)


def check_coordinator(text: str | None, prepared: "PreparedRun") -> None:
    """Refuse `--coordinator` where it has no meaning; nothing is opened.

    Raises:
        LaunchError: The run is not elastic, has ranks on other hosts, or the value is no address that can be used.
    """
    if text is None:
        return
    address = parse_listen_address(text)
    if isinstance(address, str):
        _refuse(f"`{_OPTION} {shown(text)}`: {address}", _EXAMPLE)
    if prepared.plan.elastic is None:
        _refuse(
            f"`{_OPTION}` takes workers of other machines, and the workers of this run do not come and go",
            "`--elastic MIN:MAX`",
        )
    if not prepared.is_here:
        message = (
            f"`{_OPTION}` is for runs whose own ranks are on this machine, and this one starts ranks on other hosts"
        )
        _refuse(message, f"leave `{_OPTION}` out; workers of those hosts are replaced without it")
    if _is_unspecified(address.host):
        _refuse(f"`{_OPTION} {shown(text)}` names every network of this machine", _EXAMPLE)
    try:
        listen_on_network(address).close()  # so that an address that is not ours is found before the run has a folder
    except OSError as error:
        _cannot_use(text, error)


@contextmanager
def open_network(plan: LaunchPlan, text: str | None) -> "Iterator[OpenNetwork | None]":
    """Bind the address that `--coordinator` names, hold a port for every rank of the plan, and make the ranks' certificates.

    Raises:
        LaunchError: The address is not this machine's, or the port is taken.
    """
    address = None if text is None else parse_listen_address(text)
    if address is None or isinstance(address, str):
        yield None
        return
    from ttlaunch.agent.held_port import hold_port
    from ttlaunch.running.agents.certificates import Authority

    with ExitStack() as held:
        try:
            listener = held.enter_context(listen_on_network(address))
            ports = [held.enter_context(hold_port()).getsockname()[1] for _ in plan.ranks]
        except OSError as error:
            _cannot_use(text, error)
        authority = Authority()
        own = authority.issue([contract.peer_name(row.rank) for row in plan.ranks])
        ip = str(listener.getsockname()[0])
        place = f"[{ip}]" if ":" in ip else ip
        variables = {
            contract.ENV_PEERS: json.dumps([f"{place}:{port}" for port in ports]),
            contract.ENV_CERTIFICATES: json.dumps({"authority": own.authority, "own": own.own, "key": own.key}),
        }
        yield OpenNetwork(address, listener, authority, variables)


def service_of(
    prepared: "PreparedRun", plan: LaunchPlan, folder: "RunFolder", *, scratch: "Path", network: OpenNetwork | None
) -> "Callable[[OutsideWorkers], AbstractContextManager[None]]":
    """Return a function that serves the workers of an elastic run for the time of a context."""

    @contextmanager
    def serve(workers: "OutsideWorkers") -> Iterator[None]:
        program = plan.program
        assert isinstance(program, RecipeProgram)  # noqa: S101 - no other run is elastic
        assert plan.elastic is not None  # noqa: S101 - likewise
        described = {
            "recipe": program.name,
            "layout": program.layout,
            "role": plan.ranks[0].role,
            "config": prepared.resolved_config,
            "elastic": asdict(plan.elastic),
        }
        with serving(
            workers,
            described=described,
            fingerprint=_fingerprint(plan, network),
            authority=None if network is None else network.authority,
            folder=folder,
            scratch=scratch,
            network=None if network is None else (network.address, network.listener),
        ):
            try:
                yield
            finally:
                workers.close()
                workers.wait_for_ends(_GOODBYE_S)

    return serve


def _fingerprint(plan: LaunchPlan, network: OpenNetwork | None) -> "Callable[[], Fingerprint]":
    from ttlaunch.running.membership.measure import MeasureError, measure_fingerprint

    if network is not None:
        return MeasuredOnce(lambda: measure_fingerprint(plan))

    def nobody_joins() -> NoReturn:
        raise MeasureError("nobody can join it")

    return nobody_joins


def _cannot_use(text: str | None, error: OSError) -> NoReturn:
    _refuse(f"`{_OPTION} {shown(text)}` cannot be used: {(error.strerror or str(error)).lower()}", _EXAMPLE)


def _is_unspecified(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_unspecified
    except ValueError:
        return False


def _refuse(message: str, hint: str) -> NoReturn:
    raise LaunchError([Diagnostic("P082", message, hints=(hint,), blame=Blame.COMMAND_LINE)])
