"""Torch's profiler on chosen steps of one rank, with the names that the traffic counter uses.

The trace shows every operator of torch on a time line. ttlaunch adds marks for what the profiler
cannot know: the step, and each message and wait with its operation, such as `wait gradients`. The profiler itself names torch's own
collectives, as in `DistributedDataParallel`, for example `gloo:all_reduce`.
"""

import contextlib
import os
from collections.abc import Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from ttlaunch import contract
from ttlaunch.profiling import ENV_PROFILE_STEPS, parse_steps, profile_file
from ttlaunch.runtime.telemetry.memory import StepMemory, TensorOwners
from ttlaunch.runtime.world import Rank


class StepProfile:
    """The profiler of one rank; idle before and after its steps.

    Attributes:
        is_active: Whether it records now.
        owners: Who holds tensors from step to step, for the step in which memory is counted.
    """

    def __init__(self, run_dir: Path, *, rank: Rank, steps: range) -> None:
        """Record the steps of a run, and leave the trace in its folder once they are over."""
        self.is_active = False
        self.owners = TensorOwners()
        self._steps = steps
        self._path = run_dir / profile_file(rank)
        self._unfinished = run_dir / f"unfinished.{self._path.name}"  # hosts send home what appears in `records/`
        self._profile: Any = None
        self._step: Any = None
        self._memory: StepMemory | None = None

    def begin_step(self, step: int) -> None:
        """Begin to record before the first of the steps; steps before the checkpoint of a resumed run are not recorded."""
        self._look_away()  # from a step that had no end
        if step == self._steps[-1] + 1:
            self._memory = StepMemory(self.owners)
            self._memory.__enter__()
        if step in self._steps and not self.is_active:
            activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if torch.cuda.is_available() else [])]
            self._profile = profile(activities=activities)
            self._profile.start()
            self.is_active = True
        if self.is_active:
            self._step = self.mark(f"step {step}")
            self._step.__enter__()

    def end_step(self, step: int) -> dict[str, int]:
        """Close the step, and the trace after the last one.

        Returns:
            Facts for the traffic counter: what tensors took, after the step that shows it.
        """
        if self.is_active:
            self._step.__exit__(None, None, None)
            self._step = None
            if step >= self._steps[-1]:
                self.close()
        memory = self._memory
        if memory is None:
            return {}
        self._look_away()
        peaks = {f"memory_{kind}": size for kind, size in memory.peaks.items()}
        return {"memory_step": step, **peaks}

    def mark(self, name: str) -> AbstractContextManager[Any]:
        """Name what a block does in the trace."""
        return record_function(name)

    def close(self) -> None:
        """Stop, and write what was recorded; a full disk costs the trace, not the run."""
        self._look_away()
        if not self.is_active:
            return
        self.is_active = False
        if self._step is not None:
            self._step.__exit__(None, None, None)
        self._profile.stop()
        with contextlib.suppress(OSError, RuntimeError):
            contract.make_private_folder(self._path.parent)
            # torch opens the file by its name; made before, it has the rights of the run.
            os.close(contract.open_private(str(self._unfinished), os.O_WRONLY | os.O_CREAT))
            self._profile.export_chrome_trace(str(self._unfinished))
            self._unfinished.replace(self._path)
        self._profile = None

    def _look_away(self) -> None:
        if self._memory is not None:
            self._memory.__exit__(None, None, None)
            self._memory = None


def open_profile(run_dir: Path, *, rank: Rank, environment: Mapping[str, str] = os.environ) -> StepProfile | None:
    """Return the profiler of a rank; None if the run was started without one."""
    steps = parse_steps(environment.get(ENV_PROFILE_STEPS, ""))
    return None if steps is None else StepProfile(run_dir, rank=rank, steps=steps)
