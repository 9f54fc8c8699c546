"""Start a supervisor as a new interpreter, for callers that may have threads, an event loop or signal handlers.

The order is sent over a socket; nothing shows on the command line. What the supervisor prints before it has a run's folder is
kept in an unnamed file, so that the cause is known if it dies early.
"""

import contextlib
import fcntl
import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import IO, Any

import ttlaunch
from ttlaunch import contract
from ttlaunch.app.execute import RunOptions
from ttlaunch.app.run_spec import RunSpec
from ttlaunch.app.supervisor_process import PIECE
from ttlaunch.diagnostics import Diagnostic, LaunchError, shown
from ttlaunch.diagnostics.transfer import unpack_diagnostics
from ttlaunch.running.metrics.sinks import SinkChoice

_FIRST_FREE = 3
"""Below it are standard input, output and error."""

_CODE = (
    "import sys; sys.path.insert(0, sys.argv[1]); import ttlaunch; del sys.path[0]; "
    "from ttlaunch.app.supervisor_process import main; sys.exit(main(int(sys.argv[2])))"
)
_LONGEST_WORDS = 2000
_SLICE_S = 1.0
_TICK_S = 0.05
_HURRY_S = 6.0
"""Between two orders to end: ranks have at most 5 s after the second."""
_LISTEN_S = 5.0


class Supervisor:
    """A supervisor that this process has started; its methods may be called from any thread and from signal handlers.

    Attributes:
        pid: The id of its process.
        owner: The process that has started it. A child that this one forks can neither wait for it nor hear it.
    """

    def __init__(self, process: subprocess.Popen[bytes], end: socket.socket, words: IO[bytes]) -> None:
        self.pid, self.owner = process.pid, os.getpid()
        self._process = process
        self._words = words
        self._said: list[dict[str, Any]] = []
        self._news = threading.Condition()
        self._is_silent = False
        threading.Thread(target=self._listen, args=(end,), daemon=True, name=f"ttlaunch-{self.pid}").start()

    def said(self, name: str) -> list[Any]:
        """Return all messages with this name so far."""
        with self._news:
            return [record[name] for record in self._said if name in record]

    def wait_for_run(self) -> Path:
        """Wait until the supervisor has made the folder of its run.

        Raises:
            LaunchError: It has not, and says why; nothing was started.
        """
        with self._news:
            self._news.wait_for(lambda: self._is_silent or any("run" in one or "refused" in one for one in self._said))
        with self._words:  # of no interest once the run has a folder of its own
            return self._begun_or_refused()

    def _begun_or_refused(self) -> Path:
        begun = self.said("run")
        if begun:
            return Path(begun[0])
        status = self.exit_status()
        refused = self.said("refused")
        if refused:
            raise LaunchError(unpack_diagnostics(refused[0]), status=self.said("status")[0])
        raise LaunchError([self._death(status)], status=contract.STATUS_RANK_FAILED)

    def send_signal(self, number: int) -> None:
        """Send a signal to the supervisor, if it still exists."""
        self._process.send_signal(number)

    def poll(self) -> int | None:
        """Return the exit status, or minus the number of the signal that killed it; None while it runs."""
        return self._process.poll()

    def exit_status(self, *, timeout_s: float | None = None) -> int:
        """Wait for the supervisor's end; return its exit status, or minus the number of the signal that killed it.

        Raises:
            TimeoutError: It has not ended in time.
        """
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        # Never inside `Popen.wait`: it holds a lock, and a signal handler that stops the run would wait for it for ever.
        while (status := self._process.poll()) is None:
            left_s = _SLICE_S if deadline is None else min(_SLICE_S, deadline - time.monotonic())
            if left_s <= 0:
                raise TimeoutError(f"the run is still running after {timeout_s:g} s")
            self._wait_a_moment(left_s)
        with self._news:  # all that it has said is on the line, and takes a moment to be read
            self._news.wait_for(lambda: self._is_silent, timeout=_LISTEN_S)
        return status

    def end(self) -> None:
        """End the supervisor before the caller has a handle of the run: as three Ctrl-C would, then by SIGKILL."""
        for number in (signal.SIGINT, signal.SIGINT, signal.SIGINT, signal.SIGKILL):
            self._process.send_signal(number)
            with contextlib.suppress(TimeoutError):
                self.exit_status(timeout_s=_HURRY_S)
                return

    def _wait_a_moment(self, seconds: float) -> None:
        """Wait until the supervisor ends, at most for this time."""
        try:
            descriptor = os.pidfd_open(self.pid)
        except OSError:
            time.sleep(min(seconds, _TICK_S))  # another thread has just reaped it
            return
        try:
            select.select([descriptor], [], [], seconds)
        finally:
            os.close(descriptor)

    def _listen(self, end: socket.socket) -> None:
        heard = b""
        with end:
            while True:
                try:
                    piece = end.recv(PIECE)
                except OSError:
                    piece = b""
                *lines, heard = (heard + piece).split(b"\n")
                with self._news:
                    self._said += [json.loads(line) for line in lines]
                    self._is_silent = not piece
                    self._news.notify_all()
                if not piece:
                    break
        self._process.wait()  # nobody may ask any more, and it must not stay a zombie

    def _death(self, status: int) -> Diagnostic:
        """Describe why the supervisor ended before it sent a message."""
        how = f"was killed by {signal.Signals(-status).name}" if status < 0 else f"ended with status {status}"
        with contextlib.suppress(OSError, ValueError):
            self._words.seek(-min(_LONGEST_WORDS, self._words.seek(0, os.SEEK_END)), os.SEEK_END)
        lines = self._words.read(_LONGEST_WORDS).decode("utf-8", "replace").splitlines()
        notes = ("no ranks were running", *(f"it printed: {shown(line, longest=200)}" for line in lines[-1:]))
        return Diagnostic("R050", f"the supervisor {how}", notes=notes)


def spawn_supervisor(
    spec: RunSpec,
    options: RunOptions,
    *,
    plan_hash: str,
    max_restarts: int,
    sinks: "Sequence[SinkChoice]",
    detach: bool,
) -> Supervisor:
    """Start a process that carries a run out, in a session of its own.

    Args:
        spec: What was asked for.
        options: How it is executed.
        plan_hash: The hash of the plan that the caller has checked; any other plan is refused.
        max_restarts: Restarts at the most.
        sinks: Started beside each start of the run.
        detach: Whether the run goes on when the calling process dies.

    Raises:
        OSError: The system has no room for another process.
    """
    order = {
        "spec": spec.as_json(),
        "options": {**asdict(options), "runs_dir": str(options.runs_dir)},
        "plan_hash": plan_hash,
        "max_restarts": max_restarts,
        "sinks": [(choice.kind, choice.place) for choice in sinks],
        "caller": None if detach else os.getpid(),
    }
    ours, theirs = socket.socketpair()
    words = tempfile.TemporaryFile()  # noqa: SIM115 - read when it has died, closed with the supervisor object
    with theirs:
        descriptor = fcntl.fcntl(theirs, fcntl.F_DUPFD_CLOEXEC, _FIRST_FREE)  # a daemon may have closed the first three
        try:
            supervisor = Supervisor(_start(descriptor, words), ours, words)
        finally:
            os.close(descriptor)
    _send(ours, order)
    return supervisor


def _start(descriptor: int, words: IO[bytes]) -> subprocess.Popen[bytes]:
    home = str(Path(ttlaunch.__file__).parents[1])
    return subprocess.Popen(
        [sys.executable, "-P", "-c", _CODE, home, str(descriptor)],
        stdin=subprocess.DEVNULL,
        stdout=words,
        stderr=words,
        pass_fds=(descriptor,),
        start_new_session=True,
    )


def _send(end: socket.socket, order: Mapping[str, Any]) -> None:
    """Send the order; if the supervisor has died already, its exit status tells."""
    with contextlib.suppress(OSError):
        end.sendall(json.dumps(order).encode() + b"\n")
