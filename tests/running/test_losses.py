"""The losses of a run as points: means over ranks, seconds of training, and little memory for a long run."""

import json

import pytest

from ttlaunch import contract
from ttlaunch.running.readers.losses import LossPoint, read_losses
from ttlaunch.running.readers.recorded import read_run
from ttlaunch.running.runs.run_folder import RunFolder, append_event


@pytest.fixture
def run(tmp_path):
    """`run(records of rank 0, of rank 1, …)`: the folder of a run on hosts `h0`, `h1`, …"""

    def make(*ranks):
        (tmp_path / contract.RECORDS_DIR).mkdir()
        rows = [{"rank": rank, "host": f"h{rank}", "slot": 0, "role": "worker"} for rank in range(len(ranks))]
        plan = {"recipe": {"name": "r", "folder": "/none"}, "layout": None, "config": {}, "ranks": rows, "hash": "x"}
        (tmp_path / contract.PLAN_FILE).write_text(json.dumps(plan))
        for rank, records in enumerate(ranks):
            (tmp_path / contract.progress_file(rank)).write_text("".join(map(contract.record_line, records)))
        return tmp_path

    return make


def step(time, number, loss):
    return {"kind": "step", "time": time, "step": number, "loss": loss}


def test_the_loss_of_a_step_is_the_mean_of_its_ranks_and_time_counts_from_the_start_up(run):
    first = [{"kind": "ready", "time": 10.0}, step(12.0, 1, 4.0), step(13.0, 2, 3.0)]
    second = [{"kind": "ready", "time": 111.0}, step(112.5, 1, 2.0), step(114.0, 2, 2.0)]
    validation = {"kind": "validation", "time": 114.5, "step": 2, "loss": 2.25}
    path = run(first, [*second, validation])
    append_event(RunFolder("r", path), contract.EVENT_CLOCK, host="h1", offset_s=100.0)
    losses = read_losses(read_run(path))
    assert (LossPoint(1, 3.0, 1.5), LossPoint(2, 2.5, 3.0)) == losses.training
    assert ((LossPoint(2, 2.25, 3.5),), 0) == (losses.validation, losses.left_out)


def test_losses_that_no_axis_could_show_are_counted_and_left_out(run):
    path = run([step(1.0, 1, 2.0), step(2.0, 2, float("nan")), step(3.0, 3, float("inf")), step(4.0, 4, -1e300)])
    losses = read_losses(read_run(path))
    assert ([1], 3) == ([point.step for point in losses.training], losses.left_out)


def test_a_long_run_is_joined_into_a_bounded_number_of_points(run):
    number = 5000
    records = [step(float(at), at, float(at)) for at in range(1, number + 1)]
    losses = read_losses(read_run(run(records, records)))
    assert 256 <= len(losses.training) <= 1024
    assert number == losses.training[-1].step
    assert number / 2 == pytest.approx(sum(point.loss for point in losses.training) / len(losses.training), rel=0.01)


def test_an_event_about_a_clock_that_makes_no_sense_changes_nothing(run):
    path = run([{"kind": "ready", "time": 10.0}, step(12.0, 1, 4.0)])
    for host, offset in (("h0", "1"), ("h0", float("nan")), (None, 5.0), ("h0", None)):
        append_event(RunFolder("r", path), contract.EVENT_CLOCK, host=host, offset_s=offset)
    assert (LossPoint(1, 4.0, 2.0),) == read_losses(read_run(path)).training
