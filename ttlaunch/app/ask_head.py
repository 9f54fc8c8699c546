"""Start a serving run and speak with its head, without a web server: what `ttlaunch generate` does."""

import contextlib
import socket
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from ttlaunch.app.dialogue import Dialogue
from ttlaunch.app.execute import RunOptions, marks_of_command
from ttlaunch.app.prepare_run import prepare
from ttlaunch.app.run_handle import Run
from ttlaunch.app.run_spec import RunSpec
from ttlaunch.app.serve import HANG_TIMEOUT_S
from ttlaunch.app.spawn import spawn_supervisor
from ttlaunch.diagnostics import Diagnostic, LaunchError, usage_error
from ttlaunch.serving import wire

_SOCKET = "serve.sock"
_TICK_S = 0.05
_PIECE = 65536
_LEAVING_S = 10.0


class Head:
    """A connection to the head of a serving run.

    Attributes:
        run: The run.
        hello: What the head said of itself.
    """

    def __init__(self, run: Run, connection: socket.socket) -> None:
        self.run = run
        self._connection = connection
        self._decoder = wire.Decoder(wire.FROM_HEAD, sender="the head of the serving run")
        self._messages: list[wire.FromHead] = []
        first = self.receive()
        if not isinstance(first, wire.Hello):
            raise wire.WireError("the head of the serving run did not say what it serves")
        self.hello = first

    def send(self, message: wire.ToHead) -> None:
        """Send a message; a head that is gone shows itself when the next one is received."""
        with contextlib.suppress(OSError):
            self._connection.sendall(wire.encode(message))

    def receive(self) -> wire.FromHead:
        """Wait for the next message.

        Raises:
            LaunchError: The run has ended; the error says why.
            WireError: The head sent something else than a message.
        """
        while not self._messages:
            try:
                piece = self._connection.recv(_PIECE)
            except OSError:
                piece = b""
            if not piece:
                raise _ended(self.run)
            self._messages += self._decoder.feed(piece)
        return self._messages.pop(0)

    def answers(
        self, asks: Sequence[wire.Ask], *, as_long_as_fits: bool = False
    ) -> Iterator[wire.Accepted | wire.Tokens | wire.Done]:
        """Ask for streams, and yield what is said of them as it comes, until all have ended.

        Args:
            asks: The asks, with numbers that have not been used.
            as_long_as_fits: Whether an ask for more tokens than the context holds gets as many as fit.

        Raises:
            LaunchError: An ask was refused, or the run has ended.
        """
        for ask in asks:
            self.send(ask)
        left = {ask.stream: ask for ask in asks}
        while left:
            message = self.receive()
            if isinstance(message, wire.Refused):
                room = message.numbers.get("context", 0) - message.numbers.get("prompt", 0)
                refused = left.get(message.stream)
                if refused is None or not as_long_as_fits or not 0 < room < refused.max_tokens:
                    raise usage_error(message.message)
                left[message.stream] = replace(refused, max_tokens=room)
                self.send(left[message.stream])
            if isinstance(message, wire.Accepted | wire.Tokens | wire.Done) and message.stream in left:
                yield message
                if isinstance(message, wire.Done):
                    del left[message.stream]


@contextmanager
def serving(spec: RunSpec, dialogue: Dialogue) -> Iterator[Head]:
    """Start a serving run, connect to its head, and end the run when the block ends.

    Args:
        spec: The specification that `find_served` has made.
        dialogue: Receives warnings.

    Raises:
        LaunchError: The run cannot be started, or ends before its head answers.
    """
    from ttlaunch.running.runs.run_folder import scratch_folder

    marks = marks_of_command()
    prepared = prepare(spec, dialogue)
    if not prepared.is_here:
        message = "the ranks of a serving run have to be on this machine, and the cluster has other hosts"
        raise usage_error(message, "leave `--on` out")
    with scratch_folder() as scratch:
        place = scratch / _SOCKET
        options = RunOptions(spec.runs_dir, hang_timeout_s=HANG_TIMEOUT_S, marks=marks, answers_at=str(place))
        supervisor = spawn_supervisor(
            spec, options, plan_hash=prepared.plan.hash, max_restarts=0, sinks=(), detach=False
        )
        try:
            folder = supervisor.wait_for_run()
        except BaseException:
            supervisor.end()
            raise
        with Run(folder, supervisor=supervisor) as run:
            with _connected(place, run) as connection:
                yield Head(run, connection)
            with contextlib.suppress(TimeoutError):
                run.wait(_LEAVING_S)  # it ends because nobody is connected any more


@contextmanager
def _connected(place: Path, run: Run) -> Iterator[socket.socket]:
    """Connect to a head that may still be starting.

    Raises:
        LaunchError: The run has ended.
    """
    while True:
        try:
            connection = wire.connect(place)
            break
        except OSError:
            if not run.is_running:
                raise _ended(run) from None
            time.sleep(_TICK_S)
    with connection:
        yield connection


def _ended(run: Run) -> LaunchError:
    """Return the error for a run that has ended although somebody waits for its answer."""
    report = run.wait()
    found = report.diagnostics or (Diagnostic("R048", f"the serving run {run.id} ended before it had answered"),)
    return LaunchError(found, status=report.exit_status or 1)
