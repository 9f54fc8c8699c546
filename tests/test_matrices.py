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
    missing = files - {name.partition("::")[0] for name in collected}
    others = collect("--every-cell", *sorted(name for name in missing if (ROOT / name).is_file())) if missing else []
    return [name.removeprefix("tests/") for name in collected] + others


def test_what_is_kept_of_a_matrix_is_in_it_and_is_not_all_of_it(every_cell):
    cells = {claim: set() for claim in KEPT}
    for name in every_cell:
        claim, _, cell = name.partition("[")
        if claim in cells:
            cells[claim].add(cell.removesuffix("]"))
    assert [] == [claim for claim, kept in KEPT.items() if not cells[claim] > set(kept)]


def test_a_run_has_what_is_kept_of_a_matrix_and_all_of_other_tests(every_cell):
    file = "running/membership/test_outside.py"
    claim = f"{file}::test_eight_workers_have_the_ranks_of_their_numbers_in_whatever_order_they_come"
    whole = [line for line in every_cell if line.startswith(file)]
    found = collect(f"tests/{file}")
    assert [f"{claim}[{cell}]" for cell in KEPT[claim]] == [line for line in found if line.startswith(claim)]
    assert [line for line in whole if not line.startswith(claim)] == [
        line for line in found if not line.startswith(claim)
    ]


def test_the_longest_files_are_there():
    assert [] == [name for name in LONGEST if not (ROOT / "tests" / name).is_file()]


def test_a_cell_that_is_named_runs():
    name = "running/membership/test_outside.py::"
    name += "test_eight_workers_have_the_ranks_of_their_numbers_in_whatever_order_they_come[77]"
    assert [name] == collect(f"tests/{name}")
