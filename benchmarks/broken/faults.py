"""The ways in which a rank is broken for `benchmarks/attribution.py`. Standard library only."""

import ctypes
import errno
import importlib
import json
import os
import pickle
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
        if fault != "skipped backward" and not (stop_somebody(fault) or harm_host(fault, order["peer"]) or hang(fault)):
            break_now(fault)


def stop_somebody(fault: str) -> bool:
    """Stop this rank, or stop or kill what it depends on; returns whether that was ordered, since the rank then goes on."""
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
        case "killed agent":
            os.kill(_agent(), signal.SIGKILL)
        case "killed starter":
            os.kill(_parent(os.getppid()), signal.SIGKILL)
        case "killed shim":
            os.kill(os.getppid(), signal.SIGKILL)
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
    """The agent of the run on this host: a daemon of our loader, which reads nothing. An earlier fault may have left one stopped."""
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            is_loader = b"import sys" in (folder / "cmdline").read_bytes()
            is_stopped = (folder / "stat").read_text().rpartition(")")[2].split()[0] == "T"
            if is_loader and not is_stopped and (folder / "fd/0").readlink() == Path(os.devnull):
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
            while True:  # a signal, such as the one that asks for stacks, ends the sleep
                ctypes.PyDLL(None).sleep(600)
        case "exception in a thread":
            _lose_thread()
        case "another collective" if _has_group():
            sys.modules["torch.distributed"].barrier()
            time.sleep(600)
        case "another collective" | "in finalize":
            from mpi4py import MPI

            MPI.COMM_WORLD.Barrier() if fault == "another collective" else MPI.Finalize()
            time.sleep(600)
        case _:
            return False
    return True


def _has_group() -> bool:
    """Whether this rank joined a process group of torch: torch itself may have imported its module."""
    distributed = sys.modules.get("torch.distributed")
    return distributed is not None and distributed.is_initialized()


def break_now(fault: str) -> None:
    """Do not come back."""
    if fault.startswith("SIG"):
        os.kill(os.getpid(), signal.Signals[fault])
        signal.pause()
    _FAULTS[fault]()
    raise AssertionError(fault)


def skips_backward(*, rank: int, step: int) -> bool:
    """Whether this rank is to leave out the backward pass of this step."""
    order = json.loads(Path("fault.json").read_text())
    return (order["fault"], order["rank"], order["step"]) == ("skipped backward", rank, step)


def clean_up() -> None:
    """Take as long as ordered for what comes after an exception; other ranks do not wait."""
    order = json.loads(Path("fault.json").read_text())
    is_broken = sys.exc_info()[0] in {ValueError, SystemExit} and order["fault"] in _CLEAN_UP_S
    time.sleep(_CLEAN_UP_S[order["fault"]] if is_broken else 0.0)


def _raise(error: BaseException) -> None:
    raise error


def _raise_from() -> None:
    try:
        {}["no such bucket"]
    except KeyError as error:
        raise RuntimeError("bucket 7 is not there") from error


def _raise_with_notes() -> None:
    error = ValueError("bucket 7 is short\nit has 3 values")
    error.add_note("expected 4")
    raise error


class _MuteError(Exception):
    def __str__(self) -> str:
        raise TypeError("no words")


def _write_to_a_dead_child() -> None:
    with subprocess.Popen(["true"], stdin=subprocess.PIPE) as child:
        child.wait()
        os.write(child.stdin.fileno(), b"too late")


def _send_to_nobody() -> None:
    from mpi4py import MPI

    MPI.COMM_WORLD.Send(bytearray(8), dest=MPI.COMM_WORLD.size + 7)


def _abort_world() -> None:
    from mpi4py import MPI

    MPI.COMM_WORLD.Abort(7)


def _be_killed_by_a_child() -> None:
    subprocess.run(["sh", "-c", "kill -KILL $PPID"], check=False)
    signal.pause()


def _import_a_missing_name() -> None:
    from os import no_such_name  # noqa: F401


def _call_forever() -> None:
    _call_forever()


def _run_out() -> None:
    held = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (held + _ROOM, held + _ROOM))
    _take_all()


def _take_all() -> None:
    pieces = []
    while True:
        pieces.append(bytearray(os.urandom(1)) * _PIECE)


_CLEAN_UP_S = {"clean-up of 0.4 s": 0.4, "clean-up of 4 s": 4.0, "sys.exit(0), slowly": 1.0}
_FAULTS = {
    "raise": lambda: _raise(ValueError("bucket 7 is short")),
    "clean-up of 0.4 s": lambda: _raise(ValueError("bucket 7 is short")),
    "clean-up of 4 s": lambda: _raise(ValueError("bucket 7 is short")),
    "error in one role": lambda: {}["no such bucket"],
    "sys.exit": lambda: sys.exit(3),
    "sys.exit with words": lambda: sys.exit("no data"),
    "sys.exit(0)": lambda: sys.exit(0),
    "sys.exit(0), slowly": lambda: sys.exit(0),
    "os._exit": lambda: os._exit(3),
    "os._exit(0)": lambda: os._exit(0),
    "_exit in C": lambda: ctypes.CDLL(None)["_exit"](5),
    "exec of false": lambda: os.execvp("false", ["false"]),  # noqa: S606 - as a wrapper script does
    "exec of true": lambda: os.execvp("true", ["true"]),  # noqa: S606 - likewise
    "closed peers": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "killed by its child": _be_killed_by_a_child,
    "null pointer": lambda: ctypes.string_at(0),
    "abort in C": lambda: ctypes.CDLL(None).abort(),
    "os.abort": os.abort,
    "MPI_Abort": _abort_world,
    "MPI error": _send_to_nobody,
    "out of memory": _run_out,
    "out of memory, by the kernel": _take_all,
    "MemoryError": lambda: _raise(MemoryError()),
    "import error": lambda: importlib.import_module("no_such_module"),
    "import of a missing name": _import_a_missing_name,
    "service refuses": lambda: socket.create_connection(("127.0.0.1", 1)),
    "service resets": lambda: _raise(OSError("https://data.example: Connection reset by peer")),
    "empty file": lambda: pickle.loads(b""),  # noqa: S301 - nothing is in it
    "pipe to a dead child": _write_to_a_dead_child,
    "long message": lambda: _raise(ValueError("x" * 20_000)),
    "exception group": lambda: _raise(ExceptionGroup("two", [ValueError("a"), KeyError("b")])),
    "lines and notes": _raise_with_notes,
    "raised from another": _raise_from,
    "exception without words": lambda: _raise(_MuteError()),
    "recursion": _call_forever,
    "assertion": lambda: _raise(AssertionError()),
    "division by zero": lambda: 1 / 0,
    "missing file": lambda: Path("no/such/file").read_text(),
    "full disk": lambda: _raise(OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))),
    "timeout": lambda: _raise(TimeoutError("no answer in 3 s")),
    "bytes that are no text": b"\xff".decode,
}
