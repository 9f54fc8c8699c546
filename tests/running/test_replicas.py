"""The digests of ranks, compared step by step as they arrive, and what follows for checkpoints."""

import json

import pytest

from tests.running.test_checkpoints import PLAN, Planned, write_shard
from ttlaunch import contract
from ttlaunch.planning.launch_plan import RankRow
from ttlaunch.records.audits import Digests
from ttlaunch.running import replicas as module
from ttlaunch.running.checkpoints.complete import CheckpointKeeper, complete_checkpoints
from ttlaunch.running.checkpoints.resume import find_checkpoint
from ttlaunch.running.conclude import compared_replicas
from ttlaunch.running.replicas import Difference, ReplicaWatch
from ttlaunch.running.runs.run_folder import create_run_folder


def record(step, names=None, **digests):
    """A record of these digests, with their names unless `names` is False."""
    text = "".join(f"{value:016x}" for value in digests.values())
    return Digests(time=1.0, step=step, digests=text, names=None if names is False else tuple(digests))


@pytest.fixture
def watch():
    """Three ranks that agree in step 0 and are in step 10."""
    watch = ReplicaWatch()
    for rank in range(3):
        watch.take(rank, record(0, w=1, b=2))
    watch.settle(dict.fromkeys(range(3), 10))
    return watch


def test_a_step_is_compared_when_all_ranks_have_reported_it(watch):
    watch.take(0, record(10, names=False, w=3, b=4))
    watch.take(1, record(10, names=False, w=3, b=4))
    watch.settle(dict.fromkeys(range(3), 10))
    assert (0, 0) == (watch.step, watch.agreed)
    watch.take(2, record(10, names=False, w=3, b=4))
    watch.settle(dict.fromkeys(range(3), 10))
    assert (10, 10, None) == (watch.step, watch.agreed, watch.difference)


def test_a_rank_that_has_gone_on_or_ended_without_a_report_is_not_waited_for(watch):
    watch.take(0, record(10, w=3))
    watch.settle({0: 10, 1: 11})
    assert 10 == watch.agreed


def test_what_a_rank_has_reported_that_others_go_on_without_is_compared_with_nothing(watch):
    watch.take(0, record(10, w=3))
    watch.forget({0})
    for rank in (1, 2):
        watch.take(rank, record(10, w=4))
    watch.settle({1: 10, 2: 10})
    assert (10, None) == (watch.agreed, watch.difference)


def test_the_first_difference_stays_and_no_later_step_is_compared(watch):
    watch.take(0, record(10, w=3))
    watch.take(1, record(10, w=3))
    watch.take(2, record(10, w=7))
    for rank in range(3):
        watch.take(rank, record(20, w=3))
    watch.settle({})
    assert (Difference("w", ((0, 1), (2,))), 10, 0) == (watch.difference, watch.step, watch.agreed)


def test_ranks_with_other_names_are_compared_where_they_share_one(watch):
    watch.take(0, record(10, b=9, w=3))
    watch.take(1, record(10, w=3, mine=1))
    watch.take(2, record(10, w=3, mine=1))
    watch.settle({})
    assert (None, 10) == (watch.difference, watch.agreed)


def test_digests_that_do_not_fit_their_names_count_as_missing(watch):
    watch.take(0, record(10, names=False, w=3))
    watch.take(1, record(10, names=False, w=3, b=4))
    watch.take(1, record(10, names=False, w=5, b=4))  # not new
    watch.take(2, record(10, names=False, w=3, b=4))
    watch.settle({})
    assert (None, 10) == (watch.difference, watch.agreed)


def test_a_rank_that_makes_up_steps_does_not_fill_the_memory(watch, monkeypatch):
    monkeypatch.setattr(module, "_MOST_STEPS", 5)
    for step in range(11, 1000):
        watch.take(0, record(step, w=step))
        watch.settle(dict.fromkeys(range(3), 10))
        assert len(watch._waiting) <= 5


def test_a_checkpoint_has_agreed_only_when_its_step_was_compared(watch):
    assert watch.has_agreed(0, owners=[0])
    assert not watch.has_agreed(10, owners=[0])
    for rank in range(3):
        assert not watch.has_agreed(10, owners=[0])
        watch.take(rank, record(10, names=False, w=3, b=4))
    assert not watch.has_agreed(10, owners=[0])
    watch.settle(dict.fromkeys(range(3), 10))
    assert watch.has_agreed(10, owners=[0])


def test_a_checkpoint_waits_for_the_digests_of_owners_that_have_reported_none_yet():
    watch = ReplicaWatch()
    watch.settle({0: 10, 1: 10})
    assert not watch.has_agreed(10, owners=[0, 1])
    watch.settle({0: 11, 1: 11})
    assert watch.has_agreed(10, owners=[0, 1])


def test_checkpoints_from_the_step_of_a_difference_on_are_removed_and_older_ones_stay(tmp_path, watch, until):
    folder = create_run_folder(tmp_path / "runs")
    for step in (0, 10, 20):
        write_shard(folder.path, step, 0)
        write_shard(folder.path, step, 1)
    with CheckpointKeeper(Planned(), folder, replicas=watch) as keeper:
        until((folder.path / contract.checkpoint_dir(0)).is_dir, within_s=20, what="step 0 is complete")
        for rank in range(3):
            watch.take(rank, record(10, w=3 + rank))
        watch.settle({})
        keeper.finish()
    assert ["step-0"] == sorted(path.name for path in (folder.path / "checkpoints").iterdir())
    events = [json.loads(line) for line in folder.file(contract.EVENTS_FILE).read_text().splitlines()]
    assert [10, 20] == [event["step"] for event in events if event["event"] == "checkpoint_differs"]


@pytest.mark.parametrize(("digest", "found"), [(5, 10), (6, None)])
def test_a_resume_completes_what_a_killed_launcher_left_only_if_its_digests_agree(tmp_path, digest, found):
    folder = create_run_folder(tmp_path / "runs")
    folder.file(contract.RECORDS_DIR).mkdir(exist_ok=True)
    ranks = [{"rank": rank, "host": "box", "local_rank": rank, "role": "worker"} for rank in range(2)]
    folder.file(contract.PLAN_FILE).write_text(json.dumps({**PLAN, "ranks": ranks}))
    for rank, value in enumerate((5, digest)):
        write_shard(folder.path, 10, rank)
        content = {"kind": "digests", "time": 1.0, "step": 10, "names": ["w"], "digests": f"{value:016x}"}
        folder.file(contract.progress_file(rank)).write_text(contract.record_line(content))
    search = find_checkpoint(str(folder.path), runs_folder=tmp_path / "runs", working_folder=tmp_path)
    assert found == (search.checkpoint.step if search.checkpoint else None)


def test_a_difference_is_told_with_rank_host_tensor_step_and_the_last_step_that_agreed(watch):
    for rank, value in enumerate((3, 7, 3)):
        watch.take(rank, record(10, w=value))
    watch.settle({})
    plan = Planned()
    plan.ranks, plan.program = [RankRow(rank, f"box-{rank}", 0, "worker") for rank in range(3)], None
    failure = compared_replicas(plan, watch)
    assert "rank 1 (worker, box-1) had other bits in `w` than ranks 0 and 2 in step 10" == failure.message
    assert (1, "box-1", 10) == (failure.rank, failure.host, failure.step)
    assert ("2 of 3 copies agree", "all copies agreed before the first step") == failure.evidence


def test_copies_that_differ_from_the_start_are_told_without_a_step():
    watch = ReplicaWatch()
    watch.take(0, record(0, w=3))
    watch.take(1, record(0, w=4))
    watch.settle({})
    plan = Planned()
    plan.ranks, plan.program = [RankRow(rank, "box", rank, "worker") for rank in range(2)], None
    failure = compared_replicas(plan, watch)
    said = "rank 0 (worker, box) and rank 1 (worker, box) had different bits in `w` before the first step"
    assert (said, None) == (failure.message, failure.rank)


def test_without_digests_no_checkpoint_waits(tmp_path):
    write_shard(tmp_path, 10, 0)
    write_shard(tmp_path, 10, 1)
    watch = ReplicaWatch()
    watch.settle({})
    assert [10] == complete_checkpoints(tmp_path, PLAN, run_id="a", replicas=watch)
