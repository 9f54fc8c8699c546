"""Report what a run has left on this host: processes that carry its id, its folder in shared memory, folders of its engine.

The script looks repeatedly until it finds nothing or `patience_s` is over, since some processes may still be ending. Python
3.9 and the standard library only.
"""

from __future__ import annotations

import glob
import os
import time

from ttlaunch import contract
from ttlaunch.agent.run_processes import is_gone, run_processes

TYPE_CHECKING = False  # what typing.TYPE_CHECKING is, without the time to import it
if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any

_LOOK_AGAIN_S = 0.1
_SHARED = "/dev/shm"  # noqa: S108 - looked at, not used
_LONGEST_NAME = 80


def main(arguments: dict[str, Any]) -> int:
    """Answer with one frame; `arguments` are those of `find_leftovers`."""
    contract.send_frame({"kind": "left", **find_leftovers(**arguments)})
    return 0


def find_leftovers(
    *, run_id: str, scratch: str, age_s: float, patience_s: float, folders: Sequence[str], segments: Sequence[str]
) -> dict[str, Any]:
    """Look for leftovers until there are none; returns those that remain, and after how many seconds none remained.

    Args:
        run_id: The id that the processes carry in their environment.
        scratch: The run's folder in shared memory.
        age_s: Seconds since the run began; older files and folders belong to other runs.
        patience_s: Seconds for which to look again.
        folders: Patterns for names of the engine's temporary folders.
        segments: Patterns for names of the engine's files in shared memory.
    """
    began = time.monotonic()
    while True:
        processes = [{"pid": pid, "name": _name(pid)} for pid in run_processes(run_id) if not is_gone(pid)]
        found = [scratch] if os.path.lexists(scratch) else []
        found += _of_engine(age_s + time.monotonic() - began, folders=folders, segments=segments)
        waited = time.monotonic() - began
        if not processes and not found:
            return {"processes": [], "folders": [], "clean_after_s": round(waited, 2)}
        if waited >= patience_s:
            return {"processes": processes, "folders": found, "clean_after_s": None}
        time.sleep(_LOOK_AGAIN_S)


def _of_engine(age_s: float, *, folders: Sequence[str], segments: Sequence[str]) -> list[str]:
    """Find folders of daemons that have ended and segments that no process uses; only our own, no older than the run."""
    base = os.environ.get("TMPDIR") or "/tmp"  # noqa: S108 - looked at, not used
    sessions = [path for name in folders for path in glob.glob(os.path.join(glob.escape(base), name))]
    found = [path for path in sessions if _is_ours(path, age_s) and not _has_owner(path)]
    files = [path for name in segments for path in glob.glob(os.path.join(_SHARED, name))]
    files = [path for path in files if _is_ours(path, age_s)]
    used = _mapped() if files else set()
    return sorted(found + [path for path in files if path not in used])


def _is_ours(path: str, age_s: float) -> bool:
    try:
        status = os.lstat(path)
    except OSError:
        return False
    return status.st_uid == os.getuid() and time.time() - status.st_mtime <= age_s


def _has_owner(path: str) -> bool:
    """Whether the name of the folder, or of an entry in it, contains the id of a process that is alive."""
    try:
        names = [os.path.basename(path), *os.listdir(path)]
    except OSError:
        names = [os.path.basename(path)]
    numbers = [part for name in names for part in name.split(".") if part.isdigit()]
    return any(int(number) > 1 and not is_gone(int(number)) for number in numbers)


def _mapped() -> set[str]:
    """The files in shared memory that some process uses."""
    used = set()
    for maps in glob.glob("/proc/[0-9]*/maps"):
        try:
            with open(maps, encoding="utf-8", errors="replace") as file:
                used |= {line.split(None, 5)[5].strip() for line in file if _SHARED in line}
        except OSError:
            continue
    return used


def _name(pid: int) -> str:
    """The command line of a process, cut to 80 characters; empty if the process has ended."""
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            words = file.read().replace(b"\0", b" ").decode("utf-8", "replace").strip()
    except OSError:
        return ""
    return words if len(words) <= _LONGEST_NAME else words[: _LONGEST_NAME - 1] + "…"
