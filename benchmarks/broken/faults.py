"""The ways in which a rank is broken for `benchmarks/attribution.py`. Standard library only."""

import ctypes
import importlib
import json
import os
import resource
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

_PIECE = 16 * 1024 * 1024
_ROOM = 256 * 1024 * 1024


def break_if_due(*, rank: int, role: str, step: int) -> None:
    """Break this rank if `fault.json` in the working folder says that it is its turn."""
    order = json.loads(Path("fault.json").read_text())
    if order["step"] == step and order["role"] == role and order["rank"] in {rank, None}:
        fault = order["fault"]
        if not (stop_somebody(fault) or harm_host(fault, order["peer"]) or hang(fault)):
            break_now(fault)


def stop_somebody(fault: str) -> bool:
    """Stop this rank, or what it depends on; returns whether that was ordered, since the rank then goes on."""
    match fault:
        case "stopped":
            os.kill(os.getpid(), signal.SIGSTOP)
        case "stopped shim":
            os.kill(os.getppid(), signal.SIGSTOP)
        case "stopped child":
            child = os.posix_spawn("/bin/sleep", ["sleep", "600"], os.environ)
            os.kill(child, signal.SIGSTOP)
            os.waitpid(child, 0)
        case "stopped daemon":
            os.kill(_parent(os.getppid()), signal.SIGSTOP)
        case "stopped agent":
            os.kill(_agent(), signal.SIGSTOP)
        case _:
            return False
    return True


def harm_host(fault: str, peer: str | None) -> bool:
    """Cut the network of this host, or remove folders on it; returns whether that was ordered."""
    run = Path(os.environ.get("TTLAUNCH_RUN_DIR", ""))
    match fault:
        case "network cut one way":
            rule = ["iptables", "-w", "-A", "INPUT", "-s", socket.gethostbyname(str(peer)), "-j", "DROP"]
            subprocess.run(rule, check=True)
        case "folder of the run removed":
            shutil.rmtree(run)
            time.sleep(600)
        case "folder of ttlaunch removed":
            shutil.rmtree(run.parents[1])
            time.sleep(600)
        case _:
            return False
    return True


def _parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def _agent() -> int:
    """The agent of the run on this host: a daemon of our loader, which reads nothing."""
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            is_loader = b"import sys" in (folder / "cmdline").read_bytes()
            if is_loader and (folder / "fd/0").readlink() == Path(os.devnull):
                return int(folder.name)
        except OSError:
            continue
    raise LookupError("no agent runs here")


def _lose_thread() -> None:
    def load() -> None:
        raise ValueError("shard 7 is short")

    threading.Thread(target=load, name="loader").start()
    threading.Event().wait()


def hang(fault: str) -> bool:
    """Hang; returns whether that was ordered, and only for faults that are no hang."""
    match fault:
        case "another program":
            os.execvp("sleep", ["sleep", "600"])  # noqa: S606 - it takes the place of this program
        case "endless loop":
            while True:
                pass
        case "holds the interpreter":
            ctypes.PyDLL(None).sleep(600)
        case "exception in a thread":
            _lose_thread()
        case "another collective" | "in finalize":
            from mpi4py import MPI

            MPI.COMM_WORLD.Barrier() if fault == "another collective" else MPI.Finalize()
            time.sleep(600)
        case _:
            return False
    return True


def break_now(fault: str) -> None:  # noqa: C901 - one way after the other
    """Do not come back."""
    match fault:
        case "raise":
            raise ValueError("bucket 7 is short")
        case "error in one role":
            {}["no such bucket"]
        case "sys.exit":
            sys.exit(3)
        case "os._exit":
            os._exit(3)
        case "SIGKILL" | "closed peers":
            os.kill(os.getpid(), signal.SIGKILL)
        case "SIGSEGV":
            ctypes.string_at(0)
        case "abort in C":
            ctypes.CDLL(None).abort()
        case "out of memory":
            held = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
            resource.setrlimit(resource.RLIMIT_AS, (held + _ROOM, held + _ROOM))
            _take_all()
        case "out of memory, by the kernel":
            _take_all()
        case "import error":
            importlib.import_module("no_such_module")
        case _:
            raise AssertionError(fault)


def _take_all() -> None:
    pieces = []
    while True:
        pieces.append(bytearray(os.urandom(1)) * _PIECE)
