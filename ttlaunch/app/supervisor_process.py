"""The supervisor of a run as a process: how it receives its order, and what it reports to the process that started it.

The supervisor runs in a session of its own, so Ctrl-Z and a closed terminal do not affect it. A socket connects it to the
process that started it; each message is a line with a JSON object. The command line forks its supervisor (`cli/session.py`),
which has the plan in memory. Python programs start a new interpreter (`main` below), because a process with threads must
not fork.
"""

import contextlib
import json
import os
import select
import signal
import socket
import sys
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ttlaunch import contract
from ttlaunch.app.dialogue import Unattended
from ttlaunch.app.execute import RunOptions
from ttlaunch.app.run_spec import RunSpec
from ttlaunch.diagnostics import Blame, Diagnostic, LaunchError
from ttlaunch.diagnostics.transfer import pack_diagnostics
from ttlaunch.system_reason import system_reason

if TYPE_CHECKING:
    from ttlaunch.app.outcome import Outcome
    from ttlaunch.running.runs.run_folder import RunFolder

PIECE = 65536
FREE = b"free\n"
"""The message by which the process that started a supervisor leaves and lets the run continue."""

Begun = Callable[["RunFolder"], None]
"""A function that is called with the run's folder before the run's processes are started."""


class CallerLink:
    """The supervisor's end of the socket to the process that started it."""

    def __init__(self, end: socket.socket) -> None:
        self._end = end

    def send(self, **values: Any) -> None:
        """Send a message to the process that started the supervisor; do nothing if it is gone."""
        with contextlib.suppress(OSError):
            self._end.sendall(json.dumps(values).encode() + b"\n")

    def end_with_watcher(self) -> None:
        """End the run as SIGTERM does when the other end closes the socket without having sent `FREE`."""
        threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self) -> None:
        received = b""
        with contextlib.suppress(OSError):
            while piece := self._end.recv(PIECE):
                received += piece
        if FREE not in received:
            os.kill(os.getpid(), signal.SIGTERM)


def supervise(work: Callable[[Begun], "list[Outcome]"], link: CallerLink) -> "list[Outcome]":
    """Execute plans, and report each run that has begun; from then on, this process prints into the run's folder.

    Raises:
        LaunchError: A run cannot be started.
    """

    def begun(folder: "RunFolder") -> None:
        from ttlaunch.running.runs.run_folder import supervisor_file

        leave_terminal({name: str(folder.file(supervisor_file(name))) for name in ("stdout", "stderr")})
        link.send(run=str(folder.path))

    outcomes = work(begun)
    if not outcomes[-1].folder.file(contract.REPORT_FILE).is_file():  # the disk was full
        link.send(report=outcomes[-1].report.as_json())
    return outcomes


def leave_terminal(places: Mapping[str, str]) -> None:
    """Redirect output to files, and read no input, because the terminal may close.

    Args:
        places: The paths of the files for `stdout` and `stderr`.

    Raises:
        OSError: A file cannot be written.
    """
    for name, number in (("stdout", 1), ("stderr", 2)):
        stream = getattr(sys, name)
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
        descriptor = os.open(places[name], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        os.dup2(descriptor, number)
        os.close(descriptor)
        setattr(sys, name, os.fdopen(number, "w", encoding="utf-8", errors="replace", buffering=1, closefd=False))
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)


def main(descriptor: int) -> int:
    """Supervise a run that a Python program has started, and return the exit status.

    Args:
        descriptor: The file descriptor of this process's end of the socket. The first message is the order, see
            `app/spawn.py`.
    """
    os.set_inheritable(descriptor, False)  # noqa: FBT003 - processes that this one starts must not keep the socket open
    end = socket.socket(fileno=descriptor)
    link, order = CallerLink(end), _read_order(end)
    if order["caller"] is not None and not _end_with(order["caller"]):
        return contract.STATUS_TERMINATED
    listener = Unattended()
    try:
        outcomes = supervise(lambda begun: _execute_order(order, listener, begun), link)
    except LaunchError as error:
        found = [*listener.warnings, *(error.diagnostics if not error.was_shown else ())]
        link.send(refused=pack_diagnostics(found), status=error.exit_status)
        return error.exit_status
    except OSError as error:
        reason = f"{system_reason(error)}{f': {error.filename}' if error.filename else ''}"
        link.send(
            refused=pack_diagnostics([Diagnostic("H008", reason, blame=Blame.HOSTS)]), status=contract.STATUS_HOST
        )
        return contract.STATUS_HOST
    except KeyboardInterrupt:
        return contract.STATUS_INTERRUPTED
    from ttlaunch.app.restarts import exit_status_of

    link.send(warnings=pack_diagnostics(listener.warnings))
    return exit_status_of(outcomes)


def _execute_order(order: Mapping[str, Any], dialogue: Unattended, begun: Begun) -> "list[Outcome]":
    """Make the caller's plan again, and execute it if it has the same hash."""
    from ttlaunch.app.prepare_run import prepare
    from ttlaunch.app.restarts import run_with_restarts
    from ttlaunch.app.sinks import with_sinks
    from ttlaunch.running.metrics.sinks import SinkChoice

    spec = RunSpec.from_json(order["spec"])
    prepared = prepare(spec, Unattended())  # the caller has the warnings
    if prepared.plan.hash != order["plan_hash"]:
        message = f"the plan of {prepared.plan.program.name} has changed while it was being started"
        raise LaunchError([Diagnostic("P048", message, hints=("start it again once its files are written",))])
    options = RunOptions(**{**order["options"], "runs_dir": Path(order["options"]["runs_dir"])})
    sinks = [SinkChoice(kind, place) for kind, place in order["sinks"]]

    most = order["max_restarts"]
    return run_with_restarts(prepared, options, dialogue, most=most, ready=None, begun=with_sinks(sinks, begun))


def _read_order(end: socket.socket) -> dict[str, Any]:
    text = b""
    while not text.endswith(b"\n") and (piece := end.recv(PIECE)):
        text += piece
    order = json.loads(text)
    assert isinstance(order, dict)  # noqa: S101 - `app/spawn.py` has written it
    return order


def _end_with(caller: int) -> bool:
    """End the run as SIGTERM does when the calling process ends; return False if it has ended already.

    A parent-death signal cannot be used: the kernel sends it when the *thread* that started this process ends. The end of the
    socket cannot be used either: a child that the caller forks keeps it open.
    """
    try:
        descriptor = os.pidfd_open(caller)
    except OSError:
        return False
    if os.getppid() != caller:  # the caller died before the descriptor was open, and another process may have its id
        return False

    def wait() -> None:
        select.select([descriptor], [], [])
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=wait, daemon=True).start()
    return True
