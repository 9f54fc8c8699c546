"""What the supervisor makes of other hosts: lost ones are named before what follows, and clocks are compared."""

import json
import os
import signal
from types import SimpleNamespace

import pytest

from ttlaunch import contract
from ttlaunch.engines.choose import ENGINES
from ttlaunch.errors import HostError, Trouble
from ttlaunch.planning.launch_plan import EngineNames, RankRow
from ttlaunch.records.agents import FilePiece
from ttlaunch.records.endings import RankError, RankExit
from ttlaunch.running.agents.agent_starter import write_piece
from ttlaunch.running.conclude import Ending, find_failure
from ttlaunch.running.failures.attribution import first_failure
from ttlaunch.running.failures.causes import Cause
from ttlaunch.running.failures.failure import rank_failure
from ttlaunch.running.lost_hosts import LostHost
from ttlaunch.running.runs.run_folder import RunFolder
from ttlaunch.running.watch import RankState, Watch

ROWS = [RankRow(0, "box-a", 0, "worker"), RankRow(1, "box-b", 0, "worker")]
SILENT = {"box-b": LostHost(HostError("box-b", Trouble.TIMED_OUT, "no answer within 10 s"), last_heard=5.0)}


def blamed(*, exits=None, error=None, lost=None):
    ranks = [RankState(row) for row in ROWS]
    for rank, record in (exits or {}).items():
        ranks[rank].exit = RankExit(**record)
    ranks[0].error = error and RankError(**error)
    return first_failure(ranks, lost_shims={}, lost_hosts=lost or {}, stopped=False)


def test_a_lost_host_is_named_with_its_ranks():
    failure = blamed(lost=SILENT)
    assert (failure.code, failure.message) == ("R012", "host box-b was lost: no answer within 10 s")
    assert failure.evidence == ("it ran rank 1 (worker)",)
    assert failure.next_step == "`ttlaunch doctor --on NAME` shows whether the host is back"


def test_what_mpirun_kills_after_a_host_was_lost_is_not_blamed():
    killed = {"time": 9.0, "status": None, "signal": signal.SIGKILL}
    assert blamed(exits={0: killed}, lost=SILENT).code == "R012"


def test_a_rank_that_broke_before_the_host_was_lost_is_blamed():
    error = {"time": 4.0, "type": "ValueError", "message": "short"}
    assert blamed(error=error, lost=SILENT).message == "rank 0 (worker, box-a) raised ValueError"


def test_a_rank_that_only_lost_its_peer_is_not_blamed_for_a_lost_host():
    error = {"time": 4.0, "type": "ConnectionResetError", "message": "by peer"}
    assert blamed(error=error, lost=SILENT).code == "R012"


class _Plan:
    ranks = ROWS
    engine = SimpleNamespace(names=EngineNames(launcher="mpirun", rank_variables=(), abort_message=r"^Abort\((\d+)\)"))


@pytest.fixture
def watch(tmp_path):
    (tmp_path / "records").mkdir()
    return Watch(_Plan, RunFolder("test", tmp_path)), tmp_path / "records"


def test_times_of_a_host_whose_clock_is_wrong_are_put_right(watch):
    seen, records = watch
    seen.set_clock("box-b", 3600.0)
    for rank, time in ((0, 101.0), (1, 3700.0)):
        (records / f"rank-{rank}.error.json").write_text(json.dumps({"time": time, "type": "ValueError"}))
    seen.poll()
    failure = first_failure(seen.ranks, lost_shims={}, stopped=False)
    assert (failure.rank, failure.time) == (1, 100.0)


def test_progress_of_hosts_comes_in_the_order_in_which_it_happened(watch):
    seen, records = watch
    seen.set_clock("box-b", -50.0)
    (records / "rank-0.progress.jsonl").write_text('{"kind": "note", "time": 100.0, "text": "second"}\n')
    (records / "rank-1.progress.jsonl").write_text('{"kind": "note", "time": 49.0, "text": "first"}\n')
    assert [record.text for _, record in seen.poll()] == ["first", "second"]


def test_pieces_of_a_file_continue_it_or_lie_in_what_is_there(tmp_path):
    path = tmp_path / "log"
    for offset, body in ((0, b"hel"), (0, b"hel"), (3, b"lo\n"), (1, b"el")):
        write_piece(path, FilePiece(name=path.name, offset=offset, whole=False, number=1), body)
    assert path.read_bytes() == b"hello\n"


@pytest.mark.parametrize(("offset", "whole"), [(7, False), (2**41, False), (2**43, False), (2**53, False), (1, True)])
def test_a_piece_that_leaves_a_gap_is_refused(tmp_path, offset, whole):
    path = tmp_path / "rank-0.exit.json"
    path.write_bytes(b"hello\n")
    with pytest.raises(ValueError, match=f"at offset {offset}"):
        write_piece(path, FilePiece(name=path.name, offset=offset, whole=whole, number=1), b"x")
    assert path.read_bytes() == b"hello\n"


def test_a_whole_record_replaces_what_was_there(tmp_path):
    path = tmp_path / "rank-0.exit.json"
    path.write_bytes(b'{"a": 1, "b": 2}')
    write_piece(path, FilePiece(name=path.name, offset=0, whole=True, number=1), b"{}")
    assert path.read_bytes() == b"{}"
    assert [entry.name for entry in tmp_path.iterdir()] == [path.name]


def _concluded(tmp_path, *, returncode, exits, lost=(), noticed=None, outlived=(), before=()):
    """The failure of a run of two ranks whose mpirun has ended by itself."""
    (tmp_path / "logs").mkdir(exist_ok=True)
    (tmp_path / "logs/mpirun.stderr").write_text("")
    (tmp_path / "records").mkdir(exist_ok=True)
    seen = Watch(_Plan, RunFolder("test", tmp_path))
    for rank, record in exits.items():
        seen.ranks[rank].exit = RankExit(**record)
    ending = Ending(lost_shims=dict.fromkeys(lost, 5.0), failure=noticed, terminated=7.0 if noticed else None)
    ending.tolerated, ending.lost_before_engine = frozenset(outlived), frozenset(before)
    return find_failure(
        RunFolder("test", tmp_path),
        seen,
        ending,
        plan=_Plan,
        engine=ENGINES[0].never_started(),
        returncode=returncode,
    )


def test_an_mpirun_that_leaves_a_rank_behind_has_failed_whatever_its_status(tmp_path):
    failure = _concluded(tmp_path, returncode=0, exits={0: {"status": 0, "time": 1.0}})
    message = "mpirun exited with status 0 before rank 1 (worker, box-b) had ended; no rank had failed"
    assert (failure.code, failure.message) == ("R008", message)


@pytest.mark.parametrize(
    ("said", "code", "cause"),
    [("Abort(3) on node 1", "R003", "exited with status 3"), ("Abort(256) on node 1", "R005", "left with status 0")],
)
def test_the_rank_that_had_the_engine_end_all_ranks_is_named_although_no_shim_recorded_an_end(
    tmp_path, said, code, cause
):
    log = tmp_path / contract.stderr_file(1)
    log.parent.mkdir()
    log.write_text(f"{said}\n")
    os.utime(log, (4.0, 4.0))
    failure = _concluded(tmp_path, returncode=3, exits={}, lost=(1, 0))
    assert (code, 1) == (failure.code, failure.rank)
    assert failure.cause.startswith(cause)


@pytest.mark.parametrize("noted", ["4.5 2 21\n9.0 2 21 end\n", ""])
def test_a_rank_that_aborts_mpi_is_named_although_its_log_is_a_copy_from_another_host(tmp_path, noted):
    """The copy is newer than the loss of the shims, which follows from the abort; the shim itself may not have noted when."""
    log = tmp_path / contract.stderr_file(1)
    log.parent.mkdir()
    log.write_text("Abort(3) on node 1\n")
    os.utime(log, (7.0, 7.0))
    (tmp_path / contract.times_file(1)).write_text(noted)
    failure = _concluded(tmp_path, returncode=3, exits={}, lost=(0, 1))
    assert ("R003", 1) == (failure.code, failure.rank)


@pytest.mark.parametrize(("status", "lost_at"), [(0, 4.1), (3, 4.1), (0, 3.99)])
def test_a_rank_that_had_left_is_named_although_another_ends_by_a_lost_connection_meanwhile(tmp_path, status, lost_at):
    """The run was ended because of the rank that left; the others may notice its closed connections before its end is noted."""
    error = {"type": "BrokenPipeError", "message": "", "causes": [], "time": lost_at}
    (tmp_path / "records").mkdir()
    written = json.dumps({"error": error, "uncaught": True, "left": 4.2})
    (tmp_path / contract.exceptions_file(0)).write_text(f"{written}\n")
    exits = {0: {"status": 1, "time": 6.9}, 1: {"status": status, "time": 6.8}}
    noticed = rank_failure(ROWS[1], code="R005", kind=Cause.LEFT_EARLY, cause="left before the other ranks", time=4.0)
    failure = _concluded(tmp_path, returncode=-signal.SIGTERM, exits=exits, noticed=noticed)
    assert (1, "left before the other ranks") == (failure.rank, failure.cause)


def test_a_killed_mpirun_is_named_and_no_rank_that_its_daemons_ended(tmp_path):
    ended = {rank: {"status": None, "signal": signal.SIGTERM, "time": 6.0} for rank in (0, 1)}
    failure = _concluded(tmp_path, returncode=-signal.SIGKILL, exits=ended)
    assert ("R008", "mpirun was killed by SIGKILL; no rank had failed") == (failure.code, failure.message)


def test_an_engine_that_is_killed_after_a_worker_was_lost_and_replaced_says_which_one(tmp_path):
    exits = {0: {"status": None, "signal": signal.SIGKILL, "time": 3.0}}
    failure = _concluded(tmp_path, returncode=-signal.SIGKILL, exits=exits, outlived=[0])
    cause = "mpirun was killed by SIGKILL; no rank had failed but worker-0000, without which the others went on"
    assert ("R008", cause) == (failure.code, failure.message)


def test_a_worker_that_was_lost_before_the_engine_is_named_if_nobody_has_gone_on_without_it(tmp_path):
    exits = {rank: {"status": None, "signal": signal.SIGKILL, "time": 3.0 - rank} for rank in (0, 1)}
    failure = _concluded(tmp_path, returncode=-signal.SIGKILL, exits=exits, before=[0])
    assert ("R004", 0) == (failure.code, failure.rank)


def test_an_mpirun_that_takes_all_shims_along_is_named_and_no_rank(tmp_path):
    failure = _concluded(tmp_path, returncode=143, exits={}, lost=(1, 0))
    assert failure.message.startswith("mpirun exited with status 143")


def test_one_shim_that_was_killed_is_named(tmp_path):
    ended = {"status": None, "signal": signal.SIGTERM, "time": 6.0}
    failure = _concluded(tmp_path, returncode=1, exits={0: ended}, lost=(1,))
    assert (failure.code, failure.rank) == ("R006", 1)
