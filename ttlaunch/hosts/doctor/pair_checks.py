"""Report hosts that could not talk to each other: one diagnostic for each way in which their connections failed."""

from collections import Counter
from collections.abc import Sequence

from ttlaunch.diagnostics import Blame, Diagnostic, Label, Severity, listed, shown
from ttlaunch.hosts.doctor.network import NetworkChoice
from ttlaunch.hosts.doctor.pairs import Pair
from ttlaunch.spec.topology.model import Topology

LOST = "large packets are lost"
"""What `agent/pairs.py` reports of a connection on which small packets pass and large ones do not."""

_MOST_PAIRS = 8


def check_pairs(pairs: Sequence[Pair], choice: NetworkChoice, *, topology: Topology) -> list[Diagnostic]:
    """Report hosts that did not get through to each other, and hosts between which only small packets pass."""
    open_ports = "open ports 1024 to 65535 between these hosts in their firewalls"
    return [
        *_explain(
            [pair for pair in pairs if pair.problem is not None and pair.problem != LOST],
            pairs,
            choice,
            topology=topology,
            code="H028",
            between="`{one}` and `{other}` cannot talk to each other",
            hint=f"{open_ports}, or choose another network: `network: 10.0.0.0/24` in cluster.yaml",
        ),
        *_explain(
            [pair for pair in pairs if pair.problem == LOST],
            pairs,
            choice,
            topology=topology,
            code="H029",
            between="between `{one}` and `{other}` large packets are lost",
            hint="`ip link show` on both hosts and the switch between them: all need one MTU",
        ),
    ]


def check_mtu(choice: NetworkChoice, *, topology: Topology) -> list[Diagnostic]:
    """Report interfaces of one network with different MTUs, between which large packets may be lost."""
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
            notes=(
                "messages between ranks pass, but may be slow; a switch that cannot fragment packets drops those that are too large",
            ),
            hints=(f"`ssh {first} sudo ip link set {choice.interfaces[first].name} mtu {usual}`",),
            severity=Severity.WARNING,
            blame=Blame.HOSTS,
        )
    ]


def _explain(
    failed: Sequence[Pair],
    pairs: Sequence[Pair],
    choice: NetworkChoice,
    *,
    topology: Topology,
    code: str,
    between: str,
    hint: str,
) -> list[Diagnostic]:
    """The diagnostic for those of `pairs` that failed, at the host that all of them share or else at the first one."""
    if not failed:
        return []
    spans = {str(host.name): host.span for host in topology.hosts}
    where = listed(choice.ranks, last="and", quote="")
    shared = _shared_by_all(failed, pairs)
    ends = list(dict.fromkeys(end for pair in failed for end in (pair.source, pair.target)))
    if shared and len(ends) > 2:  # noqa: PLR2004 - more than one pair
        subject = f"no other host gets through to and from `{shown(shared)}` on {where}"
        first, rest = shared, []
    elif len(ends) == 2:  # noqa: PLR2004
        first, rest = ends[0], ends[1:]
        subject = f"{between.format(one=shown(first), other=shown(rest[0]))} on {where}"
    else:
        first, rest = ends[0], ends[1:]
        subject = f"{len(failed)} of {len(pairs)} one-way connections between hosts do not work on {where}"
    details = {(pair.source, pair.target): pair.problem or "" for pair in failed}
    notes = [
        f"from {source} to {target}: {problem}" for (source, target), problem in list(details.items())[:_MOST_PAIRS]
    ]
    more = len(details) - _MOST_PAIRS
    notes += [f"and {more} more"] if more > 0 else []
    labels = [Label(spans[end], choice.addresses[end]) for end in [first, *rest[: _MOST_PAIRS - 1]]]
    message = f"{subject}; nothing was started"
    return [
        Diagnostic(code, message, labels[0], tuple(labels[1:]), notes=tuple(notes), hints=(hint,), blame=Blame.HOSTS)
    ]


def _shared_by_all(failed: Sequence[Pair], pairs: Sequence[Pair]) -> str | None:
    """The host that cannot be reached, if it takes part in every failure and none of its connections works."""
    common = set.intersection(*({pair.source, pair.target} for pair in failed))
    broken = {(pair.source, pair.target) for pair in failed}
    for host in sorted(common):
        ways = {(pair.source, pair.target) for pair in pairs if host in {pair.source, pair.target}}
        if ways == broken:
            return host
    return None
