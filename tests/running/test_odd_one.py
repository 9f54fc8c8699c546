"""Which rank stands apart where no flight recorder says who waits for whom, from scripted stacks and processes."""

import pytest

from ttlaunch.records.agents import RankProcess
from ttlaunch.running.failures.stderr_tail import Raised, ThreadError
from ttlaunch.running.hang.odd_one import describe_place, find_odd_one
from ttlaunch.running.hang.stacks import Frame
from ttlaunch.running.hang.waits import Seen

MAIN = Frame("/home/me/ring.py", 30, "main")
WAITS = (Frame("/home/me/ring.py", 22, "step"), MAIN, Frame("/x/site-packages/mpi4py/run.py", 320, "main"))
OTHER = (Frame("/home/me/ring.py", 13, "step"), MAIN)
IN_LIBRARY = (Frame("/usr/lib/python3.11/threading.py", 327, "wait"), *OTHER)


def process(rank, *, does="polls", program="/usr/bin/python3.11", waits_in="", catches_crashes=True):
    return RankProcess(
        rank=rank, name="x", program=program, does=does, waits_in=waits_in, catches_crashes=catches_crashes
    )


def ranks(*stacks, **processes):
    """Ranks with these stacks, all of which wait in MPI as far as `processes` does not say otherwise."""
    return [
        Seen(rank, "rank", "box", None, stack=stack, process=processes.get(f"p{rank}", process(rank)))
        for rank, stack in enumerate(stacks)
    ]


def odd(seen):
    found = find_odd_one(seen)
    return None if found is None else found.rank


def test_a_rank_at_another_line_than_most_is_the_odd_one():
    assert 2 == odd(ranks(WAITS, WAITS, OTHER, WAITS))


def test_a_rank_in_mpi_whose_stack_could_not_be_read_counts_as_one_of_the_others():
    assert 3 == odd(ranks(WAITS, (), WAITS, OTHER))
    assert 2 == odd(ranks(WAITS, WAITS, (), WAITS, p2=process(2, does="waits", waits_in="hrtimer_nanosleep")))
    assert odd(ranks(WAITS, (), OTHER)) is None
    assert odd(ranks(WAITS, (), ())) is None
    assert odd(ranks(WAITS, WAITS, OTHER, (), (), ())) is None


def test_a_rank_that_came_another_way_to_the_same_line_is_the_odd_one():
    elsewhere = (WAITS[0], Frame("/home/me/ring.py", 31, "main"))
    assert 1 == odd(ranks(WAITS, elsewhere, WAITS))


def test_lines_of_libraries_below_the_users_own_make_no_difference():
    assert odd(ranks(OTHER, IN_LIBRARY, OTHER)) is None


def test_of_two_ranks_that_both_wait_in_mpi_none_is_named():
    assert odd(ranks(WAITS, OTHER)) is None


def test_of_two_ranks_the_one_that_does_not_wait_in_mpi_is_named():
    assert 1 == odd(ranks(WAITS, OTHER, p1=process(1, does="waits", waits_in="hrtimer_nanosleep")))


def test_of_several_odd_ones_the_one_that_does_not_wait_in_mpi_is_named():
    third = (Frame("/home/me/ring.py", 17, "step"), MAIN)
    assert 3 == odd(ranks(WAITS, WAITS, OTHER, third, WAITS, p3=process(3, does="computes")))


@pytest.mark.parametrize(
    ("process_of_1", "said"),
    [
        (
            process(1, does="waits", program="/usr/bin/sleep", waits_in="hrtimer_nanosleep", catches_crashes=False),
            "runs `sleep` without a Python stack and sleeps in `hrtimer_nanosleep` of the kernel",
        ),
        (
            process(1, catches_crashes=False),
            "has left its program and waits while it exits, as in MPI_Finalize",
        ),
    ],
)
@pytest.mark.parametrize("others", [1, 3])
@pytest.mark.parametrize("stack", [WAITS, ()], ids=["with py-spy", "without py-spy"])
def test_a_rank_that_became_another_program_or_is_exiting_is_named(process_of_1, said, others, stack):
    seen = ranks(stack, (), *[stack] * (others - 1), p1=process_of_1)
    assert (1, said) == (odd(seen), describe_place(seen[1]))


def test_ranks_that_exit_wait_for_the_one_that_does_not():
    exiting = {f"p{rank}": process(rank, catches_crashes=False) for rank in (0, 1, 3)}
    assert 2 == odd(ranks((), (), OTHER, (), **exiting))


def test_a_rank_that_lost_a_thread_is_named_before_all_others():
    seen = ranks(WAITS, WAITS, OTHER, WAITS)
    raised = Raised("ValueError", "shard 7", "/home/me/ring.py", 7)
    seen[0] = Seen(0, "rank", "box", None, stack=WAITS, thread_error=ThreadError("loader", raised))
    assert 0 == odd(seen)


def test_ranks_of_which_nothing_is_known_have_no_odd_one():
    assert odd([Seen(rank, "rank", "box", None) for rank in range(3)]) is None


def test_the_only_rank_is_named():
    assert 0 == odd(ranks(OTHER))


def test_a_place_has_the_users_line_and_the_call_below_it():
    assert "is in `step` at ring.py:13, in `wait` at threading.py:327" == describe_place(ranks(IN_LIBRARY)[0])
