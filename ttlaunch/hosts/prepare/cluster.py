"""Prepare all hosts of a cluster: look at each, settle one lock for each kind of host, install on all at once."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from ttlaunch.diagnostics import Diagnostic
from ttlaunch.errors import HostError, Trouble
from ttlaunch.hosts.prepare.kind import Kind
from ttlaunch.hosts.prepare.lock import Lock, Wheel
from ttlaunch.hosts.prepare.locking import Locksmith
from ttlaunch.hosts.prepare.mistakes import explain_bases, explain_failures, explain_lost
from ttlaunch.hosts.prepare.one_host import Base, Job, Progress, Result, install, look
from ttlaunch.hosts.transport.fleet import on_each
from ttlaunch.hosts.transport.transport import Transport
from ttlaunch.planning.engine import EngineSignature
from ttlaunch.spec.topology.model import Topology

_LOOK_S = 70.0
_INSTALL_S = 3 * 3600.0


@dataclass(frozen=True)
class Options:
    """What was asked for.

    Attributes:
        engine: What starts ranks.
        check: Change nothing, only say what would be made.
        from_index: Let hosts fetch from an index they reach.
        preferred_minor: Of the launching machine's Python.
    """

    engine: EngineSignature
    check: bool
    from_index: bool
    preferred_minor: int


@dataclass
class Outcome:
    """What came of it.

    Attributes:
        results: By host, where the work came to an end.
        locks: By kind of host.
        bases: By host.
        diagnostics: What went wrong.
    """

    results: dict[str, Result] = field(default_factory=dict)
    locks: dict[Kind, Lock] = field(default_factory=dict)
    bases: dict[str, Base] = field(default_factory=dict)
    diagnostics: list[Diagnostic] = field(default_factory=list)


class _NotFetchedError(Exception):
    """Wheels that a host waits for cannot be had any more."""

    def __init__(self, diagnostic: Diagnostic) -> None:
        super().__init__(diagnostic.message)
        self.diagnostic = diagnostic


def prepare_hosts(
    topology: Topology, transports: Sequence[Transport], locksmith: Locksmith, options: Options, progress: Progress
) -> Outcome:
    """Make the environment of every host; hosts that can't be prepared do not keep the others from it.

    Nothing is made anywhere if a host has no base Python, or if there is no lock for one: half a cluster is of no use.
    """
    outcome = Outcome()
    _look_at_all(topology, transports, options, outcome)
    if outcome.diagnostics:
        return outcome
    for kind in dict.fromkeys(base.kind for base in outcome.bases.values()):
        assert kind is not None  # noqa: S101 - a base has a kind
        lock = locksmith.lock(kind, measured=not options.check)
        if isinstance(lock, Diagnostic):
            outcome.diagnostics.append(lock)
        else:
            outcome.locks[kind] = lock
    if not outcome.diagnostics:
        _install_on_all(topology, transports, locksmith, options, progress, outcome)
    return outcome


def _look_at_all(topology: Topology, transports: Sequence[Transport], options: Options, outcome: Outcome) -> None:
    named = [topology.cluster.python] if topology.cluster.python else []
    lost: list[HostError] = []
    without: dict[str, Base | HostError] = {}

    def work(transport: Transport) -> Base:
        return look(transport, pythons=named, preferred_minor=options.preferred_minor)

    for transport, answer in on_each(transports, work, timeout_s=_LOOK_S):
        if isinstance(answer, HostError) and answer.trouble is not Trouble.NO_PYTHON:
            lost.append(answer)
        elif isinstance(answer, HostError) or answer.path is None:
            without[transport.host] = answer
        else:
            outcome.bases[transport.host] = answer
    outcome.diagnostics += explain_bases(without, topology=topology) + explain_lost(lost, topology=topology)


def _install_on_all(
    topology: Topology,
    transports: Sequence[Transport],
    locksmith: Locksmith,
    options: Options,
    progress: Progress,
    outcome: Outcome,
) -> None:
    def fetch(wheels: Sequence[Wheel], kind: Kind) -> None:
        problem = locksmith.fetch(wheels, kind)
        if problem is not None:
            raise _NotFetchedError(problem)

    job = Job(
        folder=topology.cluster.remote_folder,
        engine=options.engine,
        check=options.check,
        from_index=options.from_index,
        index_hints=locksmith.index_hints() if options.from_index else {},
        fetch=fetch,
        path=locksmith.store.path,
    )

    def work(transport: Transport) -> Result | Diagnostic:
        base = outcome.bases[transport.host]
        assert base.kind is not None  # noqa: S101 - there is a lock for each kind
        try:
            return install(transport, job, base, outcome.locks[base.kind], progress)
        except _NotFetchedError as error:
            return error.diagnostic

    lost: list[HostError] = []
    problems: list[Diagnostic] = []
    for transport, answer in on_each(transports, work, timeout_s=_INSTALL_S):
        if isinstance(answer, HostError):
            lost.append(answer)
        elif isinstance(answer, Diagnostic):
            problems += [answer] if answer not in problems else []
        else:
            outcome.results[transport.host] = answer
        progress.phase(transport.host, _ended(answer))
    last = {host: result.last for host, result in outcome.results.items() if result.last.kind != "ready"}
    outcome.diagnostics += problems
    outcome.diagnostics += explain_failures(last, topology=topology)
    outcome.diagnostics += explain_lost(lost, topology=topology)


def _ended(answer: Result | Diagnostic | HostError) -> str:
    if isinstance(answer, HostError):
        return "lost"
    if isinstance(answer, Diagnostic):
        return "failed"
    return {"ready": "ready", "missing": "not ready"}.get(answer.last.kind, "failed")
