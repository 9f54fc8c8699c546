"""Find an order of hosts, and of the meshes of each, in which ranks that communicate are close in the mesh graph.

Rank r takes the r-th slot in the order of `hosts.txt`, so reordering the hosts places the ranks. A host is
cabled to its meshes, so they move together, and with them the host's rows in the bindings. A host with slots that are not
bound keeps its position, because no file says which meshes are cabled to these slots.

The cost is the time that messages occupy links: Σ weight ÷ channels over the links on the route of each pair of ranks that communicate, on the
routes of the virtual clock. Of two arrangements, the one with less weight on pairs without a path is better; only then does time count.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import NamedTuple

from ttlaunch.diagnostics import Diagnostic, Severity
from ttlaunch.diagnostics.count import counted
from ttlaunch.diagnostics.diagnostic import mistake_at
from ttlaunch.planning.arrangement import EXACT_UP_TO, Assignment
from ttlaunch.planning.graph import Node, links_of, node_of, traffic
from ttlaunch.planning.roles import RoleLayout
from ttlaunch.planning.routes import routes_between
from ttlaunch.planning.search import solve
from ttlaunch.spec.topology.model import Binding, Host, Rank, Slot, Topology

_WORTH_A_WARNING = 1.5


class Cost(NamedTuple):
    """The cost of an arrangement; the smaller one is better.

    Attributes:
        unreachable: The weight of the pairs of ranks whose meshes have no path between them.
        time: Over the other pairs, Σ weight ÷ channels of each link on the route.
    """

    unreachable: float
    time: float


class PairHops(NamedTuple):
    """Two ranks that communicate, and their distance in hops; None if there is no path.

    Attributes:
        weight: What both send to each other in a step: bytes, or in relation to other pairs.
        before, after: Their hops as they are, and as proposed.
    """

    a: Rank
    b: Rank
    weight: float
    before: int | None
    after: int | None


@dataclass(frozen=True)
class Proposal:
    """An order of hosts and bindings.

    Attributes:
        hosts: All hosts, in the order for `hosts.txt`.
        bindings: The current rows, in the order of the ranks that would get them.
        slots: The slot of each rank.
        exact: Whether all orders were considered.
    """

    hosts: tuple[Host, ...]
    bindings: tuple[Binding, ...]
    slots: tuple[Slot, ...]
    before: Cost
    after: Cost
    pairs: tuple[PairHops, ...]
    exact: bool

    @property
    def improves(self) -> bool:
        return self.after < self.before

    def moved(self, rank: Rank) -> bool:
        """Return whether a rank would get the mesh and slot that another rank has now."""
        return self.bindings[rank].rank != rank


def propose_placement(
    topology: Topology, layout: RoleLayout, *, weights: Mapping[tuple[Rank, Rank], float] | None = None
) -> Proposal | Diagnostic:
    """Propose the best order found, or the current one if none is better.

    Args:
        topology: The cluster.
        layout: The recipe's layout on it.
        weights: What each pair of ranks, the smaller one first, sends to each other in a step; None: what the flows declare.

    Cost: a bounded search; at most a second or two for 64 ranks.
    """
    if not topology.meshes or not topology.bindings:
        message = f"configuration `{topology.name}` has no meshes, so there is nothing to place ranks by"
        hint = "describe the meshes and their links in `mgd.yaml`, and who drives them in `rank_bindings.yaml`"
        return mistake_at("P012", message, topology.hosts[0].span, label="only hosts are described", hint=hint)
    nodes = [node_of(topology.driven(binding)) for binding in topology.bindings]
    weights = traffic(layout) if weights is None else weights
    hops, times = _distances(topology, nodes)
    longest = max((one for one in times.values() if one is not None), default=0.0)
    # The distance of a pair without a path: more than any placement with a path for every pair can cost.
    apart = (1.0 + longest) * (1.0 + sum(weights.values()) / min(weights.values(), default=1.0))
    distances = [[apart if (one := times[a, b]) is None else one for b in nodes] for a in nodes]
    blocks = _blocks(topology)
    last = blocks[-1]
    unfilled = len(last) < topology.slots[last[0]].host.slots
    problem = Assignment(distances, {(int(a), int(b)): w for (a, b), w in weights.items()}, blocks, unfilled)
    places = solve(problem)
    pairs = tuple(
        PairHops(a, b, weight, hops[nodes[a], nodes[b]], hops[nodes[places[a]], nodes[places[b]]])
        for (a, b), weight in weights.items()
    )
    hosts = tuple(dict.fromkeys([*(topology.slots[place].host for place in places), *topology.hosts]))
    return Proposal(
        hosts=hosts,
        bindings=tuple(topology.bindings[place] for place in places),
        slots=tuple(Slot(host, index) for host in hosts for index in range(host.slots))[: len(places)],
        before=_cost([(one.weight, times[nodes[one.a], nodes[one.b]]) for one in pairs]),
        after=_cost([(one.weight, times[nodes[places[one.a]], nodes[places[one.b]]]) for one in pairs]),
        pairs=pairs,
        exact=problem.size <= EXACT_UP_TO,
    )


def check_placement(topology: Topology, layout: RoleLayout, *, recipe: str) -> list[Diagnostic]:
    """Warn if another order of the hosts would cost much less; the run is correct with either order."""
    proposal = propose_placement(topology, layout) if topology.bindings else None
    if not isinstance(proposal, Proposal) or not proposal.improves:
        return []
    before, after = proposal.before, proposal.after
    if before.unreachable <= after.unreachable and before.time < _WORTH_A_WARNING * after.time:
        return []
    moved = next(rank for rank in range(len(proposal.bindings)) if proposal.moved(Rank(rank)))
    message = f"these bindings cost {render_cost(before)}; another order of the hosts costs {render_cost(after)}"
    warning = mistake_at(
        "P013",
        message,
        topology.bindings[moved].span,
        label=f"the proposal gives rank {moved} another host and mesh",
        note="the cost is the sum of weight ÷ channels over the links between the pairs of ranks that talk",
        hint=f"`ttlaunch place {recipe} --on {topology.name}` proposes that order",
        severity=Severity.WARNING,
    )
    return [warning]


def render_cost(cost: Cost) -> str:
    """Return the cost in words: `4`, or `4 and 2 without a path`."""
    return f"{cost.time:g}" + (f" and {cost.unreachable:g} without a path" if cost.unreachable else "")


def render_hops(hops: int | None) -> str:
    return "no path" if hops is None else counted(hops, "hop")


Pair = tuple[Node, Node]


def _distances(topology: Topology, nodes: Sequence[Node]) -> tuple[dict[Pair, int | None], dict[Pair, float | None]]:
    """Return, for each two nodes, the links on the route and the sum of 1 ÷ channels over them; None without a path."""
    links = links_of(topology)
    routes = routes_between(links)
    hops: dict[Pair, int | None] = {}
    times: dict[Pair, float | None] = {}
    for a, b in product(dict.fromkeys(nodes), repeat=2):
        pair = a, b
        route = () if a == b else routes.get(pair)
        hops[pair] = None if route is None else len(route)
        times[pair] = None if route is None else sum((1 / links[link // 2][2] for link in route), 0.0)
    return hops, times


def _blocks(topology: Topology) -> tuple[tuple[int, ...], ...]:
    """Return the ranks of each host, in the order of `hosts.txt`, without hosts that have none."""
    ranks: dict[Host, list[int]] = {}
    for binding in topology.bindings:
        ranks.setdefault(topology.slots[binding.rank].host, []).append(binding.rank)
    return tuple(tuple(of_host) for of_host in ranks.values())


def _cost(pairs: list[tuple[float, float | None]]) -> Cost:
    apart = sum(weight for weight, time in pairs if time is None)
    return Cost(apart, sum(weight * time for weight, time in pairs if time is not None))
