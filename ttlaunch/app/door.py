"""The door of a serving run: the web server through which clients ask, as a child of the run's supervisor.

It outlives the ranks, so it can always say how they are, and open streams go on after a restart. Its sockets listen before
anything is started: a port that is taken is a mistake of the command line. It ends when its standard input does.
"""

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from ttlaunch import contract
from ttlaunch.app.execute import FolderView, RunOptions
from ttlaunch.app.held_weights import hold_weights
from ttlaunch.diagnostics import Diagnostic, LaunchError, listed, shown, usage_mistake
from ttlaunch.quick_dataclass import dataclass
from ttlaunch.serving import wire
from ttlaunch.system_reason import system_reason
from ttlaunch.web.addresses import KeyRefusedError, check_key, is_loopback, listen, read_key

if TYPE_CHECKING:
    from ttlaunch.app.outcome import Outcome
    from ttlaunch.running.runs.run_folder import RunFolder

KEY_VARIABLE = "TTLAUNCH_SERVE_KEY"
_LIBRARIES = ("starlette", "uvicorn")
_SOCKET = "serve.sock"
_LEAVING_S = 5.0
_LOOK_S = 0.5
_LONGEST_REASON = 1000
_HIGHEST_PORT = 65535
_NAME = re.compile(r"[A-Za-z0-9._-]{1,253}|\[[0-9A-Fa-f:.]{2,45}\]")


@dataclass(frozen=True)
class DoorOptions:
    """Where the door listens, and to whom it opens.

    Attributes:
        host: The address to listen on.
        api_port: The port of the API; 0 for any.
        page_port: The port of the chat page; 0 for any.
        key_file: A file with the key that clients have to send; None for that of the environment, if there is one.
        names: Further names that a request's `Host` may have.
        is_private: Whether receipts have no prompts.
    """

    host: str = "127.0.0.1"
    api_port: int = 8080
    page_port: int = 5050
    key_file: Path | None = None
    names: tuple[str, ...] = ()
    is_private: bool = False


@dataclass(frozen=True)
class OpenPorts:
    """Sockets that listen already, for a door that is started later.

    Attributes:
        api: The API's.
        page: The chat page's.
        key: What clients have to send; None if they need nothing.
    """

    options: DoorOptions
    api: socket.socket
    page: socket.socket
    key: str | None

    @property
    def urls(self) -> tuple[str, str]:
        """Return the addresses of the chat page and of the API, as a browser on this machine takes them."""
        host = self.options.host if ":" not in self.options.host else f"[{self.options.host}]"
        page, api = (f"http://{host}:{one.getsockname()[1]}" for one in (self.page, self.api))
        return page, api

    def close(self) -> None:
        """Close this process's sockets."""
        self.api.close()
        self.page.close()


def check_door(options: DoorOptions) -> None:
    """Refuse what `open_ports` would refuse, but a port that is taken now and may be free when the door is opened.

    Raises:
        LaunchError: As for `open_ports`.
    """
    open_ports(replace(options, api_port=0, page_port=0) if options.api_port != options.page_port else options).close()


def open_ports(options: DoorOptions) -> OpenPorts:
    """Listen, and read the clients' key; from then on it is no variable of this process any more, so no rank inherits it.

    Raises:
        LaunchError: A library is missing, a port is taken, or others could ask without a key; each has a diagnostic.
    """
    missing = [name for name in _LIBRARIES if find_spec(name) is None]
    if missing:
        hint = "`pip install 'ttlaunch[serve]'`"
        raise LaunchError([usage_mistake(f"`ttlaunch serve` needs the library `{missing[0]}`", hint)])
    key, found = _find_key(options)
    found += [
        usage_mistake(f"`--allow-host {shown(name)}` is no name of a host", "`--allow-host NAME`, without a port")
        for name in options.names
        if not _NAME.fullmatch(name)
    ]
    if options.api_port == options.page_port != 0:
        message = f"`--port` and `--api-port` are both {options.api_port}: the page and the API have a port each"
        raise LaunchError([*found, usage_mistake(message, "leave one of them out, or let it be 0 for any free port")])
    sockets, refused = _listen(options)
    if found or refused:
        for one in sockets:
            one.close()
        raise LaunchError([*found, *refused])
    api, page = sockets
    return OpenPorts(options, api, page, key)


def _find_key(options: DoorOptions) -> tuple[str | None, list[Diagnostic]]:
    key = os.environ.pop(KEY_VARIABLE, None)
    try:
        if options.key_file is not None:
            key = read_key(options.key_file)
        elif key is not None:
            check_key(key, f"${KEY_VARIABLE}")
        elif not is_loopback(options.host):
            message = f"others can reach `--host {shown(options.host)}`, so clients need a key"
            return None, [usage_mistake(message, f"`--key-file FILE` with mode 0600, or ${KEY_VARIABLE}")]
    except KeyRefusedError as error:
        option = "`--key-file`: " if options.key_file is not None else ""
        return None, [usage_mistake(option + shown(str(error), longest=_LONGEST_REASON))]
    return key, []


def _listen(options: DoorOptions) -> tuple[list[socket.socket], list[Diagnostic]]:
    """Listen on both ports; return the sockets, and why there are fewer."""
    sockets: list[socket.socket] = []
    found: list[Diagnostic] = []
    for option, port in (("--api-port", options.api_port), ("--port", options.page_port)):
        try:
            sockets.append(listen(options.host, port))
        except (OSError, UnicodeError) as error:
            found.append(_cannot_listen(option, port, error, host=options.host))
            if _is_no_address(error):
                break  # on neither port
    return sockets, found


def _is_no_address(error: OSError | UnicodeError) -> bool:
    return isinstance(error, socket.gaierror | UnicodeError)


def _cannot_listen(option: str, port: int, error: OSError | UnicodeError, *, host: str) -> Diagnostic:
    if _is_no_address(error):
        return usage_mistake(f"`--host {shown(host)}` is no address of this machine", "`--host 127.0.0.1`")
    message = f"nothing can listen on port {port} of {shown(host)}: {system_reason(error)}"
    free = "0" if port == 0 else str(port + 1 if port < _HIGHEST_PORT else port - 1)
    return usage_mistake(message, f"`{option} {free}`, or `{option} 0` for any free port")


class Door:
    """The process, and what the supervisor tells it of the run; it is started with the first folder of the run."""

    def __init__(self, ports: OpenPorts, head: Path) -> None:
        self._ports, self._head, self._urls = ports, head, ports.urls
        self._process: subprocess.Popen[bytes] | None = None
        self._is_closing, self._lock = threading.Event(), threading.Lock()
        self._reason = "the run has ended"
        self._folder: RunFolder | None = None
        self._is_retiring = False

    def begin(self, folder: "RunFolder") -> None:
        """Start the process, with what it has to complain about in the file of the supervisor.

        Raises:
            OSError: It cannot be started.
        """
        if self._process is None:
            self._process = self._start(folder)
        self._note_addresses(folder)
        self._folder, self._is_retiring = folder, False
        self._tell("loading", None)
        threading.Thread(target=self._tell_silences, args=(folder,), daemon=True).start()

    def ended(self, outcome: "Outcome", goes_on: bool) -> None:  # noqa: FBT001 - called by position, as a function
        """Tell clients why the ranks have ended, and whether others follow."""
        failure = outcome.report.failure
        if failure is None:
            reason = "newer weights are being loaded" if goes_on else "the run was stopped"
        else:
            reason = failure.message
        self._reason, self._folder = reason, None
        self._tell("restarting" if goes_on else "failed", reason)

    def retire(self, step: int) -> None:
        """Have the ranks end as soon as no text is open, so that others can load the weights of a later step."""
        self._is_retiring = True
        self._tell("retiring", f"the weights of step {step} are being loaded")

    def close(self) -> None:
        """End streams that are still open, and the process."""
        self._is_closing.set()
        process, self._process = self._process, None
        if process is None:
            self._ports.close()
            return
        self._say(process, "failed", self._reason)  # a start that was to follow may have failed before its ranks
        assert process.stdin is not None  # noqa: S101 - `_start` has asked for it
        with contextlib.suppress(OSError):
            process.stdin.close()
        try:
            process.wait(_LEAVING_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

    def _start(self, folder: "RunFolder") -> subprocess.Popen[bytes]:
        options = self._ports.options
        numbers = [self._ports.api.fileno(), self._ports.page.fileno()]
        command = [
            *(sys.executable, "-m", "ttlaunch.serving.door", "--socket", str(self._head), "--host", options.host)
        ]
        command += ["--listening", *map(str, numbers)]
        command += [word for name in options.names for word in ("--allow-host", name)]
        command += ["--private-receipts"] if options.is_private else []
        environment = dict(os.environ) if self._ports.key is None else {**os.environ, KEY_VARIABLE: self._ports.key}
        process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, env=environment, pass_fds=numbers
        )
        self._ports.close()
        threading.Thread(target=self._end_run_with, args=(process, folder), daemon=True).start()
        return process

    def _note_addresses(self, folder: "RunFolder") -> None:
        """Write where clients can ask into the run's folder, for views; the key stays with who was given it."""
        from ttlaunch.running.runs.facts import DOOR_FILE

        page, api = self._urls
        content = {"page": page, "api": api, "needs_key": self._ports.key is not None}
        with contextlib.suppress(OSError):  # views do without
            folder.file(DOOR_FILE).write_text(json.dumps(content) + "\n", encoding="utf-8")

    def _end_run_with(self, process: subprocess.Popen[bytes], folder: "RunFolder") -> None:
        """End the run, as Ctrl-C does, when the process ends by itself: nobody could ask the ranks any more."""
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        if not self._is_closing.is_set():
            status = process.wait()
            how = f"was killed by signal {-status}" if status < 0 else f"ended with status {status}"
            latest = self._folder or folder  # another one since a restart
            FolderView(latest).output(
                "stderr", f"the process that answers clients {how}; the run ends with it".encode()
            )
            os.kill(os.getpid(), signal.SIGTERM)

    def _tell_silences(self, folder: "RunFolder") -> None:
        """Tell clients which host or rank does not answer: until it is back or lost, nobody else knows more."""
        from ttlaunch.running.runs.files import Tail
        from ttlaunch.running.runs.run_folder import read_event

        events, silences = Tail(folder.file(contract.EVENTS_FILE)), Silences(folder.path)
        told: str | None = None
        while not self._is_closing.wait(_LOOK_S) and self._folder is folder:
            for line in events.read():
                with contextlib.suppress(ValueError, KeyError, TypeError):
                    silences.take(read_event(line))
            if silences.reason != told and self._folder is folder and not self._is_retiring:
                told = silences.reason
                self._tell("running", told)

    def _tell(self, state: str, reason: str | None) -> None:
        if self._process is not None:
            self._say(self._process, state, reason)

    def _say(self, process: subprocess.Popen[bytes], state: str, reason: str | None) -> None:
        stdin: IO[bytes] | None = process.stdin
        assert stdin is not None  # noqa: S101 - `_start` has asked for it
        short = None if reason is None else shown(reason, longest=_LONGEST_REASON)
        message = wire.encode(wire.RunState(state=state, reason=short))
        with self._lock, contextlib.suppress(OSError, ValueError):  # it was killed, which ends the run, or is closed
            stdin.write(message)
            stdin.flush()


class Silences:
    """Which hosts and ranks of a run do not answer, by the run's events."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._hosts, self._ranks = set[str](), dict[int, str]()

    def take(self, event: Mapping[str, Any]) -> None:
        """Learn from the next event.

        Raises:
            KeyError, TypeError, ValueError: It is none that a launcher has written.
        """
        match event["event"]:
            case "host_silent":
                self._hosts.add(event["host"])
            case "host_back":
                self._hosts.discard(event["host"])
            case "rank_stopped":
                self._ranks[event["rank"]] = self._name(event["rank"])
            case "rank_goes_on":
                self._ranks.pop(event["rank"], None)

    @property
    def reason(self) -> str | None:
        """Why no token passes every stage; None if nothing is known."""
        does_not = "does not" if len(self._hosts) == 1 else "do not"
        parts = [f"{listed(sorted(self._hosts), last='and', quote='')} {does_not} answer"] if self._hosts else []
        parts += [f"{self._ranks[rank]} was stopped by a signal" for rank in sorted(self._ranks)]
        return "; ".join(parts) or None

    def _name(self, rank: int) -> str:
        from ttlaunch.running.runs.facts import read_ranks

        with contextlib.suppress(OSError):
            for row in read_ranks(self._path):
                if row.rank == rank:
                    return f"rank {rank} ({row.role}, {row.host})"
        return f"rank {rank}"


@contextmanager
def serving_door(ports: OpenPorts, options: RunOptions) -> Iterator[tuple[Door, RunOptions]]:
    """Have a door for all starts of a run; yields it, and the options with the socket on which the head has to answer.

    Raises:
        RunFolderError: There is no folder for the socket.
    """
    from ttlaunch.running.runs.run_folder import scratch_folder

    with scratch_folder() as scratch:
        place = scratch / _SOCKET
        door = Door(ports, place)
        try:
            yield door, replace(options, answers_at=str(place))
        finally:
            door.close()


def telling(
    door: Door, begun: "Callable[[RunFolder], None]", *, served: Callable[[], Path | None]
) -> "Callable[[RunFolder], None]":
    """Return a function that tells the door, too, of each start of the run, and holds the checkpoint that it serves, if it is one."""

    def begun_and_told(folder: "RunFolder") -> None:
        begun(folder)
        if checkpoint := served():
            hold_weights(checkpoint, folder.path)
        door.begin(folder)

    return begun_and_told


def described(urls: Sequence[str]) -> list[str]:
    """Return the lines that say where the model can be asked."""
    page, api = urls
    return [f"chat page   {page}", f"API         {api}/v1 (OpenAI's), {api}/chat"]
