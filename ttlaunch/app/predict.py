"""Predict what a plan will hold and send, in a child process that has torch, while nothing of the plan is started."""

import contextlib
import os
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from ttlaunch import contract
from ttlaunch.diagnostics import usage_error
from ttlaunch.engines.process import end_process, start_process
from ttlaunch.planning.launch_plan import LaunchPlan, RecipeProgram
from ttlaunch.quick_dataclass import dataclass
from ttlaunch.records.prediction import PREDICTION_FILE
from ttlaunch.running.metrics.prediction import (
    Prediction,
    TimeVerdict,
    Verdict,
    judge,
    judge_time,
    kept_prediction,
    read_prediction,
)
from ttlaunch.running.metrics.telemetry import memory_of_ranks
from ttlaunch.running.metrics.time_prediction import predicted_time
from ttlaunch.running.readers.recorded import Recorded
from ttlaunch.running.runs.files import read_file, write_whole
from ttlaunch.running.runs.registry import was_started_here
from ttlaunch.running.runs.run_folder import write_plan
from ttlaunch.spec.recipe.importing import import_recipe_module
from ttlaunch.system_reason import system_reason

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
    content = plan.as_json()
    why = refused(content)
    if why is not None:
        return why
    with tempfile.TemporaryDirectory(prefix="ttl-plan-") as folder:
        write_plan(plan, Path(folder))
        found = _run(Path(folder) / contract.PLAN_FILE, Path(plan.working_folder), {**plan.environment, **plan.secrets})
    return found if isinstance(found, NotPredicted) else _parsed(found, content)


def predict_run(recorded: Recorded) -> Prediction | NotPredicted | None:
    """Return the prediction for a run, made from its plan alone, and keep it in its folder.

    It is made when it is first asked for: at the run's start it would take some seconds of processor time.

    Returns:
        None if there is nothing to compare it with: a program has no prediction, no rank has ended, or the run goes on and needs
        the processor.
    """
    plan = recorded.plan
    is_measured = memory_of_ranks(recorded.telemetry or ()) or peaks_of(recorded)
    if recorded.is_running or not is_measured or not plan.get("recipe"):
        return None
    if not was_started_here(recorded.path, plan.get("hash")):
        return NotPredicted("this user has not started the run here, so its recipe's code is not run")
    why = refused(plan)
    if why is not None:
        return why
    kept = kept_prediction(recorded.path, plan, runs_recipe=True)
    if kept is not None:
        return kept
    found = _run(recorded.path / contract.PLAN_FILE, Path(plan["working_folder"]), plan["environment"])
    if isinstance(found, NotPredicted):
        return found
    with contextlib.suppress(OSError):  # it is made again next time
        write_whole(recorded.path / PREDICTION_FILE, found)
    return _parsed(found, plan)


def peaks_of(recorded: Recorded) -> dict[int, int]:
    """Return the bytes that the process of each rank had in memory at most, of ranks that have ended."""
    rows = (recorded.report or {}).get("ranks") or ()
    return {row["rank"]: row["peak_memory_bytes"] for row in rows if row.get("peak_memory_bytes")}


def judge_run(recorded: Recorded) -> Verdict:
    """Compare what was predicted of a run with what its ranks measured."""
    found = predict_run(recorded)
    measured = memory_of_ranks(recorded.telemetry or ())
    prediction = None if isinstance(found, NotPredicted) else found
    reason = found.reason if isinstance(found, NotPredicted) else None
    processes = {} if measured else peaks_of(recorded)  # torch's profiler takes memory of its own
    verdict = judge(recorded.traffic, prediction, measured, processes=processes, no_memory=reason)
    time, no_time = _judge_time(recorded)
    return replace(verdict, time=time, no_time=no_time)


def _judge_time(recorded: Recorded) -> tuple[TimeVerdict | None, str | None]:
    """Compare the time of the run's steps with the calibration that is kept here, if there is one; or say why that is not done."""
    if not recorded.plan.get("recipe") or not any(one.steps for one in recorded.telemetry or ()):
        return None, None
    try:
        said = predicted_time(recorded.plan)
    except (OSError, KeyError, TypeError):  # the plan of a stranger, or files that are gone
        said = None
    if said is None:
        return None, "no calibration of this host for this plan is kept; `ttlaunch plan … --step-time` makes one"
    time = judge_time(said, recorded.telemetry or ())
    return time, None if time is not None else "the run has made too few steps to compare it with"


def refused(plan: Mapping[str, Any]) -> NotPredicted | None:
    """Return why the ranks of a plan cannot be run without values in one process; None if they can, as far as their recipe says."""
    if plan.get("elastic"):
        return NotPredicted("workers come and go, and what each holds changes with them")
    try:
        recipe = import_recipe_module(Path(plan["recipe"]["folder"]), "recipe").RECIPE
    except Exception as error:  # noqa: BLE001 - whatever the user's recipe raises, now that it may have changed
        return NotPredicted(f"the recipe raises {type(error).__name__}: {error}")
    for need in recipe.needs_processes if len(plan["ranks"]) > 1 else ():
        section, _, key = need.key.rpartition(".")
        if plan["config"].get(section, {}).get(key) == need.value:
            return NotPredicted(f"with `{need.key}: {str(need.value).lower()}` each rank needs its own process")
    return None


def _parsed(found: bytes, plan: Mapping[str, Any]) -> Prediction | NotPredicted:
    prediction = read_prediction(found, plan, runs_recipe=True)
    return prediction or NotPredicted("the process that predicts wrote nothing that can be used")


def _run(plan_file: Path, working_folder: Path, variables: Mapping[str, str]) -> bytes | NotPredicted:
    variables = {**variables, "MALLOC_MMAP_THRESHOLD_": _MAP_FROM}
    return run_hollow(_MODULE, plan_file, working_folder, variables=variables, result=PREDICTION_FILE)


def run_hollow(
    module: str,
    plan_file: Path,
    working_folder: Path,
    *,
    variables: Mapping[str, str],
    result: str,
    order: tuple[str, bytes] | None = None,
) -> bytes | NotPredicted:
    """Run a child that runs the ranks of a plan without values to its end; return what it wrote.

    Args:
        module: What `python -m` starts.
        plan_file: The plan.
        working_folder: Where the ranks would run.
        variables: The plan's variables for them.
        result: The name of the file that the child writes.
        order: Name and content of a file that it reads.
    """
    with tempfile.TemporaryDirectory(prefix="ttl-prediction-") as place:
        folder = Path(place)
        (folder / contract.RECORDS_DIR).mkdir()
        if order is not None:
            (folder / order[0]).write_bytes(order[1])
        given = {
            contract.ENV_RUN_DIR: place,
            contract.ENV_PLAN: str(plan_file.resolve()),
            "CUDA_VISIBLE_DEVICES": "",
        }
        try:
            command = [sys.executable, "-m", module]
            process = start_process(command, folder=working_folder, environment={**os.environ, **variables, **given})
        except OSError as error:
            return NotPredicted(f"no process can be started in {working_folder}: {system_reason(error)}")
        try:
            _, errors = process.communicate()
        finally:
            end_process(process, patience_s=1.0)
        found = read_file(folder / result)
    if process.returncode == 0 and found is not None:
        return found
    lines = [line for line in errors.decode(errors="replace").splitlines() if line.strip()]
    return NotPredicted(lines[-1] if lines else f"the process of all ranks ended with status {process.returncode}")
