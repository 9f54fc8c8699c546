"""Put an agent on a host, or find the one that is there, and hear its greeting."""

from collections.abc import Mapping, Sequence
from typing import Any

from ttlaunch import contract
from ttlaunch.errors import HostError, Trouble
from ttlaunch.hosts.transport.frames import FrameStream
from ttlaunch.hosts.transport.pushed import explain_end, start_script
from ttlaunch.hosts.transport.transport import Transport
from ttlaunch.records.agents import AgentGone, AgentReady, parse_agent_frame
from ttlaunch.records.parser import BadRecord

START_S = 10.0
"""What an agent may take to start."""

_BESIDE = ("run_processes", "stop_marker", "stack_dump", "hosted_run", "line", "agent_server", "bridge")


def put_agent(transport: Transport, arguments: Mapping[str, Any], *, pythons: Sequence[str]) -> FrameStream:
    """Start an agent.

    Args:
        transport: The host; connected already.
        arguments: What `agent/start_agent.py` is to know.
        pythons: Interpreters to try first.

    Raises:
        HostError: As `start_script`.
    """
    return start_script(
        transport, "start_agent", beside=_BESIDE, arguments=arguments, pythons=pythons, timeout_s=START_S
    )


def join_agent(
    transport: Transport, arguments: Mapping[str, Any], *, pythons: Sequence[str], timeout_s: float
) -> FrameStream:
    """Connect to an agent that was put there before; arguments as then.

    Raises:
        HostError: As `start_script`.
    """
    place = {name: arguments[name] for name in ("socket", "folder")}
    return start_script(
        transport, "bridge", beside=("stop_marker",), arguments=place, pythons=pythons, timeout_s=timeout_s
    )


def greeting(stream: FrameStream, *, timeout_s: float) -> AgentReady | AgentGone:
    """The agent's first words, or why there is none.

    Raises:
        HostError: Something else came, or nothing in time; VERSION if the agent is of another one.
    """
    frame = stream.receive(timeout_s=timeout_s)
    if frame is None:
        lost = HostError(stream.host, Trouble.LOST, "our script on it ended without an answer")
        raise explain_end(stream, timeout_s=1.0) or lost
    said = parse_agent_frame(frame[0])
    if isinstance(said, BadRecord):
        raise HostError(stream.host, Trouble.SCRIPT, f"what came from it is {said.reason}")
    if isinstance(said, AgentReady) and said.version != contract.AGENT_VERSION:
        versions = f"its agent is of version {said.version}, this launcher of {contract.AGENT_VERSION}"
        raise HostError(stream.host, Trouble.VERSION, versions)
    if isinstance(said, AgentReady | AgentGone):
        return said
    raise HostError(stream.host, Trouble.SCRIPT, f"what came from it is no greeting: {said}"[:100])
