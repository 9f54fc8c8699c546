"""Host memory for messages of a device is kept, found again, bounded, and never used while a copy reads it."""

import itertools

import pytest
import torch

from tests.runtime.communicator_contract import CONTRACT
from tests.runtime.grpc_worlds import directory_of, in_threads, opened
from tests.runtime.late_copier import LateCopier
from ttlaunch.runtime.comm.staging import Rooms, Staging, room_bytes


class Reading:
    """A copy that ends when somebody waits for it, or when it is told to."""

    def __init__(self):
        self.done = self.waited = False

    def is_done(self):
        return self.done

    def wait(self):
        self.done = self.waited = True


def test_a_room_is_found_again_by_its_peer_tag_direction_and_size():
    rooms = Rooms(LateCopier())
    keys = list(itertools.product((0, 1), (3, 4), (True, False)))
    given = {}
    for key in keys:
        given[key] = rooms.take(100_000, key)
    for key in keys:
        rooms.give_back(given[key])
    for key in reversed(keys):
        assert rooms.take(100_001, key) is given[key]
    assert 0 == rooms.idle_bytes


def test_a_room_is_not_used_again_while_a_copy_reads_it():
    rooms, reading = Rooms(LateCopier()), Reading()
    room = rooms.take(10, (0, 0, False))
    rooms.give_back(room, reading=reading)
    other = rooms.take(10, (0, 0, False))
    assert other is not room
    reading.done = True
    assert rooms.take(10, (0, 0, False)) is room


def test_idle_rooms_are_bounded_and_the_oldest_is_freed_first():
    copier = LateCopier()
    rooms, reading = Rooms(copier, most_idle_bytes=3 * 4096), Reading()
    made = [rooms.take(1, (peer, 0, True)) for peer in range(4)]
    for room in made:
        rooms.give_back(room, reading=reading if room is made[0] else None)
    assert reading.waited  # before its memory goes
    assert 3 * 4096 == rooms.idle_bytes
    kept = [rooms.take(1, (peer, 0, True)) is made[peer] for peer in range(4)]
    assert [False, True, True, True] == kept


def test_memory_that_is_freed_is_gone():
    copier = LateCopier(most_questions=0)
    rooms = Rooms(copier, most_idle_bytes=8192)
    for size in range(1, 400):
        rooms.give_back(rooms.take(50 * size, (0, 0, True)))
    assert 8192 >= rooms.idle_bytes == copier.live_bytes


@pytest.mark.parametrize("size", [0, 1, 4096, 4097, 5000, 2**20, 2**20 + 1, 3 * 2**20 - 1, 2**31 + 7])
def test_a_room_has_few_bytes_more_than_its_message(size):
    assert size <= room_bytes(size) <= max(4096, size * 9 // 8)


def test_the_tensor_of_a_send_may_change_when_its_copy_is_complete_and_not_sooner():
    staging = Staging(LateCopier(seed=3))
    leaving = staging.leave(torch.arange(5.0), dest=1, tag=2)
    assert not leaving.is_copied()
    leaving.wait()
    assert torch.equal(torch.arange(5.0), leaving.host)
    leaving.end()
    leaving.end()
    assert 4096 == staging.rooms.idle_bytes


@pytest.mark.parametrize(
    "tensor", [torch.zeros(4, 4).T[1:], torch.zeros((1,) * 9), torch.zeros(2, dtype=torch.complex64)]
)
def test_what_cannot_be_sent_takes_no_room(tensor):
    copier = LateCopier()
    staging = Staging(copier)
    for begin in (lambda: staging.leave(tensor, dest=0, tag=0), lambda: staging.arrive(tensor, source=0, tag=0)):
        with pytest.raises(ValueError, match="cannot be"):
            begin()
    assert 0 == copier.allocated


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_staged_messages_over_grpc_keep_every_promise(tmp_path, ranks):
    copiers = [LateCopier(seed=rank) for rank in range(ranks)]
    with staged_world(tmp_path, copiers) as communicators:
        among = list(range(ranks))
        for promise in CONTRACT:
            in_threads([lambda comm, p=promise: p(comm, among)] * ranks, communicators)


def test_messages_over_grpc_use_their_rooms_again(tmp_path):
    copiers = [LateCopier(seed=rank, most_questions=3) for rank in range(2)]
    with staged_world(tmp_path, copiers) as communicators:

        def exchange(comm):
            box = torch.empty(30_000)
            for value in range(40):
                sending = comm.isend(torch.full((30_000,), float(value)), dest=1 - comm.rank)
                comm.recv(box, source=1 - comm.rank)
                sending.wait()
                assert torch.equal(torch.full((30_000,), float(value)), box)

        in_threads([exchange] * 2, communicators)
    assert all(copier.allocated <= 12 for copier in copiers)


def staged_world(folder, copiers):
    return opened([directory_of(folder, len(copiers))] * len(copiers), stagings=[Staging(one) for one in copiers])
