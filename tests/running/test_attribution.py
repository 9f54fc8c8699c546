"""Which rank broke first, from scripted records: what an ending is outranks when it was recorded."""

import json
import signal
from types import SimpleNamespace

import pytest

from tests.records.written import progress
from ttlaunch.engines.choose import ENGINES
from ttlaunch.errors import HostError, Trouble
from ttlaunch.planning.launch_plan import RankRow
from ttlaunch.records.endings import ErrorCause, ErrorInFlight, RankError, RankExit
from ttlaunch.records.ranks import kind_of
from ttlaunch.running.conclude import different_parameters
from ttlaunch.running.failures.attribution import Witnesses, first_failure
from ttlaunch.running.failures.causes import Cause
from ttlaunch.running.lost_folders import LostFolder
from ttlaunch.running.lost_hosts import LostHost
from ttlaunch.running.report import combine_digests
from ttlaunch.running.runs.run_folder import RunFolder
from ttlaunch.running.watch import Phase, RankState, Watch, fold

ROLES = ["worker", "worker", "aggregator", "optimizer"]


RECORDS = {"exit": RankExit, "error": RankError, "in_flight": ErrorInFlight, "started": lambda: None}


def test_a_removed_folder_is_named_before_the_shims_that_it_ended_but_not_before_an_exception_of_a_rank():
    ranks = [RankState(RankRow(rank, host, 0, "worker")) for rank, host in enumerate(("a", "b"))]
    run = LostFolder("the run's folder", "/far/runs/1", 10.0, ends_run=True)
    failure = first_failure(ranks, lost_shims={1: 9.8}, lost_folders={"b": run}, stopped=False)
    assert ("R066", Cause.FOLDER_LOST, "b", None) == (failure.code, failure.kind, failure.host, failure.rank)
    assert "the run's folder on b was removed: /far/runs/1, while the run needed it" == failure.message
    assert ("it was needed by rank 1",) == failure.evidence
    code = LostFolder("the synced code", "/far/code", 10.0, ends_run=False)
    assert first_failure(ranks, lost_shims={}, lost_folders={"b": code}, stopped=False) is None
    for kind, message, named in (
        ("ModuleNotFoundError", "No module named 'late'", None),
        ("FileNotFoundError", "no such file: '/far/code/x'", None),
        ("ValueError", "bucket 7", 1),
    ):
        ranks[1].error = RankError(time=12.0, type=kind, message=message)
        failure = first_failure(ranks, lost_shims={}, lost_folders={"b": code}, stopped=False)
        assert named == failure.rank
    assert "meanwhile the synced code on b was removed: /far/code" in failure.evidence


def states(**by_rank):
    """Four ranks; `r1={"exit": {...}}` says what is known of rank 1."""
    ranks = [RankState(RankRow(rank, "box", rank, role)) for rank, role in enumerate(ROLES)]
    for name, known in by_rank.items():
        for key, value in known.items():
            setattr(ranks[int(name[1:])], key, RECORDS[key](**value) if key in RECORDS else value)
    return ranks


def ended(time, *, status=None, number=None, early=False):
    return {"exit": {"time": time, "status": status, "signal": number, "left_early": early}}


def raised(time, kind="ValueError", message="short", step=0):
    return {"error": {"time": time, "type": kind, "message": message, "file": "t.py", "line": 7, "step": step}}


def said(text, **known):
    """What is known where the engine has written this."""
    engine = ENGINES[0].never_started()
    return Witnesses(engine=engine.read_output(text, {}), launcher=engine.signature.program, **known)


def blamed(ranks, *, lost=None, stopped=False):
    failure = first_failure(ranks, lost_shims=lost or {}, stopped=stopped)
    return failure and (failure.code, failure.message)


def test_nobody_is_blamed_when_all_ranks_are_done():
    assert blamed(states(r0=ended(1, status=0), r1=ended(2, status=0))) is None


def test_the_earlier_of_two_exceptions_is_the_first():
    ranks = states(r2=raised(5.0), r1=raised(4.9))
    assert blamed(ranks) == ("R002", "rank 1 (worker, box) raised ValueError")


def test_a_kill_outranks_the_exit_that_was_recorded_before_it():
    """A peer that loses its connection can be recorded before the kill that caused it."""
    ranks = states(r0=ended(1.00000, status=14), r3=ended(1.00009, number=signal.SIGKILL))
    assert blamed(ranks) == ("R004", "rank 3 (optimizer, box) was killed by SIGKILL")


NOTICED = "prterun noticed that process rank 1 with PID 4930 on node box exited on\nsignal 9 (Killed).\n"


def test_a_shim_that_was_killed_before_it_wrote_anything_is_known_from_mpirun():
    heard = said(NOTICED, killing_since=3.0)
    ranks = states(r0=ended(1.0, number=signal.SIGTERM), r1={"started": {}})
    failure = first_failure(ranks, lost_shims={}, stopped=False, witnesses=heard)
    assert ("R006", 1) == (failure.code, failure.rank)
    ranks = states(r0=ended(1.0, number=signal.SIGSEGV))
    assert 0 == first_failure(ranks, lost_shims={}, stopped=False, witnesses=heard).rank, "mpirun may kill a late shim"


def test_of_ranks_that_starved_together_the_one_that_held_most_is_named():
    def starved(time, peak):
        return {"exit": ended(time, number=signal.SIGKILL)["exit"] | {"oom_kills": 2, "peak_memory_bytes": peak}}

    ranks = states(r0=starved(1.0, 200), r1=starved(1.4, 900))
    assert blamed(ranks) == ("R024", "rank 1 (worker, box) ran out of memory")
    ranks = states(r0=starved(1.0, 200), r1=starved(9.0, 900))
    assert blamed(ranks) == ("R024", "rank 0 (worker, box) ran out of memory")


DAEMON = "PRTE has lost communication with a remote daemon.\n\n  Remote daemon: [prterun-box-1@0,2] on node box\n"


def test_a_shim_that_went_with_mpiruns_daemon_is_not_blamed():
    failure = first_failure(states(), lost_shims={1: 2.0}, stopped=False, witnesses=said(DAEMON))
    assert ("R057", None, "box") == (failure.code, failure.rank, failure.host)
    assert "mpirun's daemon on box was killed, and took the ranks there along" == failure.message
    both = said(NOTICED + DAEMON)
    assert "R006" == first_failure(states(), lost_shims={1: 2.0}, stopped=False, witnesses=both).code, (
        "first was the shim"
    )


def test_an_own_exception_outranks_the_exits_that_follow():
    ranks = states(r0=ended(1.0, status=1), r1=raised(1.1))
    assert blamed(ranks) == ("R002", "rank 1 (worker, box) raised ValueError")


@pytest.mark.parametrize(
    ("kind", "message"),
    [("ConnectionResetError", "[Errno 104]"), ("Exception", "MPI_ERR_PROC_FAILED: Process Failure")],
)
@pytest.mark.parametrize("cause", [ended(1.1, status=3), ended(1.1, number=signal.SIGSEGV)], ids=["exit", "crash"])
def test_a_rank_that_lost_its_peer_is_not_blamed_for_it(kind, message, cause):
    ranks = states(r0=raised(1.0, kind, message), r3=cause)
    assert first_failure(ranks, lost_shims={}, stopped=False).rank == 3
    assert blamed(states(r0=raised(1.0, kind, message))) == ("R026", f"rank 0 (worker, box) lost its peer: {kind}")


def came_from(time, kind, message="", *, origin="", broken=(), seen=None):
    """The record of an exception, with what the rank knows of where it came from."""
    causes = (ErrorCause(type=kind, message=message, origin=origin),)
    known = {"type": kind, "message": message, "causes": causes, "broken": broken, "seen": seen}
    return RankError(time=time, file="t.py", line=7, **known)


PEER_GONE = {"error": came_from(1.0, "ConnectionResetError", broken=("local 127.0.0.1:4711",))}


@pytest.mark.parametrize(
    "error",
    [
        came_from(1.1, "OSError", "https://data.example: Connection reset by peer"),
        came_from(1.1, "EOFError", "Ran out of input"),
        came_from(1.1, "RuntimeError", "the connection was closed by the store of tokens"),
        came_from(1.1, "ConnectionResetError", origin="connection", broken=("192.0.2.7:9000",)),
        came_from(1.1, "BrokenPipeError", origin="connection", broken=("local 127.0.0.1:443",)),
    ],
    ids=["words", "empty file", "words of a program", "server elsewhere", "server with a port of the system's"],
)
def test_a_rank_whose_server_of_data_is_gone_is_blamed_before_the_ranks_that_lost_it(error):
    ranks = states(r0=ended(0.9, number=signal.SIGTERM))
    ranks[1].error, ranks[2].error = error, PEER_GONE["error"]
    assert blamed(ranks) == ("R002", f"rank 1 (worker, box) raised {error.type}")


def test_a_refused_connection_is_blamed_unless_another_rank_has_a_cause_of_its_own():
    ranks = states(r2=ended(0.9, number=signal.SIGTERM))
    ranks[1].error = came_from(1.0, "ConnectionRefusedError", origin="connection")
    ranks[0].error = PEER_GONE["error"]
    assert blamed(ranks) == ("R002", "rank 1 (worker, box) raised ConnectionRefusedError")
    ranks[3].exit = RankExit(time=1.2, signal=signal.SIGKILL)
    assert blamed(ranks) == ("R004", "rank 3 (optimizer, box) was killed by SIGKILL")


def test_a_refused_connection_is_blamed_before_lost_ones_that_were_noticed_earlier():
    """The rank may have closed its own connections while its exception was on the way."""
    ranks = states()
    for state, time in zip(ranks, (1.0, 1.0, 1.2, 1.1), strict=True):
        state.error = came_from(time, "BrokenPipeError")
    ranks[2].error = came_from(1.2, "ConnectionRefusedError", origin="connection")
    assert blamed(ranks) == ("R002", "rank 2 (aggregator, box) raised ConnectionRefusedError")
    ranks[3].exit, ranks[3].error = RankExit(time=1.1, status=0), None
    assert blamed(ranks)[0] == "R005"


@pytest.mark.parametrize(("left", "rank"), [(None, 1), (4.0, 0), (1.5, 1)])
def test_a_rank_that_was_noticed_to_end_late_explains_lost_connections_unless_it_left_late(left, rank):
    """Without a record of when it left, as after `os._exit(0)`, the time of its end is only that at which it was noticed."""
    ranks = states(r1=ended(4.5, status=0))
    ranks[0].error = came_from(1.0, "BrokenPipeError")
    ranks[1].in_flight = None if left is None else ErrorInFlight(error=None, left=left)
    assert first_failure(ranks, lost_shims={}, stopped=False).rank == rank


@pytest.mark.parametrize(
    "error",
    [
        came_from(1.0, "Exception", "MPI_ERR_OTHER: known error not in list", origin="mpi"),
        came_from(1.0, "RuntimeError", "gloo/transport/tcp: Connection closed by peer", origin="torch"),
        came_from(1.0, "PeerLostError", "rank 3 is gone", origin="ttlaunch"),
        came_from(1.0, "EOFError", origin="connection", broken=("local",)),
        came_from(1.0, "ConnectionResetError", "a peer has closed", broken=("local",)),
        came_from(1.0, "BrokenPipeError", origin="connection", broken=("unknown",)),
    ],
    ids=lambda error: error.type,
)
def test_a_rank_that_lost_another_rank_is_not_blamed_for_a_later_failure(error):
    ranks = states(r3=ended(1.1, status=3))
    ranks[0].error = error
    assert blamed(ranks) == ("R003", "rank 3 (optimizer, box) exited with status 3")


def test_a_server_on_another_machine_may_be_a_rank_if_the_run_is_spread():
    ranks = states(r3=ended(1.1, status=3))
    ranks[0].error = came_from(1.0, "ConnectionResetError", broken=("192.0.2.7:9000",))
    assert blamed(ranks)[1].startswith("rank 0 ")
    ranks[2].row = RankRow(2, "crate", 0, "aggregator")
    assert blamed(ranks)[1].startswith("rank 3 ")


def pending(seen, *, uncaught=False):
    return ErrorInFlight(error=came_from(seen, "ValueError", "short", seen=seen), uncaught=uncaught)


@pytest.mark.parametrize(
    ("number", "words"),
    [(signal.SIGXCPU, "`ulimit -t`"), (signal.SIGXFSZ, "`ulimit -f`"), (signal.SIGALRM, "`signal.alarm`")],
)
def test_a_signal_of_the_kernel_or_of_a_timer_is_not_looked_for_outside(number, words):
    step = first_failure(states(r1=ended(2.0, number=number)), lost_shims={}, stopped=False).next_step
    assert words in step
    assert "find out who" not in step


def test_a_pipe_to_a_child_of_its_own_is_no_connection_to_a_rank():
    ranks = states()
    ranks[1].error = came_from(1.0, "EOFError", broken=("pair",))
    assert blamed(ranks) == ("R002", "rank 1 (worker, box) raised EOFError")


def test_the_only_rank_that_lost_no_peer_is_mentioned_where_all_others_lost_one():
    ranks = states()
    for state in (ranks[0], ranks[2], ranks[3]):
        state.error = came_from(1.0, "ConnectionResetError", broken=("local 127.0.0.1:4711",))
    note = "rank 1 (worker, box) is the only one that lost no peer, so the others may have lost it"
    assert first_failure(ranks, lost_shims={}, stopped=False).evidence[-1] == note
    ranks[3].error = None
    assert "the only one" not in first_failure(ranks, lost_shims={}, stopped=False).evidence[-1]


def test_the_only_rank_whose_connections_hold_is_mentioned_where_those_of_all_others_may_have_been_to_it():
    ranks = states()
    for state in (ranks[0], ranks[2], ranks[3]):
        state.error = came_from(1.0, "BrokenPipeError", broken=())
    note = "rank 1 (worker, box) is the only one that lost no connection, so the others may have lost it"
    failure = first_failure(ranks, lost_shims={}, stopped=False)
    assert ("R002", note) == (failure.code, failure.evidence[-1])


def test_an_exception_without_a_message_has_no_colon():
    ranks = states(r1={"error": {"type": "StopIteration", "time": 1.0}})
    assert first_failure(ranks, lost_shims={}, stopped=False).evidence == ("`StopIteration`",)


def test_a_file_that_hides_a_package_is_to_be_renamed_rather_than_the_package_installed():
    hidden = "No module named 'torch.distributed'; 'torch' is not a package"
    for message, words in (("No module named 'torch'", "install it"), (hidden, "rename your `torch.py`")):
        ranks = states(r1=raised(1.0, "ModuleNotFoundError", message))
        assert words in first_failure(ranks, lost_shims={}, stopped=False).next_step


def test_a_rank_that_was_ended_while_it_cleaned_up_is_blamed_before_those_that_noticed():
    ranks = states(r1=ended(2.0, number=signal.SIGTERM))
    ranks[1].in_flight, ranks[0].error = pending(0.9), PEER_GONE["error"]
    failure = first_failure(ranks, lost_shims={}, stopped=False)
    assert (failure.code, failure.rank, failure.time) == ("R002", 1, 0.9)
    assert failure.evidence == ("`ValueError: short`", "it was still cleaning up when SIGTERM ended it")


def test_a_rank_whose_end_nobody_could_record_is_blamed_for_the_exception_that_it_was_handling():
    ranks = states(r1={"started": {}})
    ranks[1].in_flight, ranks[0].error = pending(0.9), PEER_GONE["error"]
    assert blamed(ranks) == ("R002", "rank 1 (worker, box) raised ValueError")
    assert blamed(ranks, lost={1: 2.0}) == ("R002", "rank 1 (worker, box) raised ValueError")
    assert blamed(ranks, lost={1: 0.8})[0] == "R006", "its shim was killed from outside"


def test_an_exception_that_may_still_be_caught_explains_only_ends_that_nothing_else_explains():
    ranks = states(r1=ended(2.0, number=signal.SIGTERM))
    uncertain = pending(0.9)
    ranks[1].in_flight = ErrorInFlight(error=uncertain.error, is_certain=False)
    ranks[0].error = PEER_GONE["error"]
    ranks[2].error = came_from(0.8, "BrokenPipeError")  # whose time is exact, while the other one's was seen later
    assert blamed(ranks)[1].startswith("rank 1 ")
    ranks[3].exit = RankExit(time=1.2, status=3)
    assert blamed(ranks)[1].startswith("rank 3 ")


def test_the_order_of_exceptions_is_that_in_which_they_were_first_seen():
    ranks = states(r2=raised(1.5))
    ranks[1].error = came_from(4.0, "ValueError", "short", seen=1.0)
    assert blamed(ranks)[1].startswith("rank 1 ")


@pytest.mark.parametrize(
    ("known", "in_flight"),
    [
        (ended(2.0, number=signal.SIGTERM), ErrorInFlight(error=None)),
        (ended(2.0, number=signal.SIGKILL), pending(1.0)),
        (ended(2.0, status=3), pending(1.0)),
    ],
    ids=["it went on", "somebody killed it", "it exited"],
)
def test_an_exception_by_which_a_rank_did_not_end_is_not_its_failure(known, in_flight):
    ranks = states(r1=known)
    ranks[1].in_flight = in_flight
    assert "raised" not in blamed(ranks)[1]


LEFT_IMPROPERLY = "prterun has exited due to process rank 1 with PID 21241 on node vm exiting\nimproperly. There are\n"


def test_a_rank_that_left_with_status_0_is_known_from_mpirun():
    ranks = states(r0=ended(1.3, number=signal.SIGTERM), r1=ended(1.0, status=0), r2=ended(0.5, status=0))
    failure = first_failure(ranks, lost_shims={}, stopped=False, witnesses=said(LEFT_IMPROPERLY))
    assert (failure.code, failure.kind, failure.rank) == ("R005", "left_early", 1)


def test_the_last_rank_that_left_before_its_peers_failed_explains_their_failure():
    ranks = states(r1=ended(0.95, status=0), r2=ended(0.5, status=0), r3=ended(3.0, status=0))
    ranks[0].error = PEER_GONE["error"]
    assert blamed(ranks) == ("R005", "rank 1 (worker, box) left with status 0 before the other ranks")
    ranks[3].exit = RankExit(time=1.2, status=3)
    assert blamed(ranks)[1].startswith("rank 3 "), "a failure of its own outranks it"


def test_a_rank_that_finished_long_ago_does_not_explain_a_connection_to_anybody():
    ranks = states(r1=ended(1.0, status=0))
    ranks[0].error = came_from(60.0, "BrokenPipeError")
    assert blamed(ranks) == ("R002", "rank 0 (worker, box) raised BrokenPipeError")
    ranks[0].error = came_from(1.1, "BrokenPipeError")
    assert blamed(ranks)[0] == "R005"


def test_a_rank_that_took_long_to_leave_explains_lost_peers_if_it_left_before_the_run_was_ended():
    ranks = states(r1=ended(7.0, status=0))
    ranks[0].error = PEER_GONE["error"]
    told = {"lost_shims": {}, "stopped": False}
    assert first_failure(ranks, witnesses=Witnesses(ending_since=7.5), **told).rank == 1
    assert first_failure(ranks, witnesses=Witnesses(ending_since=5.0), **told).rank == 0


def test_a_rank_that_was_still_leaving_when_it_was_ended_explains_lost_peers():
    ranks = states(r1=ended(15.0, number=signal.SIGTERM), r2=ended(15.0, number=signal.SIGTERM))
    ranks[0].error = PEER_GONE["error"]
    assert blamed(ranks)[0] == "R026"
    ranks[1].in_flight = ErrorInFlight(error=None, left=0.9)
    how = "left before the other ranks; its process had not ended when SIGTERM ended it"
    assert blamed(ranks) == ("R005", f"rank 1 (worker, box) {how}")
    ranks[1].in_flight = ErrorInFlight(error=None, left=0.9, status=3)
    how = "called `sys.exit` with status 3 before the other ranks; its process had not ended when SIGTERM ended it"
    assert blamed(ranks) == ("R003", f"rank 1 (worker, box) {how}")


def test_all_lines_of_a_message_and_its_notes_are_told_up_to_a_limit():
    def told(message, notes=()):
        ranks = states()
        ranks[0].error = RankError(time=1.0, type="ValueError", message=message, notes=tuple(notes))
        return first_failure(ranks, lost_shims={}, stopped=False).evidence

    assert told("first\nsecond", ["look at file 7"]) == ("`ValueError: first`", "second", "look at file 7")
    assert told("x" * 600) == (f"`ValueError: {'x' * 500}…`",)
    assert told("\n".join("abcdefghijklmnop"))[-2:] == ("l", "… and 4 more lines in the rank's log")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_ranks_that_mpirun_ended_are_the_last_to_be_blamed(number):
    ranks = states(r0=ended(1.0, number=number), r1=ended(2.0, status=3))
    assert blamed(ranks) == ("R003", "rank 1 (worker, box) exited with status 3")
    assert blamed(states(r0=ended(1.0, number=number))) == ("R004", f"rank 0 (worker, box) was ended by {number.name}")


def test_a_rank_that_left_early_outranks_those_ended_because_of_it():
    ranks = states(r0=ended(1.0, number=signal.SIGTERM), r2=ended(2.0, status=0, early=True))
    assert blamed(ranks) == ("R005", "rank 2 (aggregator, box) left with status 0 before its role was finished")


def test_a_lost_shim_is_blamed_at_the_time_it_was_missed():
    ranks = states(r1=raised(5.0))
    assert blamed(ranks, lost={3: 4.0}) == (
        "R006",
        "rank 3 (optimizer, box) was lost: its shim was killed from outside",
    )
    assert blamed(ranks, lost={3: 6.0}) == ("R002", "rank 1 (worker, box) raised ValueError")


def test_a_shim_that_wrote_how_its_rank_ended_is_not_lost():
    assert blamed(states(r0=ended(1.0, status=0)), lost={0: 1.1}) is None


def test_a_rank_that_could_not_be_started_says_why():
    ranks = states(r0={"exit": {"time": 1.0, "start_error": "No such file or directory: /no/python"}})
    assert blamed(ranks) == ("R007", "rank 0 (worker, box) could not be started: No such file or directory: /no/python")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_signals_that_we_sent_blame_nobody(number):
    assert blamed(states(r0=ended(1.0, number=number)), lost={1: 1.0}, stopped=True) is None


def test_an_exception_is_told_even_when_the_user_ended_the_run():
    ranks = states(r0=ended(1.0, number=signal.SIGTERM), r1=raised(0.9))
    assert blamed(ranks, stopped=True) == ("R002", "rank 1 (worker, box) raised ValueError")


def test_an_unknown_signal_is_named_by_its_number():
    assert blamed(states(r0=ended(1.0, number=40))) == ("R004", "rank 0 (worker, box) was killed by signal 40")


def test_the_step_of_the_exception_is_told_with_its_place():
    failure = first_failure(states(r1=raised(1.0, step=41)), lost_shims={}, stopped=False)
    assert failure.message == "rank 1 (worker, box) raised ValueError in step 41"
    assert (failure.step, failure.place, failure.evidence) == (41, "t.py:7", ("`ValueError: short`",))


def test_a_death_without_words_is_in_the_step_after_the_last_reported_one():
    ranks = states(r1=ended(1.0, number=signal.SIGKILL) | {"step": 40})
    assert blamed(ranks) == ("R004", "rank 1 (worker, box) was killed by SIGKILL in step 41")


def test_ranks_that_agree_on_what_they_share_have_one_digest():
    digest, agree = combine_digests([{"w": "1", "b": "2"}, {"b": "2", "w": "1"}, {}])
    assert agree
    assert digest == combine_digests([{"w": "1"}, {"b": "2"}])[0]
    assert combine_digests([{}]) == (None, True)


def differing(*digests):
    """The failure of ranks that ended with these digests of their parameters."""
    ranks = states(**{f"r{rank}": {"digests": of_rank} for rank, of_rank in enumerate(digests)})
    return different_parameters(SimpleNamespace(ranks=[state.row for state in ranks], program=None), ranks)


def test_the_rank_that_two_others_contradict_is_named_also_if_it_is_the_first():
    failure = differing({"w": "3", "b": "2"}, {"w": "1", "b": "2"}, {"w": "1"})
    said = "rank 0 (worker, box) ended with other bits in `w` than ranks 1 and 2"
    assert ("R009", 0, "replicas_differ", said) == (failure.code, failure.rank, failure.kind, failure.message)


def test_of_two_copies_that_differ_both_are_named_and_neither_is_blamed():
    failure = differing({"w": "3"}, {"w": "1"}, {"b": "2"})
    said = "rank 0 (worker, box) and rank 1 (worker, box) ended with different bits in `w`"
    assert ("R009", None, said) == (failure.code, failure.rank, failure.message)
    assert ("no side has a majority, so nothing shows which one is right",) == failure.evidence


def test_two_sides_of_two_ranks_are_both_named():
    failure = differing({"w": "3"}, {"w": "1"}, {"w": "3"}, {"w": "1"})
    assert (None, "ranks 0 and 2 and ranks 1 and 3 ended with different bits in `w`") == (failure.rank, failure.message)


def test_a_tensor_with_a_majority_decides_if_another_one_that_differs_has_none():
    failure = differing({"a": "1", "w": "1"}, {"a": "2", "w": "2"}, {"w": "2"})
    assert (0, "1 further tensor with different bits: `a`") == (failure.rank, failure.evidence[-1])


def test_every_rank_that_the_majority_contradicts_is_named():
    failure = differing({"w": "1"}, {"w": "1"}, {"w": "1"}, {"w": "5"})
    assert "rank 3 (optimizer, box) ended with other bits in `w` than ranks 0, 1 and 2" == failure.message


def test_ranks_that_hold_equal_bits_have_no_failure():
    assert differing({"w": "1"}, {"w": "1", "b": "2"}, {}) is None


def test_records_are_read_as_they_grow_and_half_a_line_waits(tmp_path):
    folder = RunFolder("x", tmp_path)
    watch = Watch(SimpleNamespace(ranks=[RankRow(0, "box", 0, "worker"), RankRow(1, "box", 1, "optimizer")]), folder)
    (tmp_path / "records").mkdir()
    first, second = tmp_path / "records/rank-0.progress.jsonl", tmp_path / "records/rank-1.progress.jsonl"
    first.write_text('{"kind": "step", "time": 2, "step": 1, "loss": 3.5}\n{"kind": "step", "ti')
    second.write_text('{"kind": "ready", "time": 1, "total_steps": 9}\nnot json\n[1]\n')
    assert [(state.row.rank, kind_of(record)) for state, record in watch.poll()] == [(1, "ready"), (0, "step")]
    assert (watch.ranks[0].step, watch.ranks[0].loss, watch.ranks[1].total_steps) == (1, 3.5, 9)
    with first.open("a") as file:
        file.write('me": 3, "step": 2}\n')
    assert [record.step for _, record in watch.poll()] == [2]
    assert watch.poll() == []


def test_an_ending_decides_the_phase(tmp_path):
    (tmp_path / "records").mkdir()
    for rank, record in enumerate([{"status": 0}, {"status": 0, "left_early": True}, {"status": None, "signal": 9}]):
        (tmp_path / f"records/rank-{rank}.exit.json").write_text(json.dumps(record))
    rows = [RankRow(rank, "box", rank, "worker") for rank in range(4)]
    watch = Watch(SimpleNamespace(ranks=rows), RunFolder("x", tmp_path))
    watch.poll()
    assert [state.phase for state in watch.ranks] == [Phase.DONE, Phase.FAILED, Phase.FAILED, Phase.WAITING]


def test_speed_counts_from_the_first_reported_step():
    state = states()[0]
    for step, time in enumerate([10.0, 11.0, 12.0], start=1):
        fold(state, progress({"kind": "step", "time": time, "step": step, "tokens": 100}))
    assert state.tokens_per_s == 100.0


def test_a_host_that_was_lost_while_we_stood_still_is_told_with_it_and_no_other_failure_is():
    lost = {"b": LostHost(HostError("b", Trouble.TIMED_OUT, "it has not answered for 25 s", notes=("no route",)), 1.0)}
    note = (
        "this machine, or the supervisor, stood still for 25 s; "
        "hosts that hear nothing from it for the time of their lease end their ranks"
    )

    def named(lost_hosts, stood_still_s, **records):
        witnesses = Witnesses(stood_still_s=stood_still_s)
        ranks = states(**records)
        return first_failure(ranks, lost_shims={}, lost_hosts=lost_hosts, stopped=False, witnesses=witnesses)

    assert ("no route", note) == named(lost, 25.2).evidence
    assert ("no route",) == named(lost, 0.0).evidence
    assert note not in named(lost, 25.2, r1=raised(0.5)).evidence
    assert named({}, 25.2) is None


def test_the_end_of_a_slurm_job_explains_killed_ranks_but_not_an_exception():
    def named(trouble, **records):
        lost = {"box": LostHost(HostError("box", trouble, "Slurm has ended job 7: CANCELLED"), 5.0)}
        return first_failure(states(**records), lost_shims={2: 1.5}, lost_hosts=lost, stopped=False)

    killed = ended(1.0, number=signal.SIGKILL)
    assert (Cause.HOST_LOST, "box") == (named(Trouble.ENDED, r1=killed).kind, named(Trouble.ENDED, r1=killed).host)
    assert 1 == named(Trouble.LOST, r1=killed).rank
    assert 1 == named(Trouble.ENDED, r1=raised(1.0)).rank
