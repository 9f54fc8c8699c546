"""An mpi4py that loads another MPI than the engine's is refused before anything starts: its ranks would not meet."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.mpi
SCRIPT = "from mpi4py import MPI\nprint('size', MPI.COMM_WORLD.size)\n"
RECIPE = ("data_parallel", "--ranks", "2", "--set", "training_config.steps=2")


@pytest.fixture
def run(here, mpich_python):
    """`run("hydra", "work.py", LIBMPI=…)`: runs with our own interpreter, whose mpi4py loads Open MPI, and an engine of PATH."""
    (here / "work.py").write_text(SCRIPT)

    def start(engine, *words, **variables):
        programs = os.pathsep.join(map(str, (Path(sys.executable).parent, mpich_python.parent, os.environ["PATH"])))
        command = [sys.executable, "-m", "ttlaunch", "run", "--engine", engine, *words]
        environment = {**os.environ, "PATH": programs, "NO_COLOR": "1", "COLUMNS": "160", **variables}
        return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, env=environment)

    return start


def library(mpich_python):
    return str(mpich_python.parents[1] / "lib/libmpi.so.12")


@pytest.mark.parametrize("words", [("-n", "2", "work.py"), RECIPE], ids=["script", "recipe"])
def test_open_mpis_library_under_hydra_is_refused_and_the_hint_repairs_it(run, mpich_python, words):
    wrong = run("hydra", *words)
    assert wrong.returncode == 4, wrong.stderr
    assert "error[H004]: mpi4py is paired with another MPI: it loads Open MPI v5" in wrong.stderr
    assert "mpiexec.hydra is MPICH 5." in wrong.stderr
    name, value = "MPI4PY_LIBMPI", library(mpich_python)
    assert f"hint: `export {name}={value}` makes mpi4py load the library of MPICH" in wrong.stderr
    repaired = run("hydra", *words, **{name: value})
    assert repaired.returncode == 0, repaired.stdout + repaired.stderr
    assert words is RECIPE or "size 2" in repaired.stdout


@pytest.mark.parametrize("words", [("-n", "2", "work.py"), RECIPE], ids=["script", "recipe"])
def test_mpichs_library_under_mpirun_is_refused(run, mpich_python, words):
    wrong = run("openmpi", *words, MPI4PY_LIBMPI=library(mpich_python))
    assert wrong.returncode == 4, wrong.stderr
    assert "error[H004]: mpi4py is paired with another MPI: it loads MPICH Version: 5." in wrong.stderr


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_a_recipe_has_the_same_bits_under_both_engines(run, mpich_python, here, ranks):
    words = ("data_parallel", "--ranks", str(ranks), "--set", "training_config.steps=3", "--format", "json")
    answers = [run("openmpi", *words), run("hydra", *words, MPI4PY_LIBMPI=library(mpich_python))]
    assert [0, 0] == [answer.returncode for answer in answers], answers[1].stdout
    digests = {json.loads(answer.stdout)["parameters_sha256"] for answer in answers}
    assert len(digests) == 1
    assert None not in digests
    engines = sorted(
        json.loads(path.read_text())["engine"]["name"].split()[0] for path in here.glob("runs/*/plan.json")
    )
    assert ["MPICH", "Open"] == engines
