"""A rank's flight recorder: what is entered is what a reader finds, also while it is written and after the writer was killed."""

import os
import random
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pytest
import torch

from ttlaunch import contract
from ttlaunch.flight_recorder import (
    ANY,
    BEGUN_COLLECTIVE,
    CHANNELS,
    GROUP,
    HEADER_BYTES,
    OPERATIONS,
    SIZE,
    WAIT_ANY,
    read_recorder,
)
from ttlaunch.flight_recorder_writer import FlightRecorder, open_flight_recorder
from ttlaunch.runtime.comm.counting import CountingCommunicator
from ttlaunch.runtime.comm.in_process import InProcessWorld
from ttlaunch.runtime.telemetry.traffic_counter import TrafficCounter, operation

SEND, RECV, ISEND, IRECV, WAIT_SEND, WAIT_RECV = range(1, 7)


@pytest.fixture
def path(tmp_path):
    return tmp_path / contract.recorder_file(3)


@pytest.fixture
def recorder(path):
    return FlightRecorder(path, rank=3)


def content(path):
    return read_recorder(path.read_bytes())


def test_an_operation_is_found_as_it_was_entered_while_it_lasts_and_after(path, recorder):
    recorder.begin_step(7)
    at = recorder.begin(RECV, ("gradients", 1), ("/home/me/trainer.py", 41), peer=2, tag=5, size=1000, now=123)
    (found,) = content(path).operations
    assert (RECV, "gradients", 1, "/home/me/trainer.py:41", 2, 5, 1000, 7, 1) == (
        *(found.verb, found.name, found.bucket, found.place, found.peer, found.tag, found.nbytes),
        *(found.step, found.message),
    )
    assert content(path).waiting == found
    recorder.end(at, 456)
    (found,) = content(path).operations
    assert (123, 456, False) == (found.begun, found.ended, found.is_open)
    assert content(path).waiting is None


def test_only_the_last_operations_are_kept_in_order(path, recorder):
    for number in range(1, 3 * OPERATIONS):
        recorder.end(recorder.begin(SEND, ("weights", None), None, peer=0, tag=0, size=number, now=number), number)
    found = content(path).operations
    assert list(range(2 * OPERATIONS, 3 * OPERATIONS)) == [one.nbytes for one in found]
    assert 3 * OPERATIONS - 1 == content(path).begun


def test_messages_are_counted_by_peer_tag_and_direction_whatever_the_verb(path, recorder):
    for verb, peer, tag in [(SEND, 1, 0), (ISEND, 1, 0), (RECV, 1, 0), (IRECV, 1, 0), (ISEND, 1, 9), (SEND, 2, 0)]:
        recorder.begin(verb, ("a", None), None, peer=peer, tag=tag, size=0, now=1)
    assert {(1, 0, True): 2, (1, 0, False): 2, (1, 9, True): 1, (2, 0, True): 1} == content(path).channels


def test_a_wait_is_for_the_message_that_was_begun(path, recorder):
    recorder.begin(IRECV, ("a", None), None, peer=1, tag=0, size=8, now=1)
    first = recorder.message
    recorder.begin(IRECV, ("a", None), None, peer=1, tag=0, size=8, now=2)
    recorder.begin(WAIT_RECV, ("a", None), None, peer=1, tag=0, size=8, now=3, message=first)
    assert (WAIT_RECV, 1) == (content(path).waiting.verb, content(path).waiting.message)
    assert {(1, 0, False): 2} == content(path).channels


def test_more_channels_and_texts_than_there_is_room_for_cost_their_names_only(path, recorder):
    for tag in range(2 * CHANNELS):
        recorder.begin(SEND, (f"operation-{tag}-{'x' * 20}", None), None, peer=1, tag=tag, size=tag, now=1)
    found = content(path)
    assert CHANNELS == len(found.channels)
    assert ("", 2 * CHANNELS - 1) == (found.operations[-1].name, found.operations[-1].nbytes)
    recorder.begin(SEND, (f"operation-0-{'x' * 20}", None), None, peer=1, tag=0, size=0, now=1)
    assert (f"operation-0-{'x' * 20}", 2) == (content(path).operations[-1].name, content(path).channels[1, 0, True])


def test_steps_and_what_is_announced_are_told(path, recorder):
    traffic = TrafficCounter(recorder=recorder)
    assert (0, 0, "") == (content(path).steps, content(path).timed, content(path).phase)
    for step in (5, 6):
        traffic.begin_step(step)
        traffic.end_step()
    assert (6, 2) == (content(path).steps, content(path).timed)
    assert 0 < content(path).slowest < 10**9
    with recorder.announced("evaluation"):
        assert "evaluation" == content(path).phase
        with recorder.announced("checkpoint"):
            assert "checkpoint" == content(path).phase
        assert "evaluation" == content(path).phase
    assert "" == content(path).phase


def test_everything_a_rank_does_changes_the_header(path, recorder):
    traffic = TrafficCounter(recorder=recorder)
    seen = [path.read_bytes()[:HEADER_BYTES]]
    at = 0

    def sees(act):
        nonlocal at
        at = act()
        seen.append(path.read_bytes()[:HEADER_BYTES])

    sees(lambda: recorder.begin(SEND, ("a", None), None, peer=1, tag=0, size=0, now=1))
    sees(lambda: recorder.end(at, 2))
    sees(recorder.join_group)
    sees(lambda: recorder.begin(BEGUN_COLLECTIVE, ("b", None), None, peer=GROUP, tag=0, size=0, now=3))
    sees(lambda: recorder.begin_wait(at) or at)
    sees(lambda: recorder.end(at, 4))
    sees(lambda: traffic.enter("forward"))
    sees(lambda: traffic.begin_step(1))
    sees(traffic.end_step)
    sees(lambda: recorder.announce("evaluation"))
    assert len(seen) == len(set(seen))
    assert path.read_bytes()[:HEADER_BYTES] == seen[-1]


def test_who_waits_again_for_the_same_operation_has_not_moved(path, recorder):
    """As a script does that waits for an operation of torch for a second at a time, for ever."""
    at = recorder.begin(BEGUN_COLLECTIVE, ("b", None), None, peer=GROUP, tag=0, size=0, now=3)
    recorder.begin_wait(at)
    before = path.read_bytes()[:HEADER_BYTES]
    recorder.begin_wait(at)
    assert before == path.read_bytes()[:HEADER_BYTES]


def test_a_socket_enters_every_verb_with_the_line_that_used_it(tmp_path):
    world, boxes = (
        InProcessWorld(["peer"] * 2),
        [FlightRecorder(tmp_path / contract.recorder_file(rank), rank=rank) for rank in range(2)],
    )
    lines = {}

    def live(rank):
        comm = CountingCommunicator(world.communicator(rank), TrafficCounter(recorder=boxes[rank]))
        if rank == 0:
            lines["send"] = sys._getframe().f_lineno + 1
            comm.send(torch.zeros(2), dest=1, tag=4)
            with operation(comm, "weights", bucket=2):
                comm.isend(torch.zeros(3), dest=1).wait()
        else:
            comm.recv(torch.zeros(2), source=0, tag=4)
            with operation(comm, "weights", bucket=2):
                comm.irecv(torch.zeros(3), source=0).wait()

    outcome = world.run({0: lambda: live(0), 1: lambda: live(1)})
    assert {} == outcome.errors
    sender, receiver = (content(tmp_path / contract.recorder_file(rank)) for rank in range(2))
    assert [(SEND, 4, 8, "live"), (ISEND, 0, 12, "weights"), (WAIT_SEND, 0, 12, "weights")] == [
        (one.verb, one.tag, one.nbytes, one.name) for one in sender.operations
    ]
    assert [RECV, IRECV, WAIT_RECV] == [one.verb for one in receiver.operations]
    assert f"{__file__}:{lines['send']}" == sender.operations[0].place
    assert 2 == sender.operations[1].bucket
    assert all(one.ended >= one.begun for one in (*sender.operations, *receiver.operations))


def test_a_wait_names_its_own_message_and_one_for_any_names_nobody(tmp_path):
    world = InProcessWorld(["peer"] * 2)
    box = FlightRecorder(tmp_path / contract.recorder_file(1), rank=1)
    found = []

    def live(rank):
        comm = world.communicator(rank)
        if rank == 0:
            for size in (1, 2):
                comm.send(torch.zeros(size), dest=1, tag=9)
            return
        comm = CountingCommunicator(comm, TrafficCounter(recorder=box))
        with operation(comm, "weights", bucket=3):
            first, second = (comm.irecv(torch.zeros(size), source=0, tag=9) for size in (1, 2))
            second.wait()
            first.wait()
            found.extend([comm.wait_any([second]), comm.wait_any([second], timeout_s=0)])

    outcome = world.run({rank: partial(live, rank) for rank in range(2)})
    assert ({}, [0, 0]) == (outcome.errors, found)
    entered = content(tmp_path / contract.recorder_file(1))
    assert [
        (IRECV, 0, 9, 4, 1),
        (IRECV, 0, 9, 8, 2),
        (WAIT_RECV, 0, 9, 8, 2),
        (WAIT_RECV, 0, 9, 4, 1),
        (WAIT_ANY, ANY, 9, 8, 1),
    ] == [(one.verb, one.peer, one.tag, one.nbytes, one.message) for one in entered.operations]
    assert {("weights", 3)} == {(one.name, one.bucket) for one in entered.operations}
    assert not any(one.is_open for one in entered.operations)
    assert {(0, 9, False): 2} == entered.channels


def test_a_box_outlives_a_rank_that_is_killed(path):
    code = (
        "import sys, time; from pathlib import Path; from ttlaunch.flight_recorder_writer import FlightRecorder\n"
        "recorder = FlightRecorder(Path(sys.argv[1]), rank=3)\n"
        "recorder.begin(2, ('gradients', None), ('trainer.py', 9), peer=1, tag=0, size=64, now=time.monotonic_ns())\n"
        "print('waits', flush=True)\ntime.sleep(600)\n"
    )
    with subprocess.Popen([sys.executable, "-c", code, str(path)], stdout=subprocess.PIPE) as process:
        assert b"waits\n" == process.stdout.readline()
        assert "gradients" == content(path).waiting.name, "also while it hangs"
        os.kill(process.pid, signal.SIGKILL)
    found = content(path)
    assert ("gradients", "trainer.py:9", 3) == (found.waiting.name, found.waiting.place, found.rank)
    assert abs(found.seconds(found.waiting.begun) - time.time()) < 60


def test_what_is_no_box_is_none():
    noise = random.Random(1)  # noqa: S311 - no secret
    assert [None] * 4 == [read_recorder(data) for data in (b"", b"x" * SIZE, bytes(SIZE), noise.randbytes(SIZE - 1))]


def test_a_damaged_box_never_breaks_its_reader(path, recorder):
    recorder.end(recorder.begin(SEND, ("gradients", 1), ("trainer.py", 9), peer=1, tag=0, size=64, now=1), 2)
    whole, noise = path.read_bytes(), random.Random(2)  # noqa: S311 - no secret
    for _ in range(300):
        data = bytearray(whole)
        for _ in range(20):
            data[noise.randrange(8, SIZE)] = noise.randrange(256)
        assert read_recorder(bytes(data)).operations is not None


def test_a_rank_without_a_place_for_its_box_keeps_one_for_itself(tmp_path):
    (tmp_path / "full").write_text("")
    for environment in ({}, {"TTLAUNCH_SCRATCH": str(tmp_path / "full")}):
        recorder = open_flight_recorder(environment, rank=0)
        recorder.end(recorder.begin(SEND, ("a", None), None, peer=1, tag=0, size=0, now=1), 2)
    assert [tmp_path / "full"] == list(tmp_path.iterdir())
    open_flight_recorder({"TTLAUNCH_SCRATCH": str(tmp_path)}, rank=0)
    assert [Path(contract.recorder_file(0))] == [path.relative_to(tmp_path) for path in tmp_path.rglob("*.*")]
