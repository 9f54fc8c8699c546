"""Check Python, its packages and the engine: every host has them, they fit together, and their versions are the same."""

from collections import Counter
from collections.abc import Mapping, Sequence

from ttlaunch.diagnostics import Blame, Diagnostic, Severity, listed
from ttlaunch.hosts.doctor.facts import HostFacts
from ttlaunch.hosts.doctor.grouping import of_hosts
from ttlaunch.hosts.doctor.probe_hosts import RANK_PACKAGES
from ttlaunch.planning.engine import EngineSignature, dotted
from ttlaunch.spec.topology.model import Topology

OLDEST_FOR_RANKS = (3, 11)

Facts = Mapping[str, HostFacts]


def check_python(facts: Facts, *, topology: Topology, needs_packages: bool) -> list[Diagnostic]:
    """Report hosts without an interpreter for ranks, or with one that is too old."""
    evidence = {}
    for host, known in facts.items():
        if "software" in known.unanswered:
            continue
        if known.python is None:
            evidence[host] = f"looked for {listed(known.tried, last='and', quote='')}"
        elif needs_packages and known.python.version < OLDEST_FOR_RANKS:
            evidence[host] = f"{known.python.executable} is {dotted(known.python.version)}; 3.11 or newer is needed"
    return of_hosts(
        "H014",
        evidence,
        topology=topology,
        says=("has no Python that ranks could run with", "have no Python that ranks could run with"),
        hints=(_prepare(topology),),
    )


def check_packages(facts: Facts, *, topology: Topology, needed: Sequence[str] = RANK_PACKAGES) -> list[Diagnostic]:
    """Report packages that ranks import and that their interpreter lacks; `needed` are some of those that hosts are asked about."""
    evidence, lacking = {}, dict[str, None]()
    for host, known in facts.items():
        missing = [name for name in needed if known.python and name not in known.python.packages]
        if missing and known.python:
            evidence[host] = f"no {listed(missing, last='or', quote='')} for {known.python.executable}"
            lacking |= dict.fromkeys(missing)
    names = listed(lacking, last="or", quote="")
    return of_hosts(
        "H005",
        evidence,
        topology=topology,
        says=(f"has no {names}", f"have no {names}"),
        notes=("looked up by metadata; ranks import all of " + listed(needed, last="and", quote=""),)
        if len(needed) > 1
        else (),
        hints=(_prepare(topology),),
    )


def check_same_versions(facts: Facts, *, topology: Topology, launcher: HostFacts | None) -> list[Diagnostic]:
    """Report versions of Python and packages that differ between hosts, or, as a warning, from the launching machine."""
    versions = {host: _versions(known) for host, known in facts.items()}
    usual: dict[str, str] = {}
    evidence: dict[str, list[str]] = {}
    for name in ("Python", *RANK_PACKAGES):
        there = {host: found[name] for host, found in versions.items() if name in found}
        if not there:
            continue
        usual[name] = Counter(there.values()).most_common(1)[0][0]
        for host, version in there.items():
            if version != usual[name]:
                evidence.setdefault(host, []).append(f"{name} {version} ({usual[name]} elsewhere)")
    said = {host: ", ".join(evidence[host]) for host in facts if host in evidence}
    first = next(iter(said.values()), "")
    found = of_hosts(
        "H015",
        said,
        topology=topology,
        says=(f"differs from the others: {first}", "have other versions than the rest"),
        notes=("with another torch the same training ends with other bits",) if "torch" in first else (),
        hints=(_prepare(topology),),
    )
    return found or _other_than_here(usual, launcher, topology)


def _other_than_here(usual: Mapping[str, str], launcher: HostFacts | None, topology: Topology) -> list[Diagnostic]:
    here = _versions(launcher) if launcher else {}
    other = [
        f"{name} {here[name]} (hosts: {usual[name]})" for name in usual if here.get(name, usual[name]) != usual[name]
    ]
    if not other:
        return []
    return [
        Diagnostic(
            "H015",
            f"this machine differs from the hosts: {', '.join(other)}",
            notes=("a run on this machine may end with other bits than one on the hosts",),
            hints=(_prepare(topology),),
            severity=Severity.WARNING,
            blame=Blame.HOSTS,
        )
    ]


def check_engine(facts: Facts, *, topology: Topology, engine: EngineSignature) -> list[Diagnostic]:
    """Report hosts without the engine, or with a version that cannot be used."""
    none, wrong = {}, {}
    for host, known in facts.items():
        mpi = known.mpi
        if mpi is None:
            continue
        if mpi.mpirun is None or mpi.says is None:
            none[host] = f"{mpi.mpirun} does not answer" if mpi.mpirun else _where_looked(known, topology)
        elif (version := engine.version_in(mpi.says)) is None:
            wrong[host] = f"{mpi.mpirun} says: {mpi.says or 'nothing'}"
        elif refusal := engine.refusal(version):
            wrong[host] = f"{mpi.mpirun} is {engine.title} {dotted(version)}; {refusal}"
    named = topology.cluster.mpi_prefix
    repair = _prepare(topology)
    if named:
        repair = (
            f"`mpi_prefix:` in cluster.yaml names {named}; it is to be a folder with bin/{engine.program} of "
            f"{engine.title}, and without it that of the interpreter's environment is taken"
        )
    prepare = (repair,)
    missing = (f"has no {engine.title}", f"have no {engine.title}")
    unusable = (f"has an {engine.program} that cannot be used", f"have an {engine.program} that cannot be used")
    return [
        *of_hosts("H001", none, topology=topology, says=missing, hints=prepare),
        *of_hosts("H003", wrong, topology=topology, says=unusable, hints=prepare),
    ]


def _where_looked(known: HostFacts, topology: Topology) -> str:
    if topology.cluster.mpi_prefix:
        return f"looked in {topology.cluster.mpi_prefix}/bin"
    return f"looked beside {known.python.executable} and in PATH" if known.python else "looked in PATH"


def check_pairing(facts: Facts, *, topology: Topology, engine: EngineSignature) -> list[Diagnostic]:
    """Report hosts where mpi4py loads another MPI's library than the engine's; every rank would be a world of its own."""
    if not engine.library:
        return []
    evidence = {}
    for host, known in facts.items():
        if known.mpi is None or known.python is None or "mpi4py" not in known.python.packages:
            continue
        if known.mpi.abi is None:
            evidence[host] = "mpi4py finds no MPI library"
        elif known.mpi.abi != engine.abi:
            evidence[host] = f"mpi4py loads {known.mpi.library or 'a library'}, which is none of {engine.title}"
    return of_hosts(
        "H004",
        evidence,
        topology=topology,
        says=("pairs mpi4py with another MPI", "pair mpi4py with another MPI"),
        hints=(_prepare(topology),),
    )


def check_same_engine(
    facts: Facts, *, topology: Topology, engine: EngineSignature, launcher: HostFacts | None
) -> list[Diagnostic]:
    """Report engines of another major version, since this machine's engine starts the daemons of the hosts' engines."""
    # The engine of a host without an interpreter is a stray one from PATH: the repair of the interpreter brings another.
    usable = {host: known.mpi for host, known in facts.items() if known.python or topology.cluster.mpi_prefix}
    there = {host: version for host, mpi in usable.items() if mpi and (version := engine.version_in(mpi.says))}
    here = engine.version_in(launcher.mpi.says) if launcher and launcher.mpi else None
    if not there:
        return []
    rule = here or Counter(there.values()).most_common(1)[0][0]
    whose = "here" if here else "elsewhere"
    others = {host: version for host, version in there.items() if version != rule}
    apart = {host: version for host, version in others.items() if version[0] != rule[0]}
    worse = apart or others
    evidence = {host: f"{engine.title} {dotted(version)} ({dotted(rule)} {whose})" for host, version in worse.items()}
    first = next(iter(evidence.values()), "")
    return of_hosts(
        "H020",
        evidence,
        topology=topology,
        says=(f"has another {engine.title}: {first}", f"have another {engine.title}"),
        hints=(_prepare(topology),),
        severity=Severity.ERROR if apart else Severity.WARNING,
    )


def _versions(known: HostFacts) -> dict[str, str]:
    if known.python is None:
        return {}
    packages = {name: known.python.packages[name] for name in RANK_PACKAGES if name in known.python.packages}
    return {"Python": dotted(known.python.version[:2]), **packages}


def _prepare(topology: Topology) -> str:
    named = topology.cluster.python
    command = f"ttlaunch prepare --on {topology.name}" if topology.folder else "ttlaunch prepare"
    if named:
        return f"`python:` in cluster.yaml names {named}; without it `{command}` makes the environment that ranks need"
    return f"`{command}` gives every host the environment that ranks need"
