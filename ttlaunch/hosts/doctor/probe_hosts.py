"""Ask many hosts at once what they have; a slow or dead one never delays the answers of the others."""

import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import field

from ttlaunch.errors import HostError, Trouble
from ttlaunch.hosts.doctor.facts import Clock, HostFacts, parse_facts
from ttlaunch.hosts.transport.deadline import time_left
from ttlaunch.hosts.transport.fleet import on_each
from ttlaunch.hosts.transport.pushed import Interpreter, explain_end
from ttlaunch.hosts.transport.transport import Transport
from ttlaunch.planning.engine import EngineSignature
from ttlaunch.planning.launch_plan import GRPC_PACKAGES
from ttlaunch.quick_dataclass import dataclass
from ttlaunch.records.host_scripts import HostAnswer, HostClock
from ttlaunch.spec.topology.model import Topology

PROBE_S = 5.0
"""How long a connected host may take to answer what it has."""

RANK_PACKAGES = ("torch", "mpi4py", "numpy", "pydantic")
"""What ranks of recipes import unless their configuration says otherwise."""

_ASKED_PACKAGES = (*RANK_PACKAGES, *GRPC_PACKAGES)
SYSTEM_PYTHON = "python3"
"""Runs our scripts where it can, so that a broken interpreter for ranks can still be reported."""

_END_S = 1.0


@dataclass(frozen=True)
class Question:
    """What every host is asked.

    Attributes:
        pythons: Interpreters that ranks could run with, in order; the first that starts counts. `~/` is the host's home.
        remote_folder: The folder for ttlaunch's files on the host.
        names: The names to resolve on every host.
        engine: The engine that is looked for.
        mpi_prefix: The engine's folder; None if the engine belongs to the interpreter or is in PATH.
    """

    pythons: tuple[str, ...]
    remote_folder: str
    engine: EngineSignature
    names: tuple[str, ...] = ()
    mpi_prefix: str | None = None


@dataclass(frozen=True)
class Answers:
    """The answers of hosts by their names; each host is in `facts` or in `errors`.

    Attributes:
        seconds: How long each host in `facts` took to answer.
    """

    facts: dict[str, HostFacts] = field(default_factory=dict)
    errors: dict[str, HostError] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)


def question_for(topology: Topology, *, launcher_python: str, engine: EngineSignature) -> Question:
    """The question that fits a cluster: the Python it names, else the one that `prepare` makes, else one like ours."""
    cluster = topology.cluster
    folder = cluster.remote_folder
    made = f"{folder if folder.startswith(('/', '~/')) else f'~/{folder}'}/env/bin/python"
    pythons = (cluster.python,) if cluster.python else (made, launcher_python, "python3")
    names = tuple(str(host.name) for host in topology.hosts)
    return Question(pythons, folder, engine, names, cluster.mpi_prefix)


def probe_all(
    transports: Sequence[Transport],
    question: Question,
    *,
    begun: Mapping[str, Future[HostFacts]] | None = None,
    timeout_s: float = PROBE_S,
) -> Answers:
    """Ask connected hosts, each of which has `timeout_s`, and wait for all of them.

    Args:
        transports: The hosts.
        question: What they are asked.
        begun: Hosts that are being asked already, each with its answer.
        timeout_s: The time from now until an answer.
    """
    answers = begun or {}
    began = time.monotonic()
    found: dict[str, HostFacts | HostError] = {}
    seconds: dict[str, float] = {}

    def work(transport: Transport) -> HostFacts:
        answer = answers.get(transport.host)
        return answer.result() if answer is not None else probe(transport, question, timeout_s=timeout_s)

    for transport, answer in on_each(transports, work, timeout_s=timeout_s):
        found[transport.host] = answer
        seconds[transport.host] = time.monotonic() - began
    ordered = [(transport.host, found[transport.host]) for transport in transports]
    facts = {host: answer for host, answer in ordered if not isinstance(answer, HostError)}
    errors = {host: answer for host, answer in ordered if isinstance(answer, HostError)}
    return Answers(facts, errors, {host: seconds[host] for host in facts})


def probe(
    transport: Transport, question: Question, *, interpreter: Interpreter | None = None, timeout_s: float = PROBE_S
) -> HostFacts:
    """Ask one connected host; if the connection breaks, ask once more over a new one.

    Asking twice is safe because it changes nothing on the host, and it survives a restart of the host's sshd.

    Args:
        transport: The host.
        question: What it is asked.
        interpreter: A Python on the host, which goes on for other scripts; None to start one for this question alone.
        timeout_s: The time that both attempts have together.

    Raises:
        HostError: If the host does not answer in time.
    """
    end = time.monotonic() + timeout_s
    try:
        return _ask(transport, question, interpreter, timeout_s=timeout_s)
    except HostError as error:
        if error.trouble is not Trouble.LOST:
            raise
        try:
            transport.connect(timeout_s=time_left(end))
        except HostError:
            raise error from None
        return _ask(transport, question, interpreter, timeout_s=time_left(end))


def _ask(transport: Transport, question: Question, interpreter: Interpreter | None, *, timeout_s: float) -> HostFacts:
    end = time.monotonic() + timeout_s
    arguments = {
        "remote_folder": question.remote_folder,
        "pythons": question.pythons,
        "packages": _ASKED_PACKAGES,
        "program": question.engine.program,
        "version": question.engine.version,
        "detached": question.engine.detached,
        "mpi_prefix": question.mpi_prefix,
        "names": question.names,
    }
    asked = time.time()
    pythons = (SYSTEM_PYTHON, *question.pythons)
    python = interpreter or Interpreter(transport)
    goes_on = False
    try:
        stream = python.start(
            "probe",
            beside=("claims", "probe_software", "tracing"),
            arguments=arguments,
            pythons=pythons,
            is_last=interpreter is None,
            timeout_s=timeout_s,
        )
        first = stream.receive(timeout_s=time_left(end))
        answered = time.time()
        if first is None:
            raise explain_end(stream, timeout_s=_END_S) or _no_answer(stream.process.stderr(), transport.host)
        python.send_ahead(timeout_s=time_left(end))
        answer = stream.answer(HostAnswer, timeout_s=time_left(end))
        theirs = stream.checked(HostClock, first[0]).time
        # Their clock was read between our two readings, so the offset lies between these two differences.
        facts = parse_facts(answer.facts, clock=Clock(theirs - answered, theirs - asked))
        goes_on = interpreter is not None
    except ValueError as error:
        raise HostError(transport.host, Trouble.SCRIPT, str(error)) from error
    finally:
        if not goes_on:
            python.drop()
    return facts


def _no_answer(stderr: bytes, host: str) -> HostError:
    lines = stderr.decode("utf-8", "replace").strip().splitlines()
    return HostError(
        host, Trouble.SCRIPT, f"our script on it broke: {lines[-1]}" if lines else "our script on it printed nothing"
    )
