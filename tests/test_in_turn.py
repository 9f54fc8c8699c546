"""The part of CI that has a time: what is begun first is another file for each commit, and what had no time is printed."""

import os
import re
import time

import pytest

from tests.test_second_try import CI, OUTER, run_pytest

pytestmark = pytest.mark.slow
TESTS = "def test_one():\n    pass\n\n\ndef test_two():\n    pass\n"
ENDS_THE_TIME = TESTS.replace("pass", "import os; os.environ['IN_TURN_UNTIL'] = '0'", 1)


def in_turn(folder, *, commit, workers=0):
    """The files in the order of their tests, and what was printed."""
    own = {name: value for name, value in os.environ.items() if name not in OUTER and "XDIST" not in name}
    own |= {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTHONPATH": f"{CI}{os.pathsep}{CI.parent}"}
    own |= {"IN_TURN_COMMIT": str(commit), "IN_TURN_UNTIL": str(time.time() + 1000)}
    options = ["-v", "-p", "in_turn", "-p", "no:cacheprovider", "-c", os.devnull, "--rootdir", folder]
    distributed = ["-p", "xdist", "-n", str(workers), "--dist", "loadfile"] if workers else []
    status, printed = run_pytest(folder, ["-m", "pytest", *distributed, *options, folder], own)
    assert 0 == status, printed
    return re.findall(r"^(test_\w)\.py::test_one", printed, re.MULTILINE), printed


@pytest.fixture
def five(tmp_path):
    for name in "abcde":
        (tmp_path / f"test_{name}.py").write_text(TESTS)
    return tmp_path


def test_each_commit_begins_with_another_file_and_every_file_has_its_turn(five):
    orders = [in_turn(five, commit=commit)[0] for commit in (1, 2)]
    assert 2 == len({order[0] for order in orders})
    rotated = {tuple(order[order.index("test_a") :] + order[: order.index("test_a")]) for order in orders}
    assert {tuple(f"test_{name}" for name in "abcde")} == rotated


def test_what_has_no_time_is_not_begun_and_is_counted_by_file(five):
    (five / "test_b.py").write_text(ENDS_THE_TIME)
    order, printed = in_turn(five, commit=0, workers=1)
    assert ["test_a", "test_b"] == order[:2]
    assert "in turn: 7 tests were left to other commits, 3 had their time" in printed
    assert "  test_b.py: 1\n  test_c.py: 2\n" in printed
    assert "test_a.py: " not in printed
