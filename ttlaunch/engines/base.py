"""The protocol of engines: what every engine provides, and what only an engine knows.

An engine starts one shim per rank, and ends when they end. Everything else is the same for every engine: shims, records,
logs, leases and flight recorders. Functions receive the engine as an object; code that depends on an ability of the engine
checks its `Capability` and never compares names.
"""

import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import field
from enum import Flag, auto
from pathlib import Path
from typing import IO, Protocol, runtime_checkable

from ttlaunch.diagnostics import Diagnostic, Source
from ttlaunch.planning.engine import EngineSignature, PlansCommands
from ttlaunch.planning.launch_plan import EngineCommand
from ttlaunch.quick_dataclass import dataclass


class Capability(Flag):
    """Abilities that an engine may have; code that needs one checks whether it is in `Engine.can`.

    If an engine lacks an ability, ttlaunch refuses what needs it or does it without the engine.
    """

    LOSE_RANK = auto()
    """The other ranks continue when one has failed, so that the supervisor has to end them."""
    ADD_RANK = auto()
    """Ranks can be started while others run."""
    MPI = auto()
    """Ranks find each other through MPI, so that mpi4py has to load the engine's own library."""
    SIGNAL_RANK = auto()
    """The engine can send a signal to a single rank; otherwise ttlaunch finds the process to signal in the shims' records."""
    REQUEUE = auto()
    """The engine queues a run again that has lost its hosts."""
    OWNS_HOSTS = auto()
    """The engine's allocation determines the hosts, instead of a hostfile."""


@dataclass(frozen=True)
class EngineArguments:
    """The meaning of a user's further arguments for an engine's command.

    Attributes:
        hosts: The hosts that they name, as the text of a hostfile; None if they name none.
        hostfile: The hostfile that they name; None if they name none.
        passed: The arguments that are passed to the engine unchanged.
        rankfile: The file that they name with a host for each rank, and the mistake that this is; None if they name none.
    """

    hosts: Source | None = None
    hostfile: str | None = None
    passed: tuple[str, ...] = ()
    rankfile: tuple[str, Diagnostic] | None = None


@dataclass(frozen=True)
class DaemonStart:
    """How an engine's daemon starts on one host.

    Attributes:
        prefix: The engine's folder on the host, whose `bin` contains the daemon.
        programs: The folder of the ranks' interpreter, which comes first in their PATH.
        environment: Variables for the daemon and all processes that it starts.
        starter: The first words of a command that starts a daemon and keeps its listening sockets on networks; the networks,
            separated by commas, and the daemon's own command follow. After the ranks of a recipe have found each other, the daemon
            takes no further connection.
        secrets: Variables whose values appear on no command line and in no output.
    """

    prefix: str
    programs: str
    environment: Mapping[str, str]
    starter: tuple[str, ...]
    secrets: Mapping[str, str] = field(default_factory=dict, repr=False)


@dataclass(frozen=True)
class EngineReport:
    """Facts about the end of ranks that only the engine's own output has.

    Attributes:
        gave_up: Ranks that ended because the connection to a peer had closed.
        killed_shims: Ranks whose shim was killed by somebody other than the engine.
        left_early: Ranks that left while the engine still expected something of them, such as the end of MPI.
        lost_daemon: Whether the engine lost the connection to its daemon on a host.
    """

    gave_up: frozenset[int] = frozenset()
    killed_shims: frozenset[int] = frozenset()
    lost_daemon: bool = False
    left_early: frozenset[int] = frozenset()


class EngineProcess(Protocol):
    """The process of an engine, such as a `subprocess.Popen`; or what stands for it if agents start the ranks on their hosts."""

    @property
    def pid(self) -> int | None:
        """Its process on this machine; None if it has none."""

    @property
    def returncode(self) -> int | None:
        """Its exit status; negative if a signal ended it, None if it has not ended."""

    @property
    def stdout(self) -> IO[bytes] | None:
        """What it prints. A line that says that a rank has ended wakes the supervisor."""

    @property
    def stderr(self) -> IO[bytes] | None:
        """What it prints as errors."""

    def poll(self) -> int | None:
        """Return the exit status if it has ended; None if not."""

    def send_signal(self, number: int, /) -> None:
        """Send it a signal; on SIGTERM it ends all ranks."""

    def terminate(self) -> None:
        """Send it SIGTERM."""

    def kill(self) -> None:
        """Send it SIGKILL."""

    def wait(self, timeout: float | None = None) -> int:
        """Wait for its end; raises `subprocess.TimeoutExpired`."""


class GrowingProcess(EngineProcess, Protocol):
    """The process of an engine to which ranks can be added while others run; it lives until no more can be."""

    def add(self, ranks: Sequence[int]) -> None:
        """Start further ranks, as the first ones were started; does nothing once the process has ended."""

    def add_no_more(self) -> None:
        """Let the process end with its ranks; `add` must not be called any more."""


class WaitingProcess(GrowingProcess, Protocol):
    """The process of an engine that starts no rank before it is told to begin."""

    def begin(self, first: Sequence[int] | None = None, later: Sequence[int] = ()) -> None:
        """Start the ranks `first`, None for all of the plan; those of `later` can be added."""

    def abandon(self) -> None:
        """End the process, which has not begun."""


@runtime_checkable
class AddsRanks(Protocol):
    """What an engine with the capability `ADD_RANK` provides besides."""

    def start_waiting(self, command: EngineCommand, *, folder: Path, environment: Mapping[str, str]) -> WaitingProcess:
        """Start the process as `Engine.start` does, but no rank before it is told to begin.

        So its interpreter starts while the launcher still prepares the run.

        Raises:
            OSError: The process cannot be started.
        """


class Engine(PlansCommands, Protocol):
    """One engine as it is installed on this machine.

    An engine does not report that a rank has ended: the rank's shim writes a record at that moment, and the launcher
    follows the records. An engine's exit status and `read_output` only add what a shim could not write, because
    it was killed itself.
    """

    @property
    def name(self) -> str:
        """The engine's name and version, such as `Open MPI 5.0.11`; shown, recorded and hashed, but never compared."""

    @property
    def program(self) -> str:
        """Absolute path of the command that starts ranks."""

    @property
    def version_output(self) -> str:
        """The program's answer to `--version`, so that this machine is checked by the same rules as hosts are."""

    @property
    def signature(self) -> EngineSignature:
        """How the engine is recognised on any machine."""

    @property
    def can(self) -> Capability:
        """What the engine can do besides starting ranks and ending with them."""

    def start(self, command: EngineCommand, *, folder: Path, environment: Mapping[str, str]) -> subprocess.Popen[bytes]:
        """Start the command that the method `command` returned, in the run's folder.

        The process lives as long as any rank of the run, ends all of them on SIGTERM, and must not outlive the launcher.

        Raises:
            OSError: The process cannot be started.
        """

    def refuse_connections(self, process: EngineProcess) -> None:
        """Let the engine's process take no further connection, and keep those that it has.

        Called once all ranks of a recipe have found each other. Ranks of other programs may connect to the engine at any time.
        """

    def adapt_daemon(self, command: str, start: DaemonStart) -> str | None:
        """Return the shell command that starts the engine's daemon on a host, with the host's paths.

        Args:
            command: The command that the engine gives to its remote shell for this host.
            start: How the daemon starts on this host.

        Returns:
            None if the given command starts no daemon; it can then run unchanged.
        """

    def read_output(self, output: str, statuses: Mapping[int, int | None]) -> EngineReport:
        """Read from the engine's own messages how ranks ended.

        Args:
            output: The engine's standard error; ranks do not write there.
            statuses: The exit status of each rank; None for ranks without one.
        """

    def pairs_with(self, library: str) -> bool:
        """Return whether ranks that load this MPI library form one world when this engine starts them.

        Args:
            library: The beginning of the version that the MPI library reports, such as `Open MPI v5.0.11`.
        """

    @property
    def pairing_repair(self) -> str:
        """The hint to show if `pairs_with` returns false."""


class EngineFinder(Protocol):
    """One entry of `ttlaunch.engines.ENGINES`: an engine that this machine may or may not have."""

    @property
    def signature(self) -> EngineSignature:
        """How the engine is recognised on any machine."""

    @property
    def key(self) -> str:
        """The name by which `--engine` chooses it."""

    @property
    def can(self) -> Capability:
        """What the engine can do, wherever it is installed."""

    def find(self, *, python: str, search_path: str | None) -> Engine | Diagnostic:
        """Return the engine of this machine, or the diagnostic that says what is missing or wrong.

        Args:
            python: Interpreter of the ranks; an engine beside it wins over one in the search path.
            search_path: `PATH` of the shell; None for that of this process.
        """

    def parse_arguments(self, text: str) -> tuple[EngineArguments, list[Diagnostic]]:
        """Sort the arguments that a user passes on to the engine's command."""

    def never_started(self) -> Engine:
        """An engine that is never started, for the plan of a simulation, whose ranks are all in one process."""
