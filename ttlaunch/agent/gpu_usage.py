"""Read how busy the NVIDIA devices of a rank are and how much of their memory is in use, from NVML, the library of the driver.

A rank's devices are those on which the driver lists one of its processes. In a container the driver may list the host's process
ids; then it is the one device that its processes have opened, and none if they have opened several. Nothing is
guessed: what NVML does not say is left out. Python 3.9 and the standard library only.
"""

from __future__ import annotations

import ctypes
import os

TYPE_CHECKING = False  # what typing.TYPE_CHECKING is, without the time to import it
if TYPE_CHECKING:
    from collections.abc import Collection
    from typing import Any

_LIBRARY, _DEVICE = "libnvidia-ml.so.1", "/dev/nvidia"
_MOST_DEVICES, _MOST_PROCESSES = 64, 256
_LOOK_AGAIN = 10  # calls after which devices are looked for again: a rank may take its device late, or another one


class _Process(ctypes.Structure):
    _fields_ = (("pid", ctypes.c_uint), ("memory", ctypes.c_ulonglong), ("instances", ctypes.c_uint * 2))


class _Utilization(ctypes.Structure):
    _fields_ = (("gpu", ctypes.c_uint), ("memory", ctypes.c_uint))


class _Memory(ctypes.Structure):
    _fields_ = (("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong))


def gpu_meter() -> GpuMeter | None:
    """Return a meter of this machine's devices; None without the library of the driver."""
    try:
        return GpuMeter(ctypes.CDLL(_LIBRARY))
    except (OSError, AttributeError):  # no library, or one without these functions
        return None


class GpuMeter:
    """Reads the devices of this machine for one rank."""

    def __init__(self, nvml: Any) -> None:
        """Start NVML, given as a library with its functions.

        Raises:
            OSError: It finds no driver.
            AttributeError: The library lacks a function.
        """
        self._nvml = nvml
        if self._nvml.nvmlInit_v2() != 0:
            raise OSError("NVML finds no driver")
        self._devices: dict[int, ctypes.c_void_p] = {}  # by minor number, as in the names of their files
        count, minor = ctypes.c_uint(), ctypes.c_uint()
        self._ask("nvmlDeviceGetCount_v2", ctypes.byref(count))
        for index in range(min(count.value, _MOST_DEVICES)):
            device = ctypes.c_void_p()
            if self._ask("nvmlDeviceGetHandleByIndex_v2", index, ctypes.byref(device)) and self._ask(
                "nvmlDeviceGetMinorNumber", device, ctypes.byref(minor)
            ):
                self._devices[minor.value] = device
        self._own: list[ctypes.c_void_p] = []
        self._calls = 0

    def take(self, pids: Collection[int]) -> dict[str, int]:
        """Return the mean use and the memory in use of the devices of these processes, as fields of `records.ranks.Usage`."""
        if self._calls % _LOOK_AGAIN == 0 or not self._own:
            self._own = self._find_own(pids)
        self._calls += 1
        return self._in_use(self._own)

    def _in_use(self, devices: Collection[ctypes.c_void_p]) -> dict[str, int]:
        busy, used = _Utilization(), _Memory()
        rates = [busy.gpu for one in devices if self._ask("nvmlDeviceGetUtilizationRates", one, ctypes.byref(busy))]
        sizes = [used.used for one in devices if self._ask("nvmlDeviceGetMemoryInfo", one, ctypes.byref(used))]
        found = {"gpu_percent": round(sum(rates) / len(rates))} if rates else {}
        return {**found, "gpu_memory_bytes": sum(sizes)} if sizes else found

    def _find_own(self, pids: Collection[int]) -> list[ctypes.c_void_p]:
        own = [device for device in self._devices.values() if not self._processes_on(device).isdisjoint(pids)]
        if own:
            return own
        opened = {minor for pid in pids for minor in _opened(pid) if minor in self._devices}
        return [self._devices[minor] for minor in opened] if len(opened) == 1 else []

    def _processes_on(self, device: ctypes.c_void_p) -> set[int]:
        count, processes = ctypes.c_uint(_MOST_PROCESSES), (_Process * _MOST_PROCESSES)()
        is_known = self._ask("nvmlDeviceGetComputeRunningProcesses_v3", device, ctypes.byref(count), processes)
        return {one.pid for one in processes[: min(count.value, _MOST_PROCESSES)]} if is_known else set()

    def _ask(self, name: str, *arguments: object) -> bool:
        """Call a function of NVML; returns whether it has answered."""
        function = getattr(self._nvml, name, None)
        return function is not None and function(*arguments) == 0


def _opened(pid: int) -> set[int]:
    """Return the minor numbers of the devices that a process has opened."""
    found, folder = set(), f"/proc/{pid}/fd"
    try:
        for name in os.listdir(folder):
            target = os.readlink(f"{folder}/{name}")
            if target.startswith(_DEVICE) and target[len(_DEVICE) :].isdigit():
                found.add(int(target[len(_DEVICE) :]))
    except OSError:
        return found
    return found
