"""All rules about hosts as pure functions from facts to diagnostics, in the order in which a person reads the answers."""

from collections.abc import Mapping, Sequence

from ttlaunch.diagnostics import Diagnostic
from ttlaunch.hosts.doctor import identity, machine, software
from ttlaunch.hosts.doctor.facts import HostFacts
from ttlaunch.hosts.doctor.probe_hosts import RANK_PACKAGES
from ttlaunch.planning.engine import EngineSignature
from ttlaunch.spec.topology.model import Topology


def check_everything(
    facts: Mapping[str, HostFacts],
    *,
    topology: Topology,
    engine: EngineSignature | None,
    launcher: HostFacts | None = None,
    packages: Sequence[str] = RANK_PACKAGES,
    connections: Mapping[str, tuple[str, str] | None] | None = None,
) -> list[Diagnostic]:
    """Check all rules: errors keep a run from working, warnings and notes do not.

    Args:
        facts: The facts about the hosts that answered, in the order of the hostfile.
        topology: The cluster.
        engine: The signature of the engine that starts ranks there; None for an engine that hosts need not have.
        launcher: The facts about this machine, to compare the hosts with; None to skip these checks.
        packages: What the ranks import; empty for a program that needs no Python.
        connections: For each host, the two addresses of the connection to it: ours and the host's.
    """
    found = [
        *identity.check_machines(facts, topology=topology),
        *machine.check_answers(facts, topology=topology),
        *software.check_python(facts, topology=topology, needs_packages=bool(packages)),
    ]
    if packages:
        found += software.check_packages(facts, topology=topology, needed=packages)
        found += software.check_same_versions(facts, topology=topology, launcher=launcher)
    if engine is not None:
        found += software.check_pairing(facts, topology=topology, engine=engine) if packages else []
        found += software.check_engine(facts, topology=topology, engine=engine)
        found += software.check_same_engine(facts, topology=topology, engine=engine, launcher=launcher)
    return [
        *found,
        *machine.check_disk(facts, topology=topology),
        *machine.check_shared_memory(facts, topology=topology),
        *machine.check_listeners(facts, topology=topology),
        *identity.check_clocks(facts, topology=topology),
        *identity.check_names(facts, topology=topology, connections=connections),
        *machine.check_limits(facts, topology=topology),
        *machine.check_processors(facts, topology=topology),
        *machine.check_devices(facts, topology=topology),
        *machine.check_gpus(facts, topology=topology),
        *machine.check_leftovers(facts, topology=topology),
    ]
