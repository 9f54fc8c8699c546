"""The world in one process: the same every time, and what would hang a cluster is named with both its lines."""

import inspect
import threading
from pathlib import Path

import pytest
import torch

from ttlaunch.runtime.comm.findings import Place
from ttlaunch.runtime.comm.in_process import InProcessWorld
from ttlaunch.runtime.comm.protocol import CommunicationError

from .communicator_contract import CONTRACT


def play(*functions, roles=None):
    """Run a function per rank; each is given its communicator."""
    world = InProcessWorld(roles or ["peer"] * len(functions))
    return world.run({rank: lambda f=f, r=rank: f(world.communicator(r)) for rank, f in enumerate(functions)})


def line_of(function, text):
    """The place of the one line of the function that holds the text."""
    lines, start = inspect.getsourcelines(function)
    (number,) = [start + at for at, line in enumerate(lines) if text in line]
    return Place(str(Path(__file__)), number)


def test_messages_of_one_tag_keep_their_order_and_tags_are_apart():
    found = []

    def sender(comm):
        sends = [comm.isend(torch.tensor([value]), dest=1, tag=tag) for value, tag in ((1, 0), (2, 5), (3, 0))]
        for send in sends:
            send.wait()

    def receiver(comm):
        for tag in (5, 0, 0):
            box = torch.zeros(1, dtype=torch.int64)
            comm.recv(box, source=0, tag=tag)
            found.append(box.item())

    outcome = play(sender, receiver)
    assert ([2, 1, 3], {}, []) == (found, outcome.errors, outcome.findings)
    assert {(0, 1): 3} == outcome.messages
    assert {(0, 1): 24} == outcome.message_bytes


def test_the_thread_of_a_rank_has_its_name_in_a_stack_dump():
    names = []
    play(*[lambda _comm: names.append(threading.current_thread().name)] * 2)
    assert ["rank 0", "rank 1"] == names


def test_ranks_take_turns_in_the_same_order_every_time():
    def history():
        happened = []

        def rank(comm):
            for step in range(5):
                happened.append((comm.rank, step))
                following, before = (comm.rank + 1) % 3, (comm.rank - 1) % 3
                sending = comm.isend(torch.ones(2), dest=following)
                comm.recv(torch.zeros(2), source=before)
                sending.wait()

        assert not play(rank, rank, rank).findings
        return happened

    first = history()
    assert [first] * 5 == [history() for _ in range(5)]


def test_a_message_of_another_shape_is_found_with_both_lines():
    def sender(comm):
        comm.send(torch.zeros(3), dest=1, tag=4)

    def receiver(comm):
        comm.recv(torch.zeros(2, 2, dtype=torch.float64), source=0, tag=4)

    outcome = play(sender, receiver, roles=["worker", "server"])
    (finding,) = outcome.findings
    expected = "rank 0 (worker) sends float32 of shape (3,) where rank 1 (server) receives float64 of shape (2, 2)"
    assert ("R020", expected) == (finding.code, finding.message)
    places = [side.place for side in finding.sides]
    assert [line_of(receiver, "recv("), line_of(sender, "send(")] == places
    (error,) = outcome.errors.values()
    assert isinstance(error, CommunicationError)
    assert "rank 0 (worker) sent float32 of shape (3,), expected float64 of shape (2, 2)" == str(error)


def test_two_ranks_that_send_first_are_found_although_buffers_would_hide_it():
    def rank(comm):
        comm.send(torch.zeros(3), dest=1 - comm.rank)
        comm.recv(torch.zeros(3), source=1 - comm.rank)

    outcome = play(rank, rank)
    (finding,) = outcome.findings
    assert ("R021", "ranks wait for each other: 0 → 1 → 0") == (finding.code, finding.message)
    assert [line_of(rank, "send(")] * 2 == [side.place for side in finding.sides]
    assert "all of them send" in finding.notes[0]
    assert {} == outcome.errors


def test_a_wait_for_a_rank_that_has_ended_is_found():
    def leaver(comm):
        del comm

    def waiter(comm):
        comm.recv(torch.zeros(1), source=0)

    def bystander(comm):
        comm.recv(torch.zeros(1), source=1)

    (finding,) = play(leaver, waiter, bystander).findings
    assert ("R021", "rank 1 (peer) waits for rank 0 (peer), which has ended") == (finding.code, finding.message)
    assert ("rank 2 (peer) receives float32 of shape (1,) from rank 1 (peer), tag 0",) == finding.notes


def test_a_wrong_tag_is_named_beside_the_deadlock():
    def sender(comm):
        comm.send(torch.zeros(1), dest=1, tag=1)

    def receiver(comm):
        comm.recv(torch.zeros(1), source=0, tag=2)

    (finding,) = play(sender, receiver).findings
    assert "R021" == finding.code
    place = line_of(sender, "send(")
    expected = f"rank 0 (peer) sends float32 of shape (1,) to rank 1 (peer), tag 1 ({place.file}:{place.line})"
    assert [expected] == [note for note in finding.notes if "tag 1" in note]


def test_a_ring_of_three_is_named_in_its_order():
    def rank(comm):
        comm.recv(torch.zeros(1), source=(comm.rank + 2) % 3)

    (finding,) = play(rank, rank, rank).findings
    assert "ranks wait for each other: 0 → 2 → 1 → 0" == finding.message


def test_messages_that_are_left_over_are_found_once_a_line():
    def sender(comm):
        for _ in range(3):
            comm.isend(torch.zeros(2), dest=1)

    def receiver(comm):
        comm.irecv(torch.zeros(1), source=0, tag=9)

    sent, expected = play(sender, receiver).findings
    assert "R022" == sent.code == expected.code
    assert sent.message.endswith("to rank 1 (peer), tag 0, which no rank receives (3 times)")
    assert expected.message.endswith("from rank 0 (peer), tag 9, which no rank sends")


def test_a_tensor_that_changes_while_it_is_sent_is_found():
    def sender(comm):
        tensor = torch.zeros(2)
        sending = comm.isend(tensor, dest=1)
        tensor.add_(1)
        sending.wait()

    def receiver(comm):
        comm.recv(torch.zeros(2), source=0)

    (finding,) = play(sender, receiver).findings
    assert ("R023", line_of(sender, "isend(")) == (finding.code, finding.sides[0].place)


def test_nan_is_not_taken_for_a_change():
    def sender(comm):
        comm.send(torch.tensor([float("nan"), -0.0]), dest=1)

    assert [] == play(sender, lambda comm: comm.recv(torch.zeros(2), source=0)).findings


@pytest.mark.parametrize("kind", [ValueError, SystemExit, KeyboardInterrupt])
def test_a_rank_that_raises_ends_the_world_and_only_it_is_blamed(kind):
    def breaks(comm):
        comm.send(torch.zeros(1), dest=1)
        raise kind("no such bucket")

    def waits(comm):
        comm.recv(torch.zeros(1), source=0)
        comm.recv(torch.zeros(1), source=0)

    outcome = play(breaks, waits)
    assert [0] == list(outcome.errors)
    assert isinstance(outcome.errors[0], kind)
    assert [] == outcome.findings


def test_time_passes_only_when_nobody_can_go_on():
    """So a simulated timeout is the same every time: the late one is late because somebody keeps it."""
    found = []

    def server(comm):
        boxes = [torch.empty(1), torch.empty(1)]
        asked = [comm.irecv(box, source=rank) for rank, box in enumerate(boxes, start=1)]
        for _ in range(2):
            place = comm.wait_any(asked, timeout_s=5.0)
            found.append(place)
            if place is not None:
                asked[place].wait()
                asked = [asked[1 - place]]
        comm.send(torch.ones(1), dest=2)
        found.append(comm.wait_any(asked))
        asked[0].wait()

    def prompt(comm):
        comm.send(torch.ones(1), dest=0)

    def late(comm):
        comm.recv(torch.empty(1), source=0)
        comm.send(torch.ones(1), dest=0)

    outcome = play(server, prompt, late, roles=["server", "worker", "worker"])
    assert ({}, [], [0, None, 0]) == (outcome.errors, outcome.findings, found)


def test_a_wait_for_any_that_never_ends_names_one_who_is_still_there():
    def server(comm):
        comm.wait_any([comm.irecv(torch.empty(1), source=rank) for rank in (1, 2)])

    def leaver(_communicator):
        pass

    def other(comm):
        comm.recv(torch.empty(1), source=0)

    (finding,) = play(server, leaver, other, roles=["server", "worker", "worker"]).findings
    assert "ranks wait for each other: 0 → 2 → 0" == finding.message


def test_a_rank_outside_the_world_is_refused_at_once():
    outcome = play(lambda comm: comm.send(torch.zeros(1), dest=3))
    assert "there is no rank 3 in a world of 1" == str(outcome.errors[0])


def test_a_tensor_with_gaps_is_refused_before_it_is_sent():
    outcome = play(lambda comm: comm.send(torch.zeros(4, 4).T[1:], dest=0))
    assert "not contiguous" in str(outcome.errors[0])
    assert not outcome.messages


@pytest.mark.parametrize("ranks", [2, 3, 5, 6])
@pytest.mark.parametrize("promise", CONTRACT, ids=lambda promise: promise.__name__)
def test_every_promise_of_a_socket_is_kept(promise, ranks):
    outcome = play(*[lambda comm: promise(comm, list(range(ranks)))] * ranks)
    assert {} == outcome.errors
    left = {"R020", "R022"} if promise is CONTRACT[-1] else set()
    assert {finding.code for finding in outcome.findings} <= left
