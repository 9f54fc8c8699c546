"""The resident memory of this process, as the kernel counts it: now, and at its peak."""

import os
import resource
from pathlib import Path

_PAGE = os.sysconf("SC_PAGE_SIZE")


def resident_bytes() -> int:
    """Return the resident memory of this process; its peak where the kernel does not say more."""
    try:
        return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * _PAGE
    except (OSError, ValueError, IndexError):
        return peak_resident_bytes()


def peak_resident_bytes() -> int:
    """Return the largest resident memory of this process.

    `getrusage` counts the memory of the process that started this one as well, if that was larger: a notebook of 5 GB would make
    every simulation one of 5 GB. So it is asked only where there is no `/proc`.
    """
    try:
        lines = Path("/proc/self/status").read_text(encoding="ascii", errors="replace").splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:"))
    except (OSError, StopIteration, ValueError, IndexError):
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
