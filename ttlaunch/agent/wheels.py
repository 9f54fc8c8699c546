"""Take in wheels on a host: by content, only what is missing, continuing what was cut off, never valid half-received.

    <remote folder>/wheels/<sha256>/<file>.whl    received and verified
    <remote folder>/wheels/<sha256>.part          unfinished

Python 3.9 and the standard library only.
"""

from __future__ import annotations

import contextlib
import hashlib
import os

from ttlaunch.agent.children import FailedError, send

TYPE_CHECKING = False  # what typing.TYPE_CHECKING is, without the time to import it
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    Record = dict[str, Any]

_CHUNK = 1 << 20
_SPARE_BYTES = 64 << 20


def check_space(wheels: list[Record], folder: str, *, unpacked: int, files: int) -> None:
    """Refuse to begin what the file system has no room for.

    Args:
        wheels: All of the lock; those that are here already cost nothing more.
        folder: The remote folder.
        unpacked: Bytes of the installed environment.
        files: How many files it has.
    """
    needed = sum(wheel["size"] - _received(wheel, folder) for wheel in wheels) + unpacked + _SPARE_BYTES
    free, inodes = space(folder)
    if free < needed:
        raise FailedError("disk", needed=needed, free=free)
    if inodes is not None and inodes < files:
        raise FailedError("inodes", needed=files, free=inodes)


def space(folder: str) -> tuple[int, int | None]:
    """Bytes and files that the user may still write in a folder; None where files are not counted."""
    while not os.path.exists(folder):
        folder = os.path.dirname(folder)
    found = os.statvfs(folder)
    return found.f_bavail * found.f_frsize, found.f_favail if found.f_files else None


def place(wheel: Record, folder: str) -> str:
    """Where a wheel lies once it has been received."""
    return os.path.join(folder, "wheels", wheel["sha256"], wheel["file"])


def receive(wheels: list[Record], folder: str, next_frame: Callable[[], tuple[Record, bytes]]) -> None:
    """Ask for the wheels that are missing and take them in."""
    missing = {wheel["sha256"]: wheel for wheel in wheels if not os.path.exists(place(wheel, folder))}
    send({"kind": "need", "wheels": {sha256: _received(wheel, folder) for sha256, wheel in missing.items()}})
    while True:
        header, body = next_frame()
        if header["kind"] == "build":
            return
        wheel = missing[header["sha256"]]
        with open(_part(wheel, folder), "ab", buffering=0) as file:
            view = memoryview(body)
            while view:
                view = view[file.write(view) :]
        if header["last"]:
            _keep(wheel, folder)


def _part(wheel: Record, folder: str) -> str:
    return os.path.join(folder, "wheels", wheel["sha256"] + ".part")


def _received(wheel: Record, folder: str) -> int:
    """How many bytes of a wheel are here; all of them count only once they are verified."""
    size = int(wheel["size"])
    if os.path.exists(place(wheel, folder)):
        return size
    with contextlib.suppress(FileNotFoundError):
        part = _part(wheel, folder)
        if os.path.getsize(part) > size:
            os.unlink(part)
        return os.path.getsize(part)
    return 0


def _keep(wheel: Record, folder: str) -> None:
    """Give a wheel that is complete its name, if it is what was sent."""
    digest = hashlib.sha256()
    part, whole = _part(wheel, folder), place(wheel, folder)
    with open(part, "rb") as file:
        for chunk in iter(lambda: file.read(_CHUNK), b""):
            digest.update(chunk)
    if digest.hexdigest() != wheel["sha256"]:
        os.unlink(part)
        raise FailedError("install", lines=[f"{wheel['file']} arrived damaged; what came of it has been removed"])
    os.makedirs(os.path.dirname(whole), exist_ok=True)
    os.replace(part, whole)
