"""Fork ranks from a process that has imported torch, for `--warm`.

Python imports `at_start/sitecustomize.py` before the program of a rank. In the process that `warm_start.py` has started, this calls
`become_warm`, which imports torch and starts the shims. Each shim forks its rank. Only in a rank does `become_warm` return, so the
interpreter goes on to the program: options, arguments, `__main__` and the end of the process are Python's own.

Python 3.9 and the standard library only, and torch where the ranks' Python has it.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import json
import os
import signal
import sys

from ttlaunch.agent import shim
from ttlaunch.agent.parent_death import end_with_parent
from ttlaunch.agent.rank_starter import NAME, IsRank, Orders, RankStarter, take_name
from ttlaunch.agent.warm_start import environment_block

TYPE_CHECKING = False  # what typing.TYPE_CHECKING is, without the time to import it
if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence
    from typing import IO, Any

    Record = dict[str, Any]

_IMPORTED = ("torch", "torch.distributed", "torch._dynamo")
"""What ranks share. The first optimizer or DistributedDataParallel imports the last one, which takes as long as torch itself."""
_OPTIONS_OF_MALLOPT = {"MALLOC_TRIM_THRESHOLD_": -1, "MALLOC_MMAP_THRESHOLD_": -3}  # as malloc.h numbers them
_SAME_SEED = 67280421310721  # of torch's generator in versions in which it does not begin with a random seed
_LONGEST_PRINTED = 1 << 20


def become_warm(order: str) -> None:
    """Import torch, start the ranks of a host and wait for them; returns only in the ranks, with their variables in place.

    Args:
        order: The value of `contract.ENV_WARM`.
    """
    try:
        _start_ranks(int(order.partition(":")[0]))
    except IsRank:
        return
    except BaseException as error:  # noqa: BLE001 - the program must not run in this process
        os.write(2, f"{NAME}: {type(error).__name__}: {error}\n".encode(errors="replace"))
    os._exit(shim.SHIM_FAILED)


def _start_ranks(descriptor: int) -> None:
    with open("/proc/self/comm", encoding="utf-8", errors="surrogateescape") as file:
        name = file.read().strip()
    take_name(NAME)
    with open(descriptor, "rb") as file:
        file.seek(0)
        state = json.loads(file.read())
    gc.disable()
    printed, reason = _import(state)
    os.environ.clear()
    os.environ.update(state["inherited"])
    with open(state["plan"], encoding="utf-8") as file:
        plan = json.load(file)
    rows = [plan["ranks"][rank] for rank in state["ranks"]]
    descriptors, orders = os.listdir("/proc/self/fd"), None
    if "orders" in state:
        orders = Orders(state["orders"][0], state["orders"][1].encode())
        descriptors.remove(str(orders.descriptor))  # it is no rank's
    kept = {int(number) for number in descriptors if os.path.exists(f"/proc/self/fd/{number}")}
    gc.freeze()  # a collection in a shim or rank would otherwise touch, and so copy, all pages
    gc.enable()
    fork = None if reason else RankForker(printed, kept, name).fork
    remarks = {
        int(rank): f"this rank starts by itself, because its {variable} differs from the first rank's"
        for rank, variable in state["cold"].items()
    }
    if reason:
        remarks = {state["first"]: f"each rank starts by itself, because {reason}"}
    status = RankStarter(plan, state["plan"], fork=fork, cold=remarks).run(rows, orders)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def _import(state: Record) -> tuple[dict[int, bytes], str]:
    """Import torch; return what that printed to each stream, and why the ranks cannot be forks of this process, if they cannot."""
    files = {number: os.memfd_create(f"printed-{number}") for number in (1, 2)}
    for number, file in files.items():
        os.dup2(file, number)
    reason = ""
    try:
        if "import" in state:
            module, function = state["import"]
            getattr(importlib.import_module(module), function)(state["plan"])
        else:
            for module in _IMPORTED:
                __import__(module)
    except Exception as error:  # noqa: BLE001 - each rank meets it at its own import
        reason = f"torch cannot be imported: {type(error).__name__}: {error}"
    sys.stdout.flush()
    sys.stderr.flush()
    os.set_blocking(state["printed"], False)
    printed = {1: b"", 2: b""}
    with contextlib.suppress(BlockingIOError):
        printed[2] = os.read(state["printed"], _LONGEST_PRINTED)
    for number, file in files.items():
        printed[number] += os.pread(file, _LONGEST_PRINTED, 0)
        os.dup2(state["output"][number - 1], number)
        os.close(file)
        os.close(state["output"][number - 1])
    os.close(state["printed"])
    return printed, reason or _why_not_forked(state["program_folder"])


def _why_not_forked(program_folder: str) -> str:
    further = len(os.listdir("/proc/self/task")) - 1
    if further:
        return f"importing torch starts further threads here ({further}); `--env OMP_NUM_THREADS=1` avoids this"
    hidden = _hidden_modules(program_folder)
    return f"`{hidden[0]}` beside the program is a name of a module that torch imports" if hidden else ""


def _hidden_modules(folder: str) -> list[str]:
    """Return the imported modules in whose place a program in this folder would have imported its own."""
    found = []
    with contextlib.suppress(OSError):
        for entry in os.listdir(folder):
            name, ending = entry.partition(".")[0], entry.rpartition(".")[2]
            module = sys.modules.get(name)
            is_module = ending in ("py", "so") or os.path.isfile(os.path.join(folder, entry, "__init__.py"))
            if module is None or not is_module or name in ("sitecustomize", "usercustomize"):
                continue
            if not os.path.realpath(getattr(module, "__file__", None) or "/").startswith(f"{folder}/"):
                found.append(name)
    return sorted(found)


class RankForker:
    """Forks ranks from a process that has imported torch."""

    def __init__(self, printed: Mapping[int, bytes], kept: Collection[int], name: str) -> None:
        """Prepare to fork.

        Args:
            printed: What the import has printed to each stream, which each rank prints too.
            kept: The descriptors that ranks keep.
            name: What the kernel is to call a rank.
        """
        self._printed = printed
        self._kept = set(kept)
        self._name = name

    def fork(self, plan: Record, environment: dict[str, str]) -> ForkedRank:
        """Fork a rank from its shim, which must have no other thread. In the rank, `IsRank` is raised."""
        shim_pid, pipes = os.getpid(), (os.pipe(), os.pipe())
        pid = os.fork()
        if pid:
            for _, writer in pipes:
                os.close(writer)
            return ForkedRank(pid, *(open(reader, "rb", buffering=0) for reader, _ in pipes))
        try:
            self._enter(shim_pid, [writer for _, writer in pipes], environment, folder=plan["working_folder"])
        except BaseException as error:  # noqa: BLE001 - it must not get into the shim's code
            os.write(2, f"{type(error).__name__}: {error}\n".encode(errors="replace"))
            os._exit(shim.SHIM_FAILED)
        raise IsRank

    def _enter(self, shim_pid: int, streams: Sequence[int], environment: dict[str, str], *, folder: str) -> None:
        """Make this fork a process as Python has it before the program."""
        end_with_parent(signal.SIGKILL)
        if os.getppid() != shim_pid:  # it ended before the kernel took the order
            os._exit(shim.SHIM_FAILED)
        for number, stream in enumerate(streams, 1):
            os.dup2(stream, number)
        for name in os.listdir("/proc/self/fd"):
            if int(name) not in self._kept:
                with contextlib.suppress(OSError):  # the one that listed them
                    os.close(int(name))
        signal.signal(signal.SIGINT, signal.default_int_handler)
        for number in (signal.SIGTERM, shim.PARENT_ENDED):
            signal.signal(number, signal.SIG_DFL)
        os.environ.clear()
        os.environ.update(environment)
        _show_environment(environment)
        _set_thresholds(environment)
        take_name(self._name)
        os.chdir(folder)
        _seed_again()
        gc.unfreeze()
        for number, content in self._printed.items():
            while content:
                content = content[os.write(number, content) :]  # noqa: PLW2901 - the rest


class ForkedRank:
    """A rank's process with its two streams, as its shim has it."""

    def __init__(self, pid: int, stdout: IO[bytes], stderr: IO[bytes]) -> None:
        self.pid = pid
        self.stdout = stdout
        self.stderr = stderr


def _seed_again() -> None:
    """Let what was drawn at random while torch was imported differ between ranks; Python itself does so for `random`."""
    numpy, torch = sys.modules.get("numpy.random"), sys.modules["torch"]
    if numpy is not None:
        numpy.seed()
    if torch.initial_seed() != _SAME_SEED:
        torch.default_generator.seed()
    processes = sys.modules.get("multiprocessing.process")
    if processes is not None:
        processes.current_process().authkey = os.urandom(32)


def _set_thresholds(environment: Mapping[str, str]) -> None:
    """Give glibc the thresholds that it reads from these variables when a process starts, which a fork does not."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # other C libraries have none
    for name, number in _OPTIONS_OF_MALLOPT.items():
        if mallopt is not None and environment.get(name, "").isdecimal():
            mallopt(number, int(environment[name]))


def _show_environment(environment: Mapping[str, str]) -> None:
    """Have /proc show these variables, as of a process that was started with them.

    `os.environ` must have been replaced: then nothing uses the memory any more in which the kernel has put the first ones.
    """
    with open("/proc/self/stat", "rb") as file:
        numbers = file.read().rpartition(b")")[2].split()
    start, end = int(numbers[47]), int(numbers[48])
    block = environment_block(environment)
    if start and len(block) <= end - start:
        ctypes.memmove(start, block.ljust(end - start, b"\0"), end - start)
