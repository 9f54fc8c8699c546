"""Start a supervisor as a new interpreter, for callers that may have threads, an event loop or signal handlers.

The order is sent over a socket, so nothing of it is visible on the command line. The supervisor's output before it has made
the run's folder is kept in an unnamed file, so that the cause is known if it dies early.
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
"""The first file descriptor after those of standard input, output and error."""

_CODE = (
    "import sys; sys.path.insert(0, sys.argv[1]); import ttlaunch; del sys.path[0]; "
    "from ttlaunch.app.supervisor_process import main; sys.exit(main(int(sys.argv[2])))"
)
_LONGEST_OUTPUT = 2000
_SLICE_S = 1.0
_TICK_S = 0.05
_BETWEEN_SIGNALS_S = 6.0
"""The time between two orders to end: ranks have at most 5 s after the second."""
_LISTEN_S = 5.0


class Supervisor:
    """A supervisor that this process has started; its methods may be called from any thread and from signal handlers.

    Attributes:
        pid: The process id of the supervisor.
        owner: The id of the process that has started it. A forked child of that process can neither wait for the supervisor
            nor receive its messages.
    """

    def __init__(self, process: subprocess.Popen[bytes], end: socket.socket, output: IO[bytes]) -> None:
        self.pid, self.owner = process.pid, os.getpid()
        self._process = process
        self._output = output
        self._messages: list[dict[str, Any]] = []
        self._changed = threading.Condition()
        self._is_closed = False
        threading.Thread(target=self._listen, args=(end,), daemon=True, name=f"ttlaunch-{self.pid}").start()

    def messages(self, name: str) -> list[Any]:
        """Return the values of all messages with this name that have been received so far."""
        with self._changed:
            return [record[name] for record in self._messages if name in record]

    def wait_for_run(self) -> Path:
        """Wait until the supervisor has made the folder of its run.

        Raises:
            LaunchError: The supervisor has reported why it cannot start the run, or has ended; nothing was started.
        """
        with self._changed:
            self._changed.wait_for(
                lambda: self._is_closed or any("run" in one or "refused" in one for one in self._messages)
            )
        with self._output:  # not needed any more: the supervisor now writes into the run's folder, or has ended
            return self._begun_or_refused()

    def _begun_or_refused(self) -> Path:
        begun = self.messages("run")
        if begun:
            return Path(begun[0])
        status = self.exit_status()
        refused = self.messages("refused")
        if refused:
            raise LaunchError(unpack_diagnostics(refused[0]), status=self.messages("status")[0])
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
            TimeoutError: The supervisor has not ended in this time.
        """
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        # Do not call `Popen.wait`: it holds a lock, and a signal handler that stops the run would wait for the lock for ever.
        while (status := self._process.poll()) is None:
            left_s = _SLICE_S if deadline is None else min(_SLICE_S, deadline - time.monotonic())
            if left_s <= 0:
                raise TimeoutError(f"the run is still running after {timeout_s:g} s")
            self._wait_a_moment(left_s)
        with self._changed:  # wait until the other thread has read the last messages
            self._changed.wait_for(lambda: self._is_closed, timeout=_LISTEN_S)
        return status

    def end(self) -> None:
        """End the supervisor by up to three interrupts and then SIGKILL, for a caller that has no handle of the run."""
        for number in (signal.SIGINT, signal.SIGINT, signal.SIGINT, signal.SIGKILL):
            self._process.send_signal(number)
            with contextlib.suppress(TimeoutError):
                self.exit_status(timeout_s=_BETWEEN_SIGNALS_S)
                return

    def _wait_a_moment(self, seconds: float) -> None:
        """Wait until the supervisor ends, but not longer than this time."""
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
        received = b""
        with end:
            while True:
                try:
                    piece = end.recv(PIECE)
                except OSError:
                    piece = b""
                *lines, received = (received + piece).split(b"\n")
                with self._changed:
                    self._messages += [json.loads(line) for line in lines]
                    self._is_closed = not piece
                    self._changed.notify_all()
                if not piece:
                    break
        self._process.wait()  # the caller may never ask for the exit status, and the process must not stay a zombie

    def _death(self, status: int) -> Diagnostic:
        """Describe how the supervisor ended without having sent a message."""
        how = f"was killed by {signal.Signals(-status).name}" if status < 0 else f"ended with status {status}"
        with contextlib.suppress(OSError, ValueError):
            self._output.seek(-min(_LONGEST_OUTPUT, self._output.seek(0, os.SEEK_END)), os.SEEK_END)
        lines = self._output.read(_LONGEST_OUTPUT).decode("utf-8", "replace").splitlines()
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
    """Start a process that executes a run, in a session of its own.

    Args:
        spec: The specification of the run.
        options: How the plan is executed.
        plan_hash: The hash of the plan that the caller has checked; the supervisor refuses any other plan.
        max_restarts: The largest number of restarts.
        sinks: The sinks to which the metrics of each start are exported.
        detach: Whether the run continues when the calling process ends.

    Raises:
        OSError: The process cannot be started.
    """
    order = {
        "spec": spec.as_json(),
        "options": {
            **asdict(options),
            "runs_dir": str(options.runs_dir),
            "marks": [*options.marks, ("supervisor", time.time())],
        },
        "plan_hash": plan_hash,
        "max_restarts": max_restarts,
        "sinks": [(choice.kind, choice.place) for choice in sinks],
        "caller": None if detach else os.getpid(),
    }
    ours, theirs = socket.socketpair()
    output = tempfile.TemporaryFile()  # noqa: SIM115 - read if the supervisor dies, closed with the supervisor object
    with theirs:
        descriptor = fcntl.fcntl(theirs, fcntl.F_DUPFD_CLOEXEC, _FIRST_FREE)  # a daemon may have closed the first three
        try:
            supervisor = Supervisor(_start(descriptor, output), ours, output)
        finally:
            os.close(descriptor)
    _send(ours, order)
    return supervisor


def _start(descriptor: int, output: IO[bytes]) -> subprocess.Popen[bytes]:
    home = str(Path(ttlaunch.__file__).parents[1])
    return subprocess.Popen(
        [sys.executable, "-P", "-c", _CODE, home, str(descriptor)],
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=output,
        pass_fds=(descriptor,),
        start_new_session=True,
    )


def _send(end: socket.socket, order: Mapping[str, Any]) -> None:
    """Send the order; do nothing if the supervisor has died already, which its exit status shows."""
    with contextlib.suppress(OSError):
        end.sendall(json.dumps(order).encode() + b"\n")
