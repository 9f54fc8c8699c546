"""Report what a host has, usually in well under a second, without importing packages or changing anything there.

Two frames: the clock first, then every fact. A thread of its own finds each section, and all share one deadline. So if a
network file system is dead or a driver hangs, only its own section is missing, and the answer names it.
"""

from __future__ import annotations

import array
import contextlib
import fcntl
import glob
import os
import pwd
import re
import resource
import shutil
import socket
import struct
import subprocess
import threading
import time

from ttlaunch import contract
from ttlaunch.agent import claims, probe_software
from ttlaunch.agent.tracing import may_trace

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

_DEADLINE_S = 3.0
_CPU_FLAGS = {"avx2", "fma", "avx512f", "avx512bw", "avx512dq", "avx512vl", "asimd", "sve", "sve2", "bf16"}
_LIMITS = {"nofile": "RLIMIT_NOFILE", "nproc": "RLIMIT_NPROC", "memlock": "RLIMIT_MEMLOCK", "core": "RLIMIT_CORE"}
_NOEXEC = 8
_ADOPTERS = {"init", "systemd", "tini", "dumb-init"}  # take over processes whose parents have ended
_SHM = "/dev/shm"  # noqa: S108 - where shared memory lies on Linux
_REQUEST = 40  # size of a struct ifreq on 64-bit Linux
_MOST_ADDRESSES = 1024
_LIST, _FLAGS, _NETMASK, _MTU = 0x8912, 0x8913, 0x891B, 0x8921  # SIOCGIFCONF, …FLAGS, …NETMASK, …MTU
_UP, _RUNNING = 0x1, 0x40
_GATEWAY = 0x2
_MOST_THREADS = 16


def main(arguments: dict[str, Any]) -> int:
    """Send two frames: the clock, then every fact.

    Args:
        arguments: `remote_folder`; `pythons` that ranks could run with, in order; `packages` to look for; `program`,
            the engine's command; `mpi_prefix`; `detached`: names of the engine's processes that may have detached
            themselves from their parents; `names` to resolve.
    """
    contract.send_frame({"kind": "clock", "time": _clock()})
    sections: dict[str, Callable[[], Any]] = {
        "cpu": _cpu,
        "memory": _memory,
        "disk": lambda: _disk(_expand(arguments["remote_folder"])),
        "shm": _shm,
        "moves_listeners": may_trace,
        "devices": _devices,
        "software": lambda: probe_software.find_software(arguments),
        "network": _interfaces,
        "names": lambda: _resolve(arguments["names"], timeout_s=_DEADLINE_S * 0.9),
        "processes": lambda: _leftovers(arguments["detached"]),
    }
    answers, unanswered = _all_at_once(sections)
    for several in ("software", "network", "processes"):
        answers.update(answers.pop(several, None) or {})
    facts = {**_identity(), **answers, "limits": _limits(), "rdma": _listdir("/sys/class/infiniband")}
    contract.send_frame({"kind": "facts", "facts": {**facts, "unanswered": unanswered}})
    return 0


def _all_at_once(sections: dict[str, Callable[[], Any]]) -> tuple[dict[str, Any], list[str]]:
    """Return what the sections found before the deadline, and the names of the sections that found nothing."""
    answers: dict[str, Any] = {}

    def find(name: str, section: Callable[[], Any]) -> None:
        with contextlib.suppress(OSError, ValueError):
            answers[name] = section()

    threads = {
        name: threading.Thread(target=find, args=(name, section), daemon=True) for name, section in sections.items()
    }
    deadline = time.monotonic() + _DEADLINE_S
    for thread in threads.values():
        thread.start()
    for thread in threads.values():
        thread.join(max(0.0, deadline - time.monotonic()))
    return dict(answers), sorted(name for name in sections if name not in answers)


def _clock() -> float:
    """Return the seconds since the epoch as the host's `date` prints them, which is what a user there would compare."""
    with contextlib.suppress(OSError, ValueError, subprocess.SubprocessError):
        answer = subprocess.run(
            ["date", "+%s.%N"], stdin=subprocess.DEVNULL, capture_output=True, timeout=1, check=True
        )
        return float(answer.stdout)
    return time.time()


def _identity() -> dict[str, Any]:
    """The host's identity: two host names for one machine give the same `machine`, two containers on it do not."""
    try:
        user = pwd.getpwuid(os.getuid()).pw_name
    except KeyError:
        user = str(os.getuid())
    places = [_text("/proc/sys/kernel/random/boot_id").strip()]
    for kind in ("pid", "net"):
        with contextlib.suppress(OSError):
            places.append(str(os.stat("/proc/self/ns/" + kind).st_ino))
    return {
        "hostname": socket.gethostname(),
        "user": user,
        "uid": os.getuid(),
        "home": os.path.expanduser("~"),
        "machine": ":".join(places),
        "kernel": os.uname().release,
    }


def _cpu() -> dict[str, Any]:
    text = _text("/proc/cpuinfo").partition("\n\n")[0]
    values = {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in text.splitlines())}
    flags = set(values.get("flags", values.get("Features", "")).split()) & _CPU_FLAGS
    usable = float(len(os.sched_getaffinity(0)))
    quota, _, period = _text("/sys/fs/cgroup/cpu.max").strip().partition(" ")
    if quota.isdigit() and period.isdigit():
        usable = min(usable, int(quota) / int(period))
    return {
        "model": values.get("model name", ""),
        "architecture": os.uname().machine,
        "count": os.cpu_count() or 1,
        "usable": usable,
        "flags": sorted(flags),
    }


def _memory() -> dict[str, Any]:
    kilobytes = dict(re.findall(r"^(\w+): +([0-9]+) kB", _text("/proc/meminfo"), re.MULTILINE))
    total, available = int(kilobytes["MemTotal"]) * 1024, int(kilobytes["MemAvailable"]) * 1024
    most, used = _text("/sys/fs/cgroup/memory.max").strip(), _text("/sys/fs/cgroup/memory.current").strip()
    if most.isdigit() and used.isdigit():
        total, available = min(total, int(most)), min(available, max(0, int(most) - int(used)))
    return {"total_bytes": total, "available_bytes": available}


def _disk(path: str) -> dict[str, Any]:
    """Describe the file system of the remote folder, which need not exist yet; writes a small file there and removes it."""
    nearest = path
    while not os.path.isdir(nearest) and nearest != "/":
        nearest = os.path.dirname(nearest)
    space = os.statvfs(nearest)
    trial = os.path.join(nearest, f".ttlaunch-probe-{socket.gethostname()}-{os.getpid()}")
    problem = None
    try:
        descriptor = os.open(trial, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
        try:
            os.write(descriptor, bytes(4096))
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
            os.unlink(trial)
    except OSError as error:
        problem = (error.strerror or str(error)).lower()
    if os.path.lexists(path) and not os.path.isdir(path):
        problem = "it exists and is no folder"
    return {
        "path": path,
        "nearest": nearest,
        "file_system": _file_system(nearest),
        **_bytes_of(space),
        "free_inodes": space.f_favail if space.f_files else None,
        "problem": problem,
    }


def _file_system(path: str) -> str:
    path, best, kind = os.path.realpath(path), "", ""
    for line in _text("/proc/self/mountinfo").splitlines():
        left, _, right = line.partition(" - ")
        place = left.split()[4].encode().decode("unicode_escape")
        if (path + "/").startswith(place.rstrip("/") + "/") and len(place) >= len(best):
            best, kind = place, right.split()[0]
    return kind


def _bytes_of(space: os.statvfs_result) -> dict[str, int]:
    return {"total_bytes": space.f_blocks * space.f_frsize, "free_bytes": space.f_bavail * space.f_frsize}


def _shm() -> dict[str, Any] | None:
    if not os.path.isdir(_SHM):
        return None
    space = os.statvfs(_SHM)
    return {
        **_bytes_of(space),
        "noexec": bool(space.f_flag & _NOEXEC),
        "writable": os.access(_SHM, os.W_OK | os.X_OK),
    }


def _limits() -> dict[str, list[int | None]]:
    found = {}
    for name, constant in _LIMITS.items():
        pair = resource.getrlimit(getattr(resource, constant))
        found[name] = [None if value == resource.RLIM_INFINITY else value for value in pair]
    return found


def _devices() -> dict[str, Any]:
    tenstorrent = glob.glob("/dev/tenstorrent/[0-9]*") or glob.glob("/dev/tenstorrent[0-9]*")
    found: dict[str, Any] = {"nvidia": [], "nvidia_problem": None, "tenstorrent": sorted(tenstorrent)}
    found["gpu_files"] = gpu_files()
    program = shutil.which("nvidia-smi")
    if program is not None:
        command = [program, "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"]
        try:
            answer = subprocess.run(
                command, stdin=subprocess.DEVNULL, capture_output=True, timeout=_DEADLINE_S * 0.9, check=False
            )
            lines = answer.stdout.decode("utf-8", "replace").strip().splitlines()
            found["nvidia"] = lines if answer.returncode == 0 else []
            found["nvidia_problem"] = None if answer.returncode == 0 else "\n".join(lines[:1]) or "no message"
        except (OSError, subprocess.SubprocessError) as error:
            found["nvidia_problem"] = str(error)
    return found


def gpu_files() -> list[str]:
    """Device files without which no driver offers torch a GPU: NVIDIA's, those of Jetson and WSL, and AMD's."""
    names = ("nvidia[0-9]*", "nvidia-caps", "nvgpu", "nvhost-*", "nvmap", "dxg", "kfd")
    return sorted(path for name in names for path in glob.glob("/dev/" + name))


def interface_of(address: str) -> str | None:
    """Return the name of this machine's interface that has an IPv4 address; None if none has it, or several have."""
    names = {one["name"] for one in _interfaces()["interfaces"] if one["address"].partition("/")[0] == address}
    return names.pop() if len(names) == 1 else None


def _interfaces() -> dict[str, Any]:
    """Every IPv4 address with its interface, and the interface of the default route."""
    found = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as kernel:
        buffer = array.array("B", bytes(_REQUEST * _MOST_ADDRESSES))
        address, length = buffer.buffer_info()
        asked = struct.pack("iP", length, address)
        size = struct.unpack("iP", fcntl.ioctl(kernel, _LIST, asked))[0]
        data = buffer.tobytes()[:size]
        for start in range(0, size, _REQUEST):
            with contextlib.suppress(OSError):
                found.append(_interface(kernel, data[start : start + _REQUEST]))
    return {"interfaces": found, "default_interface": _default_route()}


def _interface(kernel: socket.socket, request: bytes) -> dict[str, Any]:
    label = request[:16].partition(b"\0")[0]
    name = label.partition(b":")[0].decode("utf-8", "replace")  # an alias such as eth0:1 belongs to eth0
    mask = fcntl.ioctl(kernel, _NETMASK, request)[20:24]  # the request names label and address, so a second one works
    flags = struct.unpack("H", fcntl.ioctl(kernel, _FLAGS, request)[16:18])[0]
    mtu = struct.unpack("i", fcntl.ioctl(kernel, _MTU, request)[16:20])[0]
    prefix = bin(int.from_bytes(mask, "big")).count("1")  # noqa: FURB161 - Python 3.9
    return {
        "name": name,
        "address": f"{socket.inet_ntoa(request[20:24])}/{prefix}",
        "mtu": mtu,
        "up": bool(flags & _UP and flags & _RUNNING),
        "speed_mbit": _speed(name),
        "bridge": os.path.isdir(f"/sys/class/net/{name}/bridge"),
    }


def _speed(name: str) -> int | None:
    try:
        with open(f"/sys/class/net/{name}/speed", encoding="ascii") as file:
            speed = int(file.read())
    except (OSError, ValueError):
        return None
    return speed if speed > 0 else None


def _default_route() -> str | None:
    with contextlib.suppress(OSError):
        with open("/proc/net/route", encoding="ascii") as file:
            rows = [line.split() for line in file.readlines()[1:]]
        routes = [(int(row[6]), row[0]) for row in rows if row[1] == "00000000" and int(row[3], 16) & _GATEWAY]
        return min(routes)[1] if routes else None
    return None


def _resolve(names: list[str], *, timeout_s: float) -> dict[str, list[str]]:
    """Resolve each name on this host into its addresses; the result lacks names without an answer in time."""
    found: dict[str, list[str]] = {}
    waiting = list(names)

    def work() -> None:
        while waiting:
            try:
                name = waiting.pop()
            except IndexError:
                return
            try:
                answers = socket.getaddrinfo(name, None, socket.AF_INET, socket.SOCK_STREAM)
            except (OSError, UnicodeError):
                found[name] = []
            else:
                found[name] = sorted({str(answer[4][0]) for answer in answers})

    deadline = time.monotonic() + timeout_s
    threads = [threading.Thread(target=work, daemon=True) for _ in range(min(_MOST_THREADS, len(names)))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    return dict(found)


def _leftovers(detached: list[str]) -> dict[str, Any]:
    """Processes that carry the id of a run whose launcher is gone, and folders of runs that no process uses.

    A process belongs to a run that still goes on if its chain of parents leads to a process outside the run, such as an
    engine's shell or an agent, or to a daemon that detached itself.
    """
    folders = {}
    for folder in glob.glob(_SHM + "/ttl-*"):
        taken = claims.take_claims(folder)
        if taken is not None:  # nobody uses it in any container, nor does it belong to another user
            claims.release(taken)
            folders[folder] = False
    runs: dict[int, str] = {}
    mark = contract.ENV_RUN_ID.encode() + b"="
    for pid in (int(name) for name in os.listdir("/proc") if name.isdigit()):
        with contextlib.suppress(OSError), open(f"/proc/{pid}/environ", "rb") as file:
            environment = file.read()
            folders = {folder: used or folder.encode() in environment for folder, used in folders.items()}
            for value in environment.split(b"\0"):
                if value.startswith(mark):
                    runs[pid] = value[len(mark) :].decode("utf-8", "replace")
    found = []
    for pid in sorted(runs):
        with contextlib.suppress(OSError, ValueError, IndexError):  # it has ended meanwhile
            if _is_left(pid, runs, detached):
                found.append({"pid": pid, "run_id": runs[pid], "age_s": _age(pid), "command": _command(pid)})
    unused = sorted(folder for folder, used in folders.items() if not used)
    return {"leftovers": found, "folders": unused}


def _is_left(pid: int, runs: dict[int, str], detached: list[str]) -> bool:
    run = runs[pid]
    while runs.get(pid) == run:
        if _command(pid) in detached:
            return False
        pid = int(_after_name(pid)[1])
    return pid <= 1 or _command(pid) in _ADOPTERS


def _after_name(pid: int) -> list[str]:
    return _text(f"/proc/{pid}/stat").rpartition(")")[2].split()


def _age(pid: int) -> float:
    started = int(_after_name(pid)[19]) / os.sysconf("SC_CLK_TCK")
    return max(0.0, float(_text("/proc/uptime").split()[0]) - started)


def _command(pid: int) -> str:
    """Return the program's name, without its arguments, which may contain secrets."""
    return _text(f"/proc/{pid}/comm").strip()


def _expand(path: str) -> str:
    """Make a path absolute; a relative one counts from the user's home."""
    return os.path.normpath(os.path.join(os.path.expanduser("~"), os.path.expanduser(path)))


def _listdir(path: str) -> list[str]:
    try:
        return sorted(os.listdir(path))
    except OSError:
        return []


def _text(path: str) -> str:
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.read()
    except OSError:
        return ""
