"""Identify the process that launched a run, and find out whether it is alive: `launcher.json` in the run's folder.

A process id alone is not enough, because it is reused, and because a container has process ids of its own. Together with the
start time of its process, the machine, the boot and the namespace it identifies one process for ever.
"""

import contextlib
import json
import os
import signal
import socket
import time
from dataclasses import asdict
from pathlib import Path

from ttlaunch import contract
from ttlaunch.agent.run_processes import processes_of_runs
from ttlaunch.quick_dataclass import dataclass
from ttlaunch.running.runs.files import read_object

TIME_LIMIT_SIGNAL = signal.SIGUSR1
"""By this signal a batch system says that the time of a job ends soon."""

_BOOT = Path("/proc/sys/kernel/random/boot_id")
_NAMESPACE = Path("/proc/self/ns/pid")
_STARTED = 19  # the index of the start time among the fields of /proc/PID/stat after the command's name


@dataclass(frozen=True)
class Launcher:
    """The identity of a process.

    Attributes:
        boot: The id of the machine's boot; "" if it cannot be read.
        started: The start of the process in clock ticks since the boot; 0 if it cannot be read.
        namespace: The namespace of process ids in which `pid` is valid; 0 if it is not known.
    """

    machine: str
    boot: str
    pid: int
    started: int
    namespace: int = 0

    @property
    def is_here(self) -> bool:
        """Whether the process belongs to this machine and to no other container on it, so that this process can see it."""
        return self.machine == socket.gethostname() and not self.is_in_container

    @property
    def is_in_container(self) -> bool:
        """Whether the process was started since this machine's boot in another namespace of process ids."""
        is_recent = self.machine == socket.gethostname() and self.boot == _boot()
        return is_recent and self.namespace not in {0, _namespace()}

    @property
    def is_alive(self) -> bool:
        """Whether the process is alive; False if it belongs to another machine, another container or an earlier boot."""
        return self.is_here and self.boot == _boot() and self.started == _started(self.pid) and self.started > 0

    def signal(self, number: int) -> bool:
        """Send the process a signal, and SIGCONT in case it is stopped; return whether it was alive."""
        try:
            descriptor = os.pidfd_open(self.pid)
        except OSError:
            return False
        try:
            if not self.is_alive:  # checked with the descriptor open, which keeps the id from being reused
                return False
            signal.pidfd_send_signal(descriptor, number)
            signal.pidfd_send_signal(descriptor, signal.SIGCONT)
        except OSError:
            return False
        finally:
            os.close(descriptor)
        return True


def this_process() -> Launcher:
    """Return the identity of this process."""
    return Launcher(socket.gethostname(), _boot(), os.getpid(), _started(os.getpid()), _namespace())


def write_launcher(folder: Path) -> None:
    """Record that this process launches the run of a folder.

    Raises:
        OSError: The file cannot be written.
    """
    (folder / contract.LAUNCHER_FILE).write_text(json.dumps(asdict(this_process())) + "\n", encoding="utf-8")


def read_launcher(folder: Path) -> Launcher | None:
    """Read which process launched a run; None if it is not recorded."""
    try:
        record = read_object(folder / contract.LAUNCHER_FILE)
        names = (str(record["machine"]), str(record["boot"]))
        return Launcher(*names, int(record["pid"]), int(record["started"]), int(record.get("namespace", 0)))
    except (OSError, ValueError, KeyError, TypeError, OverflowError):
        return None


def runs_with_processes() -> frozenset[str]:
    """Return the ids of runs that have processes on this machine."""
    return frozenset(run_id for _, run_id in processes_of_runs())


def is_running(folder: Path, *, with_processes: frozenset[str] | None = None) -> bool:
    """Whether a run is active: its launcher is alive and has not written its report, or processes have the run's id.

    Args:
        folder: The run's folder.
        with_processes: The result of `runs_with_processes`; None to call it now.
    """
    launcher = read_launcher(folder)
    if launcher is not None and launcher.is_alive and not (folder / contract.REPORT_FILE).is_file():
        return True
    return folder.name in (runs_with_processes() if with_processes is None else with_processes)


def began_at(pid: int) -> float:
    """Return when a process was started, seconds since the epoch, to a hundredth; the present time if that cannot be read."""
    ticks = _started(pid)
    age_s = time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK") if ticks else 0.0
    return time.time() - max(0.0, age_s)


def _boot() -> str:
    with contextlib.suppress(OSError):
        return _BOOT.read_text(encoding="ascii").strip()
    return ""


def _namespace() -> int:
    try:
        return _NAMESPACE.stat().st_ino
    except OSError:
        return 0


def _started(pid: int) -> int:
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
        return 0 if fields[0] in {"Z", "X"} else int(fields[_STARTED])
    except (OSError, IndexError, ValueError):
        return 0
