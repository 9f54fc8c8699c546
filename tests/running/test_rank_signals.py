"""How a rank takes signals from its first line on: as any program does, until its runtime says otherwise."""

import os
import shutil
import signal
from pathlib import Path

import pytest

from ttlaunch import contract

pytestmark = pytest.mark.mpi

RECIPES = Path(__file__).parents[2] / "recipes"

WAITS = """\
import os, threading


def peer(cfg, ctx):
    with open("ready.part", "w") as file:
        file.write(str(os.getpid()))
    os.replace("ready.part", "ready")
    wait_for_a_signal_that_never_comes()


def wait_for_a_signal_that_never_comes():
    threading.Event().wait()
"""


def test_a_rank_starts_with_the_usual_ways_to_end_and_without_those_that_its_runtime_adds(here, start_run):
    (here / "work.sh").write_text("#!/bin/sh\ncp /proc/$$/status part && mv part status\n")
    (here / "work.sh").chmod(0o755)
    run = start_run("work.sh")
    assert run.ends(within_s=20) == 0
    [line] = [line for line in (here / "status").read_text().splitlines() if line.startswith("SigIgn:")]
    ignored = int(line.split()[1], 16)
    asked = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
    assert [number for number in asked if ignored >> (number - 1) & 1] == [signal.SIGUSR1, signal.SIGUSR2]


def test_a_rank_that_waits_for_ever_writes_where_when_it_is_asked(here, start_run, until):
    shutil.copytree(RECIPES / "fabric_minimal", here / "mine", ignore=shutil.ignore_patterns("__pycache__"))
    (here / "mine/trainer.py").write_text(WAITS)
    run = start_run("mine", "-n", "1")
    rank = int(run.wait_for_file("ready"))
    stacks = run.run_folder / contract.stacks_file(0)
    assert stacks.read_text() == ""
    os.kill(rank, signal.SIGUSR2)
    until(lambda: "in wait_for_a_signal_that_never_comes" in stacks.read_text(), within_s=5, what="the stack is there")
    assert "in main" in stacks.read_text()
