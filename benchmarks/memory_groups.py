"""A control group with a limit of memory for each rank of a run, as a batch system or a container sets one, and what the ranks took in it.

    with Groups({0: 500_000_000, 1: 500_000_000}) as groups:
        ttlaunch.run(recipe, env=groups.environment, ...)
    groups.killed, groups.peaks

The kernel kills a rank when it needs more than its limit and nothing of the group can be given back. Pages of files can: the kernel reads them again.
So `peaks` has what cannot: anonymous memory, shared memory, and what the kernel itself keeps for the process.

It needs root and a memory controller of version 1; `Groups.can_be_made` says whether both are there. The groups are made below that of the calling process
and removed afterwards. A rank enters its group when its interpreter starts, and then starts it anew, so all of its memory counts. It takes the settings that its shim
gives it where the shim, too, is in the group.
"""

import os
import tempfile
import threading
import time
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Self

_ROOT = Path("/sys/fs/cgroup/memory")
_TICK_S = 0.02
_LEAVE_S = 10.0
_BASE, _IS_IN = "BENCH_GROUPS_OF_RANKS", "BENCH_RANK_IS_IN_GROUP"
_ENTER = f"""import os, sys
if sys.orig_argv[1:3] == ["-m", "ttlaunch.runtime"] and "{_IS_IN}" not in os.environ:
    with open(os.environ["{_BASE}"] + "/rank-" + os.environ["TTLAUNCH_RANK"] + "/cgroup.procs", "w") as group:
        group.write(str(os.getpid()))
    os.environ["{_IS_IN}"] = "1"
    from ttlaunch.agent.memory import settings_for_limit
    for name, value in settings_for_limit(ranks=1).items():
        os.environ.setdefault(name, value)
    os.execv(sys.executable, sys.orig_argv)
"""


class Groups:
    """Control groups for ranks, while it is entered.

    Attributes:
        environment: Variables with which ranks enter their groups.
        peaks: By rank, the most bytes that the kernel could not take back, looked at 50 times a second.
        killed: The ranks that the kernel has killed for their limit.
    """

    def __init__(self, limits: Mapping[int, int]) -> None:
        """Plan a group for each rank; a limit is in bytes."""
        self.environment: dict[str, str] = {}
        self.peaks = dict.fromkeys(limits, 0)
        self.killed: list[int] = []
        self._limits = limits
        self._ends = threading.Event()
        self._thread = threading.Thread(target=self._look)
        self._made = ExitStack()
        self._groups: dict[int, Path] = {}

    @staticmethod
    def can_be_made() -> bool:
        """Whether this process may make groups that limit memory."""
        return os.geteuid() == 0 and (_ROOT / "memory.limit_in_bytes").is_file() and _own() is not None

    def __enter__(self) -> Self:
        base = _ROOT / str(_own()).lstrip("/") / f"ttl-bench-{os.getpid()}"
        for rank, group in [(None, base), *((rank, base / f"rank-{rank}") for rank in self._limits)]:
            group.mkdir()
            self._made.callback(_remove, group)
            if rank is not None:
                self._groups[rank] = group
                (group / "memory.limit_in_bytes").write_text(str(self._limits[rank]))
        folder = self._made.enter_context(tempfile.TemporaryDirectory(prefix="ttl-bench-"))
        (Path(folder) / "sitecustomize.py").write_text(_ENTER, encoding="ascii")
        self.environment = {"PYTHONPATH": folder, _BASE: str(base)}
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ends.set()
        self._thread.join()
        self.killed = [
            rank for rank, group in self._groups.items() if _numbers(group / "memory.oom_control")["oom_kill"]
        ]
        self._made.close()

    def _look(self) -> None:
        while not self._ends.wait(_TICK_S):
            for rank, group in self._groups.items():
                held = _numbers(group / "memory.stat")
                kept = int((group / "memory.kmem.usage_in_bytes").read_text())
                self.peaks[rank] = max(self.peaks[rank], held["rss"] + held.get("shmem", 0) + kept)


def _remove(group: Path) -> None:
    """Remove a group; the kernel keeps it for a moment after its last process has ended."""
    ends = time.monotonic() + _LEAVE_S
    while True:
        try:
            group.rmdir()
        except OSError:
            if time.monotonic() > ends:
                raise
            time.sleep(_TICK_S)
        else:
            return


def _own() -> str | None:
    lines: Iterable[str] = Path("/proc/self/cgroup").read_text(encoding="ascii").splitlines()
    parts = (line.split(":", 2) for line in lines)
    return next((path for _, controllers, path in parts if "memory" in controllers.split(",")), None)


def _numbers(path: Path) -> dict[str, int]:
    rows = (line.split() for line in path.read_text(encoding="ascii").splitlines())
    return {name: int(value) for name, value in rows}
