"""How an end before its time is decided, second by second: orders, the grace, a failure in between; no process and no clock."""

import signal
from types import SimpleNamespace

import pytest

from tests.running.test_attribution import came_from
from ttlaunch.planning.launch_plan import CommandProgram, RankRow, RecipeProgram
from ttlaunch.records.endings import ErrorInFlight, RankExit
from ttlaunch.running.conclude import Ending
from ttlaunch.running.ending import NoteFailure, RunEnd, ShowMessage, SignalEngine, SignalRanks
from ttlaunch.running.watch import Phase, RankState

INT, TERM, HUP, KILL = signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGKILL
STOP, STACKS = signal.SIGUSR1, signal.SIGUSR2
EXIT = RankExit(status=0, time=1.0)


class End:
    """The end of a run of two ranks, at times that the test sets."""

    def __init__(self, *, is_recipe=True, grace_s=30.0, saves=True, phase=Phase.RUNNING, loses_ranks=False):
        config = {"checkpoint_config": {"interval": 1 if saves else None}}
        recipe = RecipeProgram("mine", "mine", "two", config, None)
        plan = SimpleNamespace(
            program=recipe if is_recipe else CommandProgram("work", ("work",)), as_json=lambda: {"config": config}
        )
        self.ranks = [RankState(RankRow(rank, "box", rank, "worker"), phase) for rank in (0, 1)]
        self.ending = Ending()
        self._end = RunEnd(self.ending, plan, grace_s=grace_s, loses_ranks=loses_ranks)

    def at(self, now, *orders):
        """What is done at a moment, after these signals have come."""
        for number in orders:
            self._end.order(number)
        return list(self._end.decide(now, self.ranks))

    def say_steps(self, *steps):
        for state, step in zip(self.ranks, steps, strict=True):
            state.stops_after = step

    def leave(self):
        for state in self.ranks:
            state.exit, state.phase = EXIT, Phase.DONE


def test_nothing_is_done_to_a_run_that_goes_well():
    assert [] == End().at(5.0)


def test_ranks_of_a_recipe_are_asked_for_their_step_and_told_the_largest():
    end = End()
    text = "Ctrl-C: ranks finish their step and save it, within 30 s; Ctrl-C again leaves them 5 s"
    assert [ShowMessage(text), SignalRanks(STOP)] == end.at(100.0, INT)
    end.say_steps(7, None)
    assert [] == end.at(101.0)
    end.say_steps(7, 9)
    assert [SignalRanks(STOP, {"after_step": 9})] == end.at(102.0)
    assert [] == end.at(103.0)
    end.leave()
    assert [] == end.at(104.0)
    assert (INT, False, 9, {}) == (
        end.ending.signal_number,
        end.ending.is_failing,
        end.ending.after_step,
        end.ending.outstayed,
    )


def test_nobody_waits_for_the_step_of_a_worker_that_was_lost_without_a_record_of_its_end():
    end = End()
    end.ending.lost_shims[1] = 99.0
    end.ending.tolerate(frozenset({1}), end.ranks)
    end.at(100.0, INT)
    end.say_steps(7, None)
    assert [SignalRanks(STOP, {"after_step": 7})] == end.at(101.0)


def test_a_sigterm_that_reaches_both_the_view_and_the_supervisor_is_one_order():
    end = End()
    assert SignalRanks(STOP) in end.at(100.0, TERM, TERM)
    assert [] == end.at(100.9, TERM)
    assert [ShowMessage("5 s are left; another signal ends every rank at once")] == end.at(101.5, TERM)
    assert [ShowMessage("ending every rank at once")] == end.at(101.6, INT)[:1]


def test_a_time_limit_is_an_order_that_is_given_once():
    end = End()
    text = "the time limit is near: ranks finish their step and save it, within 30 s; another signal leaves them 5 s"
    assert [ShowMessage(text), SignalRanks(STOP)] == end.at(100.0, signal.SIGUSR1)
    assert [] == end.at(101.0, signal.SIGUSR1)
    assert [ShowMessage("5 s are left; another signal ends every rank at once")] == end.at(102.0, TERM)
    assert signal.SIGUSR1 == end.ending.signal_number


def test_a_recipe_that_keeps_no_checkpoints_only_finishes_its_step():
    (say, _) = End(saves=False).at(100.0, TERM)
    assert ShowMessage("SIGTERM: ranks finish their step, within 30 s; another signal leaves them 5 s") == say


def test_ranks_that_outstay_the_grace_say_what_they_are_doing_and_are_killed():
    end = End()
    end.at(100.0, INT)
    end.ranks[1].exit = EXIT
    assert [] == end.at(129.9)
    assert [SignalRanks(STACKS)] == end.at(130.0)
    assert [] == end.at(130.2)
    assert [SignalRanks(KILL), SignalEngine(TERM)] == end.at(130.5)
    assert [] == end.at(131.9)
    assert [SignalEngine(KILL)] == end.at(132.0)
    assert [] == end.at(140.0)
    assert {0: 30.0} == end.ending.outstayed


def test_a_second_order_shortens_the_grace():
    end = End()
    end.at(100.0, INT)
    assert [ShowMessage("5 s are left; Ctrl-C again ends every rank at once")] == end.at(101.0, INT)
    assert [] == end.at(105.9)
    assert [SignalRanks(STACKS)] == end.at(106.0)


def test_a_second_order_never_lengthens_what_is_left():
    end = End()
    end.at(100.0, INT)
    assert [ShowMessage("2 s are left; another signal ends every rank at once")] == end.at(128.0, TERM)
    assert [SignalRanks(STACKS)] == end.at(130.0)


def test_a_third_order_kills_at_once_and_accuses_nobody():
    end = End()
    end.at(100.0, INT)
    end.at(101.0, INT)
    assert [ShowMessage("ending every rank at once"), SignalRanks(STACKS)] == end.at(102.0, INT)
    assert [SignalRanks(KILL), SignalEngine(TERM)] == end.at(102.5)
    assert {} == end.ending.outstayed


def test_three_orders_at_one_moment_are_a_first_a_second_and_a_third():
    acts = End().at(100.0, INT, INT, INT)
    assert ["Ctrl-C: ranks", "5 s are left;", "ending every "] == [
        act.text[:13] for act in acts if isinstance(act, ShowMessage)
    ]
    assert [SignalRanks(STOP), SignalRanks(STACKS)] == [act for act in acts if isinstance(act, SignalRanks)]


def test_a_terminal_that_closes_after_ctrl_c_does_not_shorten_the_grace():
    end = End()
    end.at(100.0, INT)
    assert [] == end.at(101.0, HUP)
    assert [] == end.at(129.0)
    assert INT == end.ending.signal_number


def test_a_terminal_that_closes_is_an_order_of_its_own():
    (say, act) = End().at(100.0, HUP)
    assert say.text.startswith(
        "the terminal was closed: ranks finish their step and save it, within 30 s; another signal"
    )
    assert SignalRanks(STOP) == act


@pytest.mark.parametrize("phase", [Phase.WAITING, Phase.STARTING])
def test_ranks_that_have_not_begun_have_nothing_to_save(phase):
    end = End(phase=phase)
    acts = end.at(100.0, INT)
    assert ShowMessage("Ctrl-C: ending every rank at once") == acts[0]
    assert ([SignalRanks(STACKS)] if phase is Phase.STARTING else [SignalEngine(TERM)]) == acts[1:]
    assert {} == end.ending.outstayed


@pytest.mark.parametrize("is_recipe", [True, False])
def test_without_a_grace_every_rank_is_ended_at_once(is_recipe):
    end = End(is_recipe=is_recipe, grace_s=0.0)
    acts = end.at(100.0, INT)
    assert ShowMessage("Ctrl-C: ending every rank at once") == acts[0]
    acts += end.at(100.5)
    assert SignalEngine(TERM) in acts
    assert {} == end.ending.outstayed


def test_a_grace_shorter_than_the_short_one_is_said_as_it_is():
    (say, _) = End(grace_s=2.0).at(100.0, INT)
    assert say.text.endswith("within 2 s; Ctrl-C again leaves them 2 s")


def test_after_a_failure_mpirun_has_a_moment_to_end_the_others_itself():
    end = End()
    end.ranks[0].phase = Phase.FAILED
    assert [NoteFailure()] == end.at(100.0)
    assert end.ending.is_failing
    assert [] == end.at(101.25)
    assert [SignalEngine(TERM)] == end.at(101.5)
    assert [SignalEngine(KILL)] == end.at(103.0)


def test_an_engine_that_loses_ranks_is_ended_once_the_rank_that_failed_first_can_have_reported():
    """Ranks that have lost a connection may end sooner than the exception is seen in the rank that closed it."""
    end = End(loses_ranks=True)
    end.ranks[1].phase, end.ranks[1].exit = Phase.FAILED, RankExit(status=3, time=1.0)
    assert [NoteFailure()] == end.at(100.0)
    assert [] == end.at(100.4)
    assert [SignalEngine(TERM)] == end.at(100.5)


@pytest.mark.parametrize("cause", [None, RankExit(status=0, time=2.0), RankExit(signal=9, time=2.0)])
def test_while_ranks_have_only_lost_connections_the_rank_that_closed_them_has_time_to_end(cause):
    end = End(loses_ranks=True)
    end.ranks[1].phase, end.ranks[1].exit = Phase.FAILED, RankExit(status=1, time=1.0)
    end.ranks[1].error = came_from(1.0, "ConnectionResetError", broken=("local 127.0.0.1:4711",))
    assert [NoteFailure()] == end.at(100.0)
    assert [] == end.at(102.0)
    end.ranks[0].exit = cause
    when = 115.0 if cause is None else 102.1
    assert [SignalEngine(TERM)] == end.at(when)


def test_a_connection_that_may_have_been_to_anybody_is_not_waited_for_as_long_as_one_to_a_rank():
    end = End(loses_ranks=True)
    end.ranks[1].phase, end.ranks[1].exit = Phase.FAILED, RankExit(status=1, time=1.0)
    end.ranks[1].error = came_from(1.0, "ConnectionResetError")
    assert [NoteFailure()] == end.at(100.0)
    assert [] == end.at(103.9)
    assert [SignalEngine(TERM)] == end.at(104.0)


def test_a_rank_that_has_run_all_of_its_code_has_longer_to_end():
    end = End(loses_ranks=True)
    end.ranks[1].phase, end.ranks[1].exit = Phase.FAILED, RankExit(status=1, time=1.0)
    end.ranks[1].error = came_from(1.0, "BrokenPipeError")
    end.ranks[0].in_flight = ErrorInFlight(error=None, left=0.9)
    assert [NoteFailure()] == end.at(100.0)
    assert [] == end.at(114.9)
    assert [SignalEngine(TERM)] == end.at(115.0)


def test_an_exception_in_flight_that_explains_the_lost_connections_is_waited_for_no_longer():
    end = End(loses_ranks=True)
    end.ranks[1].phase, end.ranks[1].exit = Phase.FAILED, RankExit(status=1, time=1.0)
    end.ranks[1].error = came_from(1.0, "BrokenPipeError")
    assert [NoteFailure()] == end.at(100.0)
    assert [] == end.at(101.0)
    end.ranks[0].in_flight = ErrorInFlight(error=came_from(0.9, "ValueError"))
    assert [SignalEngine(TERM)] == end.at(101.1)


def test_a_missed_shim_is_a_failure_like_any_other():
    end = End()
    end.ending.lost_shims[1] = 5.0
    assert [NoteFailure()] == end.at(100.0)
    assert [SignalEngine(TERM)] == end.at(101.5)


def test_nothing_is_waited_for_once_a_host_is_lost():
    end = End()
    end.ending.lost_hosts["box"] = None
    assert [NoteFailure(), SignalEngine(TERM)] == end.at(100.0)
    assert [SignalEngine(KILL)] == end.at(100.25)


def test_a_failure_during_the_grace_ends_the_grace():
    end = End()
    end.at(100.0, INT)
    end.ranks[0].phase = Phase.FAILED
    assert [NoteFailure()] == end.at(110.0)
    assert [SignalRanks(STACKS)] == end.at(111.5)
    assert [SignalEngine(TERM)] == end.at(112.0)
    assert (True, {}) == (end.ending.is_failing, end.ending.outstayed)


def test_a_failure_at_the_end_of_the_grace_gets_no_more_time_than_was_left():
    end = End()
    end.at(100.0, INT)
    end.ranks[0].phase = Phase.FAILED
    end.at(129.5)
    assert [SignalRanks(STACKS)] == end.at(130.0)


def test_an_order_after_a_failure_changes_the_status_and_nothing_else():
    end = End()
    end.ranks[0].phase = Phase.FAILED
    end.at(100.0)
    assert [] == end.at(100.5, INT)
    assert INT == end.ending.signal_number
    assert 100.0 == end.ending.since


def test_a_program_is_sent_sigterm_and_may_end_as_it_likes():
    end = End(is_recipe=False, phase=Phase.STARTING)
    text = "Ctrl-C: ranks were sent SIGTERM and have 30 s to end; Ctrl-C again leaves them 5 s"
    assert [ShowMessage(text), SignalRanks(TERM, {"after_step": None})] == end.at(100.0, INT)
    end.ranks[0].exit, end.ranks[0].phase = RankExit(status=5, time=1.0), Phase.FAILED
    assert [] == end.at(110.0)
    assert not end.ending.is_failing
    end.ranks[1].exit = EXIT
    assert [SignalEngine(TERM)] == end.at(111.0)  # nothing keeps mpirun any more but the shims


def test_a_program_that_outstays_the_grace_is_killed_without_being_asked_for_stacks():
    end = End(is_recipe=False, phase=Phase.STARTING)
    end.at(100.0, TERM)
    assert [SignalRanks(KILL), SignalEngine(TERM)] == end.at(130.0)
    assert {0: 30.0, 1: 30.0} == end.ending.outstayed
