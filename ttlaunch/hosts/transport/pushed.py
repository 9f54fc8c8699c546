"""Run scripts of `ttlaunch.agent` on a host that has only Python: their text is sent through standard input.

Nothing is written to the host's disk, and the command line has only a short loader. It reads modules and then the script to
call, with its arguments. The rest of standard input, and the output, are frames between the script and its caller. A script
that is not the last one runs in a fork of the loader, which then reads the next one: a host starts Python once for all of them.
"""

import json
import shlex
import struct
import threading
import zlib
from collections.abc import Mapping, Sequence
from functools import cache
from importlib.resources import files
from typing import Any

from ttlaunch.errors import HostError, Trouble
from ttlaunch.hosts.transport.frames import FrameStream
from ttlaunch.hosts.transport.transport import Process, Transport

OLDEST_PYTHON = (3, 9)
PYTHONS = ("python3", "/usr/bin/python3", "/usr/local/bin/python3", *(f"python3.{n}" for n in range(15, 8, -1)))
"""Where scripts look for an interpreter, after those that the caller names."""

_PACKING = threading.Lock()
_END_S = 1.0
_NO_PYTHON = 78
_TOO_OLD = 79
_NOT_STARTED = "126|127"  # a shell's exit status for a program that exists and cannot be started

# Understood by any Python, so that one that is too old can say so. Keeps the current folder out of the import path, and
# reads not one byte more than the text, so that the script may read standard input as it likes.
_LOADER = f"""\
import sys
if sys.version_info < {OLDEST_PYTHON}:
    sys.stderr.write("python %s is %d.%d\\n" % (sys.executable, sys.version_info[0], sys.version_info[1]))
    sys.exit({_TOO_OLD})
sys.path[:] = [p for p in sys.path if p]
import json, os, struct, types, zlib
def take(size):
    parts = []
    while size:
        part = os.read(0, size)
        if not part:
            sys.exit(0)
        parts.append(part)
        size -= len(part)
    return b"".join(parts)
def order():
    return json.loads(zlib.decompress(take(struct.unpack(">I", take(4))[0])))
def load(modules):
    for name, text in modules:
        if name not in sys.modules:
            module = sys.modules[name] = types.ModuleType(name)
            module.__file__ = name
            module.__path__ = []
            parent, _, child = name.rpartition(".")
            if parent:
                setattr(sys.modules[parent], child, module)
            exec(compile(text, name, "exec"), module.__dict__)
while True:
    load(order())
    script = order()
    if script["last"]:
        break
    child = os.fork()
    if not child:
        break
    if script["then"]:
        load(order())
    if os.waitpid(child, 0)[1]:
        sys.exit(1)
sys.exit(sys.modules[script["name"]].main(script["arguments"]))
"""


def start_interpreter(transport: Transport, *, pythons: Sequence[str] = (), timeout_s: float) -> Process:
    """Start a Python on a host that waits for a script, so that its start-up passes while the launcher does other work.

    Args:
        transport: The host; connected already.
        pythons: Interpreters to try first; `~/` at the start means the user's home on the host.
        timeout_s: The time allowed for starting it.

    Raises:
        HostError: As `Transport.start`.
    """
    return transport.start(_command(pythons), timeout_s=timeout_s)


def start_script(
    transport: Transport,
    name: str,
    *,
    beside: Sequence[str] = (),
    arguments: Mapping[str, Any] | None = None,
    pythons: Sequence[str] = (),
    interpreter: Process | None = None,
    timeout_s: float,
) -> FrameStream:
    """Start `ttlaunch/agent/<name>.py` on a host by calling its `main(arguments)`.

    Args:
        transport: The host; connected already.
        name: The module's name. It may import `ttlaunch.contract` and the standard library of Python 3.9.
        beside: Further modules of `ttlaunch.agent` that it imports.
        arguments: JSON, handed to `main`; they show on no command line.
        pythons: As for `start_interpreter`.
        interpreter: An interpreter that is already waiting on the host; None to start one.
        timeout_s: The time allowed for starting it.

    Raises:
        HostError: For the reasons of `Transport.start`. If the host has no Python, only the first `receive` may fail: see
            `explain_end`.
    """
    ready = Interpreter(transport, process=interpreter)
    return ready.start(name, beside=beside, arguments=arguments, pythons=pythons, is_last=True, timeout_s=timeout_s)


class Interpreter:
    """A Python on a host that runs scripts one after another.

    It ends with a script that fails, with `drop`, and with the connection; the next script then gets another one.
    """

    def __init__(self, transport: Transport, *, ahead: Sequence[str] = (), process: Process | None = None) -> None:
        """Prepare it; nothing is started on the host.

        Args:
            transport: The host; connected before the first script.
            ahead: Modules of `ttlaunch.agent` for later scripts, which the host compiles while the first one runs, which must
                read nothing then.
            process: A Python that is waiting on the host already.
        """
        self._transport, self._ahead, self._process = transport, tuple(ahead), process

    def start(
        self,
        name: str,
        *,
        beside: Sequence[str] = (),
        arguments: Mapping[str, Any] | None = None,
        pythons: Sequence[str] = (),
        is_last: bool = False,
        timeout_s: float,
    ) -> FrameStream:
        """Start a script; the one before it has ended, or ends without having read anything of this one.

        Args:
            name: As for `start_script`, with `beside` and `arguments`.
            beside: Further modules.
            arguments: JSON, handed to `main`.
            pythons: As for `start_interpreter`; without effect where Python is running already.
            is_last: Whether no other script follows. It then runs in the process itself.
            timeout_s: The time allowed for starting it.

        Raises:
            HostError: As `start_script`.
        """
        ahead = () if is_last or self._process is not None else self._ahead
        script = {"name": f"ttlaunch.agent.{name}", "arguments": dict(arguments or {})}
        sent = _modules((*beside, name)) + _packed({**script, "last": is_last, "then": bool(ahead)})
        sent += _modules(ahead) if ahead else b""
        if self._process is None:
            self._process = start_interpreter(self._transport, pythons=pythons, timeout_s=timeout_s)
        stream = FrameStream(self._transport.host, self._process)
        try:
            stream.process.write(sent, timeout_s=timeout_s)
        except HostError as error:
            if error.trouble is not Trouble.LOST:
                raise
            raise explain_end(stream, timeout_s=_END_S) or error from error
        return stream

    def drop(self) -> None:
        """End it, and the script that runs, as `Process.kill` does."""
        if self._process is not None:
            self._process.kill()
            self._process = None


def _modules(names: tuple[str, ...]) -> bytes:
    """Return the packed text of modules of `ttlaunch.agent`; hosts ask for the same ones at the same time, so one packs them for all."""
    with _PACKING:
        return _packed_modules(names)


@cache
def _packed_modules(names: tuple[str, ...]) -> bytes:
    contract = files("ttlaunch").joinpath("contract.py").read_text(encoding="utf-8")
    known = [("ttlaunch", ""), ("ttlaunch.contract", contract), ("ttlaunch.agent", "")]
    return _packed([*known, *((f"ttlaunch.agent.{name}", _source(name)) for name in names)])


def _packed(content: Any) -> bytes:
    packed = zlib.compress(json.dumps(content).encode())  # what fits into a connection's first flight saves round trips
    return struct.pack(">I", len(packed)) + packed


def _source(name: str) -> str:
    return files("ttlaunch.agent").joinpath(f"{name}.py").read_text(encoding="utf-8")


def explain_end(stream: FrameStream, *, timeout_s: float) -> HostError | None:
    """The error for a script that ended without an answer because no Python could run it; None for any other reason."""
    try:
        status = stream.process.wait(timeout_s=timeout_s)
    except HostError:
        return None
    lines = stream.process.stderr().decode("utf-8", "replace").strip().splitlines()
    oldest = ".".join(map(str, OLDEST_PYTHON))
    if status == _NO_PYTHON:
        return HostError(
            stream.host,
            Trouble.NO_PYTHON,
            f"no Python {oldest} or newer: looked for {', '.join(PYTHONS[:3])} and others",
            hints=("`apt install python3`, or name one with `python:` in cluster.yaml",),
        )
    if status == _TOO_OLD:
        versions = [line.removeprefix("python ") for line in lines if line.startswith("python ")]
        return HostError(
            stream.host,
            Trouble.NO_PYTHON,
            f"its Python is too old: {', '.join(dict.fromkeys(versions))}; {oldest} or newer is needed",
            hints=("install a newer Python, or name one with `python:` in cluster.yaml",),
        )
    return None


def _command(pythons: Sequence[str]) -> str:
    """A shell command that tries interpreters in turn.

    An interpreter that cannot start or is too old reads nothing from standard input, so the next one still gets the script.
    """
    names = " ".join(_quoted(name) for name in dict.fromkeys([*pythons, *PYTHONS]))
    return (
        f"old={_NO_PYTHON}; for python in {names}; do "
        'command -v "$python" >/dev/null 2>&1 || continue; '
        f'"$python" -E -s -S -c {shlex.quote(_LOADER)}; status=$?; '
        f'case "$status" in {_TOO_OLD}) old={_TOO_OLD};; {_NOT_STARTED}) ;; *) exit "$status";; esac; done; exit "$old"'
    )


def _quoted(path: str) -> str:
    return f'"$HOME"/{shlex.quote(path[2:])}' if path.startswith("~/") else shlex.quote(path)
