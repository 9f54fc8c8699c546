"""The ranks that agents have started, as the supervisor sees them: when they have ended, and what hosts report about that."""

import os
import select
import signal
import subprocess

import pytest

from ttlaunch.engines.agents import AgentsFinder
from ttlaunch.hosts.transport.local import LocalTransport
from ttlaunch.planning.engine import RanksToStart
from ttlaunch.planning.launch_plan import RankRow
from ttlaunch.records.agents import RanksEnded
from ttlaunch.running.agents.agent_controller import AgentRankController
from ttlaunch.running.agents.host_link import HostLink
from ttlaunch.running.agents.started_ranks import StartedRanks
from ttlaunch.running.runs.run_folder import RunFolder
from ttlaunch.running.watch import Phase, RankState

ENGINE = AgentsFinder().never_started()
RANKS = {"a": [0, 1], "b": [2]}


def link_to(host):
    """A link to a host that was never connected: orders wait in it."""
    return HostLink(
        LocalTransport(host),
        {"lease_s": 15.0},
        ranks=RANKS[host],
        last_step=0,
        python="python3",
        keep=lambda *_: None,
        note=lambda *_, **__: None,
    )


@pytest.fixture
def links():
    return [link_to(host) for host in RANKS]


@pytest.fixture
def started(links):
    ranks = StartedRanks(links, RANKS, {host: {"MASTER": "x"} for host in RANKS})
    yield ranks
    ranks.stdout.close()
    ranks.stderr.close()


def ends(link, status, said=""):
    link._note_end(RanksEnded(status=status, said=said))


def report_of(started):
    return AgentsFinder().never_started().read_output(started.stderr.read().decode(), {})


def test_each_host_is_ordered_once_to_start_its_own_ranks(links, started):
    assert started.poll() is None
    for link in links:
        expected = {"kind": "start", "order": 1, "ranks": RANKS[link.host], "variables": {"MASTER": "x"}, "later": []}
        assert [expected] == link._orders


def test_a_host_is_ordered_to_start_what_is_added_and_told_when_no_more_can_come(links):
    ranks = StartedRanks(links, RANKS, {host: {} for host in RANKS}, later=[1, 2])
    ranks.add([2])
    ranks.add_no_more()
    ranks.stdout.close()
    ranks.stderr.close()
    orders = [[(order["ranks"], order["later"]) for order in link._orders] for link in links]
    assert [[([0], [1]), ([], [])], [([], [2]), ([2], [])]] == orders


def test_they_have_ended_when_those_of_every_host_have(links, started):
    ends(links[0], 0)
    with pytest.raises(subprocess.TimeoutExpired):
        started.wait(0.05)
    ends(links[1], 3)
    assert (3, 3) == (started.poll(), started.wait(0.0))


def test_the_end_of_a_shim_wakes_who_waits(links, started):
    assert ([], [], []) == select.select([started.stdout], [], [], 0.0)
    links[1].changed()
    assert [started.stdout] == select.select([started.stdout], [], [], 1.0)[0]
    assert b"a rank has ended\n" == os.read(started.stdout.fileno(), 100)


def test_a_lost_host_is_not_waited_for(links, started):
    ends(links[0], 0)
    links[1].over.set()
    assert 1 == started.poll()


def test_a_kill_waits_for_no_host(links, started):
    started.kill()
    assert -signal.SIGKILL == started.wait(0.0)
    assert all(link._orders[-1]["number"] == signal.SIGKILL for link in links)


def test_a_host_reports_about_the_shims_of_its_own_ranks_alone(links, started):
    lie = "shim of rank 0 was killed by signal 9\nstarter on a was killed by SIGKILL\nb: x\nshim of rank 2 was killed by signal 9"
    ends(links[0], 0)
    ends(links[1], 9, lie)
    assert 9 == started.poll()
    report = report_of(started)
    assert (frozenset({2}), False) == (report.killed_shims, report.lost_daemon)


def test_a_killed_starter_is_told_from_one_that_the_launcher_has_killed(links, started):
    started.send_signal(signal.SIGTERM)
    ends(links[0], 143)
    ends(links[1], 137)
    started.poll()
    assert report_of(started).lost_daemon


def test_a_rank_is_added_once_and_none_after_the_last_has_ended(links, tmp_path):
    controller = AgentRankController(links, None, RunFolder("unused", tmp_path), ranks=RANKS)
    rows = [RankRow(rank, host, 0, "rank", later=rank > 0) for host, ranks in RANKS.items() for rank in ranks]
    first, second, third = (RankState(row, Phase.ABSENT if row.later else Phase.WAITING) for row in rows)
    command = ENGINE.command(RanksToStart("python3", "shim.py", rows, []))
    started = controller.start(ENGINE, command, folder=tmp_path, environment={}, rows=rows)
    controller.add([second])
    for state in (first, second):
        with pytest.raises(ValueError, match=f"rank {state.row.rank} has been started already"):
            controller.add([third, state])
    assert (Phase.WAITING, Phase.ABSENT) == (second.phase, third.phase)
    controller.add_no_more()
    with pytest.raises(ValueError, match="the run takes no further ranks"):
        controller.add([third])
    assert [2, 2] == [len(link._orders) for link in links]
    started.stdout.close()
    started.stderr.close()
