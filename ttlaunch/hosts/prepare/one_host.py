"""Prepare one host over its transport: find a Python there, send the wheels that it lacks and follow the installation."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib.resources import files
from typing import Any, Protocol

from ttlaunch.errors import HostError, Trouble
from ttlaunch.hosts.prepare.kind import Kind, parse_kind
from ttlaunch.hosts.prepare.lock import Lock, Wheel
from ttlaunch.hosts.prepare.locking import Locksmith
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
    """Shows the progress of the hosts; called from several threads."""

    def phase(self, host: str, phase: str) -> None:
        """Note what a host is doing now."""

    def moved(self, host: str, *, done: int, total: int) -> None:
        """Note how many bytes of its current phase a host has done."""


@dataclass(frozen=True)
class Base:
    """The Python on a host that its environment is built on, and the kind of host that follows from it."""

    path: str
    kind: Kind


@dataclass(frozen=True)
class Job:
    """The work to do on every host.

    Attributes:
        folder: The remote folder.
        engine: The signature of the engine that starts ranks there.
        check: Whether to change nothing and only report what would be made.
        from_index: Whether a host's pip downloads from an index, instead of receiving the wheels from here.
        locksmith: Makes the locks and provides the wheels.
        progress: Shows the progress of the hosts; called from several threads.
    """

    folder: str
    engine: EngineSignature
    check: bool
    from_index: bool
    locksmith: Locksmith
    progress: Progress


@dataclass(frozen=True)
class Result:
    """The result for one host: the final answer of its script, the bytes sent, and the seconds it took."""

    answer: EnvironmentAnswer
    sent: int = 0
    seconds: float = field(default=0.0, compare=False)


def look(
    transport: Transport, *, pythons: Sequence[str], preferred_minor: int
) -> tuple[Base | None, Sequence[FoundPython]]:
    """Find the Python of a host that an environment can be built on, if there is one; also return all that were examined.

    Raises:
        HostError: If the host cannot be asked.
    """
    arguments = {"pythons": list(pythons), "preferred_minor": preferred_minor, "oldest": list(OLDEST_BASE)}
    stream = start_script(transport, "base_python", arguments=arguments, pythons=pythons, timeout_s=_START_S)
    answer = stream.checked(FoundPythons, _expect(stream, timeout_s=_LOOK_S))
    stream.process.close_stdin()
    base = answer.base if answer.base and answer.base.version else None
    return Base(base.path, parse_kind(base)) if base else None, answer.found


def install(transport: Transport, job: Job, *, base: Base, lock: Lock) -> Result:
    """Make the environment of a host from a lock, unless the host has it already.

    Raises:
        HostError: If the host is lost, or something that is not our script answers in its place.
        LaunchError: If a wheel that the host lacks cannot be fetched.
    """
    began = time.monotonic()
    stream = start_script(
        transport,
        "install",
        beside=("parent_death", "children", "environments"),
        arguments=_arguments(job, base, lock),
        pythons=(base.path,),
        timeout_s=_START_S,
    )
    job.progress.phase(transport.host, "looking")
    sent, patience_s = 0, _STEP_S
    while True:
        header = _expect(stream, timeout_s=patience_s)
        patience_s = _STEP_S
        if header.get("kind") not in _ON_THE_WAY:
            stream.process.close_stdin()
            return Result(_ending(stream, header), sent, time.monotonic() - began)
        word = stream.checked(InstallMessage, header)
        match word.kind:
            case "waiting":
                job.progress.phase(transport.host, f"waiting for {word.holder or 'another prepare'}")
                patience_s = _ALONE_S  # the other one works for as long as it takes
            case "progress":
                _show(job.progress, transport.host, word)
            case _:
                wheels = [wheel for wheel in lock.wheels if wheel.sha256 in (word.wheels or {})]
                if wheels:
                    job.progress.phase(transport.host, "receiving")
                    job.locksmith.fetch(wheels, base.kind)
                sent += _send_wheels(stream, job, wheels=wheels, received=word.wheels or {})


def _ending(stream: FrameStream, header: Mapping[str, Any]) -> EnvironmentAnswer:
    """Parse the script's last frame; raises `HostError` if the frame is not one with which the script ends."""
    answer = stream.checked(EnvironmentAnswer, header)
    is_known = {
        "ready": answer.environment is not None,
        "missing": True,
        "failed": answer.what in FAILURES,
    }
    if not is_known.get(answer.kind):
        raise HostError(
            stream.host, Trouble.SCRIPT, f"what came from it is no answer: `kind` is {answer.kind[:_SHOWN]!r}"
        )
    return answer


def _arguments(job: Job, base: Base, lock: Lock) -> dict[str, Any]:
    rows = [asdict(wheel) for wheel in lock.wheels]
    names = {wheel.name for wheel in lock.installed}
    return {
        "folder": job.folder,
        "check": job.check,
        "lock": lock.digest(base=base.path, version=base.kind.python),
        "base": base.path,
        "version": base.kind.python,
        "wheels": rows,
        "installed": [row for row in rows if row["name"] in names],
        "unpacked": sum(wheel.unpacked for wheel in lock.installed),
        "files": sum(wheel.files for wheel in lock.installed),
        "imports": {name: module for name, module in IMPORTS.items() if name in names},
        "mpi": job.engine.as_json() if {job.engine.package, "mpi4py"} <= names else None,
        "from_index": job.from_index,
        "index_hints": job.locksmith.index_hints() if job.from_index else {},
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


def _show(progress: Progress, host: str, word: InstallMessage) -> None:
    phases = {"install": "installing", "check": "checking", "index": "asking its package index"}
    progress.phase(host, phases.get(word.phase, "at work"))
    if word.total is not None:
        progress.moved(host, done=word.done, total=word.total)


def _send_wheels(stream: FrameStream, job: Job, *, wheels: Sequence[Wheel], received: Mapping[str, int]) -> int:
    """Send the rest of each wheel, given how many bytes the host has `received`; returns the number of bytes sent."""
    total = sum(wheel.size - received[wheel.sha256] for wheel in wheels)
    sent = 0
    try:
        for wheel in wheels:
            with job.locksmith.store.path(wheel).open("rb") as file:
                file.seek(received[wheel.sha256])
                last = False
                while not last:
                    body = file.read(_BODY_BYTES)
                    last = file.tell() >= wheel.size
                    stream.send({"kind": "wheel", "sha256": wheel.sha256, "last": last}, body, timeout_s=_SEND_S)
                    sent += len(body)
                    job.progress.moved(stream.host, done=sent, total=total)
        stream.send({"kind": "build"}, timeout_s=_SEND_S)
    except HostError as error:
        if error.trouble not in {Trouble.LOST, Trouble.SCRIPT}:
            raise
        # The script may have ended because it cannot go on, as on a full disk: then its last frame, which gives the
        # reason, waits to be read; else reading meets the same trouble.
    return sent
