"""Find out who waits for whom when nothing moves any more, by comparing the counters in the ranks' flight recorders."""

from collections.abc import Mapping, Sequence

from ttlaunch.flight_recorder import DONE, GROUP, WORLD, Operation, Recording
from ttlaunch.quick_dataclass import dataclass
from ttlaunch.records.agents import RankProcess
from ttlaunch.running.failures.stderr_tail import ThreadError
from ttlaunch.running.hang.stacks import Frame, frame_to_report


@dataclass(frozen=True)
class Seen:
    """What is known of one rank at the moment of the verdict.

    Attributes:
        recording: The rank's recording; None if it cannot be read.
        is_stopped: Whether a signal has stopped the rank's process.
        stack: The stack of the main thread, innermost call first; empty if it is not known.
        idle_s: Seconds since the last operation began or ended; None if there is none.
        is_starting: Whether the role's function has not been called yet.
        has_left: Whether the process has ended.
        process: What the kernel says about the process; None if it is not known.
        thread_error: The exception that ended one of the rank's threads; None if there was none.
    """

    rank: int
    role: str
    host: str
    recording: Recording | None
    is_stopped: bool = False
    stack: tuple[Frame, ...] = ()
    idle_s: float | None = None
    is_starting: bool = False
    has_left: bool = False
    process: RankProcess | None = None
    thread_error: ThreadError | None = None

    @property
    def name(self) -> str:
        return f"rank {self.rank} ({self.role})"

    @property
    def channels(self) -> Mapping[tuple[int, int, bool], int]:
        """The number of messages begun, by peer, tag and whether the rank sends; empty without a recording."""
        return {} if self.recording is None else self.recording.channels

    @property
    def is_done(self) -> bool:
        return self.has_left or (self.recording is not None and self.recording.phase == DONE)

    @property
    def waiting(self) -> Operation | None:
        return None if self.recording is None or self.is_done else self.recording.waiting

    @property
    def place(self) -> str | None:
        """The line of the recipe, or of the program, that the rank has reached; None if it is not known."""
        frame = frame_to_report(self.stack)
        if frame is not None:
            return frame.place
        return (self.waiting.place or None) if self.waiting else None


def seen_of(rank: int, ranks: Sequence[Seen]) -> Seen:
    """Return what is known of a rank; its place may be another one, since ranks of an elastic run that never started are left out."""
    return next(one for one in ranks if one.rank == rank)


def peers_of(one: Seen, ranks: Sequence[Seen]) -> tuple[int, ...]:
    """Return the ranks that a rank waits for; a rank whose role has returned waits for all running ranks."""
    if one.is_done:
        return tuple(other.rank for other in ranks if not other.is_done)
    wait = one.waiting
    if wait is None:
        return ()
    if wait.is_collective:
        return _missing(one, wait, ranks)
    if wait.is_for_any:
        return _owing(one, wait, ranks)
    return (wait.peer,) if any(other.rank == wait.peer for other in ranks) else ()


def _owing(one: Seen, wait: Operation, ranks: Sequence[Seen]) -> tuple[int, ...]:
    """Return the ranks from which a rank has requested more messages of a tag than they have begun to send; running ones first."""
    tag = wait.tag
    owing = [
        other
        for other in ranks
        if one.channels.get((other.rank, tag, False), 0) > other.channels.get((one.rank, tag, True), 0)
    ]
    return tuple(other.rank for other in sorted(owing, key=lambda other: other.is_done))


def _missing(one: Seen, wait: Operation, ranks: Sequence[Seen]) -> tuple[int, ...]:
    """Return the ranks of a group that have not reached its operation; if all have, the other ranks that are still in it."""
    group = (GROUP, wait.tag, False)
    members = [other for other in ranks if other is not one and (wait.tag == WORLD or group in other.channels)]
    missing = tuple(other.rank for other in members if other.channels.get(group, 0) < wait.message)
    return missing or tuple(other.rank for other in members if is_in(other, wait))


def is_in(one: Seen, wait: Operation) -> bool:
    """Whether a rank is in the same operation of a group as another one, even if the two called different operations."""
    own = one.waiting
    return own is not None and own.is_collective and (own.tag, own.message) == (wait.tag, wait.message)


def waiters(ranks: Sequence[Seen]) -> Mapping[int, frozenset[int]]:
    """Return for each rank the ranks that wait for it, directly or through others."""
    direct = {one.rank: {other.rank for other in ranks if one.rank in peers_of(other, ranks)} for one in ranks}
    found = {}
    for rank, members in direct.items():
        reached, fresh = set[int](), set(members)
        while fresh:
            reached |= fresh
            fresh = {other for one in fresh for other in direct[one]} - reached
        found[rank] = frozenset(reached - {rank})
    return found


def find_cycle(ranks: Sequence[Seen]) -> tuple[int, ...]:
    """Return ranks of which each waits for the next one and the last for the first; empty if there is no such cycle."""
    for start in ranks:
        path, rank = [], start.rank
        while rank not in path:
            path.append(rank)
            peers = peers_of(seen_of(rank, ranks), ranks)
            if not peers:
                break
            rank = peers[0]
        else:
            return tuple(path[path.index(rank) :])
    return ()


def other_tags(one: Seen, peer: Seen) -> tuple[int, ...]:
    """Return the tags that a peer has sent and a rank has not requested, if the rank waits for another tag of this peer.

    The result is empty if the peer has begun to send the awaited message, or if a recording had no room for the counters.
    """
    wait = one.waiting
    if wait is None or not _waits_in_vain(one, peer):
        return ()
    return tuple(
        tag
        for (dest, tag, is_send), count in sorted(peer.channels.items())
        if is_send and dest == one.rank and tag != wait.tag and count > one.channels.get((peer.rank, tag, False), 0)
    )


def other_senders(one: Seen, ranks: Sequence[Seen]) -> tuple[int, ...]:
    """Return the ranks that have sent a rank the awaited tag, if the rank waits for another peer, which has not sent it."""
    wait = one.waiting
    if wait is None or wait.is_collective or wait.is_for_any or not _waits_in_vain(one, seen_of(wait.peer, ranks)):
        return ()
    asked = {peer for peer, tag, is_send in one.channels if tag == wait.tag and not is_send}
    sent = (other.rank for other in ranks if other.channels.get((one.rank, wait.tag, True), 0))
    return tuple(rank for rank in sent if rank not in asked)


def peers_that_sent(one: Seen, peer: Seen, ranks: Sequence[Seen]) -> tuple[int, ...]:
    """Return the other ranks of a peer's role if all of them have sent the message that a rank awaits from the peer.

    The result is empty if the peer has sent the message, or if one of the other ranks has not.
    """
    wait = one.waiting
    if wait is None or wait.is_for_any or not _waits_in_vain(one, peer):
        return ()
    others = [other for other in ranks if other.role == peer.role and other not in (one, peer)]
    key = (one.rank, wait.tag, True)
    sent = [other.rank for other in others if other.recording and other.channels.get(key, 0) >= wait.message]
    return tuple(sent) if len(sent) == len(others) else ()


def _waits_in_vain(one: Seen, peer: Seen) -> bool:
    """Whether a rank waits for a message that its peer has not begun to send."""
    wait = one.waiting
    if wait is None or wait.is_send or wait.is_collective or peer.recording is None:
        return False
    return not _was_begun(wait, one, peer)


def _was_begun(wait: Operation, one: Seen, peer: Seen) -> bool:
    """Whether the peer has begun to send or receive the message that a rank waits for."""
    if wait.is_for_any:
        return peer.rank not in _owing(one, wait, (peer,))
    return peer.channels.get((one.rank, wait.tag, not wait.is_send), 0) >= wait.message


def is_under_way(one: Seen, peer: Seen) -> bool:
    """Whether both a rank and its peer have begun to send or receive the message that the rank waits for."""
    if one.waiting is not None and one.waiting.is_collective:
        return is_in(peer, one.waiting)
    return one.waiting is not None and peer.recording is not None and _was_begun(one.waiting, one, peer)
