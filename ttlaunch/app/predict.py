"""Predict what a plan will hold and send, in a child process that has torch, while nothing of the plan is started."""

import os
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ttlaunch import contract
from ttlaunch.diagnostics import usage_error
from ttlaunch.engines.process import end_process, start_process
from ttlaunch.planning.launch_plan import LaunchPlan, RecipeProgram
from ttlaunch.quick_dataclass import dataclass
from ttlaunch.running.metrics.prediction import Prediction, read_prediction
from ttlaunch.running.runs.run_folder import write_plan

_MODULE = "ttlaunch.runtime.predict"
_MAP_FROM = str(64 * 1024)
"""From so many bytes on, memory comes from the kernel and goes back to it, so that tensors without values take no pages."""


@dataclass(frozen=True)
class NotPredicted:
    """Why there is no prediction, as a clause."""

    reason: str


def predict(plan: LaunchPlan) -> Prediction | NotPredicted:
    """Predict what each rank of a recipe's plan will hold and send.

    Raises:
        LaunchError: The plan is one of a program, whose memory nobody knows before it runs.
    """
    if not isinstance(plan.program, RecipeProgram):
        raise usage_error(f"`--predict` was given, but {plan.program.name} is a program and no recipe")
    if plan.elastic is not None:
        return NotPredicted("workers come and go, and what each holds changes with them")
    with tempfile.TemporaryDirectory(prefix="ttl-prediction-") as place:
        folder = Path(place)
        write_plan(plan, folder)
        (folder / contract.RECORDS_DIR).mkdir(exist_ok=True)
        failed = _run(folder, Path(plan.working_folder), {**plan.environment, **plan.secrets})
        if failed is not None:
            return NotPredicted(failed)
        found = read_prediction(folder, plan.as_json(), runs_recipe=True)
    return NotPredicted("the process that predicts wrote nothing that can be used") if found is None else found


def _run(folder: Path, working_folder: Path, variables: Mapping[str, str]) -> str | None:
    """Run the child in a folder that has a plan, to its end; return why it failed, None if it did not."""
    process = start_process(
        [sys.executable, "-m", _MODULE], folder=working_folder, environment=_environment(folder, variables)
    )
    try:
        _, errors = process.communicate()
    finally:
        end_process(process, patience_s=1.0)
    if process.returncode == 0:
        return None
    lines = [line for line in errors.decode(errors="replace").splitlines() if line.strip()]
    return lines[-1] if lines else f"the process that predicts ended with status {process.returncode}"


def _environment(folder: Path, variables: Mapping[str, str]) -> dict[str, str]:
    given: dict[str, Any] = {
        contract.ENV_RUN_DIR: folder,
        contract.ENV_PLAN: folder / contract.PLAN_FILE,
        "MALLOC_MMAP_THRESHOLD_": _MAP_FROM,
        "CUDA_VISIBLE_DEVICES": "",
    }
    return {**os.environ, **variables, **{name: str(value) for name, value in given.items()}}
