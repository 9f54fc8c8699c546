"""`ttlaunch.log`: the numbers that a script reports about its steps."""

import subprocess
import sys

import pytest

import ttlaunch
from ttlaunch import contract
from ttlaunch.records.ranks import StepDone, read_progress


@pytest.fixture
def progress(tmp_path, monkeypatch):
    """The file of progress of rank 1, as its shim has made it; the process is that rank."""
    path = tmp_path / contract.progress_file(1)
    path.parent.mkdir()
    path.touch()
    monkeypatch.setenv(contract.ENV_RUN_DIR, str(tmp_path))
    monkeypatch.setenv(contract.ENV_RANK, "1")
    return path


class Tensor:
    """What converts to a number, as a tensor of one element does."""

    def __float__(self):
        return 0.25


def test_a_logged_step_is_a_record_like_that_of_a_recipe(progress):
    ttlaunch.log(step=3, loss=Tensor(), samples=8)
    ttlaunch.log(step=4, loss=float("nan"))
    third, fourth = (read_progress(line) for line in progress.read_bytes().splitlines())
    assert isinstance(third, StepDone)
    assert (3, 0.25, ("samples", 8)) == (third.step, third.loss, third.counted)
    assert (4, True) == (fourth.step, fourth.loss != fourth.loss)


@pytest.mark.parametrize(
    ("call", "text"),
    [
        ({"step": 0}, "step is 0; a positive integer was expected"),
        ({"step": 1.5}, "step is 1.5"),
        ({"step": 1, "loss": "low"}, "`loss` is 'low'; a number was expected"),
        ({"step": 1, "time": 3.0}, "a metric cannot be called `time`"),
    ],
)
def test_what_is_no_metric_is_refused_and_not_written(progress, call, text):
    with pytest.raises(ValueError, match=text):
        ttlaunch.log(**call)
    assert b"" == progress.read_bytes()


def test_outside_of_a_run_nothing_happens(progress, monkeypatch):
    monkeypatch.delenv(contract.ENV_RUN_DIR)
    ttlaunch.log(step=1, loss=0.5)
    assert b"" == progress.read_bytes()


def test_a_run_that_is_over_leaves_the_script_alone(progress):
    progress.unlink()
    ttlaunch.log(step=1, loss=0.5)
    assert not progress.exists()


def test_the_call_loads_nothing_of_the_launcher():
    code = "import sys, ttlaunch; ttlaunch.log(step=1); print([n for n in sys.modules if n.startswith(('ttlaunch.app', 'pydantic'))])"
    assert "[]\n" == subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
