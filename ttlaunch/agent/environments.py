"""The environments for ranks on a host: which one is valid and current, and which may go.

    <remote folder>/envs/<lock>-<n>/    an environment; valid only once it has its record
    <remote folder>/env                 a link to the one that new runs use, swapped by one rename

Python 3.9 and the standard library only.
"""

from __future__ import annotations

import contextlib
import glob
import json
import os
import shutil

from ttlaunch.agent.children import FailedError

TYPE_CHECKING = False  # what typing.TYPE_CHECKING is, without the time to import it
if TYPE_CHECKING:
    from typing import Any

    from ttlaunch.agent.children import Listener

    Record = dict[str, Any]

RECORD = "ttlaunch.json"
LOCK = ".lock"
_CHECK_S = 600.0
_NETWORK_FILE_SYSTEMS = ("nfs", "cifs", "smb", "lustre", "gpfs", "beegfs", "ceph", "glusterfs", "fuse", "9p", "afs")


def find_ready(wanted: Record, folder: str, listener: Listener) -> tuple[str | None, str]:
    """The environment that `env` points to if it is of this lock and whole, else another such one, else why there is none."""
    current = os.path.realpath(os.path.join(folder, "env"))
    others = [os.path.join(folder, "envs", name) for name in sorted(entries(os.path.join(folder, "envs")))]
    why = "no environment has been made"
    if os.path.isdir(current):
        why = "its environment was made of other packages, or with another Python"
    for path in dict.fromkeys([current, *others]):
        if os.path.basename(path).rpartition("-")[0] != wanted["lock"] or read_record(path) is None:
            continue
        problems, _ = check(wanted, path, listener, thorough=False)
        if not problems:
            return path, ""
        why = problems[0]
    return None, why


def check(wanted: Record, environment: str, listener: Listener, *, thorough: bool) -> tuple[list[str], str | None]:
    """What an environment's own interpreter finds wrong with it, and the MPI it has.

    Thorough means to import the packages and to run the engine, which also compiles what ranks import first.
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
    """Let `env` point to an environment, by one rename; nothing to do where it does."""
    link = os.path.join(folder, "env")
    target = os.path.join("envs", os.path.basename(environment))
    if os.path.islink(link) and os.readlink(link) == target:
        return
    if os.path.lexists(link) and not os.path.islink(link):
        raise FailedError("folder", words=f"`{link}` is in the way: it is no link that ttlaunch made")
    fresh = f"{link}.{os.getpid()}"
    with contextlib.suppress(FileNotFoundError):
        os.unlink(fresh)
    os.symlink(target, fresh)
    os.replace(fresh, link)


def write_record(environment: str, record: Record) -> None:
    """Declare an environment valid, once everything else about it is on disk."""
    path = os.path.join(environment, RECORD)
    with open(path + ".new", "w", encoding="utf-8") as file:
        json.dump(record, file)
        file.flush()
        os.fsync(file.fileno())
    os.replace(path + ".new", path)


def read_record(environment: str) -> Record | None:
    """What an environment says of itself; None for one that is not finished."""
    try:
        with open(os.path.join(environment, RECORD), encoding="utf-8") as file:
            record: Record = json.load(file)
    except (OSError, ValueError):
        return None
    return record


def remove_unfinished(folder: str) -> None:
    """Clear away what a killed one left; only for who holds the lock, so that nobody is building there."""
    for name in entries(os.path.join(folder, "envs")):
        path = os.path.join(folder, "envs", name)
        if name != LOCK and read_record(path) is None:
            shutil.rmtree(path, ignore_errors=True)
    for link in glob.glob(os.path.join(glob.escape(folder), "env.*")):
        if os.path.islink(link):
            os.unlink(link)


def prune(folder: str) -> None:
    """Remove environments that are neither current nor in use, and wheels of none.

    On a network file system other hosts may use one, which cannot be seen from here, so there nothing is removed.
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
        os.unlink(os.path.join(path, RECORD))  # from now on it is unfinished, should we not get to its end
        shutil.rmtree(path, ignore_errors=True)
    for name in entries(os.path.join(folder, "wheels")):
        if name.partition(".")[0] not in wheels:
            path = os.path.join(folder, "wheels", name)
            shutil.rmtree(path) if os.path.isdir(path) else os.unlink(path)


def is_in_use(environment: str) -> bool:
    """Whether a process of this host runs a program of an environment or has loaded one of its libraries."""
    inside = environment.encode() + b"/"
    for process in glob.glob("/proc/[0-9]*"):
        for name in ("maps", "cmdline"):
            with contextlib.suppress(OSError), open(f"{process}/{name}", "rb") as file:
                if inside in file.read():
                    return True
    return False


def entries(folder: str) -> list[str]:
    """The names in a folder, none where there is no such folder."""
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
