"""Make the Python environment for ranks on a host, from wheels that the launching machine sends or an index has.

Frames to the launching machine: `waiting` (another installation works in the same folder), `need` (the missing wheels,
which the launching machine then sends, and at last `build`), `progress`, and at the end one of `ready`, `missing` and
`failed`. If the script is killed, the host has its old environment or the new one, and the next call keeps the wheels received.

Python 3.9 and the standard library only.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import shutil
import socket
import time

from ttlaunch import contract
from ttlaunch.agent import environments
from ttlaunch.agent.children import FailedError, Listener
from ttlaunch.agent.environments import check_room, receive_wheels, room, wheel_place

TYPE_CHECKING = False  # what typing.TYPE_CHECKING is, without the time to import it
if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Any

    Record = dict[str, Any]

_INSTALL_S = 3600.0
_REACH_S = 3
_ASK_S = 20.0
"""For pip to start, to look up the name, and to fetch the smallest wheel; it gives up by itself after `_REACH_S` without an answer."""
_POLL_S = 0.3
_LAST_LINES = 12
_FULL = {errno.ENOSPC, errno.EDQUOT}


def main(arguments: Record) -> int:
    """Make the environment that `arguments` describe, or with `check` only report whether it is there."""
    listener = Listener()
    folder = os.path.abspath(os.path.expanduser(arguments["folder"]))
    try:
        last = _work(arguments, folder, listener)
    except FailedError as error:
        last = {"kind": "failed", "what": error.what, **error.fields}
    except OSError as error:
        if error.errno in _FULL:
            last = {"kind": "failed", "what": "disk", "needed": None, "free": room(folder)[0]}
        else:
            words = f"{(error.strerror or str(error)).lower()}: {error.filename or folder}"
            last = {"kind": "failed", "what": "folder", "words": words}
    contract.send_frame(last)
    return 0


def _work(wanted: Record, folder: str, listener: Listener) -> Record:
    ready, why = environments.find_ready(wanted, folder, listener)
    is_current = ready == os.path.realpath(os.path.join(folder, "env"))
    if ready and is_current:
        return _ready(ready)
    if wanted["check"]:
        return {"kind": "missing", "why": why or "another environment is current"}
    for part in ("envs", "wheels"):
        os.makedirs(os.path.join(folder, part), exist_ok=True)
    with _only_one(os.path.join(folder, "envs", environments.LOCK)):
        ready, _ = environments.find_ready(wanted, folder, listener)  # another host may have made it while we waited
        if ready:
            environments.make_current(ready, folder)
            return _ready(ready)
        environments.remove_unfinished(folder)
        return _make(wanted, folder, listener)


def _ready(environment: str) -> Record:
    record = environments.read_record(environment) or {}
    return {"kind": "ready", "made": False, "from_index": False, "environment": environment, **record}


def _make(wanted: Record, folder: str, listener: Listener) -> Record:
    check_room(wanted["wheels"], folder, unpacked=wanted["unpacked"], files=wanted["files"])
    tool = [wheel for wheel in wanted["wheels"] if wheel["name"] == "pip"]
    receive_wheels(tool if wanted["from_index"] else wanted["wheels"], folder, listener.next_frame)
    environment = _bare_environment(wanted, folder, listener)
    try:
        is_from_index = _fill(wanted, folder, environment=environment, listener=listener)
        environments.make_current(environment, folder)
    except (FailedError, OSError):
        shutil.rmtree(environment, ignore_errors=True)
        raise
    with contextlib.suppress(OSError):  # the next call removes what cannot be removed now
        environments.prune(folder)
    return {**_ready(environment), "made": True, "from_index": is_from_index}


def _fill(wanted: Record, folder: str, *, environment: str, listener: Listener) -> bool:
    """Install the packages, check them, and declare the environment valid; returns whether an index served them."""
    tool = next(wheel for wheel in wanted["wheels"] if wheel["name"] == "pip")
    pip = [os.path.join(environment, "bin", "python"), os.path.join(wheel_place(tool, folder), "pip")]
    index = _reach_index(wanted, environment, pip=pip, listener=listener) if wanted["from_index"] else None
    if wanted["from_index"] and index is None:
        receive_wheels(wanted["wheels"], folder, listener.next_frame)
    _install(wanted, environment, pip=pip, listener=listener, index=index)
    contract.send_frame({"kind": "progress", "phase": "check"})
    problems, mpi = environments.check(wanted, environment, listener, thorough=True)
    if problems:
        raise FailedError("check", problems=problems)
    shutil.rmtree(_scratch(environment), ignore_errors=True)
    record = {"python": wanted["version"], "base": wanted["base"], "mpi": mpi}
    environments.write_record(environment, {**record, "wheels": [wheel["sha256"] for wheel in wanted["wheels"]]})
    return index is not None


@contextlib.contextmanager
def _only_one(path: str) -> Iterator[None]:
    """Hold the lock of a remote folder, also where several hosts share it; the system frees it when its holder ends."""
    with open(path, "a+", encoding="utf-8") as file:
        reported = None
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                file.seek(0)
                holder = file.read().strip()
                if holder != reported:
                    contract.send_frame({"kind": "waiting", "holder": holder})
                    reported = holder
                time.sleep(_POLL_S)
        file.truncate(0)
        file.write(f"process {os.getpid()} on {socket.gethostname()}")
        file.flush()
        yield
        file.truncate(0)


def _scratch(environment: str) -> str:
    """Return the folder for pip's temporary files: on the disk that was checked for room, removed with the environment."""
    return os.path.join(environment, "scratch")


def _bare_environment(wanted: Record, folder: str, listener: Listener) -> str:
    number = 1
    while os.path.exists(path := os.path.join(folder, "envs", f"{wanted['lock']}-{number}")):
        number += 1
    contract.send_frame({"kind": "progress", "phase": "install", "done": 0, "total": wanted["unpacked"]})
    command = [wanted["base"], "-I", "-m", "venv", "--without-pip", path]
    status, printed = listener.run(command, folder=folder, deadline_s=_INSTALL_S)
    if status:
        raise _failed_install(printed, folder)
    os.mkdir(_scratch(path))
    return path


def _reach_index(wanted: Record, environment: str, *, pip: list[str], listener: Listener) -> dict[str, str] | None:
    """Find variables with which this host's pip reaches an index, by asking for the smallest wheel; None if it reaches none.

    The host's own configuration comes first, then that of the launching machine's pip.
    """
    smallest = min(wanted["installed"], key=lambda wheel: wheel["size"])
    command = [*pip, "download", "--quiet", "--no-deps", "--only-binary=:all:", "--no-cache-dir", "--no-input"]
    command += [
        "--disable-pip-version-check",
        f"--timeout={_REACH_S}",
        "--retries=0",
        f"--dest={_scratch(environment)}",
    ]
    command.append(f"{smallest['name']}=={smallest['version']}")
    contract.send_frame({"kind": "progress", "phase": "index"})
    attempts: list[dict[str, str]] = [{}, wanted["index_hints"]]
    for variables in attempts:
        here = {**variables, "TMPDIR": _scratch(environment)}
        status, _ = listener.run(command, folder=environment, variables=here, deadline_s=_ASK_S)
        if status == 0:
            return variables
    return None


def _install(
    wanted: Record, environment: str, *, pip: list[str], listener: Listener, index: dict[str, str] | None
) -> None:
    """Let pip install exactly the wheels of the lock, each checked against its hash once more.

    pip compiles nothing: the check that follows imports the modules that ranks import, and Python compiles only these.
    For torch and the packages that it needs, this takes a third of the time.

    Args:
        index: Variables with which pip reaches an index; None if the wheels are on this host.
    """
    wheels = os.path.join(os.path.dirname(os.path.dirname(environment)), "wheels")
    lines = []
    for wheel in wanted["installed"]:
        name = f"./{wheel['sha256']}/{wheel['file']}" if index is None else f"{wheel['name']}=={wheel['version']}"
        lines.append(f"{name} --hash=sha256:{wheel['sha256']}\n")
    listing = os.path.join(_scratch(environment), "lock.txt")
    with open(listing, "w", encoding="utf-8") as file:
        file.writelines(lines)
    command = [*pip, "install", *(["--isolated", "--no-index"] if index is None else ["--only-binary=:all:"])]
    command += ["--no-deps", "--no-compile", "--no-cache-dir", "--disable-pip-version-check", "--no-input", "--quiet"]
    command += ["--require-hashes", "--requirement", listing]
    status, printed = listener.run(
        command,
        folder=wheels,
        variables={**(index or {}), "TMPDIR": _scratch(environment)},
        deadline_s=_INSTALL_S,
        watch=lambda process: _report_progress(process, wanted["unpacked"]),
    )
    if status:
        raise _failed_install(printed, environment)


def _report_progress(process: int, total: int) -> None:
    """Report pip's progress, measured by the bytes that its process has written."""
    with contextlib.suppress(OSError), open(f"/proc/{process}/io", encoding="ascii") as file:
        written = re.search(r"wchar: (\d+)", file.read())
        if written:
            contract.send_frame(
                {"kind": "progress", "phase": "install", "done": min(int(written.group(1)), total), "total": total}
            )


def _failed_install(printed: str, folder: str) -> FailedError:
    if "No space left on device" in printed or "Disk quota exceeded" in printed:
        return FailedError("disk", needed=None, free=room(folder)[0])
    lines = [line for line in printed.strip().splitlines() if line.strip()]
    return FailedError("install", lines=lines[-_LAST_LINES:])
