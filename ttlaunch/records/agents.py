"""The frames that the agent beside a run on a host sends to the launcher.

A frame may name only files of ranks of the run. These need not be ranks of its own host: hosts may share a folder, and
then each of them sends what it sees there. Python 3.9 and the standard library only.
"""

from __future__ import annotations

import re

from ttlaunch.records.parser import (
    BadRecord,
    Count,
    Flag,
    Rank,
    Size,
    Text,
    Time,
    Word,
    parse,
    record,
    shown,
)

TYPE_CHECKING = False  # what typing.TYPE_CHECKING is, without the time to import it
if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any, Union

_FILE = re.compile(r"(?:logs|records|stacks|blackbox|checkpoints/step-[0-9]{1,18}\.tmp)/rank-([0-9]{1,9})\.[a-z.]+\Z")
_SHOWN = 100


@record
class FilePiece:
    """A piece of a file in the run's folder.

    Attributes:
        name: Relative to the folder; of a file that a rank has there.
        offset: The offset of the piece, in bytes.
        whole: Whether the file appears at once, as records do.
        number: The number of the piece, from 1, over all connections to the agent.
    """

    name: Word
    offset: Count
    whole: Flag
    number: Size


@record
class AgentReady:
    """A new connection to the agent is ready.

    Attributes:
        version: The version of the protocol that it speaks, see `contract.AGENT_VERSION`; 0 for agents from before it
            was sent.
        time: The host's, seconds since the epoch.
        clock: The reading of the lease's clock.
        done: How many orders it has carried out.
    """

    version: Count = 0
    time: Time
    clock: Time
    done: Size


@record
class AgentAlive:
    """A sign of life of the agent, sent every second.

    Attributes:
        clock: The reading of the lease's clock, to be sent back.
        done: How many orders it has carried out.
    """

    clock: Time
    done: Size


@record
class ProcessReport:
    """The state of the processes of the host's ranks; files that the agent had sent by then have arrived.

    Attributes:
        question: Its number.
        stopped: Ranks that were stopped by a signal.
        faults: Ranks, and how often each has touched fresh memory.
    """

    question: Count
    stopped: tuple[Rank, ...]
    faults: tuple[tuple[Rank, Size], ...]


@record
class AgentGone:
    """There is no agent any more, or it refuses this launcher; `reason` is a clause."""

    reason: Text


@record
class ShimLost:
    """A shim is gone without a record; `time` is the host's, seconds since the epoch."""

    rank: Rank
    time: Time


@record
class AgentEnded:
    """The agent has finished; `killed` is the number of processes that it had to kill."""

    killed: Size


if TYPE_CHECKING:
    AgentFrame = Union[  # noqa: UP007 - Python 3.9
        FilePiece, ShimLost, ProcessReport, AgentReady, AgentAlive, AgentGone, AgentEnded
    ]
else:
    AgentFrame = object

_FRAMES: dict[str, type] = {
    "alive": AgentAlive,
    "ready": AgentReady,
    "gone": AgentGone,
    "refused": AgentGone,
    "file": FilePiece,
    "lost_shim": ShimLost,
    "looked": ProcessReport,
    "ended": AgentEnded,
}


def parse_agent_frame(header: Mapping[str, Any], *, world_size: int = 0) -> AgentFrame | BadRecord:
    """Parse the header of a frame.

    Args:
        header: The frame's header.
        world_size: How many ranks there are; 0 where no rank may be named yet.
    """
    kind = header.get("kind")
    cls = _FRAMES.get(kind) if isinstance(kind, str) else None
    if cls is None:
        return BadRecord(f"no message of an agent: {shown(kind)[:_SHOWN]}")
    said: AgentFrame | BadRecord = parse(cls, header)
    if isinstance(said, BadRecord):
        return BadRecord(f"no message of an agent: of `{kind}` {said.reason}")
    if isinstance(said, AgentGone):
        return AgentGone(reason=said.reason[:_SHOWN])
    named = _ranks_of(said)
    strange = [rank for rank in named if not 0 <= rank < world_size]
    if strange:
        what = f"the file {shown(said.name)}" if isinstance(said, FilePiece) else f"rank {strange[0]}"
        return BadRecord(f"no message of an agent: `{kind}` is about {what}, which the run does not have")
    return said


def _ranks_of(said: AgentFrame) -> list[int]:
    """The ranks that a frame is about; -1 for a file that belongs to no rank."""
    if isinstance(said, FilePiece):
        found = _FILE.match(said.name)
        return [int(found.group(1)) if found else -1]
    if isinstance(said, ShimLost):
        return [said.rank]
    return [*said.stopped, *(rank for rank, _ in said.faults)] if isinstance(said, ProcessReport) else []
