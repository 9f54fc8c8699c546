"""What it means that some hosts could not talk to each other: one diagnostic for each way in which they could not."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ttlaunch.diagnostics import Blame, Diagnostic, Label, Severity, listed, shown
from ttlaunch.hosts.doctor.network import NetworkChoice
from ttlaunch.hosts.doctor.pairs import Pair
from ttlaunch.spec.topology.model import Host, Topology

LOST = "large packets are lost"
"""What `agent/pairs.py` says of a way on which small packets pass and large ones do not."""

_MOST_PAIRS = 8


@dataclass(frozen=True)
class _Kind:
    """A way in which hosts do not get through to each other.

    Attributes:
        code: Of its diagnostic.
        between: What is said of two hosts, `{one}` and `{other}`.
        hint: What to type or change.
    """

    code: str
    between: str
    hint: str


_UNHEARD = _Kind(
    "H028",
    "`{one}` and `{other}` cannot talk to each other",
    "open ports 1024 to 65535 between these hosts in their firewalls, or choose another network: `network: 10.0.0.0/24` in cluster.yaml",
)
_TOO_LARGE = _Kind(
    "H029",
    "between `{one}` and `{other}` large packets are lost",
    "`ip link show` on both hosts and the switch between them: all need one MTU",
)


def check_pairs(pairs: Sequence[Pair], choice: NetworkChoice, *, topology: Topology) -> list[Diagnostic]:
    """Pairs that did not get through."""
    hosts = {str(host.name): host for host in topology.hosts}
    lost = [pair for pair in pairs if pair.problem == LOST]
    broken = [pair for pair in pairs if pair.problem is not None and pair.problem != LOST]
    found = []
    if broken:
        found.append(_explain(_UNHEARD, broken, pairs, choice, hosts))
    if lost:
        found.append(_explain(_TOO_LARGE, lost, pairs, choice, hosts))
    return found


def check_mtu(choice: NetworkChoice, *, topology: Topology) -> list[Diagnostic]:
    """Interfaces of one network with different MTUs: large packets may be lost, or only be cut up."""
    mtus = {host: interface.mtu for host, interface in choice.interfaces.items()}
    if len(set(mtus.values())) <= 1:
        return []
    usual = Counter(mtus.values()).most_common(1)[0][0]
    other = {host: mtu for host, mtu in mtus.items() if mtu != usual}
    first = next(iter(other))
    hosts = {str(host.name): host for host in topology.hosts}
    which = listed(other, last="and") if len(other) > 1 else f"host `{shown(first)}`"
    sizes = listed(sorted(set(other.values())), last="and", quote="")
    return [
        Diagnostic(
            "H029",
            f"{which} {'has' if len(other) == 1 else 'have'} MTU {sizes} on the chosen network, the others have {usual}",
            Label(hosts[first].span, f"{choice.interfaces[first].name} has MTU {other[first]}"),
            notes=("messages between ranks pass, but may be slow; a switch that cannot cut packets up loses them",),
            hints=(f"`ssh {first} sudo ip link set {choice.interfaces[first].name} mtu {usual}`",),
            severity=Severity.WARNING,
            blame=Blame.HOSTS,
        )
    ]


def _explain(
    kind: _Kind, failed: Sequence[Pair], pairs: Sequence[Pair], choice: NetworkChoice, hosts: Mapping[str, Host]
) -> Diagnostic:
    where = listed(choice.ranks, last="and", quote="")
    shared = _shared_by_all(failed, pairs)
    ends = list(dict.fromkeys(end for pair in failed for end in (pair.source, pair.target)))
    if shared and len(ends) > 2:  # noqa: PLR2004 - more than one pair
        subject = f"no other host gets through to and from `{shown(shared)}` on {where}"
        first, rest = shared, []
    elif len(ends) == 2:  # noqa: PLR2004
        first, rest = ends[0], ends[1:]
        subject = f"{kind.between.format(one=shown(first), other=shown(rest[0]))} on {where}"
    else:
        first, rest = ends[0], ends[1:]
        subject = f"{len(failed)} of {len(pairs)} ways between hosts do not work on {where}"
    details = {(pair.source, pair.target): pair.problem or "" for pair in failed}
    notes = [
        f"from {source} to {target}: {problem}" for (source, target), problem in list(details.items())[:_MOST_PAIRS]
    ]
    more = len(details) - _MOST_PAIRS
    notes += [f"and {more} more"] if more > 0 else []
    secondary = [Label(hosts[end].span, choice.addresses[end]) for end in rest[: _MOST_PAIRS - 1]]
    return Diagnostic(
        kind.code,
        f"{subject}; nothing was started",
        Label(hosts[first].span, choice.addresses[first]),
        tuple(secondary),
        notes=tuple(notes),
        hints=(kind.hint,),
        blame=Blame.HOSTS,
    )


def _shared_by_all(failed: Sequence[Pair], pairs: Sequence[Pair]) -> str | None:
    """The host that no other gets through to, if it takes part in every failure and none of its ways works."""
    common = set.intersection(*({pair.source, pair.target} for pair in failed))
    broken = {(pair.source, pair.target) for pair in failed}
    for host in sorted(common):
        ways = {(pair.source, pair.target) for pair in pairs if host in {pair.source, pair.target}}
        if ways == broken:
            return host
    return None
