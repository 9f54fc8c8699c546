"""Choose the networks that ranks, and mpirun's own daemons, talk over: from the facts of all hosts, without touching one.

Open MPI left to itself takes any interface that is up, docker0 included, which has the same address on every host; then
it hangs. So the network is always given, in CIDR notation because interfaces may have other names on other hosts.
"""

from collections.abc import Mapping
from fnmatch import fnmatchcase
from ipaddress import AddressValueError, IPv4Address, IPv4Network, NetmaskValueError

from ttlaunch.diagnostics import Blame, Diagnostic, Severity, listed, shown
from ttlaunch.hosts.doctor.facts import HostFacts, Interface
from ttlaunch.quick_dataclass import dataclass

IGNORED = (
    "docker*",
    "br-*",
    "virbr*",
    "vnet*",
    "veth*",
    "cni*",
    "flannel*",
    "cali*",
    "cilium*",
    "podman*",
    "lxcbr*",
    "lxdbr*",
)
"""Interfaces of containers and virtual machines inside a host, which lead to no other host."""

_EXAMPLE = "10.0.0.0/24"


@dataclass(frozen=True)
class NetworkChoice:
    """Networks in CIDR notation, and what each host is called on them.

    Attributes:
        ranks: The networks for messages between ranks.
        control: The networks for mpirun and its daemons; they reach the launching machine as well.
        addresses: The addresses of each host on the networks for ranks.
        interfaces: The name and MTU of the chosen interface of each host.
        has_rdma: Whether every host has an RDMA device.
        why: The reason for the choice, in one sentence.
        as_good: Networks that nothing tells from the chosen one: they are as fast, and SSH uses none of them more.
    """

    ranks: tuple[str, ...]
    control: tuple[str, ...]
    addresses: Mapping[str, str]
    interfaces: Mapping[str, Interface]
    has_rdma: bool
    why: str
    as_good: tuple[str, ...] = ()


def choose_network(
    facts: Mapping[str, HostFacts],
    *,
    wanted: str | None = None,
    connections: Mapping[str, tuple[str, str] | None] | None = None,
    takes_others: bool = False,
) -> NetworkChoice | Diagnostic:
    """Find a network for the ranks.

    Args:
        facts: The facts about the hosts that get ranks.
        wanted: `network` of cluster.yaml: the name of an interface, or a network.
        connections: For each host, the two addresses of the connection to it: ours and the host's; None if no network
            is in between.
        takes_others: Whether other machines than these have to reach the ranks, so that even a single host needs a network.
    """
    connections = connections or {}
    candidates = {host: find_candidates(host, facts) for host in facts}
    found: dict[str, Interface] | Diagnostic
    as_good: tuple[str, ...] = ()
    if len(facts) == 1 and not takes_others:
        host = next(iter(facts))
        chosen = {host: next((i for i in facts[host].interfaces if i.address.ip.is_loopback), None)}
        found = {name: interface for name, interface in chosen.items() if interface}
        why = "all ranks run on one machine"
    elif wanted is not None:
        found, why = _wanted(facts, wanted)
    else:
        options = _options(candidates, used := {pair[1] for pair in connections.values() if pair})
        found, why = _fastest(options) if options else _routed(candidates, used)
        as_good = tuple(str(one.network) for one in options[1:] if one.rating == options[0].rating)
    if isinstance(found, Diagnostic):
        return found
    ranks = _networks(found)
    return NetworkChoice(
        ranks,
        _control(facts, connections, ranks),
        {host: str(interface.address.ip) for host, interface in found.items()},
        found,
        all(host.rdma for host in facts.values()),
        why,
        as_good,
    )


def check_choice(choice: NetworkChoice) -> list[Diagnostic]:
    """Warn if the chosen network is one of several that could all be meant."""
    if not choice.as_good:
        return []
    chosen, others = listed(choice.ranks, last="and", quote=""), listed(choice.as_good, last="and", quote="")
    message = f"ranks use the network {chosen}, and nothing says that {others} is not meant"
    hint = f"`network: {choice.ranks[0]}` in cluster.yaml keeps this choice, `network: {choice.as_good[0]}` changes it"
    return [Diagnostic("H042", message, severity=Severity.WARNING, hints=(hint,), blame=Blame.HOSTS)]


def find_candidates(host: str, facts: Mapping[str, HostFacts]) -> list[Interface]:
    """A host's interfaces that may lead to other hosts."""
    machines: dict[str, set[str]] = {}
    for other in facts.values():
        for address in other.addresses:
            machines.setdefault(address, set()).add(other.machine)
    return [
        interface
        for interface in facts[host].interfaces
        if interface.up
        and not interface.address.ip.is_loopback
        and not interface.address.ip.is_link_local
        and not any(fnmatchcase(interface.name, pattern) for pattern in IGNORED)
        and len(machines[str(interface.address.ip)]) == 1  # an address that several machines have leads nowhere
    ]


def _wanted(facts: Mapping[str, HostFacts], wanted: str) -> tuple[dict[str, Interface] | Diagnostic, str]:
    try:
        network = IPv4Network(wanted, strict=False)
    except (AddressValueError, NetmaskValueError, ValueError):
        network = None
    found: dict[str, Interface] = {}
    if wanted == "lo" or (network and network.is_loopback):
        message = f"`{shown(wanted)}`, the `network` of cluster.yaml, is loopback: it leads to no other host"
        return _refusal(message, facts, dict.fromkeys(facts)), ""
    for host, known in facts.items():
        for interface in known.interfaces:
            if interface.address.ip in network if network else interface.name == wanted:
                found.setdefault(host, interface)
    missing = [host for host in facts if host not in found]
    if missing:
        what = "address in" if network else "interface"
        has = "has" if len(missing) == 1 else "have"
        message = f"{listed(missing, last='and')} {has} no {what} `{shown(wanted)}`, the `network` of cluster.yaml"
        return _refusal(message, facts, dict.fromkeys(missing)), ""
    return found, f"cluster.yaml asks for {wanted}"


def _options(candidates: Mapping[str, list[Interface]], used: set[str]) -> list["_Option"]:
    """The networks that all hosts share, the best first."""
    options: dict[tuple[str, ...], _Option] = {}
    for network in sorted({i.address.network for interfaces in candidates.values() for i in interfaces}):
        members = {
            host: next((i for i in interfaces if i.address.ip in network), None)
            for host, interfaces in candidates.items()
        }
        inside = {host: interface for host, interface in members.items() if interface is not None}
        if len(inside) == len(candidates):
            slowest = min(interface.speed_mbit or 0 for interface in inside.values())
            by_ssh = sum(str(interface.address.ip) in used for interface in inside.values())
            # Of two networks with the same addresses the narrower one, which sorts later, takes the other's place.
            options[tuple(str(i.address.ip) for i in inside.values())] = _Option(slowest, by_ssh, network, inside)
    return sorted(options.values(), key=lambda option: (-option.speed_mbit, -option.by_ssh, option.network))


@dataclass(frozen=True)
class _Option:
    """A network that all hosts share.

    Attributes:
        speed_mbit: The speed of its slowest interface; 0 if a driver reports none.
        by_ssh: How many hosts were reached over it.
    """

    speed_mbit: int
    by_ssh: int
    network: IPv4Network
    interfaces: dict[str, Interface]

    @property
    def rating(self) -> tuple[int, int]:
        return self.speed_mbit, self.by_ssh


def _fastest(ordered: list[_Option]) -> tuple[dict[str, Interface], str]:
    best, others = ordered[0], [option.network for option in ordered[1:]]
    hosts = len(best.interfaces)
    if not others:
        return best.interfaces, f"{best.network} is the only network that all {hosts} hosts share"
    rest = listed(others, last="and", quote="")
    if best.speed_mbit > ordered[1].speed_mbit:
        speed = f"{best.speed_mbit:,} Mbit/s"
        return (
            best.interfaces,
            f"{best.network} is the fastest of those that all {hosts} hosts share ({speed}), before {rest}",
        )
    reason = "SSH uses it" if best.by_ssh > ordered[1].by_ssh else "it is the first"
    return best.interfaces, f"{best.network} is taken because {reason}; all {hosts} hosts also share {rest}"


def _routed(candidates: Mapping[str, list[Interface]], used: set[str]) -> tuple[dict[str, Interface] | Diagnostic, str]:
    """Choose addresses of hosts that share no network; only a test shows whether routers connect them."""
    found = {}
    for host, interfaces in candidates.items():
        if interfaces:
            found[host] = max(interfaces, key=lambda i: (str(i.address.ip) in used, i.speed_mbit or 0))
    missing = [host for host in candidates if host not in found]
    if missing:
        has = "has" if len(missing) == 1 else "have"
        message = f"{listed(missing, last='and')} {has} no address that other hosts could reach"
        return _refusal(message, {}, candidates), ""
    networks = listed(sorted({str(i.address.network) for i in found.values()}), last="and", quote="")
    return found, f"no network is shared by all hosts; they may route to each other: {networks}"


def _refusal(message: str, facts: Mapping[str, HostFacts], hosts: Mapping[str, list[Interface] | None]) -> Diagnostic:
    notes = []
    for host, interfaces in hosts.items():
        shown_here = facts[host].interfaces if interfaces is None else interfaces
        places = [f"{i.name} {i.address}" for i in shown_here if not i.address.ip.is_loopback]
        notes.append(f"{host}: {listed(places, last='and', quote='') or 'no interface that counts'}")
    shared = _shared(facts)
    if shared:
        hint = f"all {len(facts)} hosts share {listed(shared, last='and', quote='')}: `network: {shared[0]}` in cluster.yaml"
    else:
        hint = f"`network: {_EXAMPLE}` in cluster.yaml, with the network that joins them"
    return Diagnostic("H027", message, notes=tuple(notes), hints=(hint,), blame=Blame.HOSTS)


def _shared(facts: Mapping[str, HostFacts]) -> list[str]:
    """The networks in which every host has an address, the best first."""
    candidates = {host: find_candidates(host, facts) for host in facts}
    return [str(option.network) for option in _options(candidates, set())]


def _networks(found: Mapping[str, Interface]) -> tuple[str, ...]:
    """The networks of the addresses, without those that lie inside another one."""
    networks = {interface.address.network for interface in found.values()}
    widest = [net for net in networks if not any(net != other and net.subnet_of(other) for other in networks)]
    return tuple(str(network) for network in sorted(widest))


def _control(
    facts: Mapping[str, HostFacts], connections: Mapping[str, tuple[str, str] | None], ranks: tuple[str, ...]
) -> tuple[str, ...]:
    """The networks by which we reached the hosts, and our own addresses on them; the ranks' where none is known.

    A host may be known here by an address that it does not have itself (a gateway's): then daemons can only use the
    networks of the ranks.
    """
    networks = set()
    ours = set()
    for host, pair in connections.items():
        if pair is None or host not in facts:
            continue
        ours.add(IPv4Address(pair[0])) if _is_v4(pair[0]) else None
        own = [i.address.network for i in facts[host].interfaces if str(i.address.ip) == pair[1]]
        networks |= set(own) or {IPv4Network(network) for network in ranks}
    if not networks:
        return ranks
    for address in ours:
        if not any(address in network for network in networks):
            networks.add(IPv4Network(address))
    widest = [net for net in networks if not any(net != other and net.subnet_of(other) for other in networks)]
    return tuple(str(network) for network in sorted(widest))


def _is_v4(text: str) -> bool:
    try:
        IPv4Address(text)
    except ValueError:
        return False
    return True
