"""The protocol of engines: what every engine provides, and what only an engine knows.

An engine starts one shim per rank and ends with them. Everything else is the same for every engine: shims, records,
logs, leases and flight recorders. It is passed on as an object; code that depends on what an engine can do asks for a
`Capability` and never compares names.
"""

import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Flag, auto
from pathlib import Path
from typing import Protocol

from ttlaunch.diagnostics import Diagnostic, Source
from ttlaunch.planning.engine import EngineSignature, PlansCommands
from ttlaunch.planning.launch_plan import EngineCommand


class Capability(Flag):
    """What an engine can do; code that needs one of these asks whether it is in `Engine.can`.

    An engine that lacks one is still complete: what needs it is refused, or done without the engine. Today only `MPI` is
    asked for, before a run on this machine; each of the others is for the first engine that has it.
    """

    LOSE_RANK = auto()
    """The other ranks run on when one has ended."""
    ADD_RANK = auto()
    """Ranks can be started while others run."""
    MPI = auto()
    """Ranks find each other through MPI, so that mpi4py has to load the engine's own library."""
    SIGNAL_RANK = auto()
    """A single rank can be sent a signal by the engine; without it, shims' records say which process to signal."""
    REQUEUE = auto()
    """A run that lost its hosts is put into the queue again by the engine."""
    OWNS_HOSTS = auto()
    """Hosts come from the engine's allocation instead of a hostfile."""


@dataclass(frozen=True)
class EngineArguments:
    """The meaning of a user's further arguments for an engine's command.

    Attributes:
        hosts: The hosts that they name, as the text of a hostfile; None if they name none.
        hostfile: The hostfile that they name; None if they name none.
        passed: What goes to the engine as it is.
    """

    hosts: Source | None = None
    hostfile: str | None = None
    passed: tuple[str, ...] = ()


@dataclass(frozen=True)
class DaemonStart:
    """How an engine's daemon starts on one host.

    Attributes:
        prefix: Folder of the engine there, whose `bin` has the daemon.
        programs: Folder whose programs ranks find first: that of their interpreter.
        environment: Variables for the daemon, and so for all that it starts.
        secrets: Variables whose values appear on no command line and in no output.
    """

    prefix: str
    programs: str
    environment: Mapping[str, str]
    secrets: Mapping[str, str] = field(default_factory=dict, repr=False)


@dataclass(frozen=True)
class EngineReport:
    """Facts about the end of ranks in an engine's own output, as far as no record has them.

    Attributes:
        gave_up: Ranks that ended because the connection to a peer had closed.
        killed_shims: Ranks whose shim was killed by somebody other than the engine.
        lost_daemon: Whether its daemon on some host went away.
    """

    gave_up: frozenset[int] = frozenset()
    killed_shims: frozenset[int] = frozenset()
    lost_daemon: bool = False


class Engine(PlansCommands, Protocol):
    """One engine as it is installed on this machine.

    An engine does not report that a rank has ended: the rank's shim writes a record at that moment, and the launcher
    follows the records. An engine's exit status and `read_output` only add what a shim could not write, because
    it was killed itself.
    """

    @property
    def name(self) -> str:
        """Its name and version, such as `Open MPI 5.0.11`; shown, recorded and hashed, and compared by nobody."""

    @property
    def program(self) -> str:
        """Absolute path of the command that starts ranks."""

    @property
    def version_output(self) -> str:
        """The program's answer to `--version`, so that this machine is checked by the same rules as hosts are."""

    @property
    def signature(self) -> EngineSignature:
        """How it is recognised on any machine."""

    @property
    def can(self) -> Capability:
        """What it can do beyond starting ranks and ending with them."""

    def start(self, command: EngineCommand, *, folder: Path, environment: Mapping[str, str]) -> subprocess.Popen[bytes]:
        """Start what `command` made, in the run's folder.

        The process lives as long as any rank of the run, ends all of them on SIGTERM, and must not outlive the launcher.

        Raises:
            OSError: It cannot be started.
        """

    def adapt_daemon(self, command: str, start: DaemonStart) -> str | None:
        """The shell command that starts its daemon on a host, with the host's own paths.

        Args:
            command: What the engine would have its remote shell run there.
            start: What is known of the host.

        Returns:
            None if the command starts no daemon and can run as it is.
        """

    def read_output(self, said: str, statuses: Mapping[int, int | None]) -> EngineReport:
        """Find out from its own messages what happened to ranks.

        Args:
            said: What it wrote to its standard error; ranks do not write there.
            statuses: The exit status of each rank; None for ranks without one.
        """

    def pairs_with(self, library: str) -> bool:
        """Whether ranks that load this library belong to one world when this engine starts them.

        Args:
            library: The beginning of the version that the MPI library reports, such as `Open MPI v5.0.11`.
        """

    @property
    def pairing_repair(self) -> str:
        """The hint for a machine where ranks load another library."""


class EngineFinder(Protocol):
    """One entry of `ttlaunch.engines.ENGINES`: an engine before it is known whether this machine has it."""

    @property
    def signature(self) -> EngineSignature:
        """How it is recognised on any machine."""

    def find(self, *, python: str, search_path: str | None) -> Engine | Diagnostic:
        """The engine of this machine, or what is missing or wrong.

        Args:
            python: Interpreter of the ranks; an engine beside it wins over one in the search path.
            search_path: `PATH` of the shell; None: the process's own.
        """

    def parse_arguments(self, text: str) -> tuple[EngineArguments, list[Diagnostic]]:
        """Sort the arguments that a user passes on to the engine's command."""

    def unused(self) -> Engine:
        """An engine that is never started, for the plan of a simulation, whose ranks are all in one process."""
