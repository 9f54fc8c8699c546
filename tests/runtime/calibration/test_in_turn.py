"""A single rank is rehearsed in several processes, one after the other (E9)."""

from ttlaunch.runtime.calibration import trainer
from ttlaunch.runtime.comm.in_process import InProcessWorld


class Copies:
    """Copies with rehearsals that last as long as they are told to."""

    def __init__(self, *lasts_s, wrong=()):
        self.given, self._lasts_s, self._now_s, self._wrong = {}, lasts_s, 0.0, wrong
        self.world = InProcessWorld(["copy"] * len(lasts_s))

    def run(self, seconds):
        found = {}

        def live(rank):
            def rehearsing(**limits):
                self.given[rank] = limits
                self._now_s += self._lasts_s[rank]
                return end_of(rank, wrong=rank in self._wrong)

            context = self.world.communicator(rank)
            context.rank, context.world_size = rank, len(self._lasts_s)
            found[rank] = trainer.in_turn(context, rehearsing, seconds=seconds, now=lambda: self._now_s)

        outcome = self.world.run({rank: lambda rank=rank: live(rank) for rank in range(len(self._lasts_s))})
        assert not outcome.errors
        return found


def end_of(rank, *, wrong=False):
    return {"ranks": [rank], "findings": ["something is wrong"] * wrong}


def test_each_copy_has_an_equal_part_of_the_time_after_the_one_before_it():
    copies = Copies(2.0, 2.0, 2.0)

    assert {rank: end_of(rank) for rank in range(3)} == copies.run(seconds=6.0)
    assert [0, 1, 2] == list(copies.given)
    assert [2.0] * 3 == [copies.given[rank]["seconds"] for rank in range(3)]


def test_what_a_copy_leaves_is_for_those_after_it():
    copies = Copies(3.5, 1.0, 0.0)

    copies.run(seconds=6.0)
    assert [2.0, 1.25, 1.5] == [copies.given[rank]["seconds"] for rank in range(3)]


def test_a_copy_whose_steps_are_long_takes_the_time_of_those_after_it():
    copies = Copies(1.0, 0.0)

    assert {0: end_of(0), 1: None} == copies.run(seconds=1.0)
    assert {"seconds": 0.5, "longest_s": 2.0} == copies.given[0]


def test_what_is_wrong_with_a_later_copy_alone_leaves_the_first_one():
    """Such as too few steps in the time that was left; what is wrong with the code of the plan, the first copy has found, too."""
    assert {0: end_of(0), 1: None} == Copies(1.0, 1.0, wrong=(1,)).run(seconds=2.0)
    assert {0: end_of(0, wrong=True), 1: None} == Copies(1.0, 1.0, wrong=(0, 1)).run(seconds=2.0)
