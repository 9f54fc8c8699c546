"""On a host, the Python environments for ranks and the wheels that they are made from.

    <remote folder>/envs/<lock>-<n>/              an environment; valid only once it has its record
    <remote folder>/env                           a link to the one that new runs use, swapped by one rename
    <remote folder>/wheels/<sha256>/<file>.whl    received and verified
    <remote folder>/wheels/<sha256>.part          partly received; the next `ttlaunch prepare` continues it

Python 3.9 and the standard library only.
"""

from __future__ import annotations

import contextlib
import fcntl
import glob
import hashlib
import json
import os
import shutil

from ttlaunch import contract
from ttlaunch.agent.children import FailedError

TYPE_CHECKING = False  # what typing.TYPE_CHECKING is, without the time to import it
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from ttlaunch.agent.children import Listener

    Record = dict[str, Any]

RECORD = "ttlaunch.json"
LOCK = ".lock"
_CHECK_S = 600.0
_CHUNK = 1 << 20
_SPARE_BYTES = 64 << 20
_NETWORK_FILE_SYSTEMS = ("nfs", "cifs", "smb", "lustre", "gpfs", "beegfs", "ceph", "glusterfs", "fuse", "9p", "afs")


def find_ready(wanted: Record, folder: str, listener: Listener) -> tuple[str | None, str]:
    """Find a valid environment for the wanted lock file, `env` first; return its path, or None and the reason."""
    current = os.path.realpath(os.path.join(folder, "env"))
    others = [os.path.join(folder, "envs", name) for name in sorted(entries(os.path.join(folder, "envs")))]
    why = "no environment has been made"
    if os.path.isdir(current):
        why = "its environment was made from other packages, or with another Python"
    for path in dict.fromkeys([current, *others]):
        if os.path.basename(path).rpartition("-")[0] != wanted["lock"] or read_record(path) is None:
            continue
        problems, _ = check(wanted, path, listener, thorough=False)
        if not problems:
            return path, ""
        why = problems[0]
    return None, why


def check(wanted: Record, environment: str, listener: Listener, *, thorough: bool) -> tuple[list[str], str | None]:
    """Check an environment with its own interpreter; return the problems and the MPI that it has.

    With `thorough`, it also imports the packages, which compiles them for the ranks, and runs the engine.
    """
    request: Record = {"packages": {wheel["name"]: wheel["version"] for wheel in wanted["installed"]}}
    if thorough:
        request.update(imports=wanted["imports"], mpi=wanted["mpi"])
    command = [os.path.join(environment, "bin", "python"), "-I", "-c", wanted["checker"]]
    try:
        status, printed = listener.run(
            command, folder=environment, stdin=json.dumps(request).encode(), deadline_s=_CHECK_S
        )
        answer: Record = json.loads(printed.strip().rpartition("\n")[2])
    except OSError as error:
        return [f"its Python does not start: {(error.strerror or str(error)).lower()}"], None
    except ValueError:
        last = printed.strip().rpartition("\n")[2]
        return [f"its Python does not work: {last or f'exit status {status}'}"], None
    return [f"{name} {words}" for name, words in answer["problems"]], answer["mpi"]


def make_current(environment: str, folder: str) -> None:
    """Let `env` point to an environment, by one rename; does nothing if it already does."""
    link = os.path.join(folder, "env")
    target = os.path.join("envs", os.path.basename(environment))
    if os.path.islink(link) and os.readlink(link) == target:
        return
    if os.path.lexists(link) and not os.path.islink(link):
        raise FailedError("folder", words=f"`{link}` is in the way: it is not a link that ttlaunch made")
    fresh = f"{link}.{os.getpid()}"
    with contextlib.suppress(FileNotFoundError):
        os.unlink(fresh)
    os.symlink(target, fresh)
    os.replace(fresh, link)


def write_record(environment: str, record: Record) -> None:
    """Declare an environment valid by writing its record; everything else of it must have been written before."""
    path = os.path.join(environment, RECORD)
    with open(path + ".new", "w", encoding="utf-8") as file:
        json.dump(record, file)
        file.flush()
        os.fsync(file.fileno())
    os.replace(path + ".new", path)


def read_record(environment: str) -> Record | None:
    """Read the record of an environment; None if it is not finished."""
    try:
        with open(os.path.join(environment, RECORD), encoding="utf-8") as file:
            record: Record = json.load(file)
    except (OSError, ValueError):
        return None
    return record


def remove_unfinished(folder: str) -> None:
    """Remove what interrupted installations left. The caller holds the folder's lock, so nothing is being built here."""
    for name in entries(os.path.join(folder, "envs")):
        path = os.path.join(folder, "envs", name)
        if name != LOCK and read_record(path) is None:
            shutil.rmtree(path, ignore_errors=True)
    for link in glob.glob(os.path.join(glob.escape(folder), "env.*")):
        if os.path.islink(link):
            os.unlink(link)


def prune(folder: str) -> None:
    """Remove environments that are neither current nor in use, and wheels that no environment needs.

    On a network file system, nothing is removed: another host may use an environment, and this host cannot see that.
    """
    envs = os.path.join(folder, "envs")
    if _is_on_network(folder):
        return
    current = os.path.realpath(os.path.join(folder, "env"))
    wheels = set()
    for name in sorted(entries(envs)):
        path = os.path.join(os.path.realpath(envs), name)
        record = read_record(path)
        if record is None:
            continue
        if path == current or is_in_use(path):
            wheels.update(record["wheels"])
            continue
        os.unlink(
            os.path.join(path, RECORD)
        )  # from here on it counts as unfinished, even if its removal is interrupted
        shutil.rmtree(path, ignore_errors=True)
    for name in entries(os.path.join(folder, "wheels")):
        if name.partition(".")[0] not in wheels:
            path = os.path.join(folder, "wheels", name)
            shutil.rmtree(path) if os.path.isdir(path) else os.unlink(path)


def is_in_use(environment: str) -> bool:
    """Whether an agent has locked an environment, or a process of this host has mapped a file of it or runs from it."""
    descriptor = os.open(environment, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:  # a file system without locks
        pass
    finally:
        os.close(descriptor)
    inside = environment.encode() + b"/"
    for process in glob.glob("/proc/[0-9]*"):
        for name in ("maps", "cmdline"):
            with contextlib.suppress(OSError), open(f"{process}/{name}", "rb") as file:
                if inside in file.read():
                    return True
    return False


def entries(folder: str) -> list[str]:
    """List the names in a folder; empty if the folder does not exist."""
    try:
        return os.listdir(folder)
    except (FileNotFoundError, NotADirectoryError):
        return []


def _is_on_network(folder: str) -> bool:
    real = os.path.realpath(folder)
    best, kind = "", ""
    with open("/proc/self/mounts", encoding="utf-8", errors="surrogateescape") as file:
        for line in file:
            point, found = line.split(" ")[1:3]
            point = point.replace("\\040", " ")
            if (real + "/").startswith(point.rstrip("/") + "/") and len(point) >= len(best):
                best, kind = point, found
    return kind.startswith(_NETWORK_FILE_SYSTEMS)


def check_room(wheels: list[Record], folder: str, *, unpacked: int, files: int) -> None:
    """Raise `FailedError` if the file system has no room for the environment.

    Args:
        wheels: All wheels of the lock file; those already on this host need no more room.
        folder: The remote folder.
        unpacked: The size of the installed environment in bytes.
        files: The number of files of the installed environment.
    """
    needed = sum(wheel["size"] - _received(wheel, folder) for wheel in wheels) + unpacked + _SPARE_BYTES
    free, inodes = room(folder)
    if free < needed:
        raise FailedError("disk", needed=needed, free=free)
    if inodes is not None and inodes < files:
        raise FailedError("inodes", needed=files, free=inodes)


def room(folder: str) -> tuple[int, int | None]:
    """Return how many bytes and files the user may still write; None for files if the file system does not limit them."""
    while not os.path.exists(folder):
        folder = os.path.dirname(folder)
    found = os.statvfs(folder)
    return found.f_bavail * found.f_frsize, found.f_favail if found.f_files else None


def wheel_place(wheel: Record, folder: str) -> str:
    """Return where a wheel is stored once it has been received."""
    return os.path.join(folder, "wheels", wheel["sha256"], wheel["file"])


def receive_wheels(wheels: list[Record], folder: str, next_frame: Callable[[], tuple[Record, bytes]]) -> None:
    """Ask the launching machine for the wheels that are missing and store them."""
    missing = {wheel["sha256"]: wheel for wheel in wheels if not os.path.exists(wheel_place(wheel, folder))}
    contract.send_frame(
        {"kind": "need", "wheels": {sha256: _received(wheel, folder) for sha256, wheel in missing.items()}}
    )
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
            _verify(wheel, folder)


def _part(wheel: Record, folder: str) -> str:
    return os.path.join(folder, "wheels", wheel["sha256"] + ".part")


def _received(wheel: Record, folder: str) -> int:
    """Return how many bytes of a wheel are on this host; a `.part` file with all its bytes still has to be verified."""
    size = int(wheel["size"])
    if os.path.exists(wheel_place(wheel, folder)):
        return size
    with contextlib.suppress(FileNotFoundError):
        part = _part(wheel, folder)
        if os.path.getsize(part) > size:
            os.unlink(part)
        return os.path.getsize(part)
    return 0


def _verify(wheel: Record, folder: str) -> None:
    """Rename a complete wheel to its final name if its SHA-256 is right; otherwise remove it."""
    digest = hashlib.sha256()
    part, whole = _part(wheel, folder), wheel_place(wheel, folder)
    with open(part, "rb") as file:
        for chunk in iter(lambda: file.read(_CHUNK), b""):
            digest.update(chunk)
    if digest.hexdigest() != wheel["sha256"]:
        os.unlink(part)
        raise FailedError("install", lines=[f"{wheel['file']} arrived damaged and has been removed"])
    os.makedirs(os.path.dirname(whole), exist_ok=True)
    os.replace(part, whole)
