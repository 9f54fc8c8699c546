"""What the kernel says about the processes of a run: what each rank does, which processes are stopped, which peers are cut off.

A hang is judged from these facts where a rank has no Python stack, and where not a rank but something beside it stands
still. All of it is read from /proc; what may not be read is left out. Python 3.9 and the standard library only.
"""

from __future__ import annotations

import fcntl
import os
import re
import signal
import socket
import struct
import time

from ttlaunch import contract
from ttlaunch.agent.run_processes import (
    is_stopped,
    name_of,
    page_faults,
    process_state,
    process_variable,
    run_processes,
)

TYPE_CHECKING = False  # what typing.TYPE_CHECKING is, without the time to import it
if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Mapping
    from typing import Any

_SAMPLE_S = 0.2  # long enough for a process that shares its processor with several others to show what it does
_LONGEST_SAMPLE_S = 1.5  # the launcher expects a frame of the agent every second, and misses it after two or more
_POLLING = 400  # switches between processes in a sample: a wait in MPI yields far more often, computing far less
_SYSTEM_SHARE = 0.25  # of the processor time: computing makes few system calls
_RETRANSMITTED = 3  # 1.4 s after the first attempt; a healthy network needs one, rarely two
_ESTABLISHED, _CONNECTING = "01", "02"
_RETRANSMITTING = "01"  # the kernel's number of the timer that waits for an acknowledgement
_MPI_LIBRARY = re.compile(r"/\S*/libmpi(?:ch|fort|cxx|_[a-z]+)?\.so\S*")
_GET_ADDRESS = 0x8915  # SIOCGIFADDR
_TABLES = (("/proc/net/tcp", socket.AF_INET), ("/proc/net/tcp6", socket.AF_INET6))


def mpi_library_of(pids: Iterable[int]) -> str | None:
    """Return the path of a library of MPI that one of these processes has loaded; None if none has."""
    for pid in pids:
        found = _MPI_LIBRARY.search(_read(f"/proc/{pid}/maps"))
        if found is not None:
            return found[0]
    return None


def look_at_processes(
    run_id: str, *, ranks: Mapping[int, int], shims: Mapping[int, int], closely: bool
) -> dict[str, Any]:
    """Return what `records.agents.ProcessReport` holds, without the number of the question.

    Args:
        run_id: The run's id.
        ranks: The process of each rank on this machine.
        shims: The process of each of these ranks' shims.
        closely: Whether to look at everything, which takes a fraction of a second; else only at what is cheap.
    """
    found: dict[str, Any] = {
        "stopped": [rank for rank, pid in ranks.items() if is_stopped(pid)],
        "faults": [[rank, page_faults(pid)] for rank, pid in ranks.items()],
        "helpers": [
            {"rank": rank, "pid": pid, "name": "", "is_shim": True} for rank, pid in shims.items() if is_stopped(pid)
        ],
    }
    if closely:
        found["helpers"] += _other_stopped(run_id, ranks, known={*ranks.values(), *shims.values()})
        found["processes"] = _describe(ranks)
        found["unacknowledged"], found["addresses"] = _unacknowledged(ranks), _addresses()
    return found


def _other_stopped(run_id: str, ranks: Collection[int], *, known: Collection[int]) -> list[dict[str, Any]]:
    """Return the stopped processes of a run that are neither ranks nor shims: the engine's, and children of ranks."""
    found = []
    for pid in run_processes(run_id):
        if pid not in known and is_stopped(pid):
            # A child inherits the variable from its rank. Another value is of a rank that another agent looks after.
            variable = process_variable(pid, contract.ENV_RANK)
            rank = next((rank for rank in ranks if str(rank) == variable), None)
            if rank is not None or not variable:
                found.append({"rank": rank, "pid": pid, "name": name_of(pid), "is_shim": False})
    return found


def _describe(ranks: Mapping[int, int]) -> list[dict[str, Any]]:
    found = []
    for rank, does in _activities(ranks).items():
        pid = ranks[rank]
        waits_in = _read(f"/proc/{pid}/wchan").strip()
        found.append(
            {
                "rank": rank,
                "name": name_of(pid),
                "program": _program(pid),
                "does": does,
                "waits_in": "" if waits_in == "0" else waits_in,
                "catches_crashes": _catches(pid, signal.SIGSEGV),
                "writes_stacks": _catches(pid, contract.STACKS_SIGNAL),
            }
        )
    return found


def _activities(ranks: Mapping[int, int]) -> dict[int, str]:
    """Watch what each rank's process does for a moment; longer if one is ready to run and gets no processor."""
    before = {rank: _counters(pid) for rank, pid in ranks.items()}
    until = time.monotonic() + _LONGEST_SAMPLE_S
    while True:
        time.sleep(_SAMPLE_S if ranks else 0.0)
        found = {rank: _activity(before[rank], _counters(pid)) for rank, pid in ranks.items()}
        starved = any(does == "waits" and process_state(ranks[rank]) == "R" for rank, does in found.items())
        if not starved or time.monotonic() > until:
            return found


def _activity(before: tuple[int, int, int], after: tuple[int, int, int]) -> str:
    user, system, switches = (now - then for now, then in zip(after, before))  # noqa: B905 - Python 3.9
    if switches > _POLLING or system > _SYSTEM_SHARE * max(user + system, 2):
        return "polls"
    return "computes" if user else "waits"


def _catches(pid: int, number: int) -> bool:
    """Whether a process has a handler for a signal."""
    masks = (line.split()[1] for line in _read(f"/proc/{pid}/status").splitlines() if line.startswith("SigCgt:"))
    return bool(int(next(masks, "0"), 16) >> (number - 1) & 1)


def _program(pid: int) -> str:
    """Return the path of the program that a process runs; empty if we may not read it."""
    try:
        return os.readlink(f"/proc/{pid}/exe")
    except OSError:
        return ""


def _counters(pid: int) -> tuple[int, int, int]:
    """Return a process's time in its program and in the kernel, in clock ticks, and how often it left the processor."""
    fields = _read(f"/proc/{pid}/stat").rpartition(")")[2].split()
    lines = _read(f"/proc/{pid}/status").splitlines()
    switches = sum(int(line.split()[1]) for line in lines if "_ctxt_switches:" in line)
    return (int(fields[11]), int(fields[12]), switches) if fields else (0, 0, switches)


def _unacknowledged(ranks: Mapping[int, int]) -> list[list[Any]]:
    """Return ranks whose peer has not acknowledged what was sent to it several times, with the peer's address and how often."""
    owners = {inode: rank for rank, pid in ranks.items() for inode in _sockets(pid)}
    return sorted(
        [owners[inode], remote, retries]
        for inode, remote, state, timer, retries in _tcp_sockets()
        if inode in owners
        and state in (_ESTABLISHED, _CONNECTING)
        and timer == _RETRANSMITTING
        and retries >= _RETRANSMITTED
    )


def _addresses() -> list[str]:
    """Return the IPv4 addresses of this machine, without the loopback."""
    found = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        for _, name in socket.if_nameindex():
            try:
                answer = fcntl.ioctl(asking, _GET_ADDRESS, struct.pack("256s", name.encode()[:15]))
            except OSError:  # the interface has no such address
                continue
            found.append(socket.inet_ntoa(answer[20:24]))
    return [address for address in found if not address.startswith("127.")]


def _tcp_sockets() -> Iterator[tuple[str, str, str, str, int]]:
    """Yield the inode, the peer's address, the state, the timer and the number of retransmissions of each TCP socket."""
    for path, family in _TABLES:
        for line in _read(path).splitlines()[1:]:
            fields = line.split()
            timer = fields[5].partition(":")[0]
            yield fields[9], _address(fields[2], family), fields[3], timer, int(fields[6], 16)


def _address(text: str, family: int) -> str:
    """Decode an address as the kernel's tables have it: words of the machine's byte order, in hexadecimal."""
    digits = text.partition(":")[0]
    words = [bytes.fromhex(digits[at : at + 8])[::-1] for at in range(0, len(digits), 8)]
    return socket.inet_ntop(family, b"".join(words)).replace("::ffff:", "")


def _sockets(pid: int) -> set[str]:
    """Return the inodes of a process's sockets, as far as we may read them."""
    folder, found = f"/proc/{pid}/fd", set()
    try:
        for name in os.listdir(folder):
            target = os.readlink(f"{folder}/{name}")
            if target.startswith("socket:["):
                found.add(target[len("socket:[") : -1])
    except OSError:
        return found
    return found


def _read(path: str) -> str:
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.read()
    except OSError:
        return ""
