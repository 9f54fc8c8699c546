"""Start ranks without mpirun: `agent/start_ranks.py` forks the shims, so no MPI has to be installed.

On this machine it is a process of its own. On other hosts, the run's agents start it. Its ranks have no variables of MPI, not even those that this shell has from a surrounding mpirun, and each rank's end is known at
once. Programs that use MPI need another engine.
"""

import contextlib
import json
import os
import platform
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePath

from ttlaunch import contract
from ttlaunch.agent import START_RANKS
from ttlaunch.diagnostics import Blame, Diagnostic
from ttlaunch.engines.base import Capability, DaemonStart, EngineArguments, EngineProcess, EngineReport
from ttlaunch.engines.process import process_options
from ttlaunch.planning.engine import EngineSignature, RanksToStart
from ttlaunch.planning.launch_plan import EngineCommand, EngineNames
from ttlaunch.quick_dataclass import dataclass
from ttlaunch.quick_pattern import quick_pattern

KEY = "agents"
SIGNATURE = EngineSignature(
    title="agents", program="start_ranks", version=r"Python (\d+\.\d+[\w.]*)", oldest=(3, 9), before=(4,)
)
_CAN = Capability.LOSE_RANK | Capability.ADD_RANK
_VERSION_S = 10.0  # for `python --version`
_KILLED_SHIM = quick_pattern(r"^shim of rank (\d{1,9}) was killed by signal", re.MULTILINE)
_LOST_STARTER = quick_pattern(r"^starter on \S+ was killed by SIGKILL$", re.MULTILINE)
_NETWORKS = "AGENTS_NETWORKS"  # a variable of ours: the networks chosen for ranks
_NAMES = EngineNames(
    launcher=SIGNATURE.program,
    rank_variables=(),  # a shim is forked with its row of the plan
    network_variables=(_NETWORKS,),
    daemons=("start_ranks", "ttlaunch-shim"),
    # Those of an mpirun or srun from within which ttlaunch was started; libraries would take them for their own.
    place_prefixes=(
        "OMPI_COMM_WORLD_",
        "OMPI_UNIVERSE_SIZE",
        "PMIX_RANK",
        "PMIX_NAMESPACE",
        "PMIX_SERVER_",
        "PMI_RANK",
        "PMI_SIZE",
    ),
    rank_prefixes=("OMPI_", "OPAL_", "PMIX_", "PMI_", "PRTE_", _NETWORKS),
    key=KEY,
    has_mpi=False,
)


@dataclass(frozen=True)
class Agents:
    """This machine's Python, which starts the ranks.

    Attributes:
        program: Absolute path of the interpreter.
    """

    program: str

    signature = SIGNATURE
    can = _CAN
    name = SIGNATURE.title
    pairing_repair = ""

    @property
    def version_output(self) -> str:
        if self.program == sys.executable:
            return f"Python {platform.python_version()}"
        try:
            answer = subprocess.run(
                [self.program, "--version"], capture_output=True, text=True, timeout=_VERSION_S, check=False
            )
        except (OSError, subprocess.TimeoutExpired):
            return ""
        return answer.stdout

    def command(self, ranks: RanksToStart) -> EngineCommand:
        script = str(PurePath(ranks.shim).with_name(PurePath(START_RANKS).name))
        argv = (self.program, "-I", "-S", script, contract.PLAN_FILE)
        networks = ranks.over_hosts.networks if ranks.over_hosts else ()
        environment = {_NETWORKS: ",".join(networks)} if networks else {}
        return EngineCommand(self.name, argv, environment, {}, names=_NAMES)

    def start(self, command: EngineCommand, *, folder: Path, environment: Mapping[str, str]) -> subprocess.Popen[bytes]:
        process = self.start_waiting(command, folder=folder, environment=environment)
        process.begin()
        return process

    def start_waiting(
        self, command: EngineCommand, *, folder: Path, environment: Mapping[str, str]
    ) -> "GrowingStarter":
        argv = [*command.argv, str(os.getpid()), "ordered"]
        return GrowingStarter(argv, stdin=subprocess.PIPE, **process_options(folder, environment))

    def refuse_connections(self, process: EngineProcess) -> None:
        """Do nothing: no socket listens."""

    def adapt_daemon(self, command: str, start: DaemonStart) -> str | None:  # noqa: ARG002 - it has no daemons
        return None

    def read_output(self, output: str, statuses: Mapping[int, int | None]) -> EngineReport:  # noqa: ARG002
        killed_shims = frozenset(int(rank) for rank in _KILLED_SHIM.findall(output))
        return EngineReport(killed_shims=killed_shims, lost_daemon=_LOST_STARTER.search(output) is not None)

    def pairs_with(self, library: str) -> bool:  # noqa: ARG002 - it has no MPI
        return False


class GrowingStarter(subprocess.Popen[bytes]):
    """`start_ranks.py`, which takes its orders through a pipe and ends if the pipe ends before the first one."""

    _left: set[int]

    def begin(self, first: Sequence[int] | None = None, later: Sequence[int] = ()) -> None:
        self._left = set(later)
        ranks = {} if first is None else {"ranks": list(first)}
        self._order({**ranks, "variables": {}, "later": list(later)})

    def abandon(self) -> None:
        with self:  # closes its pipes and waits for its end
            self.kill()

    def add(self, ranks: Sequence[int]) -> None:
        self._left -= set(ranks)
        self._order({"ranks": list(ranks)})

    def add_no_more(self) -> None:
        self._left.clear()
        self._order({"ranks": []})

    def _order(self, order: Mapping[str, object]) -> None:
        assert self.stdin is not None  # noqa: S101 - it is a pipe
        with contextlib.suppress(OSError, ValueError):  # it has ended, or the last order has been given
            self.stdin.write(json.dumps(order).encode() + b"\n")
            self.stdin.flush()
        if not self._left:
            with contextlib.suppress(OSError):
                self.stdin.close()


class AgentsFinder:
    """Finds this engine on every machine: it needs nothing but the ranks' interpreter."""

    signature = SIGNATURE
    key = KEY
    can = _CAN

    def find(self, *, python: str, search_path: str | None) -> Agents:  # noqa: ARG002 - it looks for no program
        return Agents(python)

    def parse_arguments(self, text: str) -> tuple[EngineArguments, list[Diagnostic]]:  # noqa: ARG002 - it takes none
        message = "`--mpi-args` has arguments for mpirun, which engine `agents` does not start"
        hints = ("`--hostfile FILE` names the hosts, and `--env NAME=VALUE` sets variables for the ranks",)
        return EngineArguments(), [Diagnostic("P058", message, hints=hints, blame=Blame.COMMAND_LINE)]

    def never_started(self) -> Agents:
        return Agents(sys.executable)
