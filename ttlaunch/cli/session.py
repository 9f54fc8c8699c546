"""Run the supervisor in a process and session of its own, so that Ctrl-Z and a closed terminal do not affect it.

A socket connects the command and the supervisor. The supervisor reports which run it has begun. The command may send a
message that lets the run continue without it. If the socket closes without this message, the command was killed, and the
supervisor ends the run as SIGTERM does.
"""

import contextlib
import os
import select
import signal
import socket
import sys
import time
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ttlaunch import contract
from ttlaunch.app.outcome import Outcome
from ttlaunch.app.signals import handled
from ttlaunch.app.stop import ask_to_end
from ttlaunch.app.supervisor_process import FREE, PIECE, Begun, CallerLink, supervise
from ttlaunch.cli.console import reporting_errors
from ttlaunch.cli.last_resort import status_of
from ttlaunch.diagnostics import Format
from ttlaunch.running.runs.launcher import TIME_LIMIT_SIGNAL, Launcher

if TYPE_CHECKING:
    from ttlaunch.app.slurm_job import Job

_TICK_S = 0.1
_ASK_SLURM_S = 2.0


class Session:
    """A supervisor that this process has started.

    Attributes:
        said: Everything that it has said so far.
        is_over: Whether it has ended, as far as `wait` has seen.
    """

    def __init__(self, pid: int, end: socket.socket) -> None:
        self.pid = pid
        self.said: list[dict[str, Any]] = []
        self.is_over = False
        self._end = end
        self._rest = b""
        self._status: int | None = None

    def wait(self, timeout_s: float) -> None:
        """Wait for a time, or until the supervisor sends a message or ends."""
        if self.is_over or not select.select([self._end], [], [], timeout_s)[0]:
            return
        try:
            data = self._end.recv(PIECE)
        except OSError:
            data = b""
        self.is_over = not data
        *lines, self._rest = (self._rest + data).split(b"\n")
        records = [contract.read_record(line) for line in lines]
        self.said += [record for record in records if record is not None]

    def signal(self, number: int) -> None:
        """Send a signal to the supervisor if it still exists; SIGCONT lets a stopped one receive it."""
        if self._status is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)
                os.kill(self.pid, signal.SIGCONT)

    def set_free(self) -> None:
        """Let the supervisor continue after this process ends."""
        with contextlib.suppress(OSError):
            self._end.sendall(FREE)

    def exit_status(self) -> int:
        """Wait for the supervisor's end, and return its exit status, or minus the signal that killed it."""
        if self._status is None:
            _, wait_status = os.waitpid(self.pid, 0)
            self._end.close()
            self.is_over = True
            self._status = os.waitstatus_to_exitcode(wait_status)
        return self._status


class Attached:
    """A supervisor that another process has started, for a command that attaches to its run."""

    said: Sequence[dict[str, Any]] = ()

    def __init__(self, launcher: Launcher | None) -> None:
        self._launcher = launcher

    @property
    def is_over(self) -> bool:
        return self._launcher is None or not self._launcher.is_alive

    def wait(self, timeout_s: float) -> None:
        if not self.is_over:
            time.sleep(timeout_s)

    def signal(self, number: int) -> None:
        if self._launcher is not None:
            self._launcher.signal(number)

    def set_free(self) -> None:
        """Do nothing: the supervisor does not depend on this process."""

    def exit_status(self) -> int | None:
        """Return None: only the supervisor's parent process can know the status."""
        return None


class SubmittedRun:
    """The supervisor of a run that a Slurm job has started on another machine, for a command that attaches to the run."""

    said: Sequence[dict[str, Any]] = ()

    def __init__(self, job: "Job") -> None:
        self._job = job
        self._is_over, self._asked = False, 0.0

    @property
    def is_over(self) -> bool:
        """Whether Slurm says that the job does not run; it is asked every few seconds."""
        from ttlaunch.app.slurm_job import ask_queue

        if not self._is_over and time.monotonic() - self._asked > _ASK_SLURM_S:
            queue = ask_queue([self._job])
            self._is_over = not queue.problem and not queue.of(self._job).runs
            self._asked = time.monotonic()
        return self._is_over

    def wait(self, timeout_s: float) -> None:
        time.sleep(timeout_s)

    def signal(self, number: int) -> None:  # noqa: ARG002 - Slurm passes on SIGTERM for any order to end
        """Have the run save its step and end."""
        ask_to_end(self._job)

    def set_free(self) -> None:
        """Do nothing: the job does not depend on this process."""

    def exit_status(self) -> int | None:
        """Return None: only Slurm knows the status."""
        return None


def start_session(work: Callable[[CallerLink], int]) -> Session:
    """Call `work` in a forked process, which exits with the returned status.

    Raises:
        OSError: The process cannot be started.
    """
    ours, theirs = socket.socketpair()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()  # otherwise both processes would print the content of the buffer
    pid = os.fork()
    if pid:
        theirs.close()
        return Session(pid, ours)
    status = contract.STATUS_RANK_FAILED
    try:
        ours.close()
        os.setsid()
        status = work(CallerLink(theirs))
    finally:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):
                stream.flush()
        os._exit(status)  # do not run the parent's exit handlers, and do not flush its buffers


def start_supervisor(
    work: Callable[[Begun], list[Outcome]], *, exit_status: Callable[[list[Outcome]], int], form: Format, verbose: bool
) -> Session:
    """Execute plans in a process of its own.

    The process is a fork, not a new interpreter: it has the plan and all imports already, which saves half a second. A fork is
    safe because this process has not started a thread yet.

    Args:
        work: Executes the plans; called with a function that it must call for each run that begins.
        exit_status: Computes the exit status of the process from the outcomes.
        form: The form of the output if nothing can be started.
        verbose: Whether to show notes.
    """

    def supervised(line: CallerLink) -> int:
        line.end_with_watcher()
        with reporting_errors(form=form, verbose=verbose):
            return exit_status(supervise(work, line))

    return start_session(lambda line: status_of(lambda: supervised(line)))


def wait_for_run(session: Session) -> Path | None:
    """Wait until a supervisor has begun a run, and return the run's folder; None if the supervisor ends before.

    No rank has been started until then, and every signal ends the supervisor. Meanwhile this imports what will show the run.
    """

    def end(number: int) -> None:
        session.signal(number if number in {signal.SIGINT, TIME_LIMIT_SIGNAL} else signal.SIGTERM)

    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, TIME_LIMIT_SIGNAL)
    with handled(dict.fromkeys(numbers, end)):
        import_module("ttlaunch.cli.watching")  # not before the fork: it takes the time in which the supervisor works
        while not (begun := [record["run"] for record in session.said if "run" in record]) and not session.is_over:
            session.wait(_TICK_S)
    return Path(begun[0]) if begun else None
