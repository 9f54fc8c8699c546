"""Choose which of the ranks that wait for each other in a circle to report, and describe its mistake.

If a rank of the circle is in another operation than most ranks of its role, only this rank is considered. The report
describes what is certainly a mistake of a considered rank: a message left out, a wrong sender, a wrong tag. If there is no
such mistake, the report names the rank that differs from its role, or else the rank that began to wait first.
"""

from collections import Counter
from collections.abc import Sequence

from ttlaunch.flight_recorder import Operation
from ttlaunch.running.flight_recorders import describe_collective
from ttlaunch.running.hang.waits import (
    Seen,
    is_in,
    is_under_way,
    other_senders,
    other_tags,
    peers_of,
    peers_that_sent,
    seen_of,
)

_MOST_NAMED = 3

Mismatch = tuple[str, Seen, str]
"""The code, the rank to report, and a clause whose subject is this rank."""


def find_mismatch(ranks: Sequence[Seen], circle: Sequence[int]) -> Mismatch:
    """Return the rank to report, and what is wrong with it.

    Args:
        ranks: All ranks of a run.
        circle: The ranks of which each waits for the next one, and the last for the first; not empty.
    """
    cycle = [seen_of(rank, ranks) for rank in circle]
    by_age = sorted((one for one in cycle if one.waiting), key=lambda one: -(one.idle_s or 0.0))
    odd = _odd_one_out(by_age, ranks)
    for find in (_left_out, _wrong_sender, _wrong_message, _other_meeting):
        for one in by_age:
            found = find(one, ranks)
            if found is not None and odd in (None, found[1]):
                return found
    first = odd or (by_age[0] if by_age else cycle[0])
    return "R015", first, _circle(first, cycle)


def _wrong_message(one: Seen, ranks: Sequence[Seen]) -> Mismatch | None:
    """Report a rank that waits for another tag than its peer has sent, or for a peer whose role has returned."""
    peer = seen_of(peers_of(one, ranks)[0], ranks)
    wait, tags = one.waiting, other_tags(one, peer)
    assert wait is not None  # noqa: S101 - `find_mismatch` chooses ranks that wait
    if tags:
        named = ", ".join(str(tag) for tag in tags[:_MOST_NAMED])
        return "R016", one, f"waits for tag {wait.tag} of {peer.name}, which has sent it tag {named} instead"
    if peer.is_done and not is_under_way(one, peer):
        if wait.is_collective:
            return "R037", one, f"waits in {describe_collective(wait)} for {peer.name}, which is done"
        what = f"until {peer.name} receives" if wait.is_send else f"for a message of {peer.name}"
        return "R016", one, f"waits {what}, which is done"
    return None


def _left_out(one: Seen, ranks: Sequence[Seen]) -> Mismatch | None:
    """Report a peer that has not sent a rank the message that all other ranks of the peer's role have sent."""
    wait = one.waiting
    assert wait is not None  # noqa: S101 - `find_mismatch` chooses ranks that wait
    peer = seen_of(peers_of(one, ranks)[0], ranks)
    others = peers_that_sent(one, peer, ranks)
    if not others:
        return None
    named = ", ".join(str(rank) for rank in others[:_MOST_NAMED])
    have = "has" if len(others) == 1 else "have"
    what = f"`{wait.name}` of tag {wait.tag}{f' in step {wait.step}' if wait.step else ''}"
    return "R016", peer, f"has not sent {one.name} {what}, as rank {named} {have}, and waits for another message"


def _wrong_sender(one: Seen, ranks: Sequence[Seen]) -> Mismatch | None:
    """Report a rank that waits for a message of one peer while another rank has sent it such a message."""
    others, wait = other_senders(one, ranks), one.waiting
    if not others or wait is None:
        return None
    other, peer = seen_of(others[0], ranks), seen_of(wait.peer, ranks)
    return "R016", one, f"waits for tag {wait.tag} of {peer.name}, and {other.name} has sent it instead"


def _other_meeting(one: Seen, ranks: Sequence[Seen]) -> Mismatch | None:
    """Report two ranks that are at the same place in the operations of a group, but called different operations there."""
    wait = one.waiting
    if wait is None or not wait.is_collective:
        return None
    for other in ranks:
        theirs = other.waiting
        if (
            other is not one
            and theirs is not None
            and is_in(other, wait)
            and what_must_match(theirs) != what_must_match(wait)
        ):
            return (
                "R037",
                one,
                f"is in {describe_collective(wait)}, and {other.name} at the same place in {describe_collective(theirs)}",
            )
    return None


def what_must_match(wait: Operation) -> tuple[str, int, int]:
    """Return what must be equal for ranks in the same operation of a group."""
    return wait.name, wait.nbytes, wait.bucket


def _odd_one_out(cycle: Sequence[Seen], ranks: Sequence[Seen]) -> Seen | None:
    """Return a rank that is in another operation or step than most ranks of its role; None if there is none."""
    for one in cycle:
        doing = [_doing(other) for other in ranks if other.role == one.role and other.waiting]
        common, count = Counter(doing).most_common(1)[0]
        if 2 * count > len(doing) and _doing(one) != common:
            return one
    return None


def _doing(one: Seen) -> tuple[str, int]:
    return (one.waiting.name, one.waiting.step) if one.waiting else ("", 0)


def _circle(first: Seen, cycle: Sequence[Seen]) -> str:
    index = cycle.index(first)
    ordered = [*cycle[index:], *cycle[:index]]
    ring = " → ".join(str(one.rank) for one in (*ordered, first))
    waits = [one.waiting for one in ordered if one.waiting]
    if any(is_under_way(one, other) for one, other in zip(ordered, [*ordered[1:], first], strict=True)):
        why = "a message that both ends have begun does not arrive"
    elif all(not wait.is_send for wait in waits):
        why = "all of them receive and none sends"
    elif all(wait.is_send for wait in waits):
        why = "all of them send and none receives"
    else:
        why = "some send while others receive something else"
    names = list(dict.fromkeys(wait.name for wait in waits))
    if len(names) > 1:
        parts = [f"rank {one.rank} in `{one.waiting.name}`" for one in ordered if one.waiting]
        why += f"; they are not in the same operation: {', '.join(parts[:4])}"
    return f"waits in a circle, {ring}: {why}"
