"""Which rank computes whose micro-batches in an audit. No torch: tests go through all sizes."""

from collections.abc import Sequence


def audited_place(place: int, *, hosts: Sequence[str], number: int) -> int:
    """Return whose micro-batches a rank computes: every rank is audited by one other, on another host as far as possible.

    Args:
        place: The rank's place among those that take part, at least two.
        hosts: The host of each.
        number: The number of the audit, from 1: from one to the next, ranks audit others.

    >>> [[audited_place(place, hosts="abc", number=number) for place in range(3)] for number in (1, 2, 3)]
    [[1, 2, 0], [2, 0, 1], [1, 2, 0]]
    """
    distances = _best_distances(hosts)
    return (place + distances[(number - 1) % len(distances)]) % len(hosts)


def _best_distances(hosts: Sequence[str]) -> list[int]:
    """Return the distances in the circle of ranks at which most ranks have a partner on another host."""
    count = len(hosts)
    apart = {
        distance: sum(hosts[place] != hosts[(place + distance) % count] for place in range(count))
        for distance in range(1, count)
    }
    most = max(apart.values())
    return [distance for distance, pairs in apart.items() if pairs == most]
