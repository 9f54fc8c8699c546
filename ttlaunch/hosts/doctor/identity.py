"""Which machine is which, and what time it is there: names that mean one machine, or several, and clocks that are off."""

from collections.abc import Collection, Mapping, Sequence

from ttlaunch.diagnostics import Blame, Diagnostic, Label, Severity, Span, listed, shown
from ttlaunch.hosts.doctor.facts import HostFacts
from ttlaunch.hosts.doctor.grouping import of_hosts
from ttlaunch.spec.topology.model import Topology

CLOCK_WARNING_S = 2.0
CLOCK_ERROR_S = 60.0
_MINUTE_S, _MINUTES_FROM_S = 60.0, 90.0
_HOUR_S, _HOURS_FROM_S = 3600.0, 5400.0

Facts = Mapping[str, HostFacts]


def check_machines(facts: Facts, *, topology: Topology) -> list[Diagnostic]:
    """Report names that mean one and the same machine."""
    spans = {str(host.name): host.span for host in topology.hosts}
    names: dict[str, list[str]] = {}
    for host, known in facts.items():
        names.setdefault(known.machine, []).append(host)
    why = "both names show the same boot of the same kernel, in the same namespaces"
    several = [same for same in names.values() if len(same) > 1]
    return [_one_machine(same, facts[same[0]].hostname, spans, why=why) for same in several]


def check_local_names(local: Collection[str], *, topology: Topology, hostname: str) -> list[Diagnostic]:
    """Report several names that mean this machine, `hostname`, without asking any host."""
    spans = {str(host.name): host.span for host in topology.hosts}
    same = [name for name in spans if name in local]
    why = "each of them means the machine on which ttlaunch runs"
    return [_one_machine(same, hostname, spans, why=why)] if len(same) > 1 else []


def _one_machine(same: Sequence[str], hostname: str, spans: Mapping[str, Span], *, why: str) -> Diagnostic:
    return Diagnostic(
        "H017",
        f"{listed(same, last='and')} are the same machine, `{shown(hostname)}`",
        Label(spans[same[1]], f"the same machine as {same[0]}"),
        (Label(spans[same[0]], "its other name"),),
        notes=(why,),
        hints=(f"keep one line, with the slots of {'both' if len(same) == 2 else 'all'}",),  # noqa: PLR2004
        blame=Blame.HOSTS,
    )


def check_names(
    facts: Facts, *, topology: Topology, connections: Mapping[str, tuple[str, str] | None] | None = None
) -> list[Diagnostic]:
    """Report hosts on which the name of another host means an address that the other host does not have."""
    connections = connections or {}
    wrong: dict[str, dict[str, str]] = {}
    for name, target in facts.items():
        pair = connections.get(name)
        right = target.addresses | ({pair[1]} if pair else set())
        for host, known in facts.items():
            meant = {address for address in known.names.get(name, ()) if host != name or not address.startswith("127.")}
            if meant and not meant & right and known.machine != target.machine:
                owner = next((other for other, its in facts.items() if its.addresses & meant), None)
                whose = f", which is {owner}" if owner else ""
                there, should = (listed(sorted(some), last="and", quote="") for some in (meant, right))
                wrong.setdefault(host, {})[name] = f"here {name} means {there}{whose}; {name} has {should}"
    evidence = {host: "; ".join(wrong[host].values()) for host in facts if host in wrong}
    first = next(iter(evidence), "")
    name = next(iter(wrong[first])) if first else ""
    return of_hosts(
        "H018",
        evidence,
        topology=topology,
        says=(f"takes another machine for `{name}`", "take other machines for some of the hosts"),
        notes=("MPI connects by address; programs that meet by name, as gloo and NCCL do, would meet the wrong one",),
        hints=(f"`ssh {first} getent hosts {name}`, then correct its /etc/hosts or its DNS",),
        severity=Severity.WARNING,
    )


def check_clocks(facts: Facts, *, topology: Topology) -> list[Diagnostic]:
    """Report clocks that differ from ours: 2 s mix up who failed first, a minute breaks caches and certificates."""
    off = {host: known.clock.surely_off_s for host, known in facts.items()}
    wrong = {host: _apart(seconds) for host, seconds in off.items() if abs(seconds) > CLOCK_ERROR_S}
    late = {host: _apart(s) for host, s in off.items() if CLOCK_WARNING_S < abs(s) <= CLOCK_ERROR_S}
    found = []
    for evidence, severity in ((wrong, Severity.ERROR), (late, Severity.WARNING)):
        first = next(iter(evidence.values()), "")
        found += of_hosts(
            "H019",
            evidence,
            topology=topology,
            says=(f"has a clock that is {first}", "have clocks that are off"),
            notes=("time stamps from all hosts decide who failed first",),
            hints=(
                f"`ssh {next(iter(evidence), '')} sudo timedatectl set-ntp true`, or `sudo chronyc makestep` there",
            ),
            severity=severity,
        )
    return found


def _apart(seconds: float) -> str:
    size = abs(seconds)
    if size >= _HOURS_FROM_S:
        text = f"{size / _HOUR_S:.1f} hours"
    elif size >= _MINUTES_FROM_S:
        text = f"{size / _MINUTE_S:.0f} minutes"
    else:
        text = f"{size:.1f} seconds"
    return f"{text} {'ahead' if seconds > 0 else 'behind'}"
