"""What a rank uses of NVIDIA devices: which of them are its own, and what the driver does not say.

A stand-in with the functions of `nvml.h` answers, because the machines on which tests run have no such device.
"""

import os

import pytest

from ttlaunch.agent import gpu_usage
from ttlaunch.agent.gpu_usage import GpuMeter, gpu_meter

SECOND = {"gpu_percent": 88, "gpu_memory_bytes": 40_000_000_000}
BUSY, USED = (12, 88), (1000, 40_000_000_000)


class Nvml:
    """Two devices; `pids` are the process on each, and `statuses` what functions return if not 0."""

    def __init__(self, *pids, **statuses):
        self.pids, self.statuses = pids or (0, 0), statuses

    def nvmlInit_v2(self):  # noqa: N802 - as NVML calls it, like the others below
        return self.statuses.get("init", 0)

    def nvmlDeviceGetCount_v2(self, count):  # noqa: N802
        count._obj.value = 2
        return 0

    def nvmlDeviceGetHandleByIndex_v2(self, index, device):  # noqa: N802
        device._obj.value = index + 1
        return 0

    def nvmlDeviceGetMinorNumber(self, device, minor):  # noqa: N802
        minor._obj.value = device.value - 1
        return 0

    def nvmlDeviceGetUtilizationRates(self, device, rates):  # noqa: N802
        rates._obj.gpu = BUSY[device.value - 1]
        return self.statuses.get("utilization", 0)

    def nvmlDeviceGetMemoryInfo(self, device, memory):  # noqa: N802
        memory._obj.used = USED[device.value - 1]
        return 0

    def nvmlDeviceGetComputeRunningProcesses_v3(self, device, count, processes):  # noqa: N802
        count._obj.value = 1
        processes[0].pid = self.pids[device.value - 1]
        return 0


def test_a_device_is_the_ranks_if_the_driver_lists_one_of_its_processes():
    assert SECOND == GpuMeter(Nvml(0, 1234)).take([99, 1234])
    assert {} == GpuMeter(Nvml(0, 1234)).take([99])


def test_a_rank_with_two_devices_has_their_mean_use_and_their_memory_together():
    assert {"gpu_percent": 50, "gpu_memory_bytes": 40_000_001_000} == GpuMeter(Nvml(7, 8)).take([7, 8])


def test_in_a_container_the_only_device_that_was_opened_counts(tmp_path, monkeypatch):
    opened = []
    monkeypatch.setattr(gpu_usage, "_DEVICE", f"{tmp_path}/nvidia")
    for minor, found in ((1, SECOND), (0, {})):  # with both open, nothing says which one is used
        opened.append((tmp_path / f"nvidia{minor}").open("wb"))
        assert found == GpuMeter(Nvml()).take([os.getpid()])
    for file in opened:
        file.close()


def test_what_the_driver_does_not_say_is_left_out():
    assert {"gpu_memory_bytes": 40_000_000_000} == GpuMeter(Nvml(0, 7, utilization=3)).take([7])


def test_a_device_that_is_taken_late_is_found():
    nvml = Nvml()
    meter = GpuMeter(nvml)
    assert {} == meter.take([7])
    nvml.pids = (0, 7)
    assert SECOND == meter.take([7])


def test_a_machine_without_the_library_or_with_a_driver_that_does_not_answer_has_no_meter(monkeypatch):
    monkeypatch.setattr(gpu_usage, "_LIBRARY", "libnone-of-that-name.so.1")
    assert gpu_meter() is None
    monkeypatch.setattr(gpu_usage, "_LIBRARY", None)  # this process, which has no function of NVML
    assert gpu_meter() is None
    with pytest.raises(OSError, match="no driver"):
        GpuMeter(Nvml(init=9))
