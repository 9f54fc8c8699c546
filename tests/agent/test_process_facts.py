"""What the kernel says about the processes of a run, of real processes that carry a run's id."""

import os
import signal
import socket
import subprocess
import sys

import pytest

from tests.cluster.keeper import wait_until
from ttlaunch import contract
from ttlaunch.agent.process_facts import look_at_processes
from ttlaunch.agent.run_processes import is_stopped
from ttlaunch.records.agents import ProcessReport
from ttlaunch.records.parser import parse

POLLS = "import os\nwhile True:\n    os.sched_yield()\n    os.getppid()\n"
COMPUTES = "while True:\n    sum(range(100))\n"


@pytest.fixture
def start():
    """`start(rank, *command)`: a process of the run `own`, ended with the test; without a rank, one of its engine."""
    started = []

    def start(rank, *command):
        of_rank = {} if rank is None else {contract.ENV_RANK: str(rank)}
        environment = {**os.environ, contract.ENV_RUN_ID: "own", **of_rank}
        started.append(subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True))
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.communicate()


def look(ranks, shims=None, *, closely=True):
    return parse(
        ProcessReport,
        {"question": 0, **look_at_processes("own", ranks=ranks, shims=shims or {}, closely=closely)},
    )


def stop(process):
    os.kill(process.pid, signal.SIGSTOP)
    wait_until(lambda: is_stopped(process.pid), what="a stopped process")


def test_a_process_that_sleeps_computes_or_polls_is_told_apart_and_named(start):
    sleeps, computes = start(0, "sleep", "600"), start(1, sys.executable, "-c", COMPUTES)
    polls = start(2, sys.executable, "-X", "faulthandler", "-c", POLLS)
    ranks, expected = {0: sleeps.pid, 1: computes.pid, 2: polls.pid}, {0: "waits", 1: "computes", 2: "polls"}

    def found():
        return {one.rank: one for one in look(ranks).processes}

    # The interpreters begin their loops only after they have loaded their modules.
    wait_until(lambda: expected == {rank: one.does for rank, one in found().items()}, what="processes at work")
    found = found()
    assert found[0].program.endswith("/sleep") or "coreutils" in found[0].program
    assert {0: False, 1: False, 2: True} == {rank: one.catches_crashes for rank, one in found.items()}
    assert found[0].waits_in in {"", "hrtimer_nanosleep", "do_nanosleep"}


def test_a_stopped_rank_shim_child_and_daemon_are_told_apart(start):
    rank, shim, child, daemon = (start(which, "sleep", "600") for which in (0, None, 0, None))
    for process in (rank, shim, child, daemon):
        stop(process)
    report = look({0: rank.pid}, {0: shim.pid})
    assert (0,) == report.stopped
    assert {(0, shim.pid, "", True), (0, child.pid, "sleep", False), (None, daemon.pid, "sleep", False)} == {
        (one.rank, one.pid, one.name, one.is_shim) for one in report.helpers
    }
    assert [shim.pid] == [one.pid for one in look({0: rank.pid}, {0: shim.pid}, closely=False).helpers]


def test_a_stopped_process_of_a_rank_that_another_agent_looks_after_is_left_to_that_agent(start):
    stop(start(7, "sleep", "600"))
    assert () == look({0: os.getpid()}).helpers


def test_a_peer_that_acknowledges_is_not_reported():
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as client:
        client.sendall(b"x")
        report = look({0: os.getpid()})
    assert () == report.unacknowledged
    assert "127.0.0.1" not in report.addresses


def test_a_process_that_has_ended_is_described_without_an_error(start):
    process = start(0, "true")
    process.wait()
    assert ["waits"] == [one.does for one in look({0: process.pid}).processes]
