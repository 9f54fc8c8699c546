"""Which faults `attribution.py` makes, in whom and where, and what is to be said of each."""

import random
from pathlib import Path
from typing import Any, NamedTuple

BROKEN = Path(__file__).parent / "broken"
HERE, HOSTS = "here", "hosts"
DEFAULT, AGENTS, WARM = "default", "agents", "warm"
ROUNDS = 5
RECIPE_ROUNDS = 2  # they load torch, which takes longer than all else together
RANKS = 4
ROLES = {"worker": (0, 1), "server": (2,)}
LATEST_STEP = 30
BY_KERNEL = "out of memory, by the kernel"
CLASSES = {
    **dict.fromkeys(("raise", "error in one role", "long message", "exception group", "lines and notes"), "raised"),
    **dict.fromkeys(("raised from another", "exception without words", "recursion", "assertion"), "raised"),
    **dict.fromkeys(("division by zero", "missing file", "full disk", "timeout", "bytes that are no text"), "raised"),
    **dict.fromkeys(("service refuses", "service resets", "empty file", "pipe to a dead child"), "raised"),
    **dict.fromkeys(("clean-up of 0.4 s", "clean-up of 4 s", "MPI error"), "raised"),
    **dict.fromkeys(
        ("sys.exit", "sys.exit with words", "os._exit", "_exit in C", "exec of false", "MPI_Abort"), "exited"
    ),
    **dict.fromkeys(("sys.exit(0)", "sys.exit(0), slowly", "os._exit(0)", "exec of true"), "left_early"),
    **dict.fromkeys(("SIGKILL", "SIGXCPU", "SIGALRM", "killed by its child", "closed peers"), "killed"),
    **dict.fromkeys(("SIGSEGV", "SIGBUS", "SIGFPE", "SIGILL", "SIGTRAP"), "crashed"),
    **dict.fromkeys(("null pointer", "abort in C", "os.abort"), "crashed"),
    **dict.fromkeys(("out of memory", BY_KERNEL, "MemoryError"), "out_of_memory"),
    **dict.fromkeys(("import error", "import of a missing name"), "import_error"),
    "stopped": "hung",
    "stopped shim": "hung",
    "stopped child": "hung",
    "stopped daemon": "hung",
    "stopped agent": "host_lost",
    "another program": "hung",
    "endless loop": "hung",
    "holds the interpreter": "hung",
    "another collective": "hung",
    "in finalize": "hung",
    "exception in a thread": "hung",
    "network cut one way": "hung",
    "folder of the run removed": "folder_lost",
    "folder of ttlaunch removed": "folder_lost",
    "killed shim": "shim_lost",
    "killed starter": "daemon_lost",
    "killed agent": "host_lost",
    "skipped backward": "hung",
}
"""The class that a report is to name, by fault."""

OVER_SOCKETS = {"closed peers", "clean-up of 0.4 s", "clean-up of 4 s", "sys.exit(0)", "sys.exit(0), slowly"}
"""The faults of the program in which its ranks meet over sockets: over MPI, the others notice nothing before the rank has ended."""
HOST_NAMED = {
    "stopped daemon",
    "stopped agent",
    "network cut one way",
    "folder of the run removed",
    "folder of ttlaunch removed",
    "killed starter",
    "killed agent",
}
"""Faults of a host: the report is to name the host, and no rank."""
HOSTS_ONLY = {*HOST_NAMED} - {"stopped daemon", "killed starter"}
PROGRAM_ONLY = {*OVER_SOCKETS, "in finalize", "network cut one way"} - {"sys.exit(0)"}
"""Faults of ranks that meet over MPI or sockets of their own; a recipe's transport is another matter."""
OF_MPI = {"MPI error", "MPI_Abort", "in finalize"}
OF_AGENTS = {"killed shim", "killed starter", "killed agent"}
"""Faults that engine `agents` gets too: who starts its ranks is ttlaunch itself."""
OF_SCRIPTS = {"skipped backward"}
RANKS_OF_SCRIPT = 3
HANGS = {fault for fault, kind in CLASSES.items() if kind == "hung"}
HANG_TIMEOUT_S = {"program": 4, "recipe": 4, "script": 15}
"""For `--hang-timeout`: a script that loads torch makes no progress meanwhile that anybody sees."""

LAYOUT = {HERE: ("localhost",) * RANKS, HOSTS: ("node0", "node0", "node1", "node2")}
"""The host of each rank; a recipe of three ranks has the first three."""


class Cell(NamedTuple):
    """A fault, who has it, where and when; and how the ranks are started: by the default, `agents` or `warm`."""

    place: str
    start: str
    program: str
    fault: str
    role: str
    rank: int | None
    turn: int

    @property
    def key(self) -> str:
        """What a result is kept under."""
        return "/".join(map(str, self))

    @property
    def step(self) -> int:
        """The step it breaks in, drawn at random, but the same for each call."""
        return random.Random(self.key).randint(1, LATEST_STEP)  # noqa: S311 - nothing secret

    @property
    def guilty(self) -> set[int]:
        """The ranks that may be named: the one, or any of the role."""
        return {self.rank} if self.rank is not None else set(ROLES[self.role])

    @property
    def who(self) -> str:
        """For people."""
        return self.role if self.rank is None else f"{self.role} {self.rank}"


def plan_cells(place: str, start: str, rounds: int) -> list[Cell]:
    """Every cell of a place so many times, those that load torch less often, each time in an order of its own."""
    planned = []
    for turn in range(rounds):
        with_all = _with if start == DEFAULT else _with_agents
        cells = [cell for fault in CLASSES for cell in with_all(place, start, fault, turn)]
        random.Random(f"{place} {turn}").shuffle(cells)  # noqa: S311 - nothing secret
        planned += [cell for cell in cells if cell.program == "program" or turn < RECIPE_ROUNDS]
    return planned


def _with(place: str, start: str, fault: str, turn: int) -> list[Cell]:
    """A fault in everybody who can have it."""
    if (fault in HOSTS_ONLY and place != HOSTS) or fault in OF_AGENTS | OF_SCRIPTS:
        return []
    if fault == "error in one role":
        return [Cell(place, start, "recipe", fault, role, None, turn) for role in ROLES]
    cells = [Cell(place, start, "program", fault, "rank", rank, turn) for rank in range(RANKS)]
    if fault not in PROGRAM_ONLY:
        cells += [
            Cell(place, start, "recipe", fault, role, rank, turn) for role, ranks in ROLES.items() for rank in ranks
        ]
    return cells


def _with_agents(place: str, start: str, fault: str, turn: int) -> list[Cell]:
    """A fault in every rank of the program over sockets, and of a script with DistributedDataParallel."""
    if (fault in HOSTS_ONLY and place != HOSTS) or fault in OF_MPI | {"error in one role"}:
        return []
    cells = []
    if fault not in OF_SCRIPTS | {"another collective"}:  # those of torch
        cells += [Cell(place, start, "program", fault, "rank", rank, turn) for rank in range(RANKS)]
    if fault != "network cut one way":  # a pair of hosts whose ranks may have nothing to say to each other
        cells += [Cell(place, start, "script", fault, "rank", rank, turn) for rank in range(RANKS_OF_SCRIPT)]
    return cells


def is_right(entry: dict[str, Any]) -> bool:
    """Whether a result names who was broken, where and by what."""
    cell = Cell(*(entry[name] for name in Cell._fields))
    named, hosts = entry["named"], {LAYOUT[cell.place][rank] for rank in cell.guilty}
    if cell.fault == "network cut one way":
        hosts.add(cut_peer(cell))
    if cell.fault == "killed starter" and cell.place == HERE:
        return (named, entry["host"], entry["class"]) == (None, None, "other")  # the engine itself
    if cell.fault in HOST_NAMED:
        is_there = named is None and entry["host"] in hosts
    else:
        is_there = named in cell.guilty and entry["host"] == LAYOUT[cell.place][named]
    return is_there and entry["class"] == CLASSES[cell.fault]


def cut_peer(cell: Cell) -> str:
    """The host whose packets the host of the guilty rank drops, in a network that is cut one way."""
    own = LAYOUT[cell.place][min(cell.guilty)]
    return next(host for host in reversed(LAYOUT[cell.place]) if host != own)
