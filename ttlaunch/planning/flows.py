"""Who sends how much to whom, rank by rank: what placing ranks and checking fabric sockets ask for.

Bytes are relative. A flow's `weight` is what each of its pairs exchanges in a step, both ways together; the shipped
recipes leave it at 1, because each of their flows carries one vector of the same size both ways: gradients or sums one
way and weights the other in the hierarchy, activations and their gradients in the pipeline, chunks of the vector in an
all-reduce.
"""

from ttlaunch.planning.roles import RoleLayout, pairs
from ttlaunch.spec.topology.model import Rank


def traffic(layout: RoleLayout) -> dict[tuple[Rank, Rank], float]:
    """Pairs of ranks that talk, the smaller first and each pair once, with the weight of all their flows together."""
    found: dict[tuple[Rank, Rank], float] = {}
    for flow in layout.flows:
        for a, b in pairs(flow, layout.roles):
            pair = (min(a, b), max(a, b))
            found[pair] = found.get(pair, 0.0) + flow.weight
    return found
