"""What the controller of ranks on this machine says about their shims."""

import subprocess

import pytest

from ttlaunch import contract
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
