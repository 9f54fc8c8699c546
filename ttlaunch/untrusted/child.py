"""Read what a stranger wrote in a child process that has little time, little memory and nothing else.

Templates run loops, tokenizers compile expressions, and the header of a GGUF says how long its own lists are. None of them
is read by a process that anybody waits for. A child has `CPU_S` of processor time, `MEMORY` bytes of address space, no
environment and no file but the one that it was given; once it has begun to read, it can open nothing, so it has no network
either. It dies with its parent. Standard library only, for the launcher, for what answers HTTP, and for ranks.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Any, Self, cast

CPU_S = 2
"""Seconds of processor time."""
MEMORY = 512 * 2**20
"""Bytes of address space."""
ANSWER = 2**20
"""The most bytes of an answer, unless the caller asks for more."""
WALL_S = 120.0
"""Seconds after which a child counts as stuck, on a machine that is busy with other things."""

REFUSED, OUT_OF_MEMORY, NO_LIBRARY, FAILED = 3, 4, 5, 6
"""Exit statuses of a child that ends by itself: the input is not what it should be, it takes too much, a library is missing,
or anything else."""
_PIECE = 2**16
_LONGEST_REASON = 2000
_ROOT = str(Path(__file__).resolve().parents[2])
_CODE = "import sys; sys.path.insert(0, sys.argv[1]); from ttlaunch.untrusted.__main__ import main; main()"
_ENVIRONMENT = {
    "LC_ALL": "C.UTF-8",
    "OPENBLAS_NUM_THREADS": "1",  # each thread would take address space
    "RAYON_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
}


class UntrustedError(ValueError):
    """What a stranger wrote cannot be read, or not within the limits; the text is a clause."""


class MissingLibraryError(UntrustedError):
    """The library that reads it is not installed.

    Attributes:
        library: Its name.
    """

    def __init__(self, library: str) -> None:
        super().__init__(f"the package {library} is not installed")
        self.library = library


class Child:
    """A limited child that waits for one request, or for several if its task answers each.

    A child may be started before its request is known, so that nobody waits for its imports.
    """

    def __init__(
        self,
        task: str,
        *,
        file: IO[bytes] | None = None,
        cpu_s: int = CPU_S,
        memory: int = MEMORY,
        wall_s: float = WALL_S,
    ) -> None:
        """Start it.

        Args:
            task: A task of `__main__.py`.
            file: A file that the child may read; its position is not used.
            cpu_s: Seconds of processor time, those for imports included.
            memory: Bytes of address space.
            wall_s: Seconds for a whole answer.
        """
        self._task, self._cpu_s, self._memory, self._wall_s = task, cpu_s, memory, wall_s
        descriptor = file.fileno() if file else -1
        limits = (task, str(descriptor), str(cpu_s), str(memory), str(os.getpid()))
        process = start(limits, descriptor)
        self._process = process
        self._requests, self._answers = cast("IO[bytes]", process.stdin), cast("IO[bytes]", process.stdout)
        self._said = bytearray()
        """The first bytes since the last request: the reason, if the child ends instead of answering."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def is_alive(self) -> bool:
        """Whether the child still runs."""
        return self._process.poll() is None

    def close(self) -> None:
        """End the child, whatever it does."""
        self._process.kill()
        self._process.wait()
        for pipe in (self._requests, self._answers):
            with contextlib.suppress(OSError):  # a request that nobody has read
                pipe.close()

    def send(self, request: Mapping[str, Any], *, is_last: bool = False) -> None:
        """Give the child a request; what a child that has ended would have said comes with the answer."""
        self._said.clear()
        with contextlib.suppress(OSError):
            self._requests.write(json.dumps(request).encode() + b"\n")
            self._requests.flush()
            if is_last:
                self._requests.close()

    def answer(self, most: int = ANSWER) -> bytes:
        """Return all that the child writes until it ends.

        Raises:
            UntrustedError: The input is refused, or a limit was reached.
        """
        found = bytearray()
        deadline = time.monotonic() + self._wall_s
        while piece := self._read(min(_PIECE, most + 1 - len(found)), deadline):
            found += piece
            if len(found) > most:
                raise UntrustedError(f"what it becomes has more than {_size(most)}")
        self._check_end(deadline)
        return bytes(found)

    def line(self, most: int = ANSWER) -> bytes:
        """Return what the child writes up to the end of a line, of which more may follow.

        Raises:
            UntrustedError: The child ended before, or the line is longer.
        """
        found = bytearray()
        for piece in iter(lambda: b"".join(self.pieces(1)), b"\n"):
            found += piece
            if len(found) > most:
                raise UntrustedError(f"what it becomes has more than {_size(most)}")
        return bytes(found)

    def pieces(self, size: int) -> Iterator[bytes]:
        """Yield exactly `size` bytes of the child's output, of which more may follow.

        Raises:
            UntrustedError: The child ended before it had written them.
        """
        deadline = time.monotonic() + self._wall_s
        while size:
            piece = self._read(min(16 * _PIECE, size), deadline)
            if not piece:
                self._check_end(deadline)
                raise UntrustedError("its reader ended too early")
            size -= len(piece)
            yield piece

    def _read(self, most: int, deadline: float) -> bytes:
        """Return what the child has written, up to `most` bytes; empty at its end."""
        descriptor = self._answers.fileno()
        waiting = select.poll()
        waiting.register(descriptor, select.POLLIN)
        if not waiting.poll(max(0.0, 1000 * (deadline - time.monotonic()))):
            raise UntrustedError(f"its reader was stuck for {self._wall_s:.0f} s")
        piece = os.read(descriptor, most)
        self._said += piece[: _LONGEST_REASON - len(self._said)]
        return piece

    def _check_end(self, deadline: float) -> None:
        """Raise the reason for which the child has ended, unless it has done its task."""
        try:
            status = self._process.wait(max(0.1, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            raise UntrustedError(f"its reader was stuck for {self._wall_s:.0f} s") from None
        reason = self._said.decode(errors="replace").strip()
        if status == 0:
            return
        if status == NO_LIBRARY:
            raise MissingLibraryError(reason or "for it")
        if status == REFUSED and reason:
            raise UntrustedError(reason)
        if status in (-signal.SIGXCPU, -signal.SIGKILL):
            raise UntrustedError(f"reading it takes more than {self._cpu_s} s of processor time")
        if status in (OUT_OF_MEMORY, -signal.SIGABRT, -signal.SIGSEGV, -signal.SIGBUS):
            raise UntrustedError(f"reading it takes more than {_size(self._memory)} of memory")
        raise UntrustedError(f"its reader ended with status {status}{': ' if reason else ''}{reason}")


def start(arguments: tuple[str, ...], descriptor: int) -> subprocess.Popen[bytes]:
    """Start the process of a child.

    Args:
        arguments: What `__main__.py` takes, behind the folder of this package.
        descriptor: The file that the child may read; -1 for none.
    """
    return subprocess.Popen(
        [sys.executable, "-I", "-B", "-c", _CODE, _ROOT, *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env=_ENVIRONMENT,
        cwd="/",
        pass_fds=(descriptor,) if descriptor >= 0 else (),
        start_new_session=True,
    )


def read_limited(
    task: str, request: Mapping[str, Any], *, file: IO[bytes] | None = None, most: int = ANSWER, cpu_s: int = CPU_S
) -> bytes:
    """Let a limited child do one task of `__main__.py`, and return what it answers.

    Args:
        task: The task.
        request: What the task needs; values of JSON.
        file: A file that the child may read.
        most: The most bytes of an answer.
        cpu_s: Seconds of processor time.

    Raises:
        UntrustedError: The input is refused, or a limit was reached.
    """
    with Child(task, file=file, cpu_s=cpu_s) as child:
        child.send(request, is_last=True)
        return child.answer(most)


def _size(number: int) -> str:
    return f"{number >> 20} MiB"
