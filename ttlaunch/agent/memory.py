"""Ask the kernel how many processes it killed because memory ran out where a rank runs, and how much memory there may be.

A rank that the kernel killed for this reason ends with the same signal as one killed by hand. The kernel counts its own
kills, for each control group and for the machine: if the count rose between a rank's start and its end, the kernel may
have killed the rank. Python 3.9 and the standard library only.
"""

from __future__ import annotations

import os

from ttlaunch import contract
from ttlaunch.records.prediction import MAPPED_FROM

_CONTROL_GROUPS = "/sys/fs/cgroup"
_UNLIMITED = 1 << 60


def oom_kills(*, root: str = "/") -> int | None:
    """Return how many processes the kernel has killed in our control group because memory ran out.

    If the group has no count, return that of the machine; None if the kernel does not say.
    """
    for folder in _folders(root):
        for name in ("memory.events", "memory.oom_control"):  # of version 2, of version 1
            count = _entry(os.path.join(folder, name), "oom_kill")
            if count is not None:
                return count
    return _entry(os.path.join(root, "proc/vmstat"), "oom_kill")


def memory_limit(*, root: str = "/") -> int | None:
    """Return the bytes of memory that our control group, those above it and the machine allow; None if not known."""
    total = _entry(os.path.join(root, "proc/meminfo"), "MemTotal:")
    limits = [None if total is None else total * 1024]
    top = os.path.join(root, _CONTROL_GROUPS[1:])
    for lowest in _folders(root):
        folder = lowest
        while len(folder) >= len(top):
            limits += [_number(os.path.join(folder, name)) for name in ("memory.max", "memory.limit_in_bytes")]
            folder = os.path.dirname(folder)
    return min((limit for limit in limits if limit is not None and limit < _UNLIMITED), default=None)


def settings_for_limit(*, ranks: int, root: str = "/") -> dict[str, str]:
    """Return the variables of a rank that returns freed memory at once; empty if the control groups above it allow all of the machine's.

    The group's limit is divided by the number of ranks on this host.

    By default, glibc raises its thresholds with the sizes that a program frees, up to 32 and 64 MiB. Then tens of megabytes of freed
    memory stay with the process, how many depends on chance, and the kernel may kill a rank for them. With thresholds that stay what they
    are at first, its memory is that of its tensors.
    """
    total = _entry(os.path.join(root, "proc/meminfo"), "MemTotal:")
    limit = memory_limit(root=root)
    if limit is None or total is None or limit >= total * 1024:
        return {}
    return {
        contract.ENV_MEMORY: str(limit // ranks),
        "MALLOC_MMAP_THRESHOLD_": str(MAPPED_FROM),
        "MALLOC_TRIM_THRESHOLD_": str(MAPPED_FROM),
    }


def _folders(root: str) -> list[str]:
    """Folders that may have our control group's files: its own path, or the top where a container hides that path."""
    folders = []
    top = os.path.join(root, _CONTROL_GROUPS[1:])
    try:
        with open(os.path.join(root, "proc/self/cgroup"), encoding="utf-8") as file:
            lines = file.read().splitlines()
    except OSError:
        return []
    for line in lines:
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if not controllers or "memory" in controllers.split(","):
            mounts = [os.path.join(top, "memory")] if controllers else [top, os.path.join(top, "unified")]
            folders += [os.path.normpath(mount + path) for mount in mounts]
            folders += mounts
    return folders


def _entry(path: str, name: str) -> int | None:
    """The number behind a name in a file of names and numbers."""
    try:
        with open(path, encoding="utf-8") as file:
            for line in file:
                words = line.split()
                if len(words) > 1 and words[0] == name:
                    return int(words[1])
    except (OSError, ValueError):
        return None
    return None


def _number(path: str) -> int | None:
    try:
        with open(path, encoding="utf-8") as file:
            return int(file.read())
    except (OSError, ValueError):  # `max`, or no such file
        return None
