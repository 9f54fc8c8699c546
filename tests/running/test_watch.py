"""What `Watch` reads of ranks that may come later, most of which never do."""

import json
from types import SimpleNamespace

import pytest

from ttlaunch import contract
from ttlaunch.planning.launch_plan import RankRow
from ttlaunch.running.runs.run_folder import RunFolder
from ttlaunch.running.watch import Phase, Watch


class CountedFolder(RunFolder):
    """A run's folder that notes the files that it is asked for."""

    asked: list

    def file(self, name):
        self.asked.append(name)
        return super().file(name)


@pytest.fixture
def run(tmp_path):
    (tmp_path / contract.RECORDS_DIR).mkdir()
    folder = CountedFolder("run", tmp_path)
    object.__setattr__(folder, "asked", [])
    rows = tuple(RankRow(rank, "box", rank, "worker", later=rank > 0) for rank in range(65))
    return SimpleNamespace(folder=folder, watch=Watch(SimpleNamespace(ranks=rows), folder))


def phases(run):
    run.watch.read_all()
    return {state.row.rank: state.phase for state in run.watch.ranks if state.phase is not Phase.ABSENT}


def asked(run):
    """Which ranks are there, and the files of ranks that were asked for meanwhile."""
    run.folder.asked.clear()
    return phases(run), [name for name in run.folder.asked if "rank-" in name]


def test_files_that_are_not_there_are_not_looked_for_one_by_one(run):
    assert ({0: Phase.WAITING}, []) == asked(run)
    (run.folder.path / contract.exit_file(0)).write_text(json.dumps({"status": 0, "time": 1.0}))
    assert ({0: Phase.DONE}, [contract.exit_file(0)]) == asked(run)
    assert ({0: Phase.DONE}, []) == asked(run)


def test_a_rank_that_comes_later_is_seen_by_its_first_record(run):
    phases(run)
    line = {"kind": contract.KIND_READY, "time": 1.0}
    (run.folder.path / contract.progress_file(7)).write_text(json.dumps(line) + "\n")
    assert {0: Phase.WAITING, 7: Phase.RUNNING} == phases(run)


def test_a_rank_that_ended_before_its_first_record_is_seen(run):
    (run.folder.path / contract.exit_file(9)).write_text(json.dumps({"status": 3, "time": 1.0}))
    assert {0: Phase.WAITING, 9: Phase.FAILED} == phases(run)


def test_without_a_folder_of_records_all_ranks_are_looked_for(run):
    (run.folder.path / contract.RECORDS_DIR).rmdir()
    assert {0: Phase.WAITING} == phases(run)
    assert contract.exit_file(64) in run.folder.asked
