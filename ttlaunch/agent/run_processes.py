"""Find, signal and end the processes of a run on this machine: those whose environment has the run's id, and no others.

No process is found by its name. Before a signal, a descriptor pins the process and its environment is read again, so the
signal never goes to another process that has got the same process id. Python 3.9 and the standard library only.
"""

from __future__ import annotations

import os
import signal
import time

from ttlaunch import contract

_LOOK_AGAIN_S = 0.02
_LAST_BREATH_S = 2.0
_LONGEST_STAT = 4096  # a line has some 300 bytes
_MOST_PROCESSES = 4096  # below another one that are looked at

TYPE_CHECKING = False  # what typing.TYPE_CHECKING is, without the time to import it
if TYPE_CHECKING:
    from collections.abc import Collection


def run_processes(run_id: str) -> list[int]:
    """Return the ids of processes whose environment has the run's id, as far as we may read it, without our own process."""
    return sorted(pid for pid, found in processes_of_runs() if found == run_id)


def processes_of_runs() -> list[tuple[int, str]]:
    """Return each process that belongs to a run, with the run's id, as far as we may read its environment."""
    needle = contract.ENV_RUN_ID.encode() + b"="
    found = []
    for name in os.listdir("/proc"):
        if not name.isdigit() or int(name) == os.getpid():
            continue
        environment = _environment(int(name))
        ids = [entry[len(needle) :] for entry in environment.split(b"\0") if entry.startswith(needle)]
        found += [(int(name), run_id.decode("utf-8", "replace")) for run_id in ids]
    return found


def signal_process(pid: int, number: int, *, run_id: str) -> bool:
    """Send a signal to a process if it still belongs to the run; returns whether it was sent.

    A descriptor pins the process before its environment is read, so the signal never goes to another process that has
    got the same id; without descriptors (an old kernel or Python) there is a moment in which it could.
    """
    try:
        if not hasattr(os, "pidfd_open") or not hasattr(signal, "pidfd_send_signal"):
            if belongs_to(pid, run_id):
                os.kill(pid, number)
                return True
            return False
        descriptor = os.pidfd_open(pid)
        try:
            if not belongs_to(pid, run_id):
                return False
            signal.pidfd_send_signal(descriptor, number)
        finally:
            os.close(descriptor)
    except OSError:
        return False
    return True


def kill_run_processes(run_id: str, *, grace_s: float = 0.5, daemons: Collection[str] = ()) -> list[int]:
    """Kill every process that carries the run's id, wait until they have ended, and return their process ids.

    A process that is stuck in the kernel may survive SIGKILL, so the wait ends after 2 s.

    Args:
        run_id: The id that the processes carry in their environment.
        grace_s: How long to wait first for processes that have just been asked to end.
        daemons: Names of the engine's processes, which are killed after the ranks.
    """
    deadline = time.monotonic() + grace_s
    while run_processes(run_id) and time.monotonic() < deadline:
        time.sleep(_LOOK_AGAIN_S)
    killed: list[int] = []
    # Repeat, because a killed process may have forked a child since the list of processes was read.
    while running := run_processes(run_id):
        alive = [pid for pid in running if pid not in killed]
        for pid in sorted(alive, key=lambda pid: name_of(pid) in daemons):
            signal_process(pid, signal.SIGKILL, run_id=run_id)
            killed.append(pid)
        if alive:
            deadline = time.monotonic() + _LAST_BREATH_S
        elif time.monotonic() > deadline:
            break
        time.sleep(_LOOK_AGAIN_S / 4)
    return killed


def tree_below(pid: int) -> list[int]:
    """Return the children of a process, their children and so on, also those that have ended and nobody has waited for yet."""
    found: list[int] = []
    parents = [pid]
    while parents and len(found) < _MOST_PROCESSES:
        parent = parents.pop()
        try:
            threads = os.listdir(f"/proc/{parent}/task")
        except OSError:
            continue
        for thread in threads:
            try:
                with open(f"/proc/{parent}/task/{thread}/children", "rb") as file:
                    children = [int(child) for child in file.read().split()]
            except OSError:
                continue
            found += children
            parents += children
    return found


def page_faults(pid: int) -> int:
    """Return the page faults of a process, which increase while it loads libraries; 0 if it has ended."""
    try:
        fields = _stat(pid)
        return int(fields[7]) + int(fields[9])
    except (IndexError, ValueError):
        return 0


def belongs_to(pid: int, run_id: str) -> bool:
    """Whether the environment of a process has the run's id; False if we may not read it."""
    return f"{contract.ENV_RUN_ID}={run_id}".encode() in _environment(pid).split(b"\0")


def is_gone(pid: int) -> bool:
    """Whether a process has ended, even if its parent has not waited for it yet."""
    return process_state(pid) in {"", "Z", "X"}


def is_stopped(pid: int) -> bool:
    """Whether a signal or a debugger has stopped a process, so that it could be continued."""
    return process_state(pid) in {"T", "t"}


def process_state(pid: int) -> str:
    """Return the kernel's letter for the state of a process; empty if there is no such process."""
    fields = _stat(pid)
    return fields[0].decode("ascii", "replace") if fields else ""


def _stat(pid: int) -> list[bytes]:
    """Return the fields of `/proc/PID/stat` after the process's name; nothing if there is no such process.

    Asked several times a second for each rank, so without the buffer and the decoder of a text file, which take as long as the kernel.
    """
    try:
        descriptor = os.open(f"/proc/{pid}/stat", os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return []
    try:
        return os.read(descriptor, _LONGEST_STAT).rpartition(b")")[2].split()
    except OSError:  # it has ended meanwhile
        return []
    finally:
        os.close(descriptor)


def process_variable(pid: int, name: str) -> str:
    """Return the value of a variable in a process's environment; empty if it is not set or we may not read it."""
    start = f"{name}=".encode()
    values = (entry[len(start) :] for entry in _environment(pid).split(b"\0") if entry.startswith(start))
    return next(values, b"").decode("utf-8", "replace")


def variable_of_run(run_id: str, name: str) -> str:
    """Return the value that a variable has in the processes of a run on this machine; empty if none of them has it."""
    values = (process_variable(pid, name) for pid in run_processes(run_id))
    return next(filter(None, values), "")


def _environment(pid: int) -> bytes:
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:
            return file.read()
    except OSError:
        return b""


def name_of(pid: int) -> str:
    """Return the name of a process, which is its program's unless it has chosen another; empty if it has ended."""
    try:
        with open(f"/proc/{pid}/comm", encoding="utf-8", errors="replace") as file:
            return file.read().strip()
    except OSError:
        return ""
