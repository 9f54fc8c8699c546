"""Watch and signal the processes of a run's ranks: one protocol for this machine and for other hosts."""

import contextlib
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import field
from pathlib import Path
from typing import Any, Protocol

from ttlaunch import contract
from ttlaunch.agent.process_facts import look_at_processes
from ttlaunch.agent.run_processes import is_gone, kill_run_processes, signal_process
from ttlaunch.agent.stack_dump import dump_stacks, find_py_spy
from ttlaunch.agent.worker_orders import pass_order
from ttlaunch.engines.base import AddsRanks, Engine, EngineProcess, GrowingProcess, WaitingProcess
from ttlaunch.planning.launch_plan import EngineCommand, EngineNames, LaunchPlan, RankRow
from ttlaunch.quick_dataclass import dataclass
from ttlaunch.records.agents import ProcessReport, RankProcess, StoppedHelper
from ttlaunch.records.parser import parse
from ttlaunch.running.lost_folders import LostFolder, look_at_scratch
from ttlaunch.running.lost_hosts import Losses
from ttlaunch.running.watch import Phase, RankState


@dataclass(frozen=True)
class ProcessSnapshot:
    """The state of the ranks' processes at one moment.

    Attributes:
        stopped: The ranks whose process was stopped by a signal.
        page_faults: The page faults of each rank's process so far; they grow while a rank loads libraries.
        helpers: The stopped processes of the run that are no ranks, each with its host; "" for this machine.
        processes: What each rank's process is and does, as far as it was asked and can be read.
        cuts: Pairs of hosts of which the first gets no acknowledgement from the second, each with the most attempts.
    """

    stopped: frozenset[int]
    page_faults: Mapping[int, int]
    helpers: tuple[tuple[str, StoppedHelper], ...] = ()
    processes: Mapping[int, RankProcess] = field(default_factory=dict)
    cuts: Mapping[tuple[str, str], int] = field(default_factory=dict)


def merge_reports(reports: Mapping[str, ProcessReport]) -> ProcessSnapshot:
    """Combine the reports of hosts, by host, into one snapshot."""
    known = Counter(address for report in reports.values() for address in report.addresses)
    # An address that several hosts have, such as that of a container bridge, names none of them.
    homes = {address: host for host, one in reports.items() for address in one.addresses if known[address] == 1}
    cuts: dict[tuple[str, str], int] = {}
    for host, report in reports.items():
        for _, address, attempts in report.unacknowledged:
            pair = host, homes.get(address, address)
            cuts[pair] = max(attempts, cuts.get(pair, 0))
    return ProcessSnapshot(
        frozenset(rank for report in reports.values() for rank in report.stopped),
        {rank: count for report in reports.values() for rank, count in report.faults},
        tuple((host, helper) for host, report in reports.items() for helper in report.helpers),
        {process.rank: process for report in reports.values() for process in report.processes},
        cuts,
    )


class RankController(Protocol):
    """What the supervisor can observe and do on the machines where the ranks run.

    Attributes:
        recordings: The folder below which the ranks' flight recorders can be read.
        answers_at_once: Whether `snapshot` answers immediately; otherwise it has to ask other hosts.
    """

    answers_at_once: bool

    @property
    def recordings(self) -> Path: ...

    def snapshot(self, ranks: Sequence[RankState], *, since: float, closely: bool = False) -> ProcessSnapshot | None:
        """Return the state of the ranks' processes; None until every host has answered.

        Call it again with the same `since` (monotonic clock) until it answers; a later `since` requests a new snapshot.
        When it answers, the ranks' recordings are at least as new as the snapshot.

        Args:
            ranks: All ranks of the run.
            since: When the caller first asked for this snapshot.
            closely: Whether to look at everything, which takes a fraction of a second; else only at what is cheap.
        """

    def dump_stacks(self, ranks: Sequence[RankState]) -> None:
        """Append the stacks of these ranks, read by py-spy if it is installed, to the files of the ranks' own stack dumps."""

    def settings(self, names: EngineNames) -> Mapping[str, str]:
        """Return further environment variables for the engine, under the engine's own names."""

    def start(
        self,
        engine: Engine,
        command: EngineCommand,
        *,
        folder: Path,
        environment: Mapping[str, str],
        rows: Sequence[RankRow],
    ) -> EngineProcess:
        """Start the ranks.

        Args:
            engine: The engine of the run.
            command: What it returned for these ranks.
            folder: The run's folder.
            environment: The variables of the engine, and of ranks on this machine.
            rows: All ranks of the plan; those that start later, if at all, are left for `add`.

        Raises:
            OSError: The engine cannot be started.
        """

    def add(self, ranks: Sequence[RankState]) -> None:
        """Start ranks that the plan has for later, on the same hosts and as the first ones; call it in the supervisor's thread.

        A rank that is being started has the phase `WAITING`. While a run is being ended, nothing is started any more.

        Raises:
            ValueError: A rank has been added already or was there from the beginning, or the last rank of the run has ended.
        """

    def add_no_more(self) -> None:
        """Let the engine end with the ranks that run now."""

    def losses(self, ranks: Sequence[RankState]) -> Losses:
        """Return the shims and hosts that have been lost so far.

        Raises:
            OSError: The output of ranks on other hosts can no longer be written on this machine; raised only once.
        """

    def forget(self, host: str) -> Collection[int]:
        """Go on without a lost host: count its ranks as ended, and wait for nothing from it any more.

        Each of its ranks gets a record of its end, by SIGKILL at the time of the last message from the host. `losses` leaves the
        host out, until it is back and lost again, and `add` refuses to start ranks there.

        Returns:
            The ranks that went with the host: those that had been started there and had not ended.

        Raises:
            ValueError: The host is not lost, or the engine cannot go on without it.
            OSError: The records cannot be written.
        """

    def rejoin(self, host: str) -> None:
        """Try to reach a forgotten host again, in the background and until the run ends; `rejoined` tells when it is back.

        What is left of the run there is then killed, and another agent is started, which also sends what the first one
        could not send any more.

        Raises:
            ValueError: The host is not a forgotten one.
        """

    def rejoined(self) -> Collection[str]:
        """Return the hosts that are back since the last call; `add` can start ranks there again. Call it in the supervisor's thread."""

    def signal_ranks(self, ranks: Sequence[RankState], number: int, *, marker: Mapping[str, Any] | None = None) -> None:
        """Send a signal to those of the given ranks that are running, directly and not through the engine.

        It returns without waiting for the effect. Other hosts write `marker` to `contract.ENDING_FILE` before the
        signal; on this machine the launcher has written it.
        """

    def tell(self, number: int, message: bytes) -> None:
        """Pass an order of the coordinator to a worker of an elastic run, and return without waiting for anything.

        The worker receives it as one datagram on `contract.orders_socket(number)` in the run's private folder on its host. It
        is lost if the worker or its host is gone, has not begun, or does not keep up; orders are therefore repeated.

        Args:
            number: The worker's number, which is its rank in the plan.
            message: The order; not read on its way.

        Raises:
            ValueError: The message has more than `contract.LARGEST_ORDER` bytes.
        """

    def cut(self, host: str) -> None:
        """Send nothing to a host and take nothing from it from now on, as if its cable were cut.

        Raises:
            ValueError: No rank runs on another machine of that name.
        """

    def end(self, meanwhile: Callable[[], None]) -> int:
        """Kill the run's remaining processes, collect their files, and return how many processes were killed.

        It calls `meanwhile` a few times a second while it waits for a host.
        """


class LocalRankController:
    """The controller of ranks that all run on this machine."""

    answers_at_once = True

    def __init__(
        self,
        run_id: str,
        *,
        scratch: Path,
        run_folder: Path,
        daemons: Collection[str] = (),
        variables: Mapping[str, str] | None = None,
    ) -> None:
        """Control the ranks of a run.

        Args:
            run_id: The run's id.
            scratch: The run's folder in shared memory.
            run_folder: The run's folder.
            daemons: The names of its engine's processes.
            variables: Further variables for the engine, which the shims read.
        """
        self._variables = variables or {}
        self.recordings = scratch
        self._daemons = daemons
        self._run_id = run_id
        self._run_folder = run_folder
        self._waiting: WaitingProcess | None = None
        self._growing: GrowingProcess | None = None
        self._lost: dict[int, float] = {}
        self._lost_folder: LostFolder | None = None

    def settings(self, names: EngineNames) -> Mapping[str, str]:  # noqa: ARG002 - the same for every engine
        """Return only what shims read: the engine needs no help to start processes on this machine."""
        return self._variables

    def start(
        self,
        engine: Engine,
        command: EngineCommand,
        *,
        folder: Path,
        environment: Mapping[str, str],
        rows: Sequence[RankRow],
    ) -> EngineProcess:
        first, later = split_rows(rows)
        if not isinstance(engine, AddsRanks):
            assert not later  # noqa: S101 - no plan for such an engine has ranks for later
            return engine.start(command, folder=folder, environment=environment)
        waiting, self._waiting = self._waiting, None
        process = waiting or engine.start_waiting(command, folder=folder, environment=environment)
        process.begin(first, later)
        self._growing = process if later else None
        return process

    @contextmanager
    def started_ahead(
        self, engine: Engine, command: EngineCommand, *, folder: Path, environment: Mapping[str, str]
    ) -> Iterator[None]:
        """Let the engine's process start now, if it can wait for `start`, and end it if `start` is never called."""
        if isinstance(engine, AddsRanks):
            with contextlib.suppress(OSError):  # `start` tries again, where the error is reported
                self._waiting = engine.start_waiting(command, folder=folder, environment=environment)
        try:
            yield
        finally:
            if self._waiting is not None:
                self._waiting.abandon()

    def add(self, ranks: Sequence[RankState]) -> None:
        add_to(self._growing, ranks)

    def add_no_more(self) -> None:
        growing, self._growing = self._growing, None
        if growing is not None:
            growing.add_no_more()

    def losses(self, ranks: Sequence[RankState]) -> Losses:
        """Find shims that are gone without a record of how their rank ended: somebody killed these."""
        for state in ranks:
            pid, rank = state.started.shim_pid if state.started else None, state.row.rank
            # A shim leaves its record before it exits, perhaps after the supervisor has last looked for records.
            if (
                pid
                and state.exit is None
                and is_gone(pid)
                and not (self._run_folder / contract.exit_file(rank)).exists()
            ):
                self._lost.setdefault(rank, time.time())
        self._lost_folder = self._lost_folder or look_at_scratch(self.recordings, time.time())
        return Losses(self._lost, {}, folders={"": self._lost_folder} if self._lost_folder else {})

    def forget(self, host: str) -> Collection[int]:
        raise ValueError(f"every rank runs on this machine, and there is no host {host} to lose")

    def rejoin(self, host: str) -> None:
        raise ValueError(f"every rank runs on this machine, and there is no host {host} to come back")

    def rejoined(self) -> Collection[str]:
        return ()

    def signal_ranks(
        self,
        ranks: Sequence[RankState],
        number: int,
        *,
        marker: Mapping[str, Any] | None = None,  # noqa: ARG002 - the launcher has written it
    ) -> None:
        for pid in _living(ranks).values():
            signal_process(pid, number, run_id=self._run_id)

    def tell(self, number: int, message: bytes) -> None:
        check_order(message)
        pass_order(str(self.recordings), number, message)

    def snapshot(self, ranks: Sequence[RankState], *, since: float, closely: bool = False) -> ProcessSnapshot:  # noqa: ARG002 - it is always fresh
        return merge_reports({"": look_at_ranks(self._run_id, ranks, closely=closely)})

    def dump_stacks(self, ranks: Sequence[RankState]) -> None:
        """Read the stacks now, which takes a few seconds at most."""
        py_spy = find_py_spy()
        if py_spy is not None:
            dump_stacks(_living(ranks), run_id=self._run_id, run_folder=str(self._run_folder), py_spy=py_spy)

    def cut(self, host: str) -> None:
        raise ValueError(f"every rank runs on this machine, and no connection leads to {host}")

    def end(self, meanwhile: Callable[[], None]) -> int:  # noqa: ARG002 - there is no host to wait for
        return len(kill_run_processes(self._run_id, daemons=self._daemons))


def engine_variables(
    plan: LaunchPlan, run_id: str, environment: Mapping[str, str], *, controller: RankController, scratch: Path
) -> dict[str, str]:
    """Return the environment of a run's engine: inherited variables, secrets, the engine's settings, and the run's identity."""
    names = plan.engine.names
    in_scratch = dict.fromkeys(names.folder_variables, str(scratch))
    settings = {**plan.engine.environment, **in_scratch, **controller.settings(names)}
    inherited = {name: value for name, value in environment.items() if name not in plan.managed}
    own = {contract.ENV_RUN_ID: run_id, contract.ENV_START: "", contract.ENV_SCRATCH: str(scratch)}
    return {**inherited, **plan.secrets, **settings, **own}


def split_rows(rows: Sequence[RankRow]) -> tuple[list[int], list[int]]:
    """Return the ranks that start at first and those that are for later."""
    return [row.rank for row in rows if not row.later], [row.rank for row in rows if row.later]


def add_to(process: GrowingProcess | None, ranks: Sequence[RankState]) -> None:
    """Add ranks to the process of an engine, see `RankController.add`."""
    if process is None:
        raise ValueError("the run takes no further ranks")
    for state in ranks:
        if state.phase is not Phase.ABSENT:
            raise ValueError(f"rank {state.row.rank} has been started already")
    for state in ranks:
        state.phase = Phase.WAITING
    process.add([state.row.rank for state in ranks])


def check_order(message: bytes) -> None:
    """Raise `ValueError` if an order to a worker is longer than an agent takes, see `RankController.tell`."""
    if len(message) > contract.LARGEST_ORDER:
        raise ValueError(f"an order of {len(message)} bytes, and a worker takes at most {contract.LARGEST_ORDER}")


def look_at_ranks(run_id: str, ranks: Sequence[RankState], *, closely: bool) -> ProcessReport:
    """Look at the processes of a run on this machine."""
    running = [(state.row.rank, state.started) for state in ranks if state.started and state.exit is None]
    shims = {rank: started.shim_pid for rank, started in running if started.shim_pid}
    found = look_at_processes(run_id, ranks=_living(ranks), shims=shims, closely=closely)
    report = parse(ProcessReport, {"question": 0, **found})
    assert isinstance(report, ProcessReport), report  # noqa: S101 - what our own code returns
    return report


def _living(ranks: Sequence[RankState]) -> dict[int, int]:
    """Return the process ids of the ranks that have started and not ended, by rank."""
    return {state.row.rank: state.started.pid for state in ranks if state.started and state.exit is None}
