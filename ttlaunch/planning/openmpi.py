"""Open MPI 4.1 and 5: the command line and the files that start one shim per slot, in the plan's order.

The command line names only files and settings; every value of the user's travels in `plan.json`. A rankfile puts rank
r on the r-th slot whatever mpirun's own mapping would do; `--bind-to none` then keeps it from pinning ranks to cores.
"""

import shlex
from collections.abc import Sequence
from dataclasses import dataclass

from ttlaunch import contract
from ttlaunch.planning.launch_plan import EngineCommand, RankRow
from ttlaunch.planning.mpi_args import own_settings

HOSTFILE = "hosts.txt"
RANKFILE = "rankfile.txt"
_FIRST_WITH_PRRTE = 5


@dataclass(frozen=True)
class OpenMpi:
    """What is known of the machine's Open MPI.

    Attributes:
        mpirun: Absolute path.
        version: Such as `(5, 0, 11)`.
    """

    mpirun: str
    version: tuple[int, ...]

    @property
    def name(self) -> str:
        return f"Open MPI {'.'.join(str(part) for part in self.version)}"


@dataclass(frozen=True)
class OverHosts:
    """What mpirun has to know when ranks run on other machines than the launching one.

    Attributes:
        remote_folder: Where ttlaunch keeps its things on a host; if not absolute, below the user's home there.
        networks: Networks in CIDR notation that ranks talk over; empty: mpirun chooses.
        control_networks: Likewise for mpirun's own daemons, which must also reach the launching machine.
        has_rdma: Whether every host has an RDMA device, so that Open MPI must be free to use it.
    """

    remote_folder: str
    networks: tuple[str, ...] = ()
    control_networks: tuple[str, ...] = ()
    has_rdma: bool = False


def plan_openmpi(
    engine: OpenMpi,
    *,
    python: str,
    shim: str,
    rows: Sequence[RankRow],
    slots: Sequence[tuple[str, int]],
    mpi_args: Sequence[str] = (),
    over_hosts: OverHosts | None = None,
) -> EngineCommand:
    """The command line and files for `mpirun`.

    Args:
        engine: The Open MPI to use.
        python: Interpreter that runs the shim on this machine.
        shim: Path of `shim.py` on this machine.
        rows: The ranks.
        slots: Host and number of slots, in the order of the hostfile, with `user@` where the hostfile has it.
        mpi_args: Further words for mpirun; what they set, we do not.
        over_hosts: For ranks on other machines, each of which has its own paths; None: all ranks run on this machine.
    """
    modern = engine.version[0] >= _FIRST_WITH_PRRTE
    mapping = ["--map-by", f"rankfile:file={RANKFILE}"] if modern else ["--rankfile", RANKFILE]
    settings: list[tuple[str, ...]] = [("--bind-to", "none"), ("--mca", "mpi_yield_when_idle", "1")]
    if over_hosts is None or not over_hosts.has_rdma:
        # Without these two every start waits a second for libfabric to look for network cards.
        settings += [("--mca", "pml", "ob1"), ("--mca", "btl", "self,sm,tcp" if modern else "self,vader,tcp")]
    if over_hosts is not None:
        settings += _between_hosts(over_hosts, modern=modern)
    argv = [
        engine.mpirun,
        *("-n", str(len(rows))),
        *("--hostfile", HOSTFILE),
        *mapping,
        *own_settings(settings, mpi_args),
        *mpi_args,
        *((python, "-I", "-S", shim, contract.PLAN_FILE) if over_hosts is None else _start_words(over_hosts)),
    ]
    environment = {
        # mpirun refuses to start for root unless told twice; containers and test machines are often root.
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    }
    files = {
        HOSTFILE: "".join(f"{host} slots={count}\n" for host, count in slots),
        RANKFILE: "".join(f"rank {row.rank}={row.host} slot=0\n" for row in rows),
    }
    by_hand = None if over_hosts is None else f"exec {shlex.join([python, '-I', '-S', shim])}"
    return EngineCommand(engine.name, tuple(argv), environment, files, by_hand)


def _between_hosts(over_hosts: OverHosts, *, modern: bool) -> list[tuple[str, ...]]:
    """Settings for daemons on other hosts: which networks they use, and how soon a silent peer counts as dead."""
    daemon = "--prtemca" if modern else "--mca"
    settings: list[tuple[str, ...]] = [
        # Every host is reached from here, through our own connections; a daemon on a host has none.
        (daemon, "plm_ssh_no_tree_spawn" if modern else "plm_rsh_no_tree_spawn", "1"),
        (daemon, "oob_tcp_keepalive_time", "20"),
        (daemon, "oob_tcp_keepalive_intvl", "5"),
        (daemon, "oob_tcp_keepalive_probes", "3"),
    ]
    if modern:
        settings.append((daemon, "prte_do_not_resolve", "1"))  # names of hosts may mean something to ssh alone
    if over_hosts.networks and not over_hosts.has_rdma:
        settings.append(("--mca", "btl_tcp_if_include", ",".join(over_hosts.networks)))
    if over_hosts.control_networks:
        name = "prte_if_include" if modern else "oob_tcp_if_include"
        settings.append((daemon, name, ",".join(over_hosts.control_networks)))
    return settings


def _start_words(over_hosts: OverHosts) -> list[str]:
    """What mpirun starts on every host: a script in the run's folder there, wherever that host's home is.

    The folder of the launching machine may not exist on a host, hence `--wdir /`. `TTLAUNCH_START` names another script,
    for whoever starts the command by hand.
    """
    home = "" if over_hosts.remote_folder.startswith("/") else '"$HOME"/'
    runs = f"{shlex.quote(over_hosts.remote_folder.removeprefix('~/'))}/{contract.RUNS_DIR}"
    script = f'{home}{runs}/"${contract.ENV_RUN_ID}"/{contract.START_FILE}'
    choose = f'[ -n "${contract.ENV_START}" ] || {contract.ENV_START}={script}; exec sh "${contract.ENV_START}"'
    return [*("-x", contract.ENV_RUN_ID), *("-x", contract.ENV_START), *("--wdir", "/"), "sh", "-c", choose]


def scratch_settings(engine_name: str, folder: str) -> dict[str, str]:
    """Environment of mpirun that keeps its session folder and shared-memory files inside `folder`.

    They survive a killed mpirun; inside a folder of the run's own they can be removed with it.
    """
    settings = {"TMPDIR": folder}
    if engine_name.startswith(f"Open MPI {_FIRST_WITH_PRRTE}"):
        settings |= {"PRTE_MCA_prte_tmpdir_base": folder, "OMPI_MCA_btl_sm_backing_directory": folder}
    else:
        settings |= {"OMPI_MCA_orte_tmpdir_base": folder, "OMPI_MCA_btl_vader_backing_directory": folder}
    return settings


def relay_settings(engine_name: str, command: str) -> dict[str, str]:
    """Environment of mpirun that makes it start daemons with `command HOST …` in place of ssh."""
    if engine_name.startswith(f"Open MPI {_FIRST_WITH_PRRTE}"):
        return {"PRTE_MCA_plm_ssh_agent": command}
    return {"OMPI_MCA_plm_rsh_agent": command}
