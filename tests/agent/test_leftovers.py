"""What a run has left on a host is found by its id, its folders, and nothing else."""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from ttlaunch import contract
from ttlaunch.agent.leftovers import find_leftovers
from ttlaunch.agent.send_signal import holders
from ttlaunch.engines.choose import ENGINES
from ttlaunch.planning.engine import RanksToStart

NAMES = ENGINES[0].never_started().command(RanksToStart("python", "shim.py", [], [])).names
NOTHING = {"processes": [], "folders": []}


@pytest.fixture
def places(tmp_path, monkeypatch):
    """Where a run's scratch folder is, and where MPI keeps its sessions."""
    (tmp_path / "tmp").mkdir()
    monkeypatch.setenv("TMPDIR", str(tmp_path / "tmp"))
    return tmp_path


def look(places, *, run_id="run-1", age_s=60.0, patience_s=0.0):
    scratch = str(places / "scratch")
    return find_leftovers(
        run_id=run_id,
        scratch=scratch,
        age_s=age_s,
        patience_s=patience_s,
        folders=NAMES.folders,
        segments=NAMES.segments,
    )


def without_time(answer):
    return {name: answer[name] for name in NOTHING}


def sleeper(run_id):
    return subprocess.Popen(["sleep", "60"], env={**os.environ, contract.ENV_RUN_ID: run_id})


def test_a_process_that_carries_the_id_is_left_and_one_of_another_run_is_not(places):
    own, other = sleeper("run-1"), sleeper("run-2")
    try:
        answer = look(places)
        assert {"processes": [{"pid": own.pid, "name": "sleep 60"}], "folders": []} == without_time(answer)
        assert answer["clean_after_s"] is None
    finally:
        for process in (own, other):
            process.kill()
            process.wait()
    assert 0.0 <= look(places)["clean_after_s"] < 60.0


def test_what_goes_in_time_is_not_left(places):
    line = "import sys, time; sys.stdout.write('up'); sys.stdout.flush(); time.sleep(0.5)"
    environment = {**os.environ, contract.ENV_RUN_ID: "run-1"}
    process = subprocess.Popen([sys.executable, "-c", line], env=environment, stdout=subprocess.PIPE)
    with process:
        assert b"up" == process.stdout.read(2)
        answer = look(places, patience_s=20.0)
    assert NOTHING == without_time(answer)
    assert 0.0 < answer["clean_after_s"] < 20.0


def test_the_scratch_folder_and_sessions_of_dead_daemons_are_left(places):
    dead = subprocess.Popen(["true"])
    dead.wait()
    (places / "scratch").mkdir()
    session = places / f"tmp/prte.node0.{dead.pid}.0"
    session.mkdir()
    (places / f"tmp/prte.node0.{os.getpid()}.0").mkdir()
    assert {"processes": [], "folders": [str(places / "scratch"), str(session)]} == without_time(look(places))
    os.utime(session, (0, 0))
    assert [str(places / "scratch")] == look(places)["folders"], "what is older than the run is not its own"


def test_who_holds_a_file_is_found():
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder).resolve() / "agent.claim"
        with path.open("w"):
            assert [os.getpid()] == holders(str(path))
        assert [] == holders(str(path))
