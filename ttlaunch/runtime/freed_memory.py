"""Freed memory: where a control group limits a rank, it goes back to the kernel at once, unless there turns out to be plenty.

The shim starts a rank in such a group with small thresholds of malloc. Then each large tensor is memory that the kernel gives and takes back,
which costs time: the pages must be cleared. Where the group allows clearly more than the rank has needed in its first steps, that time is
wasted.

So it is where nothing limits a rank. The thresholds that glibc chooses by itself follow the largest tensor that was freed, and what is free at the
end of the heap goes back whenever it is more than twice that: a stage of a pipeline got 10 MB anew in each step, which took 5 % of it.
"""

import ctypes
from collections.abc import Mapping

from ttlaunch import contract
from ttlaunch.runtime.resident import peak_resident_bytes

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # as malloc.h numbers them
_CHOSEN = {"MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES"}
_LARGEST = 32 * 1024 * 1024
"""What glibc lets its threshold grow to by itself; that of the free memory at the end of the heap is twice as much."""
_HOLES, _KEPT = 1.25, 3 * _LARGEST
"""How much more than it has needed a rank must have: holes between tensors, as a factor, and what the thresholds let it keep, in bytes."""


def keep_if_unlimited(environment: Mapping[str, str]) -> bool:
    """Keep freed memory from the beginning if nothing limits this rank and the user has chosen no thresholds; return whether it does."""
    return contract.ENV_MEMORY not in environment and _CHOSEN.isdisjoint(environment) and _keep()


def keep_if_plenty(environment: Mapping[str, str], *, to_come: int = 0, peak: int | None = None) -> bool:
    """Keep freed memory from now on if this rank may have clearly more than its peak until now; return whether it does.

    Args:
        environment: This rank's.
        to_come: The bytes that it will need besides.
        peak: The most bytes that it has had; None: what the kernel says.
    """
    allowed = environment.get(contract.ENV_MEMORY)
    return allowed is not None and int(allowed) >= _least(to_come + (peak or peak_resident_bytes())) and _keep()


def _keep() -> bool:
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # other C libraries have none
    return mallopt is not None and all((mallopt(_MMAP_THRESHOLD, _LARGEST), mallopt(_TRIM_THRESHOLD, 2 * _LARGEST)))


def _least(size: int) -> int:
    return int(_HOLES * size) + _KEPT
