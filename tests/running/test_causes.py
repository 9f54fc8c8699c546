"""What an ending is called, from its exception, its status or signal, the kernel's count and the log."""

import signal

import pytest

from ttlaunch.engines.choose import ENGINES
from ttlaunch.planning.launch_plan import RankRow
from ttlaunch.records.endings import RankExit
from ttlaunch.running.failures.attribution import Witnesses, first_failure
from ttlaunch.running.failures.causes import Cause, classify_ending, classify_exception
from ttlaunch.running.failures.failure import Follower, render_cascade
from ttlaunch.running.failures.stderr_tail import Crash, Raised, StderrTail, parse_stderr_tail
from ttlaunch.running.watch import RankState

TAKEN = (
    "The server socket has failed to listen on any local network address. port: 29500, useIpv6: false, code: -98, "
    "name: EADDRINUSE, message: address already in use"
)
GLOO = "[../third_party/gloo/gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:4711"
ALLOCATOR = "[enforce fail at alloc_cpu.cpp:117] err == 0. DefaultCPUAllocator: can't allocate memory: you tried"
TRACEBACK = """\
warming up
Traceback (most recent call last):
  File "<frozen runpy>", line 198, in _run_module_as_main
  File "/v/lib/python3.11/site-packages/mpi4py/__main__.py", line 7, in <module>
    main()
  File "/home/me/work.py", line 12, in <module>
    step(3)
  File "/v/lib/python3.11/site-packages/numpy/core.py", line 99, in add
    ^^^^^^^^^^^^^^
{last}
"""
CRASH = """\
Fatal Python error: Segmentation fault

Thread 0x00007f1a2b3c4d50 (most recent call first):
  File "/home/me/mine/loader.py", line 320 in wait

Current thread 0x00007f1a2b3c4d00 (most recent call first):
  File "/usr/lib/python3.11/ctypes/__init__.py", line 519 in string_at
  File "/home/me/mine/trainer.py", line 41 in worker
  File "/home/me/v/lib/python3.11/site-packages/ttlaunch/runtime/entry.py", line 90 in _call_role

Extension modules: numpy.core._multiarray_umath, mpi4py.MPI (total: 2)
"""
THROWN = "terminate called after throwing an instance of '{}'\n  what():  {}\n"
MPI_SAID = """\
[vm:00000] *** An error occurred in Socket closed
[vm:00000] *** reported by process [1781399553,2]
[vm:00000] *** on a NULL communicator
"""


@pytest.mark.parametrize(
    ("kind", "message", "expected"),
    [
        ("ValueError", "bucket 7 is short", Cause.RAISED),
        (
            "Exception",
            "Other MPI error, error stack:\ncopy_iovs(224)...: process_vm_readv failed (errno 3)",
            Cause.LOST_PEER,
        ),
        (
            "Exception",
            "Other MPI error, error stack:\ncopy_iovs(224)...: process_vm_readv failed (errno 1)",
            Cause.RAISED,
        ),
        ("ValueError", "Connection reset by peer stands in my data", Cause.RAISED),
        ("ModuleNotFoundError", "No module named 'torch'", Cause.IMPORT_ERROR),
        ("ImportError", "libtorch.so: cannot open shared object file", Cause.IMPORT_ERROR),
        ("SystemExit", "3", Cause.EXITED),
        ("SystemExit", "no data", Cause.EXITED),
        ("SystemExit", "0", Cause.LEFT_EARLY),
        ("SystemExit", "", Cause.LEFT_EARLY),
        ("MemoryError", "", Cause.OUT_OF_MEMORY),
        ("RuntimeError", ALLOCATOR, Cause.OUT_OF_MEMORY),
        ("OutOfMemoryError", "CUDA out of memory. Tried to allocate 2.00 GiB", Cause.OUT_OF_MEMORY),
        ("OSError", "[Errno 12] Cannot allocate memory", Cause.OUT_OF_MEMORY),
        ("ConnectionResetError", "[Errno 104]", Cause.LOST_PEER),
        ("RuntimeError", GLOO, Cause.LOST_PEER),
        ("RuntimeError", "Timed out waiting 1800000ms for recv operation to complete", Cause.LOST_PEER),
        ("DistNetworkError", "failed to recv, got 0 bytes", Cause.LOST_PEER),
        ("DistNetworkError", TAKEN, Cause.PORT_TAKEN),
        ("ValueError", TAKEN, Cause.RAISED),
        ("Exception", "MPI_ERR_PROC_FAILED: Process Failure", Cause.LOST_PEER),
        ("Exception", "MPI_ERR_OTHER: known error not in list", Cause.LOST_PEER),
        ("Exception", "MPI_ERR_TRUNCATE: message truncated", Cause.RAISED),
        ("Exception", "MPI_ERR_RANK: invalid rank", Cause.RAISED),
        ("CheckpointWriteError", "the disk is full", Cause.CHECKPOINT),
    ],
)
def test_an_exception_is_what_its_type_and_words_say(kind, message, expected):
    assert classify_exception(kind, message) is expected


def test_an_exception_that_follows_from_a_lost_peer_is_no_failure_of_its_own():
    assert classify_exception("KeyError", "'loss'", chain=[f"RuntimeError: {GLOO}"]) is Cause.LOST_PEER
    assert classify_exception("KeyError", "'loss'", chain=["IndexError: 3"]) is Cause.RAISED


def test_a_child_that_the_kernel_killed_is_a_want_of_memory():
    message = "DataLoader worker (pid 77) is killed by signal: Killed."
    assert classify_exception("RuntimeError", message, oom_kills=1) is Cause.OUT_OF_MEMORY
    assert classify_exception("RuntimeError", message) is Cause.RAISED


@pytest.mark.parametrize(
    ("ending", "log", "expected"),
    [
        ({"signal": signal.SIGKILL, "oom_kills": 0}, "", Cause.KILLED),
        ({"signal": signal.SIGKILL, "oom_kills": 1}, "", Cause.OUT_OF_MEMORY),
        ({"signal": signal.SIGSEGV}, CRASH, Cause.CRASHED),
        ({"signal": signal.SIGABRT}, "", Cause.CRASHED),
        ({"signal": signal.SIGABRT}, THROWN.format("std::bad_alloc", "std::bad_alloc"), Cause.OUT_OF_MEMORY),
        ({"signal": signal.SIGABRT}, THROWN.format("gloo::IoException", GLOO), Cause.LOST_PEER),
        ({"signal": signal.SIGPIPE}, "", Cause.LOST_PEER),
        ({"signal": signal.SIGXCPU}, "", Cause.KILLED),
        ({"signal": signal.SIGTERM}, "", Cause.ENDED),
        ({"status": 3}, "", Cause.EXITED),
        ({"status": 3}, TRACEBACK.format(last="ValueError: caught and printed"), Cause.EXITED),
        ({"status": 1}, TRACEBACK.format(last="ValueError: short"), Cause.RAISED),
        ({"status": 1}, TRACEBACK.format(last="ModuleNotFoundError: No module named 'x'"), Cause.IMPORT_ERROR),
        ({"status": 1}, TRACEBACK.format(last="MemoryError"), Cause.OUT_OF_MEMORY),
        ({"status": 1}, TRACEBACK.format(last="mpi4py.MPI.Exception: MPI_ERR_PROC_FAILED: gone"), Cause.LOST_PEER),
        ({"status": 14}, "[box:7] *** An error occurred in Socket closed\n", Cause.LOST_PEER),
        ({"status": 0, "left_early": True}, "", Cause.LEFT_EARLY),
        ({"start_error": "No such file"}, "", Cause.NOT_STARTED),
    ],
)
def test_an_ending_is_what_status_signal_kernel_and_log_say(ending, log, expected):
    assert classify_ending(RankExit(**ending), parse_stderr_tail(log), by_us=False) is expected


def test_a_kill_after_we_began_to_kill_is_ours():
    assert classify_ending(RankExit(signal=signal.SIGKILL), StderrTail(), by_us=True) is Cause.ENDED


def test_a_log_tells_which_exception_ended_a_program_and_where():
    words = parse_stderr_tail(TRACEBACK.format(last="mypackage.errors.ShortError: bucket 7"))
    assert words.raised == Raised("ShortError", "bucket 7", "/home/me/work.py", 12)
    assert words.lines[-1] == "mypackage.errors.ShortError: bucket 7"


def test_a_log_tells_what_an_exception_followed_from():
    cause = TRACEBACK.format(last=f"RuntimeError: {GLOO}")
    link = "\nDuring handling of the above exception, another exception occurred:\n\n"
    words = parse_stderr_tail(cause + link + TRACEBACK.format(last="KeyError: 'loss'").removeprefix("warming up\n"))
    assert words.raised.chain == (f"RuntimeError: {GLOO}",)
    assert classify_ending(RankExit(status=1), words, by_us=False) is Cause.LOST_PEER


def test_faulthandler_tells_where_a_rank_crashed():
    words = parse_stderr_tail(CRASH)
    assert words.crash == Crash("Segmentation fault", "current thread", "/home/me/mine/trainer.py", 41)
    assert not any("Extension modules" in line for line in words.lines)


def test_half_a_log_or_none_is_no_mistake():
    assert parse_stderr_tail("") == StderrTail()
    assert parse_stderr_tail("Traceback (most recent call last):\n").raised is None
    assert parse_stderr_tail("Fatal Python error: Aborted\n").crash == Crash(
        "Aborted", "a thread without Python", None, None
    )


def said_by_mpi(text, statuses):
    return ENGINES[0].never_started().read_output(text, statuses)


def test_ranks_in_which_mpi_gave_up_are_known_from_mpirun():
    statuses = {0: 3, 1: 14, 2: 14, 3: None}
    assert said_by_mpi(MPI_SAID, statuses).gave_up == {1, 2}
    assert said_by_mpi("", statuses).gave_up == set()


def states(*endings):
    ranks = [RankState(RankRow(rank, "box", rank, "worker")) for rank in range(len(endings))]
    for state, ending in zip(ranks, endings, strict=True):
        if ending is not None:
            state.exit = RankExit(**{"status": None, "signal": None, "left_early": False, **ending})
    return ranks


def failure_of(ranks, *, mpi_words="", **known):
    engine = said_by_mpi(mpi_words, {state.row.rank: state.exit.status if state.exit else None for state in ranks})
    return first_failure(ranks, lost_shims={}, stopped=False, witnesses=Witnesses(engine=engine, **known))


def test_a_peer_in_which_mpi_gave_up_is_not_blamed_for_an_exit_recorded_after_it():
    ranks = states({"status": 3, "time": 1.001}, None, {"status": 14, "time": 1.0})
    assert failure_of(ranks).rank == 2
    assert failure_of(ranks, mpi_words=MPI_SAID).rank == 0


def test_shims_that_mpirun_killed_after_a_rank_had_left_are_not_blamed():
    ranks = states({"status": 3, "time": 1.0}, None, None)
    failure = first_failure(ranks, lost_shims={1: 1.6, 2: 1.6}, stopped=False)
    assert (failure.rank, failure.kind) == (0, Cause.EXITED)
    assert render_cascade(failure.followers) == "then rank 1 and 2 were ended with the run"
    assert first_failure(ranks, lost_shims={1: 0.9}, stopped=False).kind is Cause.SHIM_LOST


def test_ranks_that_we_killed_are_not_blamed():
    ranks = states({"signal": signal.SIGKILL, "time": 5.0}, {"status": 3, "time": 1.0})
    assert failure_of(ranks, killing_since=4.0).rank == 1
    assert failure_of(ranks).rank == 0


def test_a_rank_that_the_kernel_killed_says_how_much_it_held():
    kill = {"signal": signal.SIGKILL, "time": 1.0, "oom_kills": 1}
    failure = failure_of(states({**kill, "peak_memory_bytes": 14_200_000_000, "memory_limit_bytes": 16_000_000_000}))
    assert (failure.code, failure.message) == ("R024", "rank 0 (worker, box) ran out of memory")
    said = ("the kernel killed it, or a child of it, for want of memory", "it held 14.2 GB at most of 16.0 GB")
    assert failure.evidence == said
    assert failure.next_step.startswith("lower `training_config.micro_batch_size` or ")


def test_a_rank_that_cannot_import_says_what():
    log = TRACEBACK.format(last="ModuleNotFoundError: No module named 'torch'")
    failure = failure_of(states({"status": 1, "time": 1.0}), stderr_tail=lambda _: parse_stderr_tail(log))
    assert (failure.code, failure.place) == ("R025", "/home/me/work.py:12")
    assert failure.message == "rank 0 (worker, box) could not import: No module named 'torch'"
    assert (
        failure.next_step == "install it for the interpreter of the ranks; on hosts `ttlaunch prepare --on NAME` does"
    )


def test_a_lost_peer_that_nobody_explains_is_said_to_be_unexplained():
    failure = failure_of(states({"signal": signal.SIGPIPE, "time": 1.0}))
    assert (failure.code, failure.message) == ("R026", "rank 0 (worker, box) lost its peer: SIGPIPE")
    assert failure.evidence == ("no other rank reported a failure: what ended the connection is not known",)


def test_the_line_of_a_crash_is_told():
    ranks = states({"signal": signal.SIGSEGV, "time": 1.0})
    failure = failure_of(ranks, stderr_tail=lambda _: parse_stderr_tail(CRASH))
    assert (failure.code, failure.message) == ("R004", "rank 0 (worker, box) crashed with SIGSEGV")
    assert (failure.place, failure.evidence) == (
        "/home/me/mine/trainer.py:41",
        ("Segmentation fault in the current thread",),
    )


def test_a_death_after_the_last_step_is_not_in_a_step_that_there_is_not():
    ranks = states({"signal": signal.SIGKILL, "time": 1.0})
    ranks[0].step = ranks[0].total_steps = 60
    assert failure_of(ranks).message == "rank 0 (worker, box) was killed by SIGKILL after its last step"
    ranks[0].step = 0
    assert failure_of(ranks).message == "rank 0 (worker, box) was killed by SIGKILL before the end of its first step"


def test_the_cascade_is_one_line():
    ranks = states(
        {"status": 14, "time": 1.2},
        {"signal": signal.SIGKILL, "time": 1.0},
        {"signal": signal.SIGTERM, "time": 1.3},
        {"status": 14, "time": 1.1},
        None,
        {"status": 0, "time": 0.5},
    )
    failure = failure_of(ranks, mpi_words=MPI_SAID)
    assert [(one.rank, one.kind) for one in failure.followers] == [
        (3, Cause.LOST_PEER),
        (0, Cause.LOST_PEER),
        (2, Cause.ENDED),
        (4, Cause.ENDED),
    ]
    assert (
        render_cascade(failure.followers) == "then rank 0 and 3 lost their peer, rank 2 and 4 were ended with the run"
    )
    assert failure.as_json()["cascade"][0] == {
        "class": "lost_peer",
        "rank": 3,
        "role": "worker",
        "cause": "lost its peer",
        "time": 1.1,
    }


def test_many_ranks_are_counted_and_one_is_one():
    ended = [Follower(kind=Cause.ENDED, rank=rank, role="worker", cause="") for rank in range(9)]
    assert render_cascade(ended) == "then 9 ranks were ended with the run"
    assert render_cascade(ended[:1]) == "then rank 0 was ended with the run"
    second = Follower(kind=Cause.CRASHED, rank=1, role="worker", cause="crashed with SIGSEGV", time=2.0)
    assert render_cascade([second]) == "then rank 1 crashed with SIGSEGV"
    assert render_cascade([]) is None
