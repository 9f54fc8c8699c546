"""Open MPI 4.1 and 5: the command line and the files that start one shim per slot, in the plan's order.

The command line names only files and settings; every value of the user's travels in `plan.json`. A rankfile puts rank
r on the r-th slot whatever mpirun's own mapping would do; `--bind-to none` then keeps it from pinning ranks to cores.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from ttlaunch import contract
from ttlaunch.plan.launch_plan import EngineCommand, RankRow
from ttlaunch.plan.mpi_args import own_settings

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


def plan_openmpi(
    engine: OpenMpi,
    *,
    python: str,
    shim: str,
    rows: Sequence[RankRow],
    slots: Sequence[tuple[str, int]],
    mpi_args: Sequence[str] = (),
) -> EngineCommand:
    """The command line and files for `mpirun`.

    Args:
        engine: The Open MPI to use.
        python: Interpreter that runs the shim on the hosts.
        shim: Path of `shim.py` on the hosts.
        rows: The ranks.
        slots: Host and number of slots, in the order of the hostfile, with `user@` where the hostfile has it.
        mpi_args: Further words for mpirun; what they set, we do not.
    """
    modern = engine.version[0] >= _FIRST_WITH_PRRTE
    mapping = ["--map-by", f"rankfile:file={RANKFILE}"] if modern else ["--rankfile", RANKFILE]
    settings = [
        ("--bind-to", "none"),
        ("--mca", "mpi_yield_when_idle", "1"),
        # Without these two every start waits a second for libfabric to look for network cards.
        ("--mca", "pml", "ob1"),
        ("--mca", "btl", "self,sm,tcp" if modern else "self,vader,tcp"),
    ]
    argv = [
        engine.mpirun,
        *("-n", str(len(rows))),
        *("--hostfile", HOSTFILE),
        *mapping,
        *own_settings(settings, mpi_args),
        *mpi_args,
        *(python, "-I", "-S", shim, contract.PLAN_FILE),
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
    return EngineCommand(engine.name, tuple(argv), environment, files)


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
