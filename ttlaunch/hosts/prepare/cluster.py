"""Prepare all hosts of a cluster: find each host's Python, lock the packages for each kind of host, install on all at once."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field

from ttlaunch.diagnostics import Diagnostic, LaunchError
from ttlaunch.errors import HostError, Trouble
from ttlaunch.hosts.prepare.kind import Kind
from ttlaunch.hosts.prepare.lock import Lock
from ttlaunch.hosts.prepare.mistakes import explain_bases, explain_failures, explain_lost
from ttlaunch.hosts.prepare.one_host import Base, Job, Result, install, look
from ttlaunch.hosts.transport.fleet import on_each
from ttlaunch.hosts.transport.transport import Transport
from ttlaunch.records.host_scripts import FoundPython
from ttlaunch.spec.topology.model import Topology

_LOOK_S = 70.0
_INSTALL_S = 3 * 3600.0


@dataclass
class Outcome:
    """The result of preparing all hosts.

    Attributes:
        results: The result of each host on which the work has ended.
        locks: The list of packages for each kind of host.
        bases: The Python of each host that its environment is built on.
        diagnostics: What went wrong.
    """

    results: dict[str, Result] = field(default_factory=dict)
    locks: dict[Kind, Lock] = field(default_factory=dict)
    bases: dict[str, Base] = field(default_factory=dict)
    diagnostics: list[Diagnostic] = field(default_factory=list)


def prepare_hosts(topology: Topology, transports: Sequence[Transport], job: Job) -> Outcome:
    """Make the environment of every host.

    No host is changed unless every host has a base Python and a lock, because part of a cluster is of no use. After that,
    a host on which the installation fails does not stop that of the others.
    """
    outcome = Outcome()
    _look_at_all(topology, transports, outcome)
    if outcome.diagnostics:
        return outcome
    for kind in dict.fromkeys(base.kind for base in outcome.bases.values()):
        try:
            outcome.locks[kind] = job.locksmith.lock(kind, with_sizes=not job.check)
        except LaunchError as error:
            outcome.diagnostics += error.diagnostics
    if not outcome.diagnostics:
        _install_on_all(topology, transports, job, outcome=outcome)
    return outcome


def _look_at_all(topology: Topology, transports: Sequence[Transport], outcome: Outcome) -> None:
    named = [topology.cluster.python] if topology.cluster.python else []
    lost: list[HostError] = []
    without_python: dict[str, Sequence[FoundPython] | HostError] = {}

    def work(transport: Transport) -> tuple[Base | None, Sequence[FoundPython]]:
        return look(transport, pythons=named, preferred_minor=sys.version_info.minor)

    for transport, answer in on_each(transports, work, timeout_s=_LOOK_S):
        if not isinstance(answer, HostError):
            base, found = answer
            if base is None:
                without_python[transport.host] = found
            else:
                outcome.bases[transport.host] = base
        elif answer.trouble is Trouble.NO_PYTHON:
            without_python[transport.host] = answer
        else:
            lost.append(answer)
    outcome.diagnostics += explain_bases(without_python, topology=topology) + explain_lost(lost, topology=topology)


def _install_on_all(topology: Topology, transports: Sequence[Transport], job: Job, *, outcome: Outcome) -> None:
    def work(transport: Transport) -> Result | LaunchError:
        base = outcome.bases[transport.host]
        try:
            return install(transport, job, base=base, lock=outcome.locks[base.kind])
        except LaunchError as error:
            return error

    lost: list[HostError] = []
    problems: list[Diagnostic] = []
    for transport, answer in on_each(transports, work, timeout_s=_INSTALL_S):
        if isinstance(answer, HostError):
            lost.append(answer)
        elif isinstance(answer, LaunchError):
            # Hosts of one kind often report the same problem.
            problems += [problem for problem in answer.diagnostics if problem not in problems]
        else:
            outcome.results[transport.host] = answer
        job.progress.phase(transport.host, _final_phase(answer))
    not_ready = {host: result.answer for host, result in outcome.results.items() if result.answer.kind != "ready"}
    outcome.diagnostics += problems
    outcome.diagnostics += explain_failures(not_ready, topology=topology)
    outcome.diagnostics += explain_lost(lost, topology=topology)


def _final_phase(result: Result | LaunchError | HostError) -> str:
    if isinstance(result, HostError):
        return "lost"
    if isinstance(result, LaunchError):
        return "failed"
    return {"ready": "ready", "missing": "not ready"}.get(result.answer.kind, "failed")
