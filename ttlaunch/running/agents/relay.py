"""Lets mpirun start its daemons on other hosts through the connections that the launcher has already.

mpirun is told that `agent/relay.py` is its ssh. Each command for a host arrives here on a private socket, is made to
fit the host (its own place of Open MPI, the run's id in the environment) and runs as one more channel. Secrets travel on
the command's standard input, never on its command line.
"""

import contextlib
import re
import select
import shlex
import socket
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from ttlaunch import contract
from ttlaunch.agent import RELAY
from ttlaunch.errors import HostError, Trouble
from ttlaunch.hosts.transport.transport import Process, Transport
from ttlaunch.planning.openmpi import relay_settings

_START_DAEMON_S = 30.0
_LOOK_S = 1.0
_NO_ANSWER = 255
_DAEMON = re.compile(r"(?:^|[\s;])(?:\S*/)?(?P<name>prted|orted)(?=\s)(?P<arguments>.*)", re.DOTALL)
_SYSTEM_PREFIXES = {"/usr", "/usr/local"}
_SOCKET = "relay"
_PROGRAM = "ssh"


@dataclass(frozen=True)
class DaemonStart:
    """How mpirun's daemon starts on one host.

    Attributes:
        prefix: Folder of Open MPI there, whose `bin` has the daemon.
        programs: Folder whose programs ranks find first: that of their interpreter.
        environment: Variables for the daemon, and so for all it starts.
        secrets: Likewise; their values show nowhere.
    """

    prefix: str
    programs: str
    environment: Mapping[str, str]
    secrets: Mapping[str, str] = field(default_factory=dict, repr=False)


class Relay:
    """Serves mpirun's requests until it is closed."""

    def __init__(
        self,
        transports: Mapping[str, Transport],
        starts: Mapping[str, DaemonStart],
        *,
        scratch: Path,
        is_lost: Callable[[str], bool],
    ) -> None:
        """Listen from now on.

        Args:
            transports: The hosts.
            starts: How daemons start on them.
            scratch: Where the socket and mpirun's substitute for ssh are put.
            is_lost: Whether a host counts as lost; while it does not, a daemon outlives the connection it was started over.
        """
        self._transports = transports
        self._is_lost = is_lost
        self._starts = starts
        self._scratch = scratch
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.bind(str(scratch / _SOCKET))
        self._socket.listen(len(transports))
        words = shlex.join([sys.executable, "-I", "-S", str(RELAY), str(scratch / _SOCKET)])
        (scratch / _PROGRAM).write_text(f'exec {words} "$@"\n', encoding="utf-8")
        threading.Thread(target=self._serve, daemon=True).start()

    def settings(self, engine_name: str) -> dict[str, str]:
        """Environment of mpirun that makes it ask here."""
        return relay_settings(engine_name, f"sh {self._scratch / _PROGRAM}")

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
            threading.Thread(target=self._answer, args=(connection,), daemon=True).start()

    def _answer(self, connection: socket.socket) -> None:
        with connection, contextlib.suppress(OSError, EOFError, ValueError):  # mpirun has gone: nobody to answer
            frame = contract.read_frame(connection.recv)
            if frame is None:
                return
            status, stdout, stderr = self._run(connection, str(frame[0]["host"]), str(frame[0]["command"]))
            connection.sendall(contract.pack_frame({"status": status, "stderr": stderr}, stdout))

    def _run(self, connection: socket.socket, host: str, command: str) -> tuple[int, bytes, str]:
        """Run a command to its end, however long that takes: a daemon's may last as long as the run."""
        if host not in self._transports:
            return _NO_ANSWER, b"", f"ttlaunch: mpirun asks for `{host}`, which is no host of this run\n"
        start = self._starts[host]
        try:
            process = self._transports[host].start(daemon_command(command, start), timeout_s=_START_DAEMON_S)
            try:
                if _DAEMON.search(command):  # nothing else reads them
                    process.write(_exports(start.secrets).encode(), timeout_s=_START_DAEMON_S)
                process.close_stdin()
                stdout = b"".join(_output(process, connection))
                return process.wait(timeout_s=_START_DAEMON_S), stdout, process.stderr().decode("utf-8", "replace")
            except HostError:
                if _DAEMON.search(command):
                    self._wait_while_it_lives(host, connection)
                raise
            finally:
                process.kill()
        except HostError as error:
            return _NO_ANSWER, b"", f"ttlaunch: {error}\n"

    def _wait_while_it_lives(self, host: str, connection: socket.socket) -> None:
        """A daemon has left the connection's session: mpirun hears nothing of a broken one until the host is lost."""
        while not self._is_lost(host) and not _has_gone(connection, within_s=_LOOK_S):
            continue


def _output(process: Process, connection: socket.socket) -> Iterator[bytes]:
    """What a command prints until it ends, or until mpirun no longer waits for it."""
    while True:
        try:
            part = process.read(timeout_s=_LOOK_S)
        except HostError as error:
            if error.trouble is not Trouble.TIMED_OUT:
                raise
            if _has_gone(connection):
                raise
            continue
        if not part:
            return
        yield part


def _has_gone(connection: socket.socket, *, within_s: float = 0.0) -> bool:
    readable, _, _ = select.select([connection], [], [], within_s)
    return bool(readable) and not connection.recv(1, socket.MSG_PEEK)


def daemon_command(command: str, start: DaemonStart) -> str:
    """The command line for a host: mpirun's own arguments for its daemon, with the host's paths.

    mpirun writes its own place into the command, which need not be that of the host. A command that starts no daemon is
    left as it is.
    """
    match = _DAEMON.search(command)
    if match is None:
        return command
    variables = dict(start.environment)
    lines = ['eval "$(cat)"']  # the secrets; standard input may be a socket, which no shell can open by name
    if start.prefix not in _SYSTEM_PREFIXES:
        variables |= dict.fromkeys(("OPAL_PREFIX", "PRTE_PREFIX", "PMIX_PREFIX"), start.prefix)
        lines.append(f"LD_LIBRARY_PATH={shlex.quote(start.prefix)}/lib${{LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}}")
        lines.append("export LD_LIBRARY_PATH")
    lines.append(f"PATH={shlex.quote(start.programs)}:{shlex.quote(start.prefix)}/bin:$PATH; export PATH")
    daemon = shlex.quote(f"{start.prefix}/bin/{match['name']}")
    return "; ".join([*lines, _exports(variables).replace("\n", "; ") + f"exec {daemon}{match['arguments']}"])


def _exports(variables: Mapping[str, str]) -> str:
    return "".join(f"export {name}={shlex.quote(value)}\n" for name, value in variables.items())
