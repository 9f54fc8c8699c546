"""Which rank has departed from the order of its group, from scripted flight recorders."""

import pytest

from ttlaunch import contract
from ttlaunch.flight_recorder import COLLECTIVE, GROUP, NOBODY, SKIPPED, WORLD, read_recorder
from ttlaunch.flight_recorder_writer import FlightRecorder
from ttlaunch.running.hang.departure import find_departure

STEP = [("backward", 64, 10), ("mean", 4, 12)]


@pytest.fixture
def departure(tmp_path):
    """`departure([(name, bytes, line), …], …)`: by rank what it called in the group of all ranks; the last call lasts."""

    def find(*scripts, skips=(), tag=WORLD):
        recordings = {}
        for rank, script in enumerate(scripts):
            box = FlightRecorder(tmp_path / contract.recorder_file(rank), rank=rank)
            for name, size, line in script:
                if rank in skips:
                    box.begin(SKIPPED, ("backward", None), ("a.py", 8), peer=NOBODY, tag=0, size=0, now=1, message=1)
                at = box.begin(COLLECTIVE, (name, None), ("a.py", line), peer=GROUP, tag=tag, size=size, now=10)
                if (name, size, line) != script[-1]:
                    box.end(at, 20)
            recordings[rank] = read_recorder((tmp_path / contract.recorder_file(rank)).read_bytes())
        return find_departure(recordings)

    return find


@pytest.mark.parametrize("who", [0, 1])
def test_the_rank_that_leaves_its_own_order_is_named_with_what_it_skipped(departure, who):
    scripts = [[*STEP, *STEP, *STEP, STEP[0]], [*STEP, *STEP, *STEP, STEP[1]]]
    found = departure(*(scripts if who else scripts[::-1]))
    assert (who, "a.py:10") == (found.rank, found.place)
    other = 1 - who
    assert (
        f"has skipped backward of 64 bytes at a.py:10: it called mean of 4 bytes at a.py:12, and rank {other} waits in what it skipped"
        == found.cause
    )


def test_several_operations_that_a_rank_skipped_are_counted(departure):
    long = [("a", 1, 1), ("b", 2, 2), ("c", 3, 3), ("d", 4, 4)]
    found = departure([*long, *long, *long[:2]], [*long, *long, long[0], long[3]])
    assert (1, "a.py:2") == (found.rank, found.place)
    assert "has skipped b of 2 bytes at a.py:2 and the operation after it: it called d" in found.cause


def test_without_an_order_the_rank_that_differs_from_most_is_named(departure):
    found = departure([("sum", 8, 3)], [("barrier", 0, 5)], [("sum", 8, 3)])
    assert (1, "a.py:5") == (found.rank, found.place)
    assert "called barrier at a.py:5, where rank 0 and 2 called sum of 8 bytes at a.py:3" == found.cause


def test_a_pass_that_only_one_rank_records_as_skipped_is_named_by_its_forward_pass(departure):
    found = departure([("backward", 64, 10)] * 3, [("backward", 64, 10)] * 2 + [("barrier", 0, 30)], skips=(1,))
    assert (1, "a.py:8") == (found.rank, found.place)
    assert found.cause.startswith("has skipped backward after its forward pass at a.py:8: it called barrier at a.py:30")


def test_skips_of_all_ranks_are_their_way_to_train(departure):
    found = departure([("backward", 64, 10)] * 3, [("backward", 64, 10)] * 2 + [("barrier", 0, 30)], skips=(0, 1))
    assert "called barrier at a.py:30, where rank 0 called backward of 64 bytes at a.py:10" == found.cause


def test_ranks_that_have_called_the_same_have_not_departed(departure):
    assert departure([*STEP, *STEP], STEP) is None


def test_ranks_of_different_groups_are_not_compared(departure):
    assert departure([("sum", 8, 3)], [], tag=7) is None
