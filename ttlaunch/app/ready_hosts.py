"""Make hosts ready for a run: connect, check, and send the code. Nothing starts unless all hosts are ready.

Independent work runs at the same time: files are read while ttlaunch connects to the hosts, and the hosts connect to each
other while ttlaunch sends the code.
"""

import shlex
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from subprocess import CompletedProcess
from typing import TYPE_CHECKING

from ttlaunch import contract
from ttlaunch.app.check_python import needs_torch
from ttlaunch.app.dialogue import Dialogue, stop_on_errors
from ttlaunch.app.prepare_run import PreparedRun, make_plan
from ttlaunch.app.program_on_hosts import check_program
from ttlaunch.app.reach import in_background, reach_hosts
from ttlaunch.app.ready_here import LaunchContext
from ttlaunch.app.sync_code import pythons_of, sync_code
from ttlaunch.diagnostics import Diagnostic, LaunchError, Severity
from ttlaunch.engines.base import Capability
from ttlaunch.errors import HostError
from ttlaunch.hosts.doctor.checks import check_everything
from ttlaunch.hosts.doctor.cuda import check_cuda, check_one_each, gpus_of_hosts
from ttlaunch.hosts.doctor.facts import HostFacts, facts_of_launcher
from ttlaunch.hosts.doctor.network import NetworkChoice, check_choice, choose_network
from ttlaunch.hosts.doctor.pair_checks import check_pairs
from ttlaunch.hosts.doctor.pairs import measure_pairs
from ttlaunch.hosts.doctor.probe_hosts import probe, probe_all, question_for
from ttlaunch.hosts.doctor.software import check_packages
from ttlaunch.hosts.doctor.troubles import explain_troubles
from ttlaunch.hosts.sync.data import DataItem, data_item
from ttlaunch.hosts.sync.release import Release, make_release
from ttlaunch.hosts.sync.results import Outcome, Synced
from ttlaunch.hosts.transport.pushed import Interpreter, start_interpreter
from ttlaunch.hosts.transport.transport import CONNECT_S, Process, Transport, run
from ttlaunch.planning.launch_plan import CommandProgram, LaunchPlan, RecipeProgram, is_python
from ttlaunch.planning.make import Networks
from ttlaunch.planning.on_host import plan_on_host
from ttlaunch.quick_dataclass import dataclass
from ttlaunch.running.agents.agent_connection import AGENT_MODULES
from ttlaunch.running.agents.over_hosts import ReadyHost, RunOnHosts, start_controller
from ttlaunch.running.membership.measure import MEASURE_S, MeasureError
from ttlaunch.running.rank_controller import RankController
from ttlaunch.running.runs.run_folder import RunFolder
from ttlaunch.running.watch import Watch
from ttlaunch.spec.topology.model import Topology

if TYPE_CHECKING:
    from ttlaunch.app.coordinator_network import OpenNetwork

_HEAD = "head"
"""The socket on which the head of a serving run answers, in the run's folder in shared memory on its host."""
Reading = Future[tuple[Release | None, list[Diagnostic]]]
"""The future release for the hosts and its diagnostics, while a thread reads the files."""


@dataclass(frozen=True)
class _Cluster:
    """The hosts on which the ranks of a run will be started, and the dialogue for reports about them."""

    topology: Topology
    prepared: PreparedRun
    dialogue: Dialogue
    takes_others: bool

    def stop(
        self,
        found: Sequence[Diagnostic],
        errors: Mapping[str, HostError] | None = None,
        answered: Mapping[str, float] | None = None,
    ) -> None:
        """Pass warnings to the dialogue, and stop if there is an error.

        Raises:
            LaunchError: There is an error among the diagnostics, or a host did not answer.
        """
        if errors:
            found = [*explain_troubles(list(errors.values()), topology=self.topology, answered=answered or {}), *found]
        stop_on_errors(found, self.dialogue)


def ready_hosts(
    prepared: PreparedRun, dialogue: Dialogue, *, lease_s: float, takes_others: bool = False
) -> LaunchContext:
    """Make every host of the plan ready; `takes_others`: workers of other machines may join, and have to reach the ranks.

    Raises:
        LaunchError: A host cannot be made ready; nothing was started.
    """
    # Leave out hosts without ranks: they need not even be switched on.
    used = set(prepared.plan.hosts)
    topology = replace(prepared.topology, hosts=tuple(host for host in prepared.topology.hosts if host.name in used))
    cluster = _Cluster(topology, prepared, dialogue, takes_others)
    marks = {"connections": time.time()}
    reading = in_background(lambda: _read_release(prepared))
    begun = _Begun(cluster)
    transports = reach_hosts(topology, dialogue, then=begun.begin)
    marks["hosts"] = time.time()
    import_module("ttlaunch.running.supervise")  # takes the time in which the hosts start Python
    facts, choice = _check_hosts(cluster, transports, begun)
    # Let hosts connect to each other while the code is being sent; the result is needed only before the plan is completed.
    measuring = in_background(lambda: measure_pairs(transports, choice.addresses, interpreters=begun.interpreters))
    marks["sync"] = time.time()
    outcome = _send_code(cluster, transports, facts, reading=reading, receivers=begun.receivers)
    pairs = measuring.result()
    cluster.stop(check_pairs(pairs.pairs, choice, topology=topology), pairs.errors)
    plan = _complete_plan(prepared, choice)
    hosts = [
        _ready_host(host, facts[host.host], outcome, interpreter=begun.interpreters[host.host], program=plan.program)
        for host in transports
    ]
    marks["folder"] = time.time()
    return _ReadyHosts(
        plan,
        outcome.release.tree_hash,
        hosts,
        cluster=cluster,
        addresses=choice.addresses,
        lease_s=lease_s,
        marks=marks,
    )


def _complete_plan(prepared: PreparedRun, choice: NetworkChoice) -> LaunchPlan:
    networks = Networks(choice.ranks, choice.control, has_rdma=choice.has_rdma)
    plan = make_plan(prepared.description, prepared.request, replace(prepared.surroundings, networks=networks))
    assert isinstance(plan, LaunchPlan)  # noqa: S101 - the same specification has given a plan before
    return plan


class _Begun:
    """What is begun on each host as soon as it is connected, while others are still being connected; it changes nothing there.

    Attributes:
        interpreters: By host, the Python that runs the checks and becomes the agent.
        facts: By host, the answer to what every host is asked.
        receivers: By host, a Python that waits for the code.
    """

    def __init__(self, cluster: _Cluster) -> None:
        prepared = cluster.prepared
        python, engine = prepared.surroundings.python, prepared.engine.signature
        self._topology = cluster.topology
        self.question = question_for(cluster.topology, launcher_python=python, engine=engine)
        self.interpreters: dict[str, Interpreter] = {}
        self.facts: dict[str, Future[HostFacts]] = {}
        self.receivers: dict[str, Future[Process]] = {}

    def begin(self, host: Transport) -> None:
        """Ask a host that is connected, and start the interpreters there, without waiting for either."""
        python = self.interpreters[host.host] = Interpreter(host, ahead=("pairs", *AGENT_MODULES, "start_agent"))
        self.facts[host.host] = in_background(lambda: probe(host, self.question, interpreter=python))
        pythons = pythons_of(self._topology)
        self.receivers[host.host] = in_background(lambda: start_interpreter(host, pythons=pythons, timeout_s=CONNECT_S))


def _read_release(prepared: PreparedRun) -> tuple[Release | None, list[Diagnostic]]:
    program = prepared.plan.program
    recipe = Path(program.folder) if isinstance(program, RecipeProgram) else None
    return make_release(prepared.surroundings.working_folder, recipe=recipe)


def _check_hosts(
    cluster: _Cluster, transports: Sequence[Transport], begun: _Begun
) -> tuple[dict[str, HostFacts], NetworkChoice]:
    """Check everything that a run needs on its hosts, such as the engine, and choose the network."""
    prepared, topology = cluster.prepared, cluster.topology
    engine = prepared.engine
    answers = probe_all(transports, begun.question, begun=begun.facts)
    cluster.stop([], answers.errors, answers.seconds)
    connections = {transport.host: transport.addresses for transport in transports}
    checked = check_everything(
        answers.facts,
        topology=topology,
        engine=engine.signature if Capability.MPI in engine.can else None,
        launcher=facts_of_launcher(engine.program, engine.version_output),
        packages=prepared.plan.program.packages if isinstance(prepared.plan.program, RecipeProgram) else (),
        connections=connections,
    )
    found = [diagnostic for diagnostic in checked if diagnostic.severity is Severity.ERROR]
    if prepared.description.choice is not None:
        choice_made, gpus = prepared.description.choice, gpus_of_hosts(answers.facts)
        found += check_cuda(choice_made.loaded, gpus, topology=topology)
        ranks_on = [row.host for row in prepared.plan.ranks]
        found += check_one_each(choice_made.loaded, gpus, ranks_on=ranks_on, needs=choice_made.recipe.needs_processes)
        from ttlaunch.app.served_memory import check_hosts  # programs start sooner without it

        found += check_hosts(prepared, answers.facts)
    if _needs_torch(prepared):
        found += check_packages(answers.facts, topology=topology, needed=("torch",))
    cluster.stop(found)
    choice = choose_network(
        answers.facts, wanted=topology.cluster.network, connections=connections, takes_others=cluster.takes_others
    )
    if isinstance(choice, Diagnostic):
        raise LaunchError([choice])
    cluster.stop(check_choice(choice))
    return answers.facts, choice


def _needs_torch(prepared: PreparedRun) -> bool:
    """Whether the ranks run a script that imports torch with the interpreter that the hosts were asked about."""
    python = prepared.description.python
    return python is not None and python.interpreter == sys.executable and needs_torch(python)


def _send_code(
    cluster: _Cluster,
    transports: Sequence[Transport],
    facts: Mapping[str, HostFacts],
    *,
    reading: Reading,
    receivers: Mapping[str, Future[Process]],
) -> Outcome:
    """Check that each host has the ranks' program or gets it with the release, then send the release to all hosts."""
    prepared, (release, found) = cluster.prepared, reading.result()
    if release is None:
        raise LaunchError(found)
    if isinstance(prepared.plan.program, CommandProgram):
        programs = {host: str(Path(known.python.executable).parent) for host, known in facts.items() if known.python}
        missing = check_program(
            prepared.plan.program,
            transports,
            release=release,
            working_folder=prepared.surroundings.working_folder,
            programs=programs,
        )
        cluster.stop(missing)
    outcome, found = sync_code(
        transports,
        release,
        topology=cluster.topology,
        data=_data(prepared),
        found=found,
        dialogue=cluster.dialogue,
        interpreters=receivers,
    )
    cluster.stop(found)
    return outcome


def _data(prepared: PreparedRun) -> list[DataItem]:
    """List the files that ranks read besides the code: the training text, and the files from which training begins."""
    program = prepared.plan.program
    if not isinstance(program, RecipeProgram):
        return []
    files = (program.start or {}).get("files", ())
    return [data_item(found) for found in ([program.data] if program.data else []) + list(files)]


def _ready_host(
    transport: Transport,
    facts: HostFacts,
    outcome: Outcome,
    *,
    interpreter: Interpreter,
    program: RecipeProgram | CommandProgram,
) -> ReadyHost:
    """Collect the facts that a run needs about a host that was checked and has the code."""
    release, synced = outcome.release, outcome.hosts[transport.host]
    assert isinstance(synced, Synced)  # noqa: S101 - `_send_code` raises if a host has no code
    assert facts.python is not None  # noqa: S101 - `check_everything` refuses a host without it
    copies = {str(release.project): f"{synced.release}/{contract.PROJECT_DIR}"}
    if isinstance(program, RecipeProgram) and release.recipe is not None:
        copies[program.folder] = f"{synced.release}/{release.recipe}"
    return ReadyHost(
        transport=transport,
        interpreter=interpreter,
        python=facts.python.executable,
        mpi_prefix=facts.mpi.prefix if facts.mpi else None,
        remote_folder=synced.remote_folder,
        release=synced.release,
        lock=f"{synced.remote_folder}/{contract.release_lock(synced.tree_hash)}",
        copies=copies,
        data=synced.data,
    )


class _ReadyHosts:
    """Hosts that are connected and checked and have the code."""

    def __init__(
        self,
        plan: LaunchPlan,
        release: str,
        hosts: Sequence[ReadyHost],
        *,
        cluster: _Cluster,
        addresses: Mapping[str, str],
        lease_s: float,
        marks: dict[str, float],
    ) -> None:
        self.marks = marks
        self._addresses = addresses
        self.plan = plan
        self.release = release
        self._hosts = hosts
        self._cluster = cluster
        self._lease_s = lease_s

    def ask_python(self, arguments: Sequence[str]) -> CompletedProcess[bytes]:
        host = self._hosts[0]
        python = self._cluster.prepared.surroundings.python
        environment = plan_on_host(self.plan, host.places, python=python, described=self._described)["environment"]
        # A secret decides no bits, and has no place on a command line.
        words = [f"{name}={value}" for name, value in environment.items() if not contract.referred_variable(value)]
        # `-c` would import what lies in the current folder; nobody but root can put anything there.
        command = f"cd / && exec env {shlex.join([*words, host.python, *arguments])}"
        try:
            done = run(host.transport, command, timeout_s=MEASURE_S)
        except HostError as error:
            raise MeasureError(f"{host.transport.host} does not say: {error}") from error
        return CompletedProcess(command, done.status, done.stdout, done.stderr)

    @property
    def _described(self) -> set[str]:
        topology = self._cluster.prepared.topology
        return {*topology.cluster.environment, *topology.global_environment}

    @contextmanager
    def controller(
        self,
        folder: RunFolder,
        watch: Watch,
        scratch: Path,
        *,
        variables: Mapping[str, str],
        network: "OpenNetwork | None" = None,
    ) -> Iterator[RankController]:
        prepared = self._cluster.prepared
        python, secrets = prepared.surroundings.python, self.plan.secrets
        if is_python(self.plan):
            variables = {**variables, contract.ENV_MASTER_ADDR: self._addresses[self.plan.ranks[0].host]}
        asked_at = variables.get(contract.ENV_ANSWERS_AT)
        if asked_at is not None:
            variables = {**variables, contract.ENV_ANSWERS_AT: f"{scratch}/{_HEAD}"}
        on_hosts = RunOnHosts(
            self.plan,
            folder,
            scratch,
            python,
            prepared.engine,
            described=self._described,
            secrets=secrets,
            variables=variables,
            addresses=self._addresses,
            lease_s=self._lease_s,
            authority=network.authority if network else None,
        )
        self.marks["agents"] = time.time()
        try:
            controller = start_controller(on_hosts, self._hosts, watch)
            if isinstance(controller, dict):
                self._cluster.stop([], controller)
            assert not isinstance(controller, dict)  # noqa: S101 - `stop` raises if a host failed
            with self._head_at(asked_at, scratch):
                yield controller
        finally:
            for host in self._hosts:
                host.transport.close()

    def _head_at(self, here: str | None, scratch: Path) -> AbstractContextManager[None]:
        """Let those who ask a serving run reach its head, rank 0, through a socket on this machine; `here`: its path."""
        if here is None:
            return nullcontext()
        from ttlaunch.running.agents.distant_head import distant_head

        head = next(host for host in self._hosts if host.transport.host == self.plan.ranks[0].host)
        return distant_head(head.transport, there=f"{scratch}/{_HEAD}", here=Path(here), python=head.python)
