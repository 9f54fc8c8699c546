"""Set up a run on its hosts once they are ready and have the code: each gets its plan and an agent.

All that differs between hosts is known here: where the interpreter, the engine, the release and the data lie on each.
"""

import json
import shlex
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ttlaunch import contract
from ttlaunch.engines.base import DaemonStart, Engine
from ttlaunch.errors import HostError
from ttlaunch.hosts.transport.transport import Transport
from ttlaunch.planning.launch_plan import LaunchPlan
from ttlaunch.planning.on_host import HostPlaces, plan_on_host
from ttlaunch.running.agents.agent_controller import AgentRankController, end_agents, start_agents
from ttlaunch.running.agents.host_link import HostLink
from ttlaunch.running.agents.relay import Relay
from ttlaunch.running.runs.run_folder import RunFolder
from ttlaunch.running.watch import Watch


@dataclass(frozen=True)
class ReadyHost:
    """A host that has everything its ranks need.

    Attributes:
        python: The interpreter of its ranks.
        mpi_prefix: Folder of its engine.
        remote_folder: Absolute.
        release: Folder of the code there, absolute.
        lock: File that keeps the code from being pruned, absolute.
        copies: Path on the launching machine to path on the host.
        data: Where texts and checkpoints lie there, by the SHA-256 of their content.
    """

    transport: Transport
    python: str
    mpi_prefix: str
    remote_folder: str
    release: str
    lock: str
    copies: Mapping[str, str]
    data: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class RunOnHosts:
    """What all hosts of a run have in common.

    Attributes:
        python: The interpreter that the plan names.
        engine: What starts the ranks.
        described: Variables that the cluster's files set.
        secrets: Values that travel to the hosts and are written nowhere.
        lease_s: How long ranks on a host may run without a message from this launcher.
    """

    plan: LaunchPlan
    folder: RunFolder
    scratch: Path
    python: str
    engine: Engine
    described: Collection[str] = ()
    secrets: Mapping[str, str] = field(default_factory=dict, repr=False)
    lease_s: float = contract.LEASE_S


def start_controller(
    run: RunOnHosts, hosts: Sequence[ReadyHost], watch: Watch
) -> AgentRankController | dict[str, HostError]:
    """Start an agent with the plan on every host; if one host cannot, end those that were started.

    Returns:
        The controller, or the hosts that failed with the reasons.
    """
    arguments = {host.transport.host: _agent_arguments(run, host, number=number) for number, host in enumerate(hosts)}
    started = start_agents(
        [host.transport for host in hosts],
        arguments,
        last_step=run.plan.last_checkpoint_step,
        folder=run.folder,
        pythons={host.transport.host: host.python for host in hosts},
    )
    failed = {name: answer for name, answer in started.items() if isinstance(answer, HostError)}
    links = [answer for answer in started.values() if isinstance(answer, HostLink)]
    if failed:
        end_agents(links)
        return failed
    for link in links:
        watch.set_clock(link.host, link.clock_offset_s)
    transports = {host.transport.host: host.transport for host in hosts}
    over = {link.host: link.over for link in links}
    starts = {host.transport.host: _daemon_start(run, host) for host in hosts}
    relay = Relay(transports, starts, engine=run.engine, scratch=run.scratch, is_lost=lambda host: over[host].is_set())
    return AgentRankController(links, relay, run.folder)


def _agent_arguments(run: RunOnHosts, host: ReadyHost, *, number: int) -> dict[str, Any]:
    folder = f"{host.remote_folder}/{contract.RUNS_DIR}/{run.folder.run_id}"
    package = f"{host.release}/{contract.PACKAGE_DIR}"
    places = HostPlaces(host.python, package, host.copies, host.data)
    plan = plan_on_host(run.plan, places, python=run.python, described=run.described)
    shim = [host.python, "-I", "-S", f"{package}/ttlaunch/agent/shim.py", f"{folder}/{contract.PLAN_FILE}"]
    return {
        "run_id": run.folder.run_id,
        "folder": folder,
        "scratch": str(run.scratch),
        "ranks": [row.rank for row in run.plan.ranks if row.host == host.transport.host],
        "daemons": list(run.plan.engine.names.daemons),
        "socket": str(run.scratch / f"agent-{number}"),
        "lease_s": run.lease_s,
        "lock": host.lock,
        "python": host.python,
        "files": {
            contract.PLAN_FILE: json.dumps(plan, indent=1) + "\n",
            contract.START_FILE: f"exec {shlex.join(shim)}\n",
        },
    }


def _daemon_start(run: RunOnHosts, host: ReadyHost) -> DaemonStart:
    scratch = str(run.scratch)
    environment = {contract.ENV_RUN_ID: run.folder.run_id, contract.ENV_SCRATCH: scratch, "TMPDIR": scratch}
    return DaemonStart(host.mpi_prefix, host.python.rpartition("/")[0], environment, run.secrets)
