"""The frames that the agent beside a run on a host sends to the launcher.

A host may report only about its own ranks, and may send only files that these ranks write. Hosts that share a folder see the
files of each other's ranks, but each host sends only those of its own. Python 3.9 and the standard library only.
"""

from __future__ import annotations

import re

from ttlaunch import contract
from ttlaunch.profiling import profile_file
from ttlaunch.records.parser import (
    BadRecord,
    Count,
    FilePath,
    Flag,
    Pid,
    Port,
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
    from collections.abc import Collection, Mapping
    from typing import Any, Union

_RANK, _STEP = re.compile(r"/rank-(0|[1-9][0-9]{0,8})\."), re.compile(r"/step-([1-9][0-9]{0,15})\.tmp/")
_SHOWN = 100


@record
class FilePiece:
    """A piece of a file in the run's folder.

    Attributes:
        name: The path of the file, relative to the run's folder; it must be a file that a rank writes.
        offset: The offset of the piece in the file, in bytes.
        whole: Whether the piece is a whole file, which replaces the former content in one step.
        number: The number of the piece, from 1, over all connections to the agent.
    """

    name: Word
    offset: Count
    whole: Flag
    number: Size


@record
class AgentReady:
    """The agent's greeting on a new connection.

    Attributes:
        version: The version of the protocol, see `contract.AGENT_VERSION`; 0 for agents that did not send a version yet.
        time: The time of the host's clock, seconds since the epoch.
        clock: The present reading of the lease's clock.
        done: How many orders the agent has carried out.
        pid: The agent's process; None for agents that did not send it yet.
        ports: The ports that the agent holds for ranks.
    """

    version: Count = 0
    time: Time
    clock: Time
    done: Size
    pid: Pid | None = None
    ports: tuple[Port, ...] = ()


@record
class AgentStopped:
    """The message of the bridge that a signal has stopped the agent, whose process is `pid`."""

    pid: Pid


@record
class AgentAlive:
    """A sign of life of the agent, sent every second.

    Attributes:
        clock: The present reading of the lease's clock, which the launcher sends back.
        done: How many orders the agent has carried out.
    """

    clock: Time
    done: Size


@record
class RankProcess:
    """What the kernel says about the process of one rank.

    Attributes:
        name: The process's name.
        program: The path of the program that it runs; empty if that cannot be read.
        does: What it did for a moment: `polls` (many system calls, as while it waits in MPI), `computes` or `waits`.
        waits_in: The function of the kernel that it sleeps in; empty if it does not sleep or the kernel does not say.
        catches_crashes: Whether it has a handler for SIGSEGV, as Python has while its fault handler is enabled.
        writes_stacks: Whether it has a handler for `contract.STACKS_SIGNAL`, as ranks of Python programs have.
    """

    rank: Rank
    name: Word
    program: FilePath
    does: Word
    waits_in: Word
    catches_crashes: Flag
    writes_stacks: Flag = False


@record
class StoppedHelper:
    """A process of a run that is no rank and that a signal has stopped.

    Attributes:
        rank: The rank whose shim or child it is; None for a process of the engine.
        name: The process's name; empty for a shim.
    """

    rank: Rank | None
    pid: Pid
    name: Word
    is_shim: Flag


@record
class ProcessReport:
    """The state of the processes of the host's ranks; files that the agent had sent by then have arrived.

    Attributes:
        question: The number of the launcher's request.
        stopped: The ranks that a signal has stopped.
        faults: The ranks, each with the number of its page faults so far.
        helpers: The stopped processes of the run that are no ranks.
        processes: What each rank's process is and does; empty unless the request was to look closely.
        unacknowledged: Ranks whose peer at an address has not acknowledged what was sent, each with the address and the number
            of attempts.
        addresses: The host's addresses, by which other hosts' reports name it.
    """

    question: Count
    stopped: tuple[Rank, ...]
    faults: tuple[tuple[Rank, Size], ...]
    helpers: tuple[StoppedHelper, ...] = ()
    processes: tuple[RankProcess, ...] = ()
    unacknowledged: tuple[tuple[Rank, Word, Count], ...] = ()
    addresses: tuple[Word, ...] = ()


@record
class FolderGone:
    """The message that a folder of the run no longer exists on the host; `what` names its purpose."""

    what: Word
    path: FilePath
    time: Time


@record
class AgentGone:
    """The message that there is no agent any more, or that it refuses this launcher; `reason` is a clause."""

    reason: Text


@record
class ShimLost:
    """The message that a shim is gone without a record of its rank's end; `time` is that of the host's clock."""

    rank: Rank
    time: Time


@record
class RanksEnded:
    """The message that the process which the agent started the ranks with has ended, and all ranks with it.

    Attributes:
        status: Its exit status, or 128 + the signal that ended it.
        said: The end of what it and the shims printed.
    """

    status: Count
    said: Text


@record
class AgentEnded:
    """The message that the agent has finished; `killed` is the number of processes that it had to kill."""

    killed: Size


if TYPE_CHECKING:
    AgentFrame = Union[  # noqa: UP007 - Python 3.9
        FilePiece,
        ShimLost,
        FolderGone,
        ProcessReport,
        AgentReady,
        AgentStopped,
        AgentAlive,
        AgentGone,
        AgentEnded,
        RanksEnded,
    ]
else:
    AgentFrame = object

_FRAMES: dict[str, type] = {
    "alive": AgentAlive,
    "ready": AgentReady,
    "gone": AgentGone,
    "stopped": AgentStopped,
    "refused": AgentGone,
    "file": FilePiece,
    "lost_shim": ShimLost,
    "folder_gone": FolderGone,
    "looked": ProcessReport,
    "ended": AgentEnded,
    "ranks_ended": RanksEnded,
}


def parse_agent_frame(
    header: Mapping[str, Any], *, ranks: Collection[int] = (), last_step: int = 0
) -> AgentFrame | BadRecord:
    """Parse the header of a frame.

    Args:
        header: The frame's header.
        ranks: The ranks on the host; empty while the host may not report about ranks yet.
        last_step: The last step that can have a checkpoint; 0 if none can.
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
    if isinstance(said, FilePiece):
        strange = None if is_file_of(said, ranks=ranks, last_step=last_step) else f"the file {shown(said.name)}"
    else:
        strange = next((f"rank {rank}" for rank in _ranks_of(said) if rank not in ranks), None)
    if strange is not None:
        return BadRecord(f"no message of an agent: `{kind}` is about {strange}, which its host does not have")
    return said


def is_file_of(piece: FilePiece, *, ranks: Collection[int], last_step: int) -> bool:
    """Whether one of these ranks writes a piece's file, and `whole` is as it must be for this kind of file."""
    found, of_step = _RANK.search(piece.name), _STEP.search(piece.name)
    if found is None or int(found.group(1)) not in ranks:
        return False
    rank, step = int(found.group(1)), int(of_step.group(1)) if of_step else 0
    folder = contract.checkpoint_dir(step) + contract.UNFINISHED_SUFFIX
    if of_step:
        return (
            step <= last_step
            and piece.name == f"{folder}/{(contract.shard_record if piece.whole else contract.shard_file)(rank)}"
        )
    whole = [
        contract.error_file(rank),
        contract.exit_file(rank),
        contract.recorder_file(rank),
        contract.torch_error_file(rank),
    ]
    in_pieces = [
        contract.stdout_file(rank),
        contract.stderr_file(rank),
        contract.times_file(rank),
        contract.stacks_file(rank),
        contract.progress_file(rank),
        contract.exceptions_file(rank),
        contract.traffic_file(rank),
        contract.trace_file(rank),
        profile_file(rank),
    ]
    # Compare with names made by the contract, so that no other spelling of a path is accepted.
    return piece.name in (whole if piece.whole else in_pieces)


def _ranks_of(said: AgentFrame) -> list[int]:
    """Return the ranks about which a frame reports."""
    if isinstance(said, ShimLost):
        return [said.rank]
    if not isinstance(said, ProcessReport):
        return []
    named = [said.stopped, [one.rank for one in said.processes], [one.rank for one in said.helpers]]
    named += [[rank for rank, _ in said.faults], [rank for rank, *_ in said.unacknowledged]]
    return [rank for ranks in named for rank in ranks if rank is not None]
