"""The list of the ranks that wait for each other in an active run: what a report of a hang would say, read without asking the run."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest

from ttlaunch import contract
from ttlaunch.flight_recorder import IRECV, RECV, WORLD
from ttlaunch.flight_recorder_writer import FlightRecorder
from ttlaunch.planning.launch_plan import RankRow
from ttlaunch.records.ranks import Started
from ttlaunch.running.flight_recorders import read_recorders
from ttlaunch.running.hang.verdict import judge
from ttlaunch.running.hang.waits import Seen
from ttlaunch.running.readers.waits import COPIED_EVERY_S, waits_now
from ttlaunch.running.watch import Phase, RankState

ROLES = ("worker", "worker", "server")


@pytest.fixture
def states():
    return [
        RankState(RankRow(rank, "box", rank, role), phase=Phase.RUNNING, clock_offset_s=0.0)
        for rank, role in enumerate(ROLES)
    ]


@pytest.fixture
def run(tmp_path):
    path = tmp_path / "2026-01-01T00-00-00-aaaa"
    path.mkdir()
    return path


def wait_for(folder, rank, *, peer, seconds=0.0, tag=7):
    """Have a rank's recorder say that it has waited for a peer for so long."""
    box = FlightRecorder(folder / contract.recorder_file(rank), rank=rank)
    box.begin_step(3)
    box.begin(RECV, ("answer", None), None, peer=peer, tag=tag, size=8, now=time.monotonic_ns() - int(seconds * 1e9))
    return box


@pytest.fixture
def process(run, tmp_path):
    """A process of the run on this machine; its environment names the run's folder in shared memory."""
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    variables = {**os.environ, contract.ENV_RUN_ID: run.name, contract.ENV_SCRATCH: str(scratch)}
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, env=variables) as child:
        yield child, scratch
        child.send_signal(signal.SIGCONT)
        child.stdin.close()


def test_it_says_of_a_run_on_this_machine_what_a_report_of_its_hang_would(run, process, states):
    _, scratch = process
    boxes = [wait_for(scratch, rank, peer=2, seconds=4.0) for rank in (0, 1)]
    boxes.append(FlightRecorder(scratch / contract.recorder_file(2), rank=2))
    boxes[2].begin_step(3)
    found = waits_now(run, states, is_recipe=True)
    seen = [
        Seen(rank, ROLES[rank], "box", recording) for rank, recording in read_recorders(scratch, ranks=range(3)).items()
    ]
    table = judge(seen, quiet_s=12.0, now=0.0).evidence
    assert ["waits for rank 2", "waits for rank 2", "waits for none"] == [one.state for one in found]
    assert all(one.state in row and one.operation in row for one, row in zip(found, table, strict=True))
    assert [(2,), (2,), ()] == [one.waits_for for one in found]
    assert all(4.0 <= one.for_s < 30.0 for one in found[:2])
    assert (None, 0.0) == (found[2].for_s, found[0].seen_s)
    json.dumps([one.as_json() for one in found])


def test_a_rank_that_a_signal_has_stopped_waits_for_nobody(run, process, states):
    child, scratch = process
    wait_for(scratch, 1, peer=2)
    states[1].started = Started(time=1.0, pid=child.pid, shim_pid=child.pid)
    child.send_signal(signal.SIGSTOP)
    os.waitpid(child.pid, os.WUNTRACED)
    found = waits_now(run, states, is_recipe=True)
    assert ("is stopped", (), None) == (found[1].state, found[1].waits_for, found[1].for_s)


@pytest.mark.parametrize(("age", "seen_s"), [(3.0, 3.0), (COPIED_EVERY_S * 4, 0.0)])
def test_the_copy_of_another_hosts_recorder_is_as_old_as_it_is_unless_a_newer_one_would_have_come(
    run, states, age, seen_s
):
    wait_for(run, 0, peer=2, seconds=60.0)
    then = time.time() - age
    os.utime(run / contract.recorder_file(0), (then, then))
    first = waits_now(run, states, is_recipe=True)[0]
    assert seen_s == pytest.approx(first.seen_s, abs=0.9)
    assert 60.0 - first.seen_s == pytest.approx(first.for_s, abs=5.0)


def test_workers_that_have_not_come_and_runs_without_recorders_are_left_out(run, states):
    assert [] == waits_now(run, states, is_recipe=True)
    states[2].phase = Phase.ABSENT
    wait_for(run, 0, peer=1)
    assert [0, 1] == [one.rank for one in waits_now(run, states, is_recipe=True)]


def test_what_a_rank_wrote_into_its_recorder_is_shown_without_control_characters(run, states):
    box = FlightRecorder(run / contract.recorder_file(0), rank=0)
    box.begin(IRECV, ("a\x1b[31mb", None), None, peer=10**6, tag=WORLD, size=-1, now=time.monotonic_ns())
    assert "\x1b" not in waits_now(run, states, is_recipe=True)[0].operation
