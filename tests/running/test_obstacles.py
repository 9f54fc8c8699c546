"""What is said of a run that hangs on something beside its ranks: a stopped shim, child or daemon, or a cut network."""

import pytest

from ttlaunch.planning.launch_plan import RankRow
from ttlaunch.records.agents import ProcessReport, StoppedHelper
from ttlaunch.running.hang.obstacles import find_obstacle
from ttlaunch.running.rank_controller import merge_reports
from ttlaunch.running.watch import RankState

RANKS = [RankState(RankRow(rank, host, 0, "worker")) for rank, host in enumerate(("a", "b", "c"))]


def report(*, helpers=(), unacknowledged=(), address=None):
    return ProcessReport(
        question=1,
        stopped=(),
        faults=(),
        helpers=helpers,
        unacknowledged=unacknowledged,
        addresses=("172.17.0.1", *([address] if address else [])),
    )


def obstacle(**reports):
    return find_obstacle(
        merge_reports({"" if host == "here" else host: one for host, one in reports.items()}), RANKS, quiet_s=9.0
    )


def stopped(rank, pid, name="", *, is_shim=False):
    return StoppedHelper(rank=rank, pid=pid, name=name, is_shim=is_shim)


def test_without_an_obstacle_there_is_none():
    assert obstacle(a=report(), b=report()) is None


def test_a_stopped_shim_is_named_with_its_rank_and_before_a_stopped_daemon():
    found = obstacle(
        here=report(helpers=(stopped(None, 4, "prterun"),)), b=report(helpers=(stopped(1, 5, is_shim=True),))
    )
    assert ("R013", 1, "b") == (found.code, found.rank, found.host)
    assert found.cause == "cannot go on: its shim (process 5) was stopped by a signal, and nobody resumed it within 9 s"
    assert found.next_step == "`kill -CONT 5` on b continues a stopped process"


def test_a_stopped_child_of_a_rank_is_named_with_the_rank():
    found = obstacle(b=report(helpers=(stopped(1, 5, "loader"),)))
    assert ("R013", 1) == (found.code, found.rank)
    assert found.cause.startswith("cannot go on: its child `loader` (process 5) was stopped by a signal, and ")


@pytest.mark.parametrize(
    ("where", "host", "said"),
    [("c", "c", "`prted` (process 6) on c, "), ("here", None, "`prted` (process 6) on this machine, ")],
)
def test_a_stopped_daemon_is_named_with_its_host(where, host, said):
    found = obstacle(**{where: report(helpers=(stopped(None, 6, "prted"),))})
    assert ("R064", None, host) == (found.code, found.rank, found.host)
    assert found.cause.startswith(said + "a process of the launcher of ranks, was stopped by a signal, and nobody ")
    assert found.evidence == (("it started rank 2",) if host else ())


@pytest.mark.parametrize(
    ("helper", "said"),
    [
        (stopped(7, 6, is_shim=True), "the shim of rank 7 (process 6) on c, "),
        (stopped(7, 6, "loader"), "`loader` (process 6) on c, "),
    ],
)
def test_a_stopped_process_of_a_worker_that_has_not_come_is_named_with_its_host(helper, said):
    found = obstacle(c=report(helpers=(helper,)))
    assert ("R064", None, "c") == (found.code, found.rank, found.host)
    assert found.cause.startswith(said)


def test_a_cut_between_two_hosts_names_both_and_the_one_that_does_not_answer():
    found = obstacle(
        a=report(unacknowledged=((0, "10.0.0.2", 5),), address="10.0.0.1"),
        b=report(address="10.0.0.2"),
        c=report(address="10.0.0.3"),
    )
    assert ("R065", None, "b") == (found.code, found.rank, found.host)
    assert found.cause == (
        "the network between a and b carries nothing, at least not in one direction: b has not acknowledged what a has "
        "sent it 6 times"
    )
    assert found.evidence == ("b has not acknowledged what a has sent it 6 times", "on a: rank 0", "on b: rank 1")


def test_a_host_that_several_others_cannot_reach_is_named():
    found = obstacle(
        a=report(unacknowledged=((0, "10.0.0.2", 5),), address="10.0.0.1"),
        b=report(unacknowledged=((1, "10.0.0.1", 9),), address="10.0.0.2"),
        c=report(unacknowledged=((2, "10.0.0.1", 4),), address="10.0.0.3"),
    )
    assert "a" == found.host


def test_a_peer_whose_address_no_host_or_several_hosts_have_is_named_by_its_address():
    assert "9.9.9.9" == obstacle(a=report(unacknowledged=((0, "9.9.9.9", 5),))).host
    assert "172.17.0.1" == obstacle(a=report(unacknowledged=((0, "172.17.0.1", 5),)), b=report()).host
