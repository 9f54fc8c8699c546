"""Compare what each pair of ranks has sent on a virtual clock with the recipe's formula.

A thousand ranks have a million pairs, each with two or three flows of the formula. Ranks with the same times send the same, so one row of
what they have sent is compared with the formula's row of each of them: to how many ranks of each group goes how much.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ttlaunch.records.virtual import VirtualEdge
    from ttlaunch.spec.recipe.traffic import Traffic


def bytes_of_pairs(flows: Iterable["Traffic"], *, world_size: int, steps: int) -> list[dict[int, int]]:
    """Return for each rank the formula's bytes to each other one within so many steps.

    Cost: less than a microsecond for each flow.
    """
    found: list[dict[int, int]] = [{} for _ in range(world_size)]
    times_of: dict[int, int] = {}
    for one in flows:
        times = times_of.get(one.every)
        if times is None:
            times = sum(step % one.every == 0 or step == steps for step in range(1, steps + 1))
            times_of[one.every] = times
        row, size = found[one.source], one.per_step * times + one.in_first_step
        row[one.dest] = row.get(one.dest, 0) + size
    return found


def count_differing(
    formula: Sequence[Mapping[int, int]], groups: Sequence[Iterable[int]], edges: Iterable["VirtualEdge"]
) -> int:
    """Count the pairs of ranks that have sent other bytes within steps than the formula says.

    Args:
        formula: For each rank its bytes to each other one.
        groups: The ranks that have sent the same, by group; each rank is in one.
        edges: What each rank of a group has sent to ranks of each group.
    """
    group_of = [0] * len(formula)
    for place, members in enumerate(groups):
        for rank in members:
            group_of[rank] = place
    sent: list[Counter[tuple[int, int]]] = [
        Counter() for _ in groups
    ]  # of each rank: to which group how much, how often
    for edge in edges:
        if edge.step_bytes:
            sent[edge.source][edge.dest, edge.step_bytes] += edge.peers
    differing = 0
    for rank, row in enumerate(formula):
        expected = Counter([(group_of[dest], size) for dest, size in row.items() if size])
        found = sent[group_of[rank]]
        if expected != found:
            differing += max((expected - found).total(), (found - expected).total())
    return differing
