"""Divide ranks into classes that do the same, for a simulation that runs one rank of each.

The division begins with what is known before: the role, how slow a rank is, and how large its shares of the data are. Where the messages of a
simulation show that the ranks of a class are not alike (`NotAlikeError`), the class is divided by what other ranks have sent to them and
received from them, and the simulation begins anew.

Source: refining until nothing contradicts is R. Paige, R. Tarjan, "Three partition refinement algorithms", SIAM J. Computing 16(6), 1987.
"""

from collections import Counter, defaultdict
from collections.abc import Hashable, Iterable, Mapping, Sequence
from itertools import pairwise

from ttlaunch.runtime.comm.virtual_world import Classes, NotAlikeError, VirtualOutcome
from ttlaunch.runtime.world import Rank

_LONGEST = 8
"""Longer rows of ranks that repeat are not looked for: each place in a row is a class or two."""

_LEAST_ROWS = 3


def first_classes(roles: Sequence[str], differences: Sequence[Hashable]) -> Classes:
    """Divide ranks by what is known before they run; the first rank of each role, which often decides for all, is alone.

    Args:
        roles: The role of each rank.
        differences: What else distinguishes each rank: how slow it is, and how large its shares of the data are.
    """
    found: dict[Hashable, list[Rank]] = defaultdict(list)
    known = set[str]()
    for rank, role in enumerate(roles):
        found[role, role in known, differences[rank]].append(Rank(rank))
        known.add(role)
    return _in_order(found.values())


def combed_classes(roles: Sequence[str], differences: Sequence[Hashable], period: int) -> Classes:
    """Divide ranks as `first_classes` does, and also by their places in a row of so many ranks that repeats, such as the stages of a pipeline.

    The first such row is alone.
    """
    places = places_within_role(roles)
    known = [(one, place % period, place < period) for one, place in zip(differences, places, strict=True)]
    return first_classes(roles, known)


def periods(roles: Sequence[str], seen: Iterable[tuple[Rank, Rank]]) -> list[int]:
    """Return how long a row of ranks may be that repeats; nothing if no ranks of one role exchange messages.

    Args:
        roles: The role of each rank.
        seen: Ranks, and those with which they have exchanged messages.
    """
    counts = [roles.count(role) for role in _with_peers(roles, seen)]
    return [
        period
        for period in range(2, _LONGEST + 1)
        if counts and all(count % period == 0 and count >= _LEAST_ROWS * period for count in counts)
    ]


def exchange_within_roles(roles: Sequence[str], seen: Iterable[tuple[Rank, Rank]]) -> bool:
    """Whether ranks of one role exchange messages."""
    return bool(_with_peers(roles, seen))


def _with_peers(roles: Sequence[str], seen: Iterable[tuple[Rank, Rank]]) -> set[str]:
    return {roles[one] for one, other in seen if roles[one] == roles[other]}


def with_witnesses(classes: Classes) -> Classes:
    """Make the last rank of each class a class of its own: it runs too, and shows whether the first one stands for all.

    Blocks of data and shards are cut so that ranks with equal ones follow each other: if first and last are equal, so are those between.
    """
    divided_ones = [part for ranks in classes for part in (ranks[:-1], ranks[-1:]) if part]
    return _in_order(divided_ones)


def divided(classes: Classes, which: Sequence[int], seen: Mapping[tuple[Rank, Rank], int]) -> Classes:
    """Divide classes by what the ranks that have run have seen of their members, and then by the classes of their partners.

    Args:
        classes: The classes, before the last rank of each became a witness.
        which: Members of which classes, by their places among those with witnesses, are not alike; empty: any may be.
        seen: Observer and other rank, and a number that is equal for ranks with which the observer has exchanged the same.
    """
    by_partners = _divided(classes, which, seen, distances=_distances(classes, seen))
    return by_partners if len(by_partners) > len(classes) else _divided(classes, which, seen, distances={})


def _divided(
    classes: Classes,
    which: Sequence[int],
    seen: Mapping[tuple[Rank, Rank], int],
    *,
    distances: Mapping[int, Sequence[int]],
) -> Classes:
    """Divide classes as `divided` does, with the distances at which the members of classes, by their places, have partners."""
    places = with_witnesses(classes)
    suspects = {rank for place in which for rank in places[place]} or {rank for ranks in classes for rank in ranks}
    # A partner is seen by one observer alone, whatever it does: that says nothing about it, and would put observers into classes of their own.
    partners = {
        (one, Rank(one + distance))
        for place, found in distances.items()
        for one in (classes[place][0], classes[place][-1])
        for distance in found
    }
    views = {pair: view for pair, view in seen.items() if pair not in partners}
    observers = sorted({observer for observer, _ in views})
    parts: list[Sequence[Rank]] = []
    for ranks in classes:
        parts += _parts(ranks, observers, views) if suspects.intersection(ranks) else [ranks]
    return _divided_by_partners(parts, {rank: found for place, found in distances.items() for rank in classes[place]})


def _distances(classes: Classes, seen: Iterable[tuple[Rank, Rank]]) -> dict[int, list[int]]:
    """Return for classes, by their places, how far away the partners of each member probably are, such as the next stage of a pipeline.

    Known are those of the first and of the last member: where both have partners in the same class, at the same distances, it is taken for
    granted that those between have, too. If that is wrong, the division that follows from it does not hold, and is found out.
    """
    place_of = {rank: place for place, ranks in enumerate(classes) for rank in ranks}
    ends = {rank for ranks in classes if len(ranks) > 1 for rank in (ranks[0], ranks[-1])}
    away: dict[tuple[Rank, int], set[int]] = defaultdict(set)
    for one, other in seen:
        if one in ends:
            away[one, place_of[other]].add(other - one)
    found: dict[int, list[int]] = defaultdict(list)
    for (one, theirs), distances in away.items():
        ranks = classes[place_of[one]]
        if one == ranks[0] and away.get((ranks[-1], theirs)) == distances:
            found[place_of[one]] += sorted(distances)
    return found


def _divided_by_partners(parts: Sequence[Sequence[Rank]], distances: Mapping[Rank, Sequence[int]]) -> Classes:
    """Divide classes until the partners of all members of a class are in the same classes, as far as a row of ranks may be long."""
    colours = {rank: place for place, ranks in enumerate(parts) for rank in ranks}
    for _ in range(_LONGEST):
        known: dict[tuple[int, ...], int] = {}
        finer = {
            rank: known.setdefault(
                (colour, *(colours.get(Rank(rank + distance), -1) for distance in distances.get(rank, ()))), len(known)
            )
            for rank, colour in colours.items()
        }
        is_stable, colours = len(known) == len(set(colours.values())), finer
        if is_stable:
            break
    found: dict[int, list[Rank]] = defaultdict(list)
    for rank in sorted(colours):
        found[colours[rank]].append(rank)
    return _in_order(found.values())


def _parts(ranks: Sequence[Rank], observers: Sequence[Rank], seen: Mapping[tuple[Rank, Rank], int]) -> list[list[Rank]]:
    """Divide ranks by what all observers have seen; nobody observes itself, so an observer joins those that it may be like."""
    parts: dict[tuple[int | None, ...], list[Rank]] = defaultdict(list)
    watching = set(observers)
    for rank in ranks:
        if rank not in watching:
            parts[tuple(seen.get((observer, rank)) for observer in observers)].append(rank)
    alone: list[list[Rank]] = []
    for rank in ranks:
        if rank in watching:
            views = [seen.get((observer, rank)) for observer in observers]
            like = [
                part
                for view, part in parts.items()
                if all(
                    one == other or observers[at] == rank
                    for at, (one, other) in enumerate(zip(view, views, strict=True))
                )
            ]
            if len(like) == 1:
                like[0].append(rank)
            else:
                alone.append([rank])
    return [sorted(part) for part in (*parts.values(), *alone)]


def places_within_role(roles: Sequence[str]) -> list[int]:
    """Return for each rank how many ranks before it have its role."""
    counts: dict[str, int] = defaultdict(int)
    found = []
    for role in roles:
        found.append(counts[role])
        counts[role] += 1
    return found


def spans(ranks: Sequence[Rank]) -> list[dict[str, int]]:
    """Write ranks, in order, as the first and last one of each row of ranks that follow each other.

    >>> spans([0, 1, 2, 5])
    [{'first': 0, 'last': 2}, {'first': 5, 'last': 5}]
    """
    cuts = [0, *(place for place, (one, other) in enumerate(pairwise(ranks), 1) if other != one + 1), len(ranks)]
    return [{"first": ranks[begin], "last": ranks[end - 1]} for begin, end in pairwise(cuts)]


def edges_of(outcome: VirtualOutcome, classes: Classes) -> list[dict[str, int]]:
    """Count, for the first rank of each class, to how many ranks of each class it has sent the same.

    Raises:
        NotAlikeError: The last rank of a class has sent something else, or to ranks of other classes.
    """
    place_of = {rank: place for place, ranks in enumerate(classes) for rank in ranks}
    sent: dict[int, Counter[tuple[int, int, int, int]]] = {
        rank: Counter() for ranks in classes for rank in (ranks[0], ranks[-1])
    }
    for (source, dest), count in outcome.messages.items():
        if source in sent:
            size, in_step = outcome.message_bytes[source, dest], outcome.step_bytes[source, dest]
            sent[source][place_of[dest], count, size, in_step] += 1
    for ranks in classes:
        if sent[ranks[0]] != sent[ranks[-1]]:
            reason = f"rank {ranks[0]} and rank {ranks[-1]} send to ranks that are not alike"
            raise NotAlikeError(reason, place_of_witness(classes, ranks))
    names = ("source", "dest", "messages", "bytes", "step_bytes")
    rows = {(place, *row): peers for place, ranks in enumerate(classes) for row, peers in sent[ranks[0]].items()}
    return [{**dict(zip(names, row, strict=True)), "peers": peers} for row, peers in sorted(rows.items())]


def place_of_witness(classes: Classes, ranks: Sequence[Rank]) -> int:
    """Return the place of the last rank of a class among classes and their witnesses, as `NotAlikeError` names those."""
    return with_witnesses(classes).index((ranks[-1],))


def _in_order(parts: Iterable[Sequence[Rank]]) -> Classes:
    return tuple(sorted(tuple(part) for part in parts))
