"""The address at which an elastic run takes workers of other machines: `--coordinator HOST:PORT`."""

import ipaddress
import json
import socket
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, NoReturn

from ttlaunch import contract
from ttlaunch.diagnostics import Blame, Diagnostic, LaunchError, shown
from ttlaunch.planning.launch_plan import LaunchPlan
from ttlaunch.quick_dataclass import dataclass
from ttlaunch.running.membership.service import ListenAddress, listen_on_network, parse_listen_address
from ttlaunch.system_reason import system_reason

if TYPE_CHECKING:
    from ttlaunch.app.prepare_run import PreparedRun
    from ttlaunch.running.agents.certificates import Authority

_OPTION = "--coordinator"
_EXAMPLE = "`--coordinator 10.0.0.1:7000` takes workers at this address of this machine"


@dataclass(frozen=True)
class OpenNetwork:
    """Where a run takes workers of other machines.

    Attributes:
        listener: Bound to the address; nobody listens on it yet.
        authority: That of the run.
    """

    address: ListenAddress
    listener: socket.socket
    authority: "Authority"

    @contextmanager
    def meeting_places(self, plan: LaunchPlan) -> Iterator[Mapping[str, str]]:
        """Hold a port at the address for every rank of a plan whose ranks run here, and make their certificates.

        Yields:
            The variables by which these ranks, and workers of other machines, reach each other.

        Raises:
            LaunchError: There are no ports.
        """
        from ttlaunch.agent.held_port import hold_port

        with ExitStack() as held:
            try:
                ports = [held.enter_context(hold_port()).getsockname()[1] for _ in plan.ranks]
            except OSError as error:
                _refuse(
                    f"this machine has too few free ports for the workers: {system_reason(error)}",
                    _EXAMPLE,
                )
            own = self.authority.issue([contract.peer_name(row.rank) for row in plan.ranks])
            ip = str(self.listener.getsockname()[0])
            place = f"[{ip}]" if ":" in ip else ip
            yield {
                contract.ENV_PEERS: json.dumps([f"{place}:{port}" for port in ports]),
                contract.ENV_CERTIFICATES: json.dumps({"authority": own.authority, "own": own.own, "key": own.key}),
            }


def check_coordinator(text: str | None, prepared: "PreparedRun") -> None:
    """Refuse `--coordinator` where it has no meaning; nothing is opened.

    Raises:
        LaunchError: The run is not elastic, or the value is no address that can be used.
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
    if not prepared.is_here and _is_loopback(address.host):
        hint = "the address that this machine has in the network of the hosts, such as `--coordinator 10.0.0.1:7000`"
        _refuse(f"`{_OPTION} {shown(text)}` can be reached from no other machine, and the ranks are on hosts", hint)
    if _is_unspecified(address.host):
        _refuse(f"`{_OPTION} {shown(text)}` names every network of this machine", _EXAMPLE)
    try:
        listen_on_network(address).close()  # so that an address that is not ours is found before the run has a folder
    except OSError as error:
        _cannot_use(text, error)


def refuse_in_job() -> NoReturn:
    """Refuse `--coordinator` for a job of Slurm, which starts its launcher on a host that nobody knows before.

    Raises:
        LaunchError: Always.
    """
    message = f"`{_OPTION}` names an address of the machine that starts the ranks, and Slurm chooses that machine when the job begins"
    _refuse(message, f"`ttlaunch run --on slurm:PARTITION … {_OPTION} HOST:PORT` starts the ranks from this machine")


@contextmanager
def open_network(text: str | None) -> "Iterator[OpenNetwork | None]":
    """Bind the address that `--coordinator` names, and make the authority of the run.

    Raises:
        LaunchError: The address is not this machine's, or the port is taken.
    """
    address = None if text is None else parse_listen_address(text)
    if address is None or isinstance(address, str):
        yield None
        return
    from ttlaunch.running.agents.certificates import Authority

    try:
        listener = listen_on_network(address)
    except OSError as error:
        _cannot_use(text, error)
    with listener:
        yield OpenNetwork(address, listener, Authority())


def _cannot_use(text: str | None, error: OSError) -> NoReturn:
    _refuse(f"`{_OPTION} {shown(text)}` cannot be used: {system_reason(error)}", _EXAMPLE)


def _is_unspecified(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_unspecified
    except ValueError:
        return False


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _refuse(message: str, hint: str) -> NoReturn:
    raise LaunchError([Diagnostic("P082", message, hints=(hint,), blame=Blame.COMMAND_LINE)])
