"""Hosts that a run loses and goes on without, and that come back: two agents on this machine, behind a network that fails."""

import os
import signal
import sys

import pytest

from tests.running.conftest import wait_until
from tests.running.test_host_link import Flaky
from ttlaunch import contract
from ttlaunch.agent import START_RANKS
from ttlaunch.agent.run_processes import is_gone
from ttlaunch.engines.agents import AgentsFinder
from ttlaunch.planning.engine import RanksToStart
from ttlaunch.planning.launch_plan import CommandProgram, LaunchPlan, RankRow
from ttlaunch.running.agents.agent_controller import AgentRankController
from ttlaunch.running.agents.agent_starter import AgentStarter
from ttlaunch.running.lost_hosts import SilenceWatch
from ttlaunch.running.runs.run_folder import create_run_folder, read_events, write_plan
from ttlaunch.running.watch import Phase, Watch

WITHIN_S = 60.0
ROWS = (
    RankRow(0, "near", 0, "rank"),
    RankRow(1, "far", 0, "rank"),
    RankRow(2, "far", 1, "rank", later=True),
    RankRow(3, "far", 2, "rank", later=True),
)
# Each rank says which one it is and what its host told it, and ends once a file of its number is there.
WORK = 'echo "rank $TTLAUNCH_RANK sees $PLACE"; until [ -e "$0/end-$TTLAUNCH_RANK" ]; do sleep 0.05; done'


class Network(Flaky):
    def __init__(self, host):
        super().__init__()
        self.host = host


class LongRun:
    """A run of four ranks on two hosts, of which the last two are added."""

    def __init__(self, folder):
        finder = AgentsFinder()
        hosts = (("near", 1), ("far", 3))
        command = finder.never_started().command(RanksToStart(sys.executable, START_RANKS, ROWS, hosts))
        plan = LaunchPlan(
            topology="lab",
            program=CommandProgram("work", ("work",)),
            rank_command=("sh", "-c", WORK, str(folder)),
            working_folder=str(folder),
            environment={},
            managed=(),
            ranks=ROWS,
            flows=(),
            links=(),
            engine=command,
        )
        self.marks, self.folder, self.transports = (
            folder,
            create_run_folder(folder / "runs"),
            [
                Network("near"),
                Network("far"),
            ],
        )
        write_plan(plan, self.folder.path, run_id=self.folder.run_id)
        self.starter = AgentStarter(
            self.transports,
            {transport.host: self._arguments(transport.host) for transport in self.transports},
            last_step=0,
            folder=self.folder,
            pythons={transport.host: sys.executable for transport in self.transports},
        )
        self.watch = Watch(plan, self.folder)
        self.links = self.starter.start_all()
        self.controller = AgentRankController(
            list(self.links.values()),
            None,
            self.folder,
            ranks={"near": [0], "far": [1, 2, 3]},
            own={"far": {"PLACE": "old"}},
            starter=self.starter,
            renewed=lambda link: {"PLACE": f"{link.host}:{len(link.ports)}"},
        )
        self.process = self.controller.start(
            finder.never_started(), command, folder=self.folder.path, environment={}, rows=ROWS
        )

    def _arguments(self, host):
        scratch, there = self.marks / "s", self.marks / host / self.folder.run_id
        return {
            "run_id": self.folder.run_id,
            "folder": str(there),
            "scratch": str(scratch),
            "socket": str(scratch / f"agent-{host}"),
            "lease_s": 600.0,
            "ranks": [row.rank for row in ROWS if row.host == host],
            "needed": {"the synced code": str(self.marks / "code")} if host == "far" else {},
            "holds_ports": 2,
            "files": {contract.PLAN_FILE: (self.folder.path / contract.PLAN_FILE).read_text()},
            "starter": [sys.executable, "-I", "-S", START_RANKS, str(there / contract.PLAN_FILE)],
        }

    def printed(self, rank):
        path = self.folder.path / contract.stdout_file(rank)
        return path.read_text() if path.exists() else ""

    def up(self, rank):
        """Wait until a rank runs; returns its process."""
        wait_until(lambda: "sees" in self.printed(rank), within_s=WITHIN_S, what=f"rank {rank} is up")
        wait_until(lambda: self.states()[rank].started, within_s=WITHIN_S, what=f"rank {rank} has started")
        return self.watch.ranks[rank].started.pid

    def states(self):
        self.watch.read_all()
        return self.watch.ranks

    def loses_far(self):
        """Kill the agent of that host, whose ranks end with it, and take it from the network once the host counts as lost."""
        os.kill(self.controller._link_to("far").agent, signal.SIGKILL)
        wait_until(self.is_lost, within_s=WITHIN_S, what="the host is lost")
        self.transports[1].up = False

    def is_lost(self):
        return "far" in self.controller.losses(self.watch.ranks).hosts

    def events(self, *kinds):
        return [event for event in read_events(self.folder.path) if event["event"] in kinds]

    def close(self):
        for transport in self.transports:
            transport.up = True
        self.process.kill()
        self.controller.end(lambda: None)
        self.process.stdout.close()
        self.process.stderr.close()
        for transport in self.transports:
            transport.close()


@pytest.fixture
def run(tmp_path):
    (tmp_path / "code").mkdir()
    made = LongRun(tmp_path)
    yield made
    made.close()


@pytest.fixture
def lost(run):
    """The run once its far host is lost, and the process that ran there."""
    run.up(0)
    process = run.up(1)
    run.loses_far()
    return run, process


def test_a_run_goes_on_without_a_lost_host_whose_ranks_count_as_killed(lost):
    run, process = lost
    near = run.watch.ranks[0].started.pid
    assert [1] == list(run.controller.forget("far"))
    losses = run.controller.losses(run.watch.ranks)
    assert ({}, {}, {}) == (losses.hosts, losses.shims, losses.silent)
    state = run.states()[1]
    assert (Phase.FAILED, signal.SIGKILL) == (state.phase, state.exit.signal)
    wait_until(lambda: is_gone(process), within_s=WITHIN_S, what="the rank ends with its agent")
    with pytest.raises(ValueError, match="rank 2 cannot start: host far is lost"):
        run.controller.add([run.watch.ranks[2]])
    assert Phase.ABSENT is run.watch.ranks[2].phase
    assert (None, False) == (run.process.poll(), is_gone(near))
    (run.marks / "end-0").touch()
    assert 0 == run.process.wait(WITHIN_S), (
        "the end of the others is the end, and how the lost ones ended counts for nothing"
    )


def test_a_host_that_is_back_starts_ranks_again_and_sends_what_it_could_not_send(lost):
    run, _ = lost
    run.controller.forget("far")
    run.controller.rejoin("far")
    wait_until(lambda: run.events("host_stays_away"), within_s=WITHIN_S, what="an attempt has failed")
    assert [] == list(run.controller.rejoined())
    with (run.marks / "far" / run.folder.run_id / contract.stdout_file(1)).open("a") as log:
        log.write("its last words\n")
    run.transports[1].up = True
    back = wait_until(run.controller.rejoined, within_s=WITHIN_S, what="the host is back")
    assert (["far"], []) == (list(back), list(run.controller.rejoined()))
    run.controller.add([run.watch.ranks[2]])
    run.up(2)
    assert "rank 2 sees far:2\n" == run.printed(2)
    assert ["rank 0 sees \n", "rank 1 sees old\nits last words\n"] == [run.printed(rank) for rank in (0, 1)]
    losses = run.controller.losses(run.watch.ranks)
    assert ({}, {}) == (losses.hosts, losses.shims)
    assert not is_gone(run.watch.ranks[0].started.pid), "another agent of the run on the same machine keeps its ranks"
    for rank in (0, 2):
        (run.marks / f"end-{rank}").touch()
    run.controller.add_no_more()
    assert 0 == run.process.wait(WITHIN_S)


def test_a_host_can_be_lost_and_come_back_twice(lost):
    run, _ = lost
    for rank in (2, 3):
        run.controller.forget("far")
        run.controller.rejoin("far")
        run.transports[1].up = True
        wait_until(run.controller.rejoined, within_s=WITHIN_S, what="the host is back")
        run.controller.add([run.watch.ranks[rank]])
        run.up(rank)
        run.loses_far()
    assert [3] == list(run.controller.forget("far"))
    assert [Phase.FAILED] * 3 == [state.phase for state in run.states()[1:]]
    assert 2 == len(run.events("host_returned"))


def test_a_host_without_the_code_of_the_run_stays_away_and_the_reason_is_noted_once(lost):
    run, _ = lost
    run.controller.forget("far")
    (run.marks / "code").rmdir()
    run.transports[1].up = True
    run.controller.rejoin("far")
    [event] = wait_until(lambda: run.events("host_stays_away"), within_s=WITHIN_S, what="an attempt has failed")
    place = run.marks / "code"
    # A reason has a limited length, and the path may be long.
    assert f"its agent cannot be started: {place}: the synced code is gone".startswith(event["reason"])
    assert str(place) in event["reason"]
    place.mkdir()
    assert ["far"] == list(wait_until(run.controller.rejoined, within_s=WITHIN_S, what="the host is back"))


def test_a_run_that_ends_while_a_host_is_away_waits_for_one_last_attempt(lost):
    run, _ = lost
    run.controller.forget("far")
    run.controller.rejoin("far")
    wait_until(lambda: run.events("host_stays_away"), within_s=WITHIN_S, what="an attempt has failed")
    run.controller.end(lambda: None)
    assert not run.controller._returning["far"].take()


def test_only_a_host_that_is_lost_can_be_forgotten_and_only_a_forgotten_one_comes_back(run):
    run.up(1)
    with pytest.raises(ValueError, match="host far, which is not lost"):
        run.controller.forget("far")
    with pytest.raises(ValueError, match="host far is none without which the run goes on"):
        run.controller.rejoin("far")


def test_each_loss_of_a_host_is_in_the_history_of_the_run(lost):
    class Silent:
        def output(self, stream, line):
            raise AssertionError(line)

    run, _ = lost
    silence = SilenceWatch(run.folder, Silent())
    for _ in range(2):
        silence.notice(run.controller.losses(run.watch.ranks))
    run.controller.forget("far")
    silence.notice(run.controller.losses(run.watch.ranks))
    assert ["far"] == [event["host"] for event in run.events("host_lost")]
