"""Run scripts of `ttlaunch.agent` on a host that has only Python: their text is sent through standard input.

Nothing is written to the host's disk, and the command line has only a short loader. It reads modules and then the script to
call, with its arguments. The rest of standard input, and the output, are frames between the script and its caller. A script
that is not the last one runs in a fork of the loader, which then reads the next one: a host starts Python once for all of them.

The loader says which bytecode its Python understands. If this Python has the same, modules are sent as bytecode, which this
machine has in its cache: compiling them takes longer than anything else that a warm host does for a start.
"""

import json
import marshal
import shlex
import struct
import threading
import zlib
from collections.abc import Mapping, Sequence
from functools import cache
from importlib.util import MAGIC_NUMBER, find_spec
from types import CodeType
from typing import Any

from ttlaunch.errors import HostError, Trouble
from ttlaunch.hosts.transport.frames import PYTHON_IS_UP, FrameStream
from ttlaunch.hosts.transport.transport import Process, Transport

OLDEST_PYTHON = (3, 9)
PYTHONS = ("python3", "/usr/bin/python3", "/usr/local/bin/python3", *(f"python3.{n}" for n in range(15, 8, -1)))
"""Where scripts look for an interpreter, after those that the caller names."""

_PACKING = threading.Lock()
_END_S = 1.0
_NO_PYTHON = 78
_TOO_OLD = 79
_CODE = b"m"  # the first byte of modules as bytecode; JSON never begins with it
_NOT_STARTED = "126|127"  # a shell's exit status for a program that exists and cannot be started

# Understood by any Python, so that one that is too old can say so. Keeps the current folder out of the import path, and
# reads not one byte more than the text, so that the script may read standard input as it likes.
_LOADER = f"""\
import sys
if sys.version_info < {OLDEST_PYTHON}:
    sys.stderr.write("python %s is %d.%d\\n" % (sys.executable, sys.version_info[0], sys.version_info[1]))
    sys.exit({_TOO_OLD})
sys.path[:] = [p for p in sys.path if p]
import json, marshal, os, struct, types, zlib
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
    text = zlib.decompress(take(struct.unpack(">I", take(4))[0]))
    return marshal.loads(text[1:]) if text[:1] == {_CODE!r} else json.loads(text)
def load(modules):
    for name, text in modules:
        if name not in sys.modules:
            module = sys.modules[name] = types.ModuleType(name)
            module.__file__ = name
            module.__path__ = []
            parent, _, child = name.rpartition(".")
            if parent:
                setattr(sys.modules[parent], child, module)
            exec(compile(text, name, "exec") if isinstance(text, str) else text, module.__dict__)
magic = getattr(sys.modules.get("_frozen_importlib_external"), "MAGIC_NUMBER", b"")
hello = json.dumps({{"kind": "{PYTHON_IS_UP}", "bytecode": magic.hex()}}).encode()
os.write(1, struct.pack(">II", len(hello), 0) + hello)
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
        self._bytecode = ""
        self._stream: FrameStream | None = None  # of the newest script
        self._owes_ahead = False

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
        then = bool(self._ahead) and not is_last and self._process is None
        script = {"name": f"ttlaunch.agent.{name}", "arguments": dict(arguments or {}), "last": is_last, "then": then}
        if self._process is None:
            self._process = start_interpreter(self._transport, pythons=pythons, timeout_s=timeout_s)
        if self._stream is None:
            stream = FrameStream(self._transport.host, self._process)
            self._learn_bytecode(stream, timeout_s=timeout_s)
        else:
            self.send_ahead(timeout_s=timeout_s)
            stream = FrameStream(self._transport.host, self._process)
        self._stream, self._owes_ahead = stream, then
        self._write(stream, self._modules((*beside, name)) + _packed(script), timeout_s=timeout_s)
        return stream

    def _learn_bytecode(self, stream: FrameStream, *, timeout_s: float) -> None:
        """Wait for the first word of Python: this round trip takes less time than to compile the text of the first script."""
        try:
            stream.wait_for_python(timeout_s=timeout_s)
        except HostError:
            self.drop()
            raise
        self._bytecode = stream.bytecode

    def send_ahead(self, *, timeout_s: float) -> None:
        """Send the modules for later scripts, once the first script has answered something; without effect later.

        Raises:
            HostError: As `start`.
        """
        if self._stream is None:
            return
        self._bytecode = self._bytecode or self._stream.bytecode
        if self._owes_ahead:
            self._owes_ahead = False
            self._write(self._stream, self._modules(self._ahead), timeout_s=timeout_s)

    def _modules(self, names: tuple[str, ...]) -> bytes:
        return _modules(names, as_code=self._bytecode == MAGIC_NUMBER.hex())

    def _write(self, stream: FrameStream, sent: bytes, *, timeout_s: float) -> None:
        try:
            stream.process.write(sent, timeout_s=timeout_s)
        except HostError as error:
            if error.trouble is not Trouble.LOST:
                raise
            raise explain_end(stream, timeout_s=_END_S) or error from error

    def drop(self) -> None:
        """End it, and the script that runs, as `Process.kill` does."""
        if self._process is not None:
            self._process.kill()
            self._process = self._stream = None
            self._bytecode, self._owes_ahead = "", False


def _modules(names: tuple[str, ...], *, as_code: bool = False) -> bytes:
    """Return modules of `ttlaunch.agent`, packed; hosts ask for the same ones at the same time, so one packs them for all."""
    with _PACKING:
        return _packed_modules(names, as_code=as_code)


@cache
def _packed_modules(names: tuple[str, ...], *, as_code: bool) -> bytes:
    if as_code:
        packages = [(package, compile("", package, "exec")) for package in ("ttlaunch", "ttlaunch.agent")]
        modules = [
            ("ttlaunch.contract", _code("contract")),
            *((f"ttlaunch.agent.{name}", _code(f"agent.{name}")) for name in names),
        ]
        # All hosts wait for it, and better packing takes three times as long for a tenth of the bytes.
        return _packed_bytes(_CODE + marshal.dumps([*packages, *modules]), level=1)
    known = [("ttlaunch", ""), ("ttlaunch.contract", _text("contract.py")), ("ttlaunch.agent", "")]
    return _packed([*known, *((f"ttlaunch.agent.{name}", _source(name)) for name in names)])


def _packed(content: Any) -> bytes:
    return _packed_bytes(json.dumps(content).encode())


def _packed_bytes(content: bytes, *, level: int = -1) -> bytes:
    packed = zlib.compress(content, level)  # what fits into a connection's first flight saves round trips
    return struct.pack(">I", len(packed)) + packed


def _code(name: str) -> CodeType:
    """Return the bytecode of a module of ttlaunch, from Python's cache if it is there, without its table of lines."""
    spec = find_spec(f"ttlaunch.{name}")
    get_code = getattr(spec and spec.loader, "get_code", None)
    code = get_code(f"ttlaunch.{name}") if get_code else None
    if code is None:  # no file of this module
        code = compile(_source(name.removeprefix("agent.")), name, "exec")
    return _without_lines(code)


def _without_lines(code: CodeType) -> CodeType:
    consts = tuple(_without_lines(one) if isinstance(one, CodeType) else one for one in code.co_consts)
    return code.replace(co_linetable=b"", co_consts=consts)


def _source(name: str) -> str:
    return _text("agent", f"{name}.py")


def _text(*place: str) -> str:
    from importlib.resources import files  # noqa: PLC0415 - takes 10 ms, and only hosts with another Python need texts

    return files("ttlaunch").joinpath(*place).read_text(encoding="utf-8")


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
