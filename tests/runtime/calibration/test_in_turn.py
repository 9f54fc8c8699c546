"""A single rank is rehearsed in several processes, one after the other (E9)."""

import time

import pytest

from ttlaunch.runtime.calibration import trainer
from ttlaunch.runtime.comm.in_process import InProcessWorld


class Copies:
    """Copies with rehearsals that last as long as they are told to."""

    def __init__(self, *lasts_s):
        self.given, self._lasts_s = {}, lasts_s
        self.world = InProcessWorld(["copy"] * len(lasts_s))

    def run(self, seconds):
        found = {}

        def live(rank):
            def rehearsing(**limits):
                self.given[rank] = limits
                time.sleep(self._lasts_s[rank])
                return {"ranks": [rank]}

            context = self.world.communicator(rank)
            context.rank, context.world_size = rank, len(self._lasts_s)
            found[rank] = trainer.in_turn(context, rehearsing, seconds=seconds)

        outcome = self.world.run({rank: lambda rank=rank: live(rank) for rank in range(len(self._lasts_s))})
        assert not outcome.errors
        return found


def test_each_copy_has_an_equal_part_of_the_time_after_the_one_before_it():
    copies = Copies(0.2, 0.2, 0.2)

    assert {rank: {"ranks": [rank]} for rank in range(3)} == copies.run(seconds=0.6)
    assert [0, 1, 2] == list(copies.given)
    assert [pytest.approx(0.2, abs=0.05)] * 3 == [copies.given[rank]["seconds"] for rank in range(3)]


def test_a_copy_whose_steps_are_long_takes_the_time_of_those_after_it():
    copies = Copies(1.0, 0.0)

    assert {0: {"ranks": [0]}, 1: None} == copies.run(seconds=1.0)
    assert {"seconds": 0.5, "longest_s": 2.0} == copies.given[0]
