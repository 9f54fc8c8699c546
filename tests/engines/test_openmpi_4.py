"""Open MPI 4.1, as Linux distributions have it, with the MPI library that belongs to it; the rest is `conformance.py`."""

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
        folders = [path for path in here.glob("runs/[!.]*") if path.is_dir()]
        report = json.loads((folders[0] / "report.json").read_text()) if folders else None
        return process, report, folders[0] if folders else None

    return run


def test_a_recipe_runs_with_the_systems_library(run_with_openmpi_4, skip_or_fail):
    library = next((path for path in LIBRARIES if Path(path).exists()), None)
    if library is None:
        skip_or_fail("no libmpi.so.40 of the system")
    process, report, _ = run_with_openmpi_4(
        "fabric_minimal", "-n", "2", "--set", "all_reduce_config.megabytes=0.1", MPI4PY_LIBMPI=library
    )
    assert process.returncode == 0, process.stderr
    assert report["results"]["sum"] == 3.0
