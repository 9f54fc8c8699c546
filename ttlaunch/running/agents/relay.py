"""Let an engine start its daemons on other hosts through the connections that the launcher already has.

The engine calls `agent/relay.py` in place of ssh. That program passes each command for a host to this module over a private
socket. The engine object adapts the command to the host (the path of its daemon there, the run's id in the environment),
and it runs in a new channel of the host's connection. Secrets are written to its standard input, never on its command line.
"""

import contextlib
import select
import shlex
import socket
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from ttlaunch import contract
from ttlaunch.agent import RELAY
from ttlaunch.agent.claims import is_same_user
from ttlaunch.engines.base import DaemonStart, Engine
from ttlaunch.errors import HostError, Trouble
from ttlaunch.hosts.transport.transport import Process, Transport
from ttlaunch.planning.launch_plan import EngineNames

_START_DAEMON_S = 30.0
_POLL_S = 1.0
_NO_ANSWER = 255
_SOCKET = "relay"
_PROGRAM = "ssh"


class Relay:
    """Runs the engine's commands on other hosts until it is closed."""

    def __init__(
        self,
        transports: Mapping[str, Transport],
        starts: Mapping[str, DaemonStart],
        *,
        engine: Engine,
        scratch: Path,
        is_lost: Callable[[str], bool],
    ) -> None:
        """Begin to listen.

        Args:
            transports: The connections to the hosts, by host.
            starts: How the engine's daemon is started, by host.
            engine: The engine that the daemons belong to.
            scratch: The folder for the socket and for the script that the engine calls in place of ssh.
            is_lost: Returns whether a host counts as lost; before that, its daemon may still run although its connection broke.
        """
        self._transports = transports
        self._engine = engine
        self._is_lost = is_lost
        self._starts = starts
        self._scratch = scratch
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.bind(str(scratch / _SOCKET))
        self._socket.listen(len(transports))
        command = shlex.join([sys.executable, "-I", "-S", str(RELAY), str(scratch / _SOCKET)])
        (scratch / _PROGRAM).write_text(f'exec {command} "$@"\n', encoding="utf-8")
        threading.Thread(target=self._serve, daemon=True).start()

    def settings(self, names: EngineNames) -> dict[str, str]:
        """Return the environment that makes the engine use this relay in place of ssh."""
        variable = names.remote_shell_variable
        return {variable: f"sh {self._scratch / _PROGRAM}"} if variable else {}

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # wakes the thread that accepts
        self._socket.close()

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self._socket.accept()
            except OSError:  # closed
                return
            if not is_same_user(connection):
                connection.close()
                continue
            threading.Thread(target=self._answer, args=(connection,), daemon=True).start()

    def _answer(self, connection: socket.socket) -> None:
        with (
            connection,
            contextlib.suppress(OSError, EOFError, ValueError),
        ):  # the engine's program has closed the socket
            frame = contract.read_frame(connection.recv)
            if frame is None:
                return
            status, stdout, stderr = self._run(connection, str(frame[0]["host"]), str(frame[0]["command"]))
            connection.sendall(contract.pack_frame({"status": status, "stderr": stderr}, stdout))

    def _run(self, connection: socket.socket, host: str, command: str) -> tuple[int, bytes, str]:
        """Run a command until it ends, and return its status and output; a daemon's may last as long as the run."""
        if host not in self._transports:
            asking = self._engine.signature.program
            return _NO_ANSWER, b"", f"ttlaunch: {asking} asks for `{host}`, which is no host of this run\n"
        start = self._starts[host]
        adapted = self._engine.adapt_daemon(command, start)
        try:
            process = self._transports[host].start(adapted or command, timeout_s=_START_DAEMON_S)
            try:
                # Only the daemon's shell reads secrets; any other command would take them for its own input.
                if adapted is not None:
                    process.write(_exports(start.secrets).encode(), timeout_s=_START_DAEMON_S)
                process.close_stdin()
                stdout = b"".join(_output(process, connection))
                return process.wait(timeout_s=_START_DAEMON_S), stdout, process.stderr().decode("utf-8", "replace")
            except HostError:
                if adapted is not None:
                    self._wait_while_it_lives(host, connection)
                raise
            finally:
                process.kill()
        except HostError as error:
            return _NO_ANSWER, b"", f"ttlaunch: {error}\n"

    def _wait_while_it_lives(self, host: str, connection: socket.socket) -> None:
        """Wait until the host is lost or the engine has ended its program.

        A daemon survives its connection, so the engine must not take it for ended before the host is lost.
        """
        while not self._is_lost(host) and not _has_closed(connection, within_s=_POLL_S):
            continue


def _output(process: Process, connection: socket.socket) -> Iterator[bytes]:
    """Yield what a command prints until it ends, or until the engine no longer waits for it."""
    while True:
        try:
            part = process.read(timeout_s=_POLL_S)
        except HostError as error:
            if error.trouble is not Trouble.TIMED_OUT:
                raise
            if _has_closed(connection):
                raise
            continue
        if not part:
            return
        yield part


def _has_closed(connection: socket.socket, *, within_s: float = 0.0) -> bool:
    readable, _, _ = select.select([connection], [], [], within_s)
    return bool(readable) and not connection.recv(1, socket.MSG_PEEK)


def _exports(variables: Mapping[str, str]) -> str:
    return "".join(f"export {name}={shlex.quote(value)}\n" for name, value in variables.items())
