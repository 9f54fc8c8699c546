"""A host cannot make up a checkpoint of a step that the run has not reached."""

import pytest

from tests.running.conftest import wait_until
from tests.running.test_checkpoints import Planned, write_shard
from ttlaunch import contract
from ttlaunch.planning.launch_plan import RankRow
from ttlaunch.running.bad_records import BadRecords
from ttlaunch.running.checkpoints.complete import CheckpointKeeper, is_reached
from ttlaunch.running.runs.run_folder import create_run_folder
from ttlaunch.running.watch import RankState


def at(*steps, hosts=("good", "evil", "other")):
    """Ranks on these hosts that have reported these steps."""
    return [
        RankState(RankRow(rank, host, 0, "worker"), step=step)
        for rank, (step, host) in enumerate(zip(steps, hosts, strict=False))
    ]


@pytest.mark.parametrize(
    ("ranks", "owners", "reached"),
    [
        (at(10, 10), [1], True),
        (at(9, 10), [1], True),
        (at(7, 10), [1], False),
        (at(7, 10), [0, 1], True),
        (at(0, 10), [1], True),
        (at(0, 0), [1], False),
        (at(7, 10, 10), [1], True),
        (at(1, 1, hosts=("one", "one")), [1], True),
        ([], [1], True),
    ],
    ids=[
        "all are there",
        "the others are about to report it",
        "the others are far behind",
        "shards of two hosts",
        "the others never report",
        "nobody has reported anything",
        "one other is there",
        "one host has all ranks",
        "nobody knows",
    ],
)
def test_a_step_counts_as_reached_if_somebody_else_has_come_as_far(ranks, owners, reached):
    assert reached is is_reached(10, owners, ranks=ranks)


def test_a_checkpoint_that_one_host_makes_up_is_never_completed_and_is_gone_in_the_end(tmp_path):
    folder, bad, ranks = create_run_folder(tmp_path / "runs"), BadRecords(), at(5, 1000)
    with CheckpointKeeper(Planned(), folder, ranks=ranks, complain=bad.add) as keeper:
        write_shard(folder.path, 1000, 1, owners=[1])
        for rank in (0, 1):
            write_shard(folder.path, 5, rank)
        wait_until((folder.path / contract.checkpoint_dir(5)).is_dir, within_s=20, what="the true one is complete")
        keeper.finish()
    assert ["step-5"] == [path.name for path in (folder.path / contract.CHECKPOINTS_DIR).iterdir()]
    [told] = bad.fresh()
    assert (1, "no rank on another host has come to step 1000") == (told.rank, told.reason)
