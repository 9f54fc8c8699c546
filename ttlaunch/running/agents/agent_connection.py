"""Connect to the agent on a host: start it, or reach one that runs already, and read its greeting."""

from collections.abc import Mapping, Sequence
from typing import Any

from ttlaunch import contract
from ttlaunch.errors import HostError, Trouble
from ttlaunch.hosts.transport.frames import FrameStream
from ttlaunch.hosts.transport.pushed import Interpreter, explain_end, start_script
from ttlaunch.hosts.transport.transport import Transport
from ttlaunch.records.agents import AgentGone, AgentReady, AgentStopped, parse_agent_frame
from ttlaunch.records.parser import BadRecord

START_S = 10.0
"""The time that an agent may take to start."""
AGENT_MODULES = (
    "held_port",
    "claims",
    "run_processes",
    "process_facts",
    "stop_marker",
    "stack_dump",
    "worker_orders",
    "hosted_run",
    "line",
    "starter",
    "take_over",
    "agent_server",
    "bridge",
)
"""The modules of `agent/` that are sent along with `start_agent`."""
BRIDGE_MODULES = ("claims", "run_processes", "stop_marker")
"""The modules of `agent/` that are sent along with `bridge`."""


def put_agent(interpreter: Interpreter, arguments: Mapping[str, Any], *, pythons: Sequence[str]) -> FrameStream:
    """Start an agent.

    Args:
        interpreter: A Python on the host, running already or not; no other script can follow in it.
        arguments: The arguments of `agent/start_agent.py`.
        pythons: Interpreters on the host, in the order in which they are tried if none runs.

    Raises:
        HostError: The script cannot be started, see `start_script`.
    """
    return interpreter.start(
        "start_agent", beside=AGENT_MODULES, arguments=arguments, pythons=pythons, is_last=True, timeout_s=START_S
    )


def join_agent(
    transport: Transport, arguments: Mapping[str, Any], *, pythons: Sequence[str], timeout_s: float
) -> FrameStream:
    """Connect to an agent that was started with these arguments, and whose process is `agent`.

    Raises:
        HostError: The bridge to the agent cannot be started, see `start_script`.
    """
    place = {name: arguments.get(name) for name in ("socket", "folder", "agent")}
    return start_script(
        transport,
        "bridge",
        beside=BRIDGE_MODULES,
        arguments=place,
        pythons=pythons,
        timeout_s=timeout_s,
    )


def greeting(stream: FrameStream, *, timeout_s: float) -> AgentReady | AgentGone:
    """Read the agent's greeting, or why there is no agent.

    Raises:
        HostError: Another frame came, or none in time, the agent has another version (`Trouble.VERSION`), or a signal has
            stopped it (`Trouble.STOPPED`).
    """
    frame = stream.receive(timeout_s=timeout_s)
    if frame is None:
        lost = HostError(stream.host, Trouble.LOST, "our script on it ended without an answer")
        raise explain_end(stream, timeout_s=1.0) or lost
    answer = parse_agent_frame(frame[0])
    if isinstance(answer, BadRecord):
        raise HostError(stream.host, Trouble.SCRIPT, f"what came from it is {answer.reason}")
    if isinstance(answer, AgentReady) and answer.version != contract.AGENT_VERSION:
        versions = f"its agent is of version {answer.version}, this launcher of {contract.AGENT_VERSION}"
        raise HostError(stream.host, Trouble.VERSION, versions)
    if isinstance(answer, AgentStopped):
        raise HostError(stream.host, Trouble.STOPPED, f"its agent (process {answer.pid}) was stopped by a signal")
    if isinstance(answer, AgentReady | AgentGone):
        return answer
    raise HostError(stream.host, Trouble.SCRIPT, f"it did not send a greeting but {answer}"[:100])
