"""What only the engine without an MPI has to do; what every engine does is in `conformance.py`."""

import os
import signal
from pathlib import Path

import pytest

from tests.running.conftest import StartedRun, wait_until
from ttlaunch.running.runs.run_folder import read_events

pytestmark = pytest.mark.mpi


@pytest.fixture
def start(here):
    """`start(program, text, *options)` starts a program that is no Python by the engine `agents`."""
    runs = []

    def make(text, *options, ranks=2):
        (here / "work.sh").write_text(f"#!/bin/sh\n{text}\n")
        (here / "work.sh").chmod(0o755)
        runs.append(StartedRun(here, ["--engine", "agents", "-n", str(ranks), *options, "work.sh"]))
        return runs[-1]

    yield make
    for run in runs:
        run.close()


@pytest.fixture
def libmpi(skip_or_fail):
    """The path of a library of MPI."""
    from mpi4py import MPI  # noqa: F401, PLC0415 - loads it

    found = [line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines() if "/libmpi" in line]
    if not found:
        skip_or_fail("mpi4py loads no libmpi here")
    return found[0]


@pytest.mark.parametrize("text", ["exec sleep 60", "sleep 60; true"])
def test_a_program_that_loads_mpi_without_mpirun_is_ended_and_told_the_engine_to_use(start, libmpi, text):
    run = start(f"LD_PRELOAD={libmpi}; export LD_PRELOAD; {text}")
    assert 1 == run.ends(within_s=30)
    failure = run.report["failure"]
    assert ("R068", "no_mpi") == (failure["code"], failure["class"])
    assert f"`NoMpiError: it has loaded {libmpi}" in run.stderr
    assert "hint: `--engine openmpi` gives the ranks MPI" in run.stderr


def test_a_single_rank_may_be_alone_in_its_world_of_mpi(start, libmpi):
    run = start(f"LD_PRELOAD={libmpi} sleep 1", ranks=1)
    assert 0 == run.ends(within_s=30), run.stderr


def test_a_killed_rank_is_named_and_the_others_are_ended(start):
    run = start("[ $TTLAUNCH_RANK = 1 ] && { sleep 1; echo $$ > pid-1; exec sleep 600; }; exec sleep 600")
    os.kill(int(run.wait_for_file("pid-1")), signal.SIGKILL)
    assert 1 == run.ends(within_s=30)
    assert 1 == run.report["failure"]["rank"]
    history = [event["event"] for event in read_events(run.run_folder)]
    assert ["failed", "ending", "end"] == [event for event in history if event in {"failed", "ending", "end"}]


def test_the_starter_of_ranks_ends_with_its_supervisor_before_the_guard_kills_it(start):
    run = start("trap 'touch told-$TTLAUNCH_RANK; exit 0' TERM; touch up-$TTLAUNCH_RANK; while :; do sleep 0.1; done")
    wait_until(lambda: (run.folder / "up-0").exists() and (run.folder / "up-1").exists(), within_s=30, what="up")
    os.kill(run.supervisor(), signal.SIGKILL)
    assert run.ends(within_s=30) != 0
    wait_until(lambda: not run.processes(), within_s=30, what="nothing is left")
    assert ["told-0", "told-1"] == sorted(path.name for path in run.folder.glob("told-*"))
