"""Set up a run on hosts that are ready and have the code: send each host its plan, and start an agent there.

Only this module knows what differs between hosts: the paths of the interpreter, the engine, the release and the data.
"""

import json
import shlex
from collections.abc import Collection, Mapping, Sequence
from dataclasses import field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ttlaunch import contract
from ttlaunch.engines.base import DaemonStart, Engine
from ttlaunch.errors import HostError, Trouble
from ttlaunch.hosts.transport.pushed import Interpreter
from ttlaunch.hosts.transport.transport import Transport
from ttlaunch.planning.launch_plan import LaunchPlan, RecipeProgram, is_python
from ttlaunch.planning.on_host import HostPlaces, plan_on_host
from ttlaunch.quick_dataclass import dataclass
from ttlaunch.running.agents.agent_controller import AgentRankController, end_agents
from ttlaunch.running.agents.agent_starter import AgentStarter
from ttlaunch.running.agents.host_link import HostLink
from ttlaunch.running.agents.relay import Relay
from ttlaunch.running.lost_folders import folders_on_host
from ttlaunch.running.runs.run_folder import RunFolder, append_event
from ttlaunch.running.watch import Watch

if TYPE_CHECKING:
    from ttlaunch.running.agents.certificates import Authority


@dataclass(frozen=True)
class ReadyHost:
    """A host that has everything its ranks need.

    Attributes:
        interpreter: Runs our scripts on the host, and becomes the agent.
        python: The interpreter of the host's ranks.
        mpi_prefix: The folder of the engine's installation on the host; None for an engine that has no MPI.
        remote_folder: The folder of ttlaunch on the host, absolute.
        release: The folder of the synced code on the host, absolute.
        lock: The file whose lock keeps the release from being removed, absolute.
        copies: The path on the host of each synced path of the launching machine.
        data: The paths on the host of texts and checkpoints, by the SHA-256 of their content.
    """

    transport: Transport
    interpreter: Interpreter
    python: str
    mpi_prefix: str | None
    remote_folder: str
    release: str
    lock: str
    copies: Mapping[str, str]
    data: Mapping[str, str] = field(default_factory=dict)

    @property
    def places(self) -> HostPlaces:
        """The paths that its plan has."""
        return HostPlaces(self.python, f"{self.release}/{contract.PACKAGE_DIR}", self.copies, self.data)


@dataclass(frozen=True)
class RunOnHosts:
    """What all hosts of a run have in common.

    Attributes:
        python: The interpreter that the plan names.
        engine: The engine that starts the ranks.
        described: The names of variables that the cluster's files set.
        secrets: Variables that are sent to the hosts and written to no file.
        variables: What shims read from their environment besides the run's id.
        addresses: The address of each host in the network chosen for ranks.
        lease_s: How long ranks on a host may run without a message from this launcher.
        authority: That of a run which workers of other machines can join; None: nobody can.
    """

    plan: LaunchPlan
    folder: RunFolder
    scratch: Path
    python: str
    engine: Engine
    described: Collection[str] = ()
    secrets: Mapping[str, str] = field(default_factory=dict, repr=False)
    variables: Mapping[str, str] = field(default_factory=dict)
    addresses: Mapping[str, str] = field(default_factory=dict)
    lease_s: float = contract.LEASE_S
    authority: "Authority | None" = None


def start_controller(
    run: RunOnHosts, hosts: Sequence[ReadyHost], watch: Watch
) -> AgentRankController | dict[str, HostError]:
    """Start an agent with the plan on every host; if one host cannot, end those that were started.

    Returns:
        The controller, or the hosts that failed with the reasons.
    """
    arguments = {host.transport.host: _agent_arguments(run, host, number=number) for number, host in enumerate(hosts)}
    starter = AgentStarter(
        [host.transport for host in hosts],
        arguments,
        last_step=run.plan.last_checkpoint_step,
        folder=run.folder,
        pythons={host.transport.host: host.python for host in hosts},
        goes_on=run.plan.elastic is not None,
    )
    started = starter.start_all({host.transport.host: host.interpreter for host in hosts})
    links = [answer for answer in started.values() if isinstance(answer, HostLink)]
    failed = {name: answer for name, answer in started.items() if isinstance(answer, HostError)}
    failed |= _without_ports(run, hosts, links)
    if failed:
        end_agents(links)
        return failed
    for link in links:
        _set_clock(run, watch, link)
    run = replace(run, variables={**run.variables, **_meeting_places(run, links)})
    return _controller(run, hosts, watch, links=links, starter=starter)


def _controller(
    run: RunOnHosts, hosts: Sequence[ReadyHost], watch: Watch, *, links: Sequence[HostLink], starter: AgentStarter
) -> AgentRankController:
    """Return the controller of ranks on hosts whose agents run."""
    own = _certificates(run, hosts) if _talks_over_grpc(run) else {}
    transports = {host.transport.host: host.transport for host in hosts}
    relay = None
    if not _agents_start(run):
        over = {link.host: link.over for link in links}
        starts = {host.transport.host: _daemon_start(run, host) for host in hosts}
        relay = Relay(
            transports, starts, engine=run.engine, scratch=run.scratch, is_lost=lambda host: over[host].is_set()
        )
    ranks = {host.transport.host: _ranks_of(run, host) for host in hosts}

    def renewed(link: HostLink) -> dict[str, str]:
        _set_clock(run, watch, link)
        return _meeting_places_anew(run, link)

    return AgentRankController(
        links,
        relay,
        run.folder,
        ranks=ranks,
        variables=run.variables,
        own=own,
        secrets=run.secrets,
        starter=None if relay else starter,
        renewed=renewed,
    )


def _set_clock(run: RunOnHosts, watch: Watch, link: HostLink) -> None:
    """Note by how much a host's clock is ahead of this machine's."""
    watch.set_clock(link.host, link.clock_offset_s)
    append_event(run.folder, contract.EVENT_CLOCK, host=link.host, offset_s=round(link.clock_offset_s, 3))


def _agents_start(run: RunOnHosts) -> bool:
    """Whether the agents start the ranks, because the engine reaches no hosts itself."""
    return not run.plan.engine.names.remote_shell_variable


def _agent_arguments(run: RunOnHosts, host: ReadyHost, *, number: int) -> dict[str, Any]:
    folder = _folder_of(run, host)
    plan = plan_on_host(run.plan, host.places, python=run.python, described=run.described)
    scripts, plan_path = f"{host.places.package}/ttlaunch/agent", f"{folder}/{contract.PLAN_FILE}"
    shim = [host.python, "-I", "-S", f"{scripts}/shim.py", plan_path]
    starter = [host.python, "-I", "-S", f"{scripts}/start_ranks.py", plan_path]
    return {
        "run_id": run.folder.run_id,
        "folder": folder,
        "scratch": str(run.scratch),
        "ranks": _ranks_of(run, host),
        "needed": folders_on_host(
            run=folder, scratch=str(run.scratch), release=host.release, remote=host.remote_folder
        ),
        "daemons": list(run.plan.engine.names.daemons),
        "starter": starter if _agents_start(run) else None,
        "socket": str(run.scratch / f"agent-{number}"),
        "lease_s": run.lease_s,
        "lock": host.lock,
        "holds_ports": _ports_wanted(run, host),
        "python": host.python,
        "files": {
            contract.PLAN_FILE: json.dumps(plan, indent=1) + "\n",
            contract.START_FILE: f"exec {shlex.join(shim)}\n",
        },
    }


def _daemon_start(run: RunOnHosts, host: ReadyHost) -> DaemonStart:
    scratch = str(run.scratch)
    environment = {contract.ENV_RUN_ID: run.folder.run_id, contract.ENV_SCRATCH: scratch, "TMPDIR": scratch}
    environment |= run.variables
    script = f"{host.release}/{contract.PACKAGE_DIR}/ttlaunch/agent/start_daemon.py"
    # Ranks of programs do not report that they have found each other.
    ranks = _ranks_of(run, host) if isinstance(run.plan.program, RecipeProgram) else []
    starter = (host.python, "-I", "-S", script, _folder_of(run, host), ",".join(map(str, ranks)))
    assert host.mpi_prefix is not None  # noqa: S101 - a host without the engine is refused
    return DaemonStart(host.mpi_prefix, host.python.rpartition("/")[0], environment, starter, run.secrets)


def _talks_over_grpc(run: RunOnHosts) -> bool:
    """Whether ranks exchange messages over gRPC with those of other hosts, or with workers of other machines."""
    is_alone = len(run.plan.hosts) == 1 and run.authority is None
    return isinstance(run.plan.program, RecipeProgram) and run.plan.program.uses_grpc and not is_alone


def _ports_wanted(run: RunOnHosts, host: ReadyHost) -> int:
    """Return how many ports a host is to hold for its ranks."""
    if _talks_over_grpc(run):
        return len(_ranks_of(run, host))
    # Only the host of rank 0 is asked to hold a port, so no other host can choose where the ranks of a program meet.
    return int(is_python(run.plan) and run.plan.ranks[0].host == host.transport.host)


def _without_ports(run: RunOnHosts, hosts: Sequence[ReadyHost], links: Sequence[HostLink]) -> dict[str, HostError]:
    """Return the hosts whose agents do not hold the ports that they were asked for."""
    wanted = {host.transport.host: _ports_wanted(run, host) for host in hosts}
    short = [link.host for link in links if len(link.ports) < wanted[link.host]]
    return {host: HostError(host, Trouble.SCRIPT, "its agent holds too few ports for the ranks") for host in short}


def _meeting_places(run: RunOnHosts, links: Sequence[HostLink]) -> dict[str, str]:
    """Return the variables that tell ranks at which ports they find each other."""
    left = {link.host: list(link.ports) for link in links}
    if is_python(run.plan):
        return {contract.ENV_MASTER_PORT: str(left[run.plan.ranks[0].host][0])}
    if not _talks_over_grpc(run):
        return {}
    peers = [f"{run.addresses[row.host]}:{left[row.host].pop(0)}" for row in run.plan.ranks]
    return {contract.ENV_PEERS: json.dumps(peers)}


def _meeting_places_anew(run: RunOnHosts, link: HostLink) -> dict[str, str]:
    """Return the variables that are others on a host that is back, because its new agent holds other ports."""
    if not _talks_over_grpc(run):
        return {}
    peers, ports = json.loads(run.variables[contract.ENV_PEERS]), list(link.ports)
    for number, row in enumerate(run.plan.ranks):
        if row.host == link.host:
            peers[number] = f"{run.addresses[row.host]}:{ports.pop(0)}"
    return {contract.ENV_PEERS: json.dumps(peers)}


def _certificates(run: RunOnHosts, hosts: Sequence[ReadyHost]) -> dict[str, dict[str, str]]:
    """Return, for each host, the variable with which its ranks prove who they are."""
    from ttlaunch.running.agents.certificates import make_certificates  # noqa: PLC0415 - few runs need cryptography

    names = {host.transport.host: [contract.peer_name(rank) for rank in _ranks_of(run, host)] for host in hosts}
    return {
        host: {contract.ENV_CERTIFICATES: json.dumps({"authority": one.authority, "own": one.own, "key": one.key})}
        for host, one in make_certificates(names, run.authority).items()
    }


def _folder_of(run: RunOnHosts, host: ReadyHost) -> str:
    return f"{host.remote_folder}/{contract.RUNS_DIR}/{run.folder.run_id}"


def _ranks_of(run: RunOnHosts, host: ReadyHost) -> list[int]:
    return [row.rank for row in run.plan.ranks if row.host == host.transport.host]
