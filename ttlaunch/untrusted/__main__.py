"""What a limited child does: it gives up all that it does not need, and then does one task.

The library that a task needs is imported first, because afterwards nothing can be opened any more.
"""

from __future__ import annotations

import ctypes
import importlib
import json
import os
import resource
import signal
import sys
from collections.abc import Callable, Iterator
from typing import BinaryIO, NoReturn, Protocol

from ttlaunch.untrusted.child import FAILED, NO_LIBRARY, OUT_OF_MEMORY, REFUSED, MissingLibraryError, UntrustedError

_TASKS = {
    "chat": "chat_template",
    "gguf-header": "gguf_header",
    "gguf-tokenizer": "gguf_tokenizer",
    "gguf-values": "gguf_values",
    "tokenizer": "tokenizer",
}
"""By task the module that does it, with a function `answers`."""
_PR_SET_PDEATHSIG = 1


class Task(Protocol):
    """A function that yields the bytes of its answers to requests, which may be about a file."""

    def __call__(self, requests: Iterator[dict[str, object]], file: BinaryIO) -> Iterator[bytes]: ...


def main() -> None:
    """Do the task that the arguments name, within the limits that they name."""
    _, task, descriptor, cpu_s, memory, parent = sys.argv[1:]
    _end_with(int(parent))
    try:
        answers = find_task(task)
    except MissingLibraryError as error:
        _end(NO_LIBRARY, error.library)
    file = os.fdopen(int(descriptor), "rb", closefd=False) if int(descriptor) >= 0 else sys.stdin.buffer
    do(answers, file, cpu_s=int(cpu_s), memory=int(memory))


def do(answers: Task, file: BinaryIO, *, cpu_s: int, memory: int) -> NoReturn:
    """Give up what is not needed, do a task with the requests of the standard input, and end the process."""
    limit(cpu_s=cpu_s, memory=memory)
    try:
        for piece in answers(map(json.loads, sys.stdin.buffer), file):
            _write(piece)
    except UntrustedError as error:
        _end(REFUSED, str(error))
    except (MemoryError, RecursionError):
        _end(OUT_OF_MEMORY, "")
    except Exception as error:  # noqa: BLE001 - a mistake of ours, or of a library
        _end(FAILED, f"{type(error).__name__}: {error}")
    os._exit(0)  # what was read is not taken apart piece by piece


def limit(*, cpu_s: int, memory: int) -> None:
    """Give up what reading does not need: processor time, memory, further files, processes, and writing to files.

    Sockets are files too, so there is no network after this.
    """
    resource.setrlimit(resource.RLIMIT_CPU, (cpu_s, cpu_s + 1))
    resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    resource.setrlimit(resource.RLIMIT_NPROC, (0, 0))
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, 0))


def find_task(task: str) -> Task:
    try:
        module = importlib.import_module(f"ttlaunch.untrusted.{_TASKS[task]}")
    except ModuleNotFoundError as error:
        raise MissingLibraryError(error.name or "") from error
    answers: Task = module.answers
    return answers


def _end_with(parent: int) -> None:
    """Have the kernel kill this process when its parent ends."""
    try:
        prctl: Callable[[int, int], int] = ctypes.CDLL(None).prctl
        prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    except (OSError, AttributeError):  # another system; a closed pipe ends the child at its next word
        return
    if os.getppid() != parent:
        os._exit(1)


def _write(piece: bytes) -> None:
    rest = memoryview(piece)
    while rest:
        rest = rest[os.write(1, rest) :]


def _end(status: int, reason: str) -> NoReturn:
    os.write(1, reason.encode(errors="replace"))
    os._exit(status)
