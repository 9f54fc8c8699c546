"""Calibrate this host for a plan: rehearse its ranks here for a few seconds, and keep what was found.

The measuring itself is a run of a recipe of ttlaunch's own (`ttlaunch/runtime/calibration/`), so messages pass through the same engine and
the same transport as the plan's.
"""

import os
import socket
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from ttlaunch import contract
from ttlaunch.app.library import run
from ttlaunch.app.predict import NotPredicted, refused
from ttlaunch.diagnostics import LaunchError, usage_error
from ttlaunch.diagnostics.launch_error import usage_mistake
from ttlaunch.planning.launch_plan import LaunchPlan, RecipeProgram
from ttlaunch.records.calibration import KeptPlan, RehearsalEnd, rehearsal_file
from ttlaunch.records.parser import BadRecord, read
from ttlaunch.running.metrics.time_prediction import TimePrediction, keep, predicted_time, settle_rehearsal, time_of
from ttlaunch.running.runs.files import read_file
from ttlaunch.running.runs.run_folder import write_plan
from ttlaunch.system_reason import system_reason

_RECIPE = Path(contract.__file__).parent / "runtime" / "calibration"
_SECONDS = 4.0
_LONGEST_S = 10.0
_COPIES_OF_ONE = 2
"""How often a single rank is rehearsed: a process keeps the pages of memory that it got, which make it up to a tenth slower or quicker than another.
A third one would take a second more to begin where there are two cores, and a calibration longer than 10 s."""
_WHEN = "try again when less is running here; `uptime` shows how much is"
_HERE = {"localhost", "127.0.0.1", "::1"}


def predict_time(plan: LaunchPlan, *, anew: bool, seconds: float = _SECONDS) -> TimePrediction | NotPredicted:
    """Predict the time of a plan's steps from the calibration that is kept, or calibrate if there is none.

    Args:
        plan: A recipe's plan.
        anew: Whether to calibrate even if a calibration is kept.
        seconds: How long ranks rehearse, up to twice as long if they make few steps.

    Raises:
        LaunchError: The plan is one of a program; or the calibration failed, or is useless.

    Cost: with a calibration at most 10 s, or as much more as `seconds` is, in which all cores that the plan needs are used; else next to none.
    """
    if not isinstance(plan.program, RecipeProgram):
        raise usage_error(f"`--step-time` was given, but {plan.program.name} is a program and no recipe")
    content = plan.as_json()
    kept = None if anew else predicted_time(content)
    if kept is not None:
        return kept
    why = _not_here(content) or refused(content)
    return why or _calibrate(plan, content, seconds)


def copies_of(ranks: int) -> int:
    """Return in how many processes the ranks of a plan are rehearsed.

    A single rank is in two, one after the other. Several ranks are in as many at the same time as there are ranks and cores, and at least
    in two, which exchange the messages that are measured.
    """
    return _COPIES_OF_ONE if ranks == 1 else max(2, min(ranks, len(os.sched_getaffinity(0))))


def _not_here(plan: Mapping[str, Any]) -> NotPredicted | None:
    """Return why the ranks of a plan cannot be rehearsed on this machine; None if they can."""
    elsewhere = sorted({row["host"] for row in plan["ranks"]} - _HERE - {socket.gethostname()})
    if elsewhere:
        return NotPredicted(f"only this machine can be calibrated, and ranks are on {elsewhere[0]}")
    if plan["config"]["device_config"]["device"] == "cuda":
        return NotPredicted("only processors can be calibrated, and `device_config.device` is cuda")
    return None


def _calibrate(plan: LaunchPlan, content: Mapping[str, Any], seconds: float) -> TimePrediction | NotPredicted:
    """Run the rehearsal, settle what its copies have found, and keep it.

    Raises:
        LaunchError: It failed, or is useless.
    """
    ranks = len(content["ranks"])
    copies = copies_of(ranks)
    with tempfile.TemporaryDirectory(prefix="ttl-calibration-") as place:
        folder = Path(place)
        write_plan(plan, folder / "plan")
        (folder / "found").mkdir()
        order = {
            "calibration_config.plan": str(folder / "plan" / contract.PLAN_FILE),
            "calibration_config.folder": str(folder / "found"),
            "calibration_config.seconds": seconds,
            "multihost_config.socket_type": content["config"]["multihost_config"]["socket_type"],
        }
        hangs_s = 4 * max(_LONGEST_S, seconds)
        report = run(_RECIPE, on="local", ranks=copies, set=order, runs_dir=folder / "runs", hang_timeout=hangs_s)
        if report.exit_status != 0:
            raise LaunchError(report.diagnostics, status=report.exit_status)
        ends = [_read_end(folder / "found" / rehearsal_file(copy)) for copy in range(copies)]
    usable = [one for one in ends if not isinstance(one, BadRecord)]
    if len(usable) < copies or any(len(one.ranks) != ranks for one in usable):
        return NotPredicted("the ranks that calibrate wrote nothing that can be used")
    counted = [one for one in usable if not one.is_spare]
    for finding in (text for one in counted for text in one.findings):
        raise _mistake(f"the steps of this plan cannot be rehearsed here: {finding}", "rehearse a smaller model")
    found = settle_rehearsal(counted)
    if isinstance(found, str):
        raise _mistake(f"this machine is too busy for a calibration: {found}", _WHEN)
    not_kept = _keep(content, found)
    prediction = time_of(found, content)
    return (
        NotPredicted("no rank of the plan counts steps")
        if prediction is None
        else replace(prediction, not_kept=not_kept)
    )


def _read_end(path: Path) -> RehearsalEnd | BadRecord:
    data = read_file(path)
    return BadRecord("it is missing") if data is None else read(RehearsalEnd, data)


def _keep(content: Mapping[str, Any], found: KeptPlan) -> str | None:
    """Keep a calibration, or return why it cannot be kept: what was measured is known all the same."""
    try:
        keep(content, found)
    except OSError as error:
        return system_reason(error)
    return None


def _mistake(message: str, hint: str) -> LaunchError:
    return LaunchError([usage_mistake(message, hint, code="H050")], status=4)
