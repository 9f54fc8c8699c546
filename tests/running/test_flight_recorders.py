"""What the launcher says of flight recorders: a rank's last operation in words, and which recordings a run folder keeps."""

import pytest

from ttlaunch import contract
from ttlaunch.flight_recorder import DONE, read_recorder
from ttlaunch.flight_recorder_writer import FlightRecorder
from ttlaunch.planning.launch_plan import RankRow
from ttlaunch.running.flight_recorders import (
    drop_evidence,
    keep_recorders,
    last_operation,
    last_operations,
    read_recorders,
)
from ttlaunch.running.watch import RankState

RECV, WAIT_SEND = 2, 5
ROLES = ("worker", "worker", "aggregator")


@pytest.fixture
def recording(tmp_path):
    return FlightRecorder(tmp_path / contract.recorder_file(0), rank=0)


def told(tmp_path, *, after_s=12.4):
    """What is said of the recording so many seconds after the moment 0 of its operations."""
    recording = read_recorder((tmp_path / contract.recorder_file(0)).read_bytes())
    last = last_operation(recording, roles=ROLES, end=recording.seconds(0) + after_s)
    return last and last.text


def test_an_operation_that_lasts_is_told_with_all_that_is_known(tmp_path, recording):
    recording.begin_step(7)
    recording.begin(RECV, ("gradients", 1), ("/home/me/trainer.py", 41), peer=2, tag=3, size=13_200_000, now=0)
    assert (
        "recv of 13.2 MB from rank 2 (aggregator), gradients, tag 3, bucket 1, step 7, "
        "begun 12.4 s before the end, at trainer.py:41"
    ) == told(tmp_path)


def test_an_operation_that_is_done_says_when(tmp_path, recording):
    recording.end(recording.begin(WAIT_SEND, ("weights", None), None, peer=1, tag=0, size=12, now=10**9), 2 * 10**9)
    expected = (
        "wait for send of 12 bytes to rank 1 (worker), weights, tag 0, begun 11.4 s and done 10.4 s before the end"
    )
    assert expected == told(tmp_path)


def test_a_rank_that_did_nothing_or_all_of_it_has_no_last_operation(tmp_path, recording):
    assert told(tmp_path) is None
    recording.begin(RECV, ("gradients", 1), None, peer=2, tag=3, size=4, now=0)
    assert told(tmp_path) is not None
    recording.announce(DONE)
    assert told(tmp_path) is None


def test_times_of_another_hosts_clock_are_put_right(tmp_path, recording):
    recording.begin(RECV, ("gradients", None), None, peer=2, tag=3, size=4, now=0)
    ranks = [RankState(RankRow(0, "far", 0, "worker"), clock_offset_s=100.0)]
    end = read_recorder((tmp_path / contract.recorder_file(0)).read_bytes()).seconds(0) - 100 + 3
    assert {0: 3.0} == {rank: last.began_s for rank, last in last_operations(tmp_path, ranks, end=end).items()}


def test_boxes_are_kept_for_a_run_that_ended_badly_and_for_no_other(tmp_path, recording):
    recording.begin(RECV, ("gradients", None), None, peer=2, tag=3, size=4, now=0)
    run = tmp_path / "run"
    (run / "stacks").mkdir(parents=True)
    (run / "stacks/rank-0.txt").write_text("")
    (run / "stacks/rank-1.txt").write_text("Thread 0x1\n")
    (tmp_path / contract.recorder_file(1)).write_text("no recording")
    keep_recorders(tmp_path, run, world_size=3)
    drop_evidence(run, is_done=False)
    assert ["blackbox/rank-0.box", "stacks/rank-1.txt"] == sorted(str(p.relative_to(run)) for p in run.glob("*/*"))
    assert [0] == list(read_recorders(run, ranks=range(3)))
    (run / "stacks/rank-1.txt").unlink()
    drop_evidence(run, is_done=True)
    assert [] == list(run.iterdir())
