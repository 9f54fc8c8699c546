"""What the controller of ranks on this machine says about their shims."""

import json
import subprocess
import sys

import psutil
import pytest

from tests.running.conftest import wait_until
from ttlaunch import contract
from ttlaunch.agent import SHIM
from ttlaunch.engines.agents import AgentsFinder
from ttlaunch.planning.engine import RanksToStart
from ttlaunch.planning.launch_plan import RankRow
from ttlaunch.records.ranks import Started
from ttlaunch.running.rank_controller import LocalRankController
from ttlaunch.running.watch import Phase, RankState


@pytest.mark.parametrize("has_recorded", [True, False])
def test_a_shim_is_lost_only_if_it_ended_without_a_record_of_its_rank(tmp_path, has_recorded):
    """The record may be newer than what the supervisor has read: the rank's state still says that it runs."""
    shim = subprocess.Popen(["true"])
    shim.wait()
    state = RankState(RankRow(0, "localhost", 0, "rank"), Phase.STARTING)
    state.started = Started(time=1.0, pid=shim.pid, shim_pid=shim.pid, host="here")
    (tmp_path / contract.RECORDS_DIR).mkdir()
    if has_recorded:
        (tmp_path / contract.exit_file(0)).write_text('{"rank": 0, "time": 2.0, "status": 0}')
    controller = LocalRankController("run", scratch=tmp_path, run_folder=tmp_path)
    assert ([] if has_recorded else [0]) == list(controller.losses([state]).shims)


def test_ranks_of_an_engine_that_can_wait_start_only_with_the_order_and_its_process_ends_without_one(tmp_path):
    """The interpreter of `start_ranks.py` is up before the order, so that the run need not wait for it."""
    (tmp_path / contract.PLAN_FILE).write_text(json.dumps({"format": contract.PLAN_FORMAT, "ranks": []}))
    engine = AgentsFinder().find(python=sys.executable, search_path=None)
    command = engine.command(RanksToStart(sys.executable, str(SHIM), (), ()))
    controller = LocalRankController("run", scratch=tmp_path, run_folder=tmp_path)

    def starters():
        return [process for process in psutil.Process().children() if process.name() == "start_ranks"]

    with controller.started_ahead(engine, command, folder=tmp_path, environment={}):
        wait_until(starters, within_s=30, what="start_ranks.py starts")
    assert not starters()
    with controller.started_ahead(engine, command, folder=tmp_path, environment={}):
        wait_until(starters, within_s=30, what="start_ranks.py starts")
        process = controller.start(engine, command, folder=tmp_path, environment={}, rows=())
        assert [process.pid] == [starter.pid for starter in starters()]
        assert 0 == process.wait(30)
        for stream in (process.stdout, process.stderr):
            stream.close()
