"""Start a serving run and speak with its head, without a web server: what `ttlaunch generate` does."""

import contextlib
import socket
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
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
            raise LaunchError([Diagnostic("R063", "the head of the serving run did not say what it serves")])
        self.hello = first

    def send(self, message: wire.ToHead) -> None:
        """Send a message; a head that is gone shows itself when the next one is received.

        Raises:
            LaunchError: The message is longer than the head reads.
        """
        try:
            frame = wire.encode(message)
        except wire.WireError as error:
            most = wire.LONGEST_FRAME // 2**20
            raise usage_error(f"the prompt is too long to be sent to the model: at most {most} MiB are read") from error
        with contextlib.suppress(OSError):
            self._connection.sendall(frame)

    def receive(self) -> wire.FromHead:
        """Wait for the next message.

        Raises:
            LaunchError: The run has ended, or its head sent something else than a message; the error says why.
        """
        while not self._messages:
            try:
                piece = self._connection.recv(_PIECE)
            except OSError:
                piece = b""
            if not piece:
                raise _ended(self.run)
            try:
                self._messages += self._decoder.feed(piece)
            except wire.WireError as error:
                raise LaunchError([Diagnostic("R063", str(error))]) from error
        return self._messages.pop(0)

    def answers(self, asks: Sequence[wire.Ask]) -> Iterator[wire.Accepted | wire.Tokens | wire.Done]:
        """Ask for streams, and yield what is said of them as it comes, until all have ended.

        Args:
            asks: The asks, with numbers that have not been used. Where the context ends before `max_tokens`, the text ends there.

        Raises:
            LaunchError: An ask was refused, its computation failed, or the run has ended.
        """
        for ask in asks:
            self.send(ask)
        left = {ask.stream for ask in asks}
        while left:
            message = self.receive()
            if isinstance(message, wire.Refused):
                raise usage_error(message.message)
            if isinstance(message, wire.Done) and message.reason == "error":
                raise LaunchError(
                    [Diagnostic("R005", f"the text has no end: {message.message or 'it is not known why'}")]
                )
            if isinstance(message, wire.Accepted | wire.Tokens | wire.Done) and message.stream in left:
                yield message
                if isinstance(message, wire.Done):
                    left.discard(message.stream)


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
    found = report.diagnostics or (
        Diagnostic("R005", f"the head of the serving run {run.id} left before it had answered"),
    )
    return LaunchError(found, status=report.exit_status or 1)
