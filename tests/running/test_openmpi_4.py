"""Open MPI 4.1, as Linux distributions have it: the same plan, another command line."""

import json
import subprocess
from pathlib import Path

import pytest

pytestmark = pytest.mark.mpi

SYSTEM = Path("/usr/bin/mpirun")
LIBRARIES = ("/usr/lib/x86_64-linux-gnu/libmpi.so.40", "/usr/lib/aarch64-linux-gnu/libmpi.so.40")


@pytest.fixture
def run_with_openmpi_4(here, bare_python, skip_or_fail):
    """`run_with_openmpi_4(*arguments)`: the finished `ttlaunch run` and its report."""
    answer = (
        subprocess.run([SYSTEM, "--version"], capture_output=True, text=True, check=False) if SYSTEM.exists() else None
    )
    if answer is None or "(Open MPI) 4." not in answer.stdout:
        skip_or_fail("no Open MPI 4 in /usr/bin")

    def run(*arguments, **variables):
        python, environment = bare_python()
        process = subprocess.run(
            [python, "-m", "ttlaunch", "run", *arguments],
            env={**environment, "PATH": f"{SYSTEM.parent}:/bin", **variables},
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        folders = [path for path in here.glob("runs/*") if path.is_dir()]
        report = json.loads((folders[0] / "report.json").read_text()) if folders else None
        return process, report, folders[0] if folders else None

    return run


def test_any_program_runs_on_two_ranks(here, run_with_openmpi_4):
    (here / "work.sh").write_text('#!/bin/sh\necho "rank $TTLAUNCH_RANK of $TTLAUNCH_WORLD_SIZE"\n')
    (here / "work.sh").chmod(0o755)
    process, report, folder = run_with_openmpi_4("work.sh", "-n", "2")
    assert process.returncode == 0, process.stderr
    said = [line for line in process.stdout.splitlines() if line.startswith("rank ")]
    assert sorted(said) == ["rank 0 rank | rank 0 of 2", "rank 1 rank | rank 1 of 2"]
    assert (report["status"], report["leftovers"]) == ("done", 0)
    engine = json.loads((folder / "plan.json").read_text())["engine"]
    assert engine["name"].startswith("Open MPI 4.")
    assert "--rankfile" in engine["argv"]


def test_a_rank_that_fails_is_named(here, run_with_openmpi_4):
    (here / "work.sh").write_text('#!/bin/sh\n[ "$TTLAUNCH_RANK" = 0 ] && sleep 60\nexit 3\n')
    (here / "work.sh").chmod(0o755)
    process, report, _ = run_with_openmpi_4("work.sh", "-n", "2")
    assert process.returncode == 1
    assert process.stderr.startswith("error[R003]: rank 1 (rank, localhost) exited with status 3\n")
    assert report["duration_s"] < 10


def test_a_recipe_runs_with_the_systems_library(run_with_openmpi_4, skip_or_fail):
    library = next((path for path in LIBRARIES if Path(path).exists()), None)
    if library is None:
        skip_or_fail("no libmpi.so.40 of the system")
    process, report, _ = run_with_openmpi_4(
        "fabric_minimal", "-n", "2", "--set", "all_reduce_config.megabytes=0.1", MPI4PY_LIBMPI=library
    )
    assert process.returncode == 0, process.stderr
    assert report["results"]["sum"] == 3.0
