"""Classify why a rank ended: by its own fault, by a cause from outside, or because another rank was gone.

An exception is classified by its type and message, and by what its rank wrote about where it came from: what a rank lost must
be another rank, not a server of data. An ending without an exception is classified by its status, its signal,
the kernel's count of kills, and the last lines of the rank's log. Times are not considered.
"""

import re
import signal
from collections.abc import Collection, Iterable
from enum import StrEnum

from ttlaunch import contract
from ttlaunch.quick_pattern import quick_pattern
from ttlaunch.rank_exceptions.outline import CONNECTION, PAIR
from ttlaunch.records.endings import ErrorCause, RankError, RankExit
from ttlaunch.running.failures.stderr_tail import StderrTail, chained


class Cause(StrEnum):
    """The classes of endings that are failures, as `report.json` names them."""

    RAISED = "raised"  # an exception of its own
    IMPORT_ERROR = "import_error"
    NO_MPI = "no_mpi"  # it uses MPI, and was started without
    PORT_TAKEN = "port_taken"  # on which torch's store was to listen
    CHECKPOINT = "checkpoint"  # a checkpoint could not be read or written
    EXITED = "exited"  # with a status that is not 0: sys.exit, os._exit, exit of C, MPI_Abort
    LEFT_EARLY = "left_early"  # with status 0 before its role had finished
    DEPARTED = "departed"  # it called another collective operation of torch than the other ranks of its group
    TRAINED_ALONE = "trained_alone"  # ranks of a script joined no group, and each trained a model of its own
    NOT_STARTED = "not_started"
    KILLED = "killed"  # by a signal from outside the run
    OUT_OF_MEMORY = "out_of_memory"
    CRASHED = "crashed"  # in compiled code
    SHIM_LOST = "shim_lost"  # the rank's parent was killed, and the rank with it
    DAEMON_LOST = "daemon_lost"  # the engine's own process on a host was killed, and shims and ranks with it
    FOLDER_LOST = "folder_lost"  # somebody removed a folder of the run
    HOST_LOST = "host_lost"
    HUNG = "hung"  # no rank made progress
    DIFFERS = "replicas_differ"  # ranks hold the same tensor with different bits
    DIVERGED = "diverged"  # the loss, or the norm of the gradient, is NaN or infinite
    AUDITED = "audited"  # an audit found gradients that another rank contradicts
    OTHER = "other"  # the run failed, not a rank: its folder, the engine
    LOST_PEER = "lost_peer"  # ended because another rank had gone
    FENCED = "fenced"  # its host was cut off, so the agent there ended it
    ENDED = "ended"  # by the engine or by us, with the run

    @property
    def follows(self) -> bool:
        """Whether such an ending is the consequence of another rank's end, even if that was recorded later."""
        return self in {Cause.LOST_PEER, Cause.FENCED, Cause.ENDED}

    @property
    def exit_status(self) -> int:
        """The exit status of a run whose first failure is of this class."""
        return _EXIT_STATUSES.get(self, contract.STATUS_RANK_FAILED)


_EXIT_STATUSES = {
    Cause.HOST_LOST: contract.STATUS_HOST_LOST,
    Cause.HUNG: contract.STATUS_HUNG,
    Cause.AUDITED: contract.STATUS_AUDIT,
}


_CONNECTION_TYPES = {"BrokenPipeError", "ConnectionAbortedError", "ConnectionRefusedError", "ConnectionResetError"}
_PEER_TYPES = {*_CONNECTION_TYPES, "DistNetworkError", "EOFError", "PeerLostError"}
_GENERAL_TYPES = {
    "CommunicationError",
    "DistBackendError",
    "DistError",
    "DistStoreError",
    "Exception",
    "RuntimeError",
    "SocketError",  # the name of `CommunicationError` in records of older versions
    "TimeoutError",
}
_PEER_WORDS = quick_pattern(
    r"connection (?:was |likely )*(?:closed|reset|aborted|refused)|broken pipe|socket closed|is gone: "
    r"|timed out waiting .*for (?:recv|send) operation|pair closure|remote process exited|ncclRemoteError"
    r"|failed to recv, got 0 bytes"
    r"|process_vm_(?:read|write)v\b.{0,20}(?:errno 3\b|no such process)",  # MPI copied from a process that has ended
    re.IGNORECASE,
)
_OWN_MPI_ERRORS = quick_pattern(
    r"MPI_ERR_(?:ARG|BUFFER|COMM|COUNT|DIMS|GROUP|INFO|KEYVAL|NO_MEM|OP|RANK|REQUEST|ROOT|TAG|TOPOLOGY|TRUNCATE|TYPE|WIN)\b"
)
_PORT_TAKEN = quick_pattern(
    r"server socket has failed to (?:listen|bind).*(?:EADDRINUSE|address already in use)", re.IGNORECASE | re.DOTALL
)
_EMPTY_PICKLE = "Ran out of input"
_FIRST_USUAL_PORT = 1024  # no rank of a user's listens below
_MEMORY_TYPES = {"MemoryError", "_ArrayMemoryError", "OutOfMemoryError"}
_MEMORY_WORDS = quick_pattern(
    r"can(?:'t|not) allocate memory|out of memory|std::bad_alloc|MPI_ERR_NO_MEM", re.IGNORECASE
)
_IMPORT_TYPES = {"ImportError", "ModuleNotFoundError"}
_CHECKPOINT_TYPES = {"CheckpointReadError", "CheckpointWriteError"}
_CRASHES = {
    signal.SIGABRT,
    signal.SIGBUS,
    signal.SIGFPE,
    signal.SIGILL,
    signal.SIGSEGV,
    signal.SIGSYS,
    signal.SIGTRAP,
}
_END_SIGNALS = {signal.SIGINT, signal.SIGTERM}
_ABORTED = quick_pattern(r"terminate called .*", re.DOTALL)


def classify_exception(
    kind: str, message: str, *, chain: Iterable[str] = (), lost: bool | None = None, oom_kills: int = 0
) -> Cause:
    """Classify an exception.

    Args:
        kind: The name of the exception's type.
        message: The exception's message.
        chain: `type: message` of the exceptions that it was raised from, or during whose handling it was raised.
        lost: Whether the exception says that another rank is gone; None: judge by the types and messages.
        oom_kills: How many processes the kernel killed for lack of memory in the rank's control group; one may be its child.
    """
    if kind in _CHECKPOINT_TYPES:
        return Cause.CHECKPOINT
    if kind == "NotFiniteError":
        return Cause.DIVERGED
    if kind == "AuditError":
        return Cause.AUDITED
    if kind == "NoMpiError":
        return Cause.NO_MPI
    if _is_port_taken(kind, message):
        return Cause.PORT_TAKEN
    general = kind in _GENERAL_TYPES or kind == "OSError"
    if kind in _MEMORY_TYPES or (general and _MEMORY_WORDS.search(message)):
        return Cause.OUT_OF_MEMORY
    if general and oom_kills and "killed by signal" in message:
        return Cause.OUT_OF_MEMORY
    if _is_about_a_peer_in(kind, message, chain) if lost is None else lost:
        return Cause.LOST_PEER
    if kind == "SystemExit":
        return Cause.LEFT_EARLY if message in {"", "0", "None", "False"} else Cause.EXITED
    return Cause.IMPORT_ERROR if kind in _IMPORT_TYPES else Cause.RAISED


def _is_port_taken(kind: str, message: str) -> bool:
    """Whether torch's store could not listen because another process does; the type alone looks like that of a lost peer."""
    return (kind in _PEER_TYPES or kind in _GENERAL_TYPES) and bool(_PORT_TAKEN.search(message))


class LostPeer(StrEnum):
    """Whether an exception says that another rank is gone."""

    YES = "yes"
    PERHAPS = "perhaps"  # a connection was lost, but nothing tells to whom
    NO = "no"


def lost_peer(error: RankError, *, hosts: Collection[str]) -> LostPeer:
    """Judge by what a rank wrote about an exception and those that led to it whether it lost another rank.

    Args:
        error: The record.
        hosts: The hosts of the run's ranks.
    """
    if _is_port_taken(error.type, error.message):
        return LostPeer.NO
    if error.causes is None:
        chain = chained(error.traceback.splitlines())
        return LostPeer.YES if _is_about_a_peer_in(error.type, error.message, chain) else LostPeer.NO
    answers = {_names_a_rank(cause, error, hosts) for cause in error.causes}
    return LostPeer.YES if LostPeer.YES in answers else LostPeer.PERHAPS if LostPeer.PERHAPS in answers else LostPeer.NO


def _names_a_rank(cause: ErrorCause, error: RankError, hosts: Collection[str]) -> LostPeer:
    if not _is_about_a_peer(cause.type, cause.message):
        return LostPeer.NO
    if cause.type == "PeerLostError" or cause.origin not in {"", CONNECTION}:
        return LostPeer.YES  # nobody else is reached over MPI, torch.distributed or our own messages
    broken = [address for address in error.broken if address != PAIR]
    if any(_may_be_a_rank(address, hosts) for address in broken):
        return LostPeer.YES
    if broken or (cause.origin != CONNECTION and cause.type not in _CONNECTION_TYPES):
        return LostPeer.NO
    return LostPeer.PERHAPS


def _may_be_a_rank(address: str, hosts: Collection[str]) -> bool:
    """Whether a rank may be at an address, as `rank_exceptions/describe.py` writes it."""
    port = address.rpartition(":")[2]
    if port.isdecimal() and int(port) < _FIRST_USUAL_PORT:
        return False
    return len(set(hosts)) > 1 or address.startswith("local") or address == "unknown"


def classify_ending(ending: RankExit, stderr_tail: StderrTail, *, by_us: bool, lost_peer: bool = False) -> Cause:
    """Classify an ending for which there is no record of an exception.

    Args:
        ending: The shim's record of a failure.
        stderr_tail: The last lines of the rank's log.
        by_us: Whether the launcher had begun to end the run before the rank ended.
        lost_peer: Whether the engine reported that this rank gave up because a peer was gone.
    """
    if ending.start_error:
        return Cause.NOT_STARTED
    number = ending.signal
    if number:
        return _classify_signal(number, ending, stderr_tail, by_us=by_us)
    if ending.left_early:
        return Cause.LEFT_EARLY
    raised = stderr_tail.raised
    if raised is not None and ending.status == 1:
        return classify_exception(raised.type, raised.message, chain=raised.chain, oom_kills=ending.oom_kills or 0)
    return Cause.LOST_PEER if lost_peer or _PEER_WORDS.search("\n".join(stderr_tail.lines)) else Cause.EXITED


def _classify_signal(number: int, ending: RankExit, stderr_tail: StderrTail, *, by_us: bool) -> Cause:
    if number in _END_SIGNALS or (number == signal.SIGKILL and by_us):
        return Cause.ENDED
    if number == signal.SIGKILL:
        return Cause.OUT_OF_MEMORY if ending.oom_kills else Cause.KILLED
    if number == signal.SIGPIPE:
        return Cause.LOST_PEER
    thrown = _ABORTED.search(stderr_tail.text) if number == signal.SIGABRT else None
    if thrown and _MEMORY_WORDS.search(thrown[0]):
        return Cause.OUT_OF_MEMORY
    if thrown and _PEER_WORDS.search(thrown[0]):
        return Cause.LOST_PEER
    return Cause.CRASHED if number in _CRASHES else Cause.KILLED


def _is_about_a_peer_in(kind: str, message: str, chain: Iterable[str]) -> bool:
    return _is_about_a_peer(kind, message) or any(_is_about_a_peer(*_split_link(link)) for link in chain)


def _is_about_a_peer(kind: str, message: str) -> bool:
    """Whether an exception only says that the other end of a connection is gone."""
    if message.startswith("MPI_ERR_"):
        return not _OWN_MPI_ERRORS.match(message)
    if kind == "EOFError" and message == _EMPTY_PICKLE:
        return False
    return kind in _PEER_TYPES or (kind in _GENERAL_TYPES and bool(_PEER_WORDS.search(message)))


def _split_link(link: str) -> tuple[str, str]:
    kind, _, message = link.partition(": ")
    return kind.rpartition(".")[2], message
