"""Prepare one host over its transport: look at its Pythons, then send what its environment lacks and watch it grow."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.resources import files
from pathlib import Path
from typing import Any, Protocol

from ttlaunch.errors import HostError, Trouble
from ttlaunch.hosts.prepare.kind import Kind, parse_kind
from ttlaunch.hosts.prepare.lock import Lock, Wheel
from ttlaunch.hosts.prepare.requirements import IMPORTS
from ttlaunch.hosts.transport.frames import FrameStream
from ttlaunch.hosts.transport.pushed import explain_end, start_script
from ttlaunch.hosts.transport.transport import Transport
from ttlaunch.planning.engine import EngineSignature
from ttlaunch.records.host_scripts import EnvironmentAnswer, FoundPython, FoundPythons, InstallMessage

OLDEST_BASE = (3, 11)
FAILURES = frozenset({"disk", "inodes", "install", "check", "folder"})
"""What a host may name as the reason why it has no environment."""

_ON_THE_WAY = {"waiting", "progress", "need"}
_SHOWN = 40
_START_S = 10.0
_LOOK_S = 60.0
_ALONE_S = 3600.0
_STEP_S = 660.0  # more than the check on the host may take at most
_SEND_S = 60.0
_BODY_BYTES = 1 << 20


class Progress(Protocol):
    """Whoever shows how far the hosts are; called from several threads."""

    def phase(self, host: str, words: str) -> None:
        """A host has begun with something."""

    def moved(self, host: str, *, done: int, total: int) -> None:
        """It has come so many bytes far with that."""


@dataclass(frozen=True)
class Base:
    """The Pythons of a host.

    Attributes:
        path: The one an environment can be built on; None: there is none.
        kind: What it makes of the host.
        found: All that were looked at.
    """

    path: str | None
    kind: Kind | None
    found: Sequence[FoundPython]


@dataclass(frozen=True)
class Job:
    """What to make on a host.

    Attributes:
        folder: The remote folder.
        engine: What starts ranks there.
        check: Only say whether it is there.
        from_index: Let the host's pip fetch what it can reach itself.
        index_hints: Variables for that.
        fetch: Has wheels brought to this machine; raises what ends the work if that cannot be.
        path: Where a wheel lies on this machine.
    """

    folder: str
    engine: EngineSignature
    check: bool
    from_index: bool
    index_hints: Mapping[str, str]
    fetch: Callable[[Sequence[Wheel], Kind], None]
    path: Callable[[Wheel], Path]


@dataclass(frozen=True)
class Result:
    """How it ended: the last frame of the script on the host, and what was sent."""

    last: EnvironmentAnswer
    sent: int = 0
    seconds: float = field(default=0.0, compare=False)


def look(transport: Transport, *, pythons: Sequence[str], preferred_minor: int) -> Base:
    """Find the Python of a host that an environment can be built on.

    Raises:
        HostError: If it cannot be asked.
    """
    arguments = {"pythons": list(pythons), "preferred_minor": preferred_minor, "oldest": list(OLDEST_BASE)}
    stream = start_script(transport, "base_python", arguments=arguments, pythons=pythons, timeout_s=_START_S)
    said = stream.checked(FoundPythons, _expect(stream, timeout_s=_LOOK_S))
    stream.process.close_stdin()
    base = said.base if said.base and said.base.version else None
    return Base(base.path if base else None, parse_kind(base) if base else None, said.found)


def install(transport: Transport, job: Job, base: Base, lock: Lock, progress: Progress) -> Result:
    """Make a host's environment what the lock says, unless it is.

    Raises:
        HostError: If the host is lost, or something else speaks in its place.
    """
    assert base.path is not None  # noqa: S101 - hosts without a base have been reported before
    assert base.kind is not None  # noqa: S101
    began = time.monotonic()
    stream = start_script(
        transport,
        "install",
        beside=("children", "wheels", "environments"),
        arguments=_arguments(job, base, lock),
        pythons=(base.path,),
        timeout_s=_START_S,
    )
    progress.phase(transport.host, "looking")
    sent, patience_s = 0, _STEP_S
    while True:
        header = _expect(stream, timeout_s=patience_s)
        patience_s = _STEP_S
        if header.get("kind") not in _ON_THE_WAY:
            stream.process.close_stdin()
            return Result(_ending(stream, header), sent, time.monotonic() - began)
        said = stream.checked(InstallMessage, header)
        match said.kind:
            case "waiting":
                progress.phase(transport.host, f"waiting for {said.holder or 'another prepare'}")
                patience_s = _ALONE_S
            case "progress":
                _show(progress, transport.host, said)
            case _:
                sent += _send_wheels(stream, job, base.kind, lock, said.wheels or {}, progress)


def _ending(stream: FrameStream, header: Mapping[str, Any]) -> EnvironmentAnswer:
    """The last word of the script; raises `HostError` if it says nothing that we know."""
    said = stream.checked(EnvironmentAnswer, header)
    is_known = {
        "ready": said.environment is not None,
        "missing": True,
        "failed": said.what in FAILURES,
    }
    if not is_known.get(said.kind):
        raise HostError(
            stream.host, Trouble.SCRIPT, f"what came from it is no answer: `kind` is {said.kind[:_SHOWN]!r}"
        )
    return said


def _arguments(job: Job, base: Base, lock: Lock) -> dict[str, Any]:
    assert base.kind is not None  # noqa: S101
    rows = [
        {"name": w.name, "version": w.version, "sha256": w.sha256, "file": w.file, "size": w.size} for w in lock.wheels
    ]
    names = {wheel.name for wheel in lock.installed}
    return {
        "folder": job.folder,
        "check": job.check,
        "lock": lock.digest(base=str(base.path), version=base.kind.python),
        "base": base.path,
        "version": base.kind.python,
        "wheels": rows,
        "installed": [row for row in rows if row["name"] in names],
        "unpacked": sum(wheel.unpacked for wheel in lock.installed),
        "files": sum(wheel.files for wheel in lock.installed),
        "imports": {name: module for name, module in IMPORTS.items() if name in names},
        "mpi": job.engine.as_json() if {job.engine.package, "mpi4py"} <= names else None,
        "from_index": job.from_index,
        "index_hints": dict(job.index_hints),
        "checker": files("ttlaunch.agent").joinpath("check_environment.py").read_text(encoding="utf-8"),
    }


def _expect(stream: FrameStream, *, timeout_s: float) -> dict[str, Any]:
    try:
        header, _ = stream.expect(timeout_s=timeout_s)
    except HostError as error:
        reason = explain_end(stream, timeout_s=1.0)
        stream.process.kill()
        raise (reason or error) from error
    return header


def _show(progress: Progress, host: str, said: InstallMessage) -> None:
    words = {"install": "installing", "check": "checking", "index": "asking its package index"}
    progress.phase(host, words.get(said.phase, "at work"))
    if said.total is not None:
        progress.moved(host, done=said.done, total=said.total)


def _send_wheels(
    stream: FrameStream, job: Job, kind: Kind, lock: Lock, missing: Mapping[str, int], progress: Progress
) -> int:
    """Send the rest of each wheel that a host lacks; gives the number of bytes."""
    wheels = [wheel for wheel in lock.wheels if wheel.sha256 in missing]
    if wheels:
        progress.phase(stream.host, "receiving")
        job.fetch(wheels, kind)
    total = sum(wheel.size - missing[wheel.sha256] for wheel in wheels)
    sent = 0

    def told(size: int) -> None:
        nonlocal sent
        sent += size
        progress.moved(stream.host, done=sent, total=total)

    try:
        for wheel in wheels:
            _send_wheel(stream, job.path(wheel), wheel, missing[wheel.sha256], told)
        stream.send({"kind": "build"}, timeout_s=_SEND_S)
    except HostError as error:
        if error.trouble not in {Trouble.LOST, Trouble.SCRIPT}:
            raise
        # It may have ended because it cannot go on, as on a full disk: then its last frame waits to be read, which says
        # so; else reading meets the same trouble.
    return sent


def _send_wheel(stream: FrameStream, path: Path, wheel: Wheel, begin: int, told: Callable[[int], None]) -> None:
    """Send a wheel from a place in it to its end; `told` hears of every part."""
    with path.open("rb") as file:
        file.seek(begin)
        last = False
        while not last:
            body = file.read(_BODY_BYTES)
            last = file.tell() >= wheel.size
            stream.send({"kind": "wheel", "sha256": wheel.sha256, "last": last}, body, timeout_s=_SEND_S)
            told(len(body))
