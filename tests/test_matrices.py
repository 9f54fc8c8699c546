"""A matrix in `matrices.py` names a test that is there and cells that it has, and only the rest is left out."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.matrices import COLLECTED, KEPT, LONGEST

ROOT = Path(__file__).parents[1]


def collect(*words):
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider", *words]
    environment = {
        name: value for name, value in os.environ.items() if name != "PYTEST_ADDOPTS"
    }  # markers of the outer run
    answer = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False, timeout=200
    )
    assert answer.returncode == 0, answer.stdout + answer.stderr
    return [line.removeprefix("tests/") for line in answer.stdout.splitlines() if "::" in line]


@pytest.fixture(scope="module")
def every_cell(request):
    """The tests of all files that have a matrix: from this run where it collected them, else from a run that does."""
    files = {f"tests/{claim.partition('::')[0]}" for claim in KEPT}
    collected = request.config.stash[COLLECTED]
    if files <= {name.partition("::")[0] for name in collected}:
        return [name.removeprefix("tests/") for name in collected]
    return collect("--every-cell", *sorted(name for name in files if (ROOT / name).is_file()))


def test_what_is_kept_of_a_matrix_is_in_it_and_is_not_all_of_it(every_cell):
    cells = {claim: set() for claim in KEPT}
    for name in every_cell:
        claim, _, cell = name.partition("[")
        if claim in cells:
            cells[claim].add(cell.removesuffix("]"))
    assert [] == [claim for claim, kept in KEPT.items() if not cells[claim] > set(kept)]


def test_a_run_has_what_is_kept_of_a_matrix_and_all_of_other_tests(every_cell):
    claim = "mpi/test_drift.py::test_local_steps_have_the_bits_of_a_simulation"
    expected = [
        line for line in every_cell if line.startswith("mpi/test_drift.py") and not line.endswith("[local_sgd]")
    ]
    found = collect("tests/mpi/test_drift.py")
    assert [f"{claim}[diloco]"] == [line for line in found if line.startswith(claim)]
    assert [line for line in expected if "that_lead" not in line] == [line for line in found if "that_lead" not in line]


def test_the_longest_files_are_there():
    assert [] == [name for name in LONGEST if not (ROOT / "tests" / name).is_file()]


def test_a_cell_that_is_named_runs():
    name = "mpi/test_drift.py::test_local_steps_have_the_bits_of_a_simulation[local_sgd]"
    assert [name] == collect(f"tests/{name}")
