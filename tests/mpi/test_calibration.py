"""A calibration on this machine, with real messages, and what it says of a step (E9)."""

import json
import os
import subprocess
import sys

import pytest

TINY = ["training_config.steps=24", "training_config.validation_sequences=2", "transformer_config.embedding_dim=16"]


def planned_time(here, *options):
    """What a plan says of its time; None if the machine is too busy, which is an answer, too."""
    environment = {**os.environ, "XDG_CACHE_HOME": str(here / "cache")}
    words = [sys.executable, "-m", "ttlaunch", "plan", "data_parallel", "--step-time", "--format", "json", *options]
    words += [word for one in TINY for word in ("--set", one)]
    answer = subprocess.run(words, capture_output=True, text=True, timeout=200, check=False, env=environment)
    if "error[H050]" in answer.stderr:
        assert (4, "") == (answer.returncode, answer.stdout)
        return None
    assert (0, "") == (answer.returncode, answer.stderr)
    return json.loads(answer.stdout)["time"]


@pytest.mark.mpi
def test_a_rehearsed_step_has_parts_and_the_calibration_is_kept(here):
    """E9: with an interval for each of them, and no run is left behind."""
    time = planned_time(here)
    if time is None:
        return
    assert 4 == len(time["link"]["samples"])
    assert 0 < time["step"]["low_s"] <= time["step"]["median_s"] <= time["step"]["high_s"]
    for rank in time["ranks"]:
        parts = sum(one["median_s"] for one in rank["phases"].values())
        assert parts == pytest.approx(rank["step"]["median_s"], rel=0.2)  # medians of parts need not add up exactly
    assert 1 == len([*(here / "cache").rglob("calibrations/*.json")])
    assert not (here / "runs").exists()


@pytest.mark.mpi
def test_a_single_rank_is_rehearsed_in_two_processes(here):
    """E9: each of them is slower or quicker than another for as long as it lives."""
    time = planned_time(here, "--ranks", "1")

    assert time is None or (2, None) == (time["copies"], time["link"])
