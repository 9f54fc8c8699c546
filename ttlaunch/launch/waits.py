"""Who waits for whom when nothing moves any more, from what the ranks' black boxes say of themselves and of each other."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ttlaunch.black_box import DONE, Box, Operation
from ttlaunch.launch.stacks import Frame, recipe_frame


@dataclass(frozen=True)
class Seen:
    """What is known of one rank at the moment.

    Attributes:
        box: None if it cannot be read.
        is_stopped: Whether its process was stopped by a signal.
        stack: Of its main thread, innermost call first; empty if it did not answer.
        idle_s: Since its last operation was begun or ended, if that is known.
    """

    rank: int
    role: str
    host: str
    box: Box | None
    is_stopped: bool = False
    stack: tuple[Frame, ...] = ()
    idle_s: float | None = None

    @property
    def name(self) -> str:
        return f"rank {self.rank} ({self.role})"

    @property
    def is_done(self) -> bool:
        return self.box is not None and self.box.phase == DONE

    @property
    def waiting(self) -> Operation | None:
        return None if self.box is None or self.is_done else self.box.waiting

    @property
    def place(self) -> str | None:
        """The recipe's line that it is at."""
        frame = recipe_frame(self.stack)
        if frame is not None:
            return frame.place
        return (self.waiting.place or None) if self.waiting else None


def peers_of(one: Seen, ranks: Sequence[Seen]) -> tuple[int, ...]:
    """The ranks that a rank waits for; one whose role has returned waits for all that are still at work."""
    if one.is_done:
        return tuple(other.rank for other in ranks if not other.is_done)
    known = one.waiting is not None and 0 <= one.waiting.peer < len(ranks)
    return (one.waiting.peer,) if one.waiting is not None and known else ()


def waiters(ranks: Sequence[Seen]) -> Mapping[int, frozenset[int]]:
    """By rank, those that wait for it, directly or through others."""
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
    """Ranks that wait for each other, in that order; empty if there is no such cycle."""
    for start in ranks:
        path, at = [], start.rank
        while at not in path:
            path.append(at)
            peers = peers_of(ranks[at], ranks)
            if not peers:
                break
            at = peers[0]
        else:
            return tuple(path[path.index(at) :])
    return ()


def other_tags(one: Seen, peer: Seen) -> tuple[int, ...]:
    """Tags under which the peer has sent what the rank has not asked for, while it waits for another tag of this peer.

    Empty if the message that it waits for was begun, or if a box had no room to count.
    """
    wait = one.waiting
    if wait is None or wait.is_send or one.box is None or peer.box is None or _was_begun(wait, one, peer):
        return ()
    counts = one.box.channels
    return tuple(
        tag
        for (dest, tag, is_send), count in sorted(peer.box.channels.items())
        if is_send and dest == one.rank and tag != wait.tag and count > counts.get((peer.rank, tag, False), 0)
    )


def _was_begun(wait: Operation, one: Seen, peer: Seen) -> bool:
    """Whether the other end of a message has been begun."""
    assert peer.box is not None  # noqa: S101 - the caller has looked
    return peer.box.channels.get((one.rank, wait.tag, not wait.is_send), 0) >= wait.message


def is_under_way(one: Seen, peer: Seen) -> bool:
    """Whether both ends of the message have been begun that a rank waits for."""
    return one.waiting is not None and peer.box is not None and _was_begun(one.waiting, one, peer)
