"""What staged messages promise beside the contract of every transport, as functions that all ranks of a world run.

Copies are those of `LateCopier`: late, in odd order, and poisoned before they are complete. `plain` is MPI's own communicator, in which a
rank waits without any call of the transport.
"""

import itertools

import torch
from mpi4py import MPI

from tests.runtime import communicator_contract
from tests.runtime.late_copier import LateCopier, bytes_of
from ttlaunch.runtime.comm.collectives import barrier
from ttlaunch.runtime.comm.mpi import MpiCommunicator
from ttlaunch.runtime.comm.staging import Staging

SIZES = (0, 1, 3, 1000, 4096, 5000, 100_000)


def run(world, note):
    """Keep every promise, with staged tensors only and with some."""
    rank = MPI.COMM_WORLD.rank
    among = list(range(MPI.COMM_WORLD.size))
    for few, promise in itertools.product((False, True), [*communicator_contract.CONTRACT[:-1], *PROMISES]):
        most = 3 if promise is rooms_are_used_again_and_few else 40
        copier = LateCopier(seed=100 * rank + few, most_questions=most, takes=_odd if few else _all)
        staging = Staging(copier, most_idle_bytes=2**20)
        comm = MpiCommunicator(MPI.COMM_WORLD, world=world, rank=rank, staging=staging)
        promise(comm, among)
        comm.barrier()
        comm.close()
        assert not comm.queued
        assert staging.rooms.idle_bytes <= 2**20
        note(promise.__name__)
    mismatch = communicator_contract.CONTRACT[-1]
    comm = MpiCommunicator(MPI.COMM_WORLD, world=world, rank=rank, staging=Staging(LateCopier()))
    mismatch(comm, among)
    comm.close()  # the sender waits for nothing, so its sends begin here
    note(mismatch.__name__)


def _all(tensor):
    del tensor
    return True


def _odd(tensor):
    return tensor.numel() % 2 == 1


def all_may_send_to_all_before_any_receives(comm, among):
    for size in SIZES:
        sends = [comm.isend(filled(size, comm.rank, other), dest=other, tag=1) for other in among for _ in range(3)]
        for other in among:
            for _ in range(3):
                box = torch.empty(size)
                comm.recv(box, source=other, tag=1)
                assert same(filled(size, other, comm.rank), box)
        for send in sends:
            send.wait()


def staged_and_other_tensors_of_one_tag_keep_their_order(comm, among):
    after, before = communicator_contract.neighbours(comm, among)
    sizes = [place % 7 + (100_000 if place % 3 == 0 else 0) for place in range(40)]
    sends = [comm.isend(torch.full((size,), float(at)), dest=after, tag=at % 2) for at, size in enumerate(sizes)]
    for tag in (1, 0):
        for at, size in list(enumerate(sizes))[tag::2]:
            box = torch.empty(size)
            comm.recv(box, source=before, tag=tag)
            assert same(torch.full((size,), float(at)), box)
    for send in reversed(sends):
        send.wait()


def a_tensor_may_change_when_its_send_was_waited_for(comm, among):
    after, before = communicator_contract.neighbours(comm, among)
    for size in (3, 5001, 100_001):
        sent, box = torch.ones(size), torch.zeros(size)
        receiving = comm.irecv(box, source=before)
        sending = comm.isend(sent, dest=after)
        sending.wait()
        sent.fill_(7.0)
        receiving.wait()
        assert same(torch.ones(size), box)


def ranks_that_only_wait_for_any_get_their_messages(comm, among):
    for size in (3, 100_001):
        sends = [comm.isend(torch.full((size,), float(comm.rank)), dest=other, tag=2) for other in among]
        boxes = {other: torch.empty(size) for other in among}
        asked = {other: comm.irecv(box, source=other, tag=2) for other, box in boxes.items()}
        while asked:
            found = list(asked)[comm.wait_any(list(asked.values()))]
            asked.pop(found).wait()
            assert same(torch.full((size,), float(found)), boxes[found])
        while sends:
            sends.pop(comm.wait_any(sends)).wait()


def ranks_that_only_test_get_their_messages(comm, among):
    """What is tested needs no copy, and stands for every transfer of the communicator."""
    after, before = communicator_contract.neighbours(comm, among)
    for size, direct in ((3, 4), (100_001, 100_000)):
        boxes = torch.empty(size), torch.empty(direct)
        receives = [comm.irecv(box, source=before, tag=3) for box in boxes]
        sends = [comm.isend(torch.ones(count), dest=after, tag=3) for count in (size, direct)]
        while not receives[1].test():
            pass
        for message in (*receives, *sends):
            message.wait()
        assert all(same(torch.ones_like(box), box) for box in boxes)


def a_send_has_begun_when_its_rank_leaves(comm, among):
    """After the barrier, and after the end, the rank calls the transport no more."""
    after, before = communicator_contract.neighbours(comm, among)
    plain = MPI.COMM_WORLD
    for leave in (comm.barrier, comm.close):
        for size in (3, 100_001):
            sending, box = comm.isend(torch.ones(size), dest=after, tag=4), torch.zeros(size)
            leave()
            if comm.rank % 2 == 0:
                rest_until_the_other_half_is_there(plain)
            comm.recv(box, source=before, tag=4)
            if comm.rank % 2 == 1:
                rest_until_the_other_half_is_there(plain)
            sending.wait()
            assert same(torch.ones(size), box)


def rest_until_the_other_half_is_there(plain):
    waiting = plain.Ibarrier()
    while not waiting.Test():
        pass


def rooms_are_used_again_and_few(comm, among):
    after, before = communicator_contract.neighbours(comm, among)
    copier = comm._staging._copier
    for value in range(60):
        for size in (11, 30_001):
            box, sending = torch.empty(size), comm.isend(torch.full((size,), float(value)), dest=after)
            comm.recv(box, source=before)
            sending.wait()
            assert same(torch.full((size,), float(value)), box)
    assert copier.allocated <= 2 * 20, copier.allocated  # a copy reads its room until somebody has asked up to 3 times
    for size in range(20_001, 120_001, 2500):  # all of them together are more than may be kept
        box, sending = torch.empty(size), comm.isend(torch.ones(size), dest=after)
        comm.recv(box, source=before)
        sending.wait()
    assert copier.live_bytes <= 2**20 + 2 * 600_000


def a_barrier_of_messages_ends(comm, among):
    for _ in range(5):
        barrier(comm, among=among)


PROMISES = [
    all_may_send_to_all_before_any_receives,
    staged_and_other_tensors_of_one_tag_keep_their_order,
    a_tensor_may_change_when_its_send_was_waited_for,
    ranks_that_only_wait_for_any_get_their_messages,
    ranks_that_only_test_get_their_messages,
    a_send_has_begun_when_its_rank_leaves,
    rooms_are_used_again_and_few,
    a_barrier_of_messages_ends,
]


def filled(size, source, dest):
    return torch.arange(size, dtype=torch.float32) + 10 * source + dest


def same(expected, found):
    return torch.equal(bytes_of(expected), bytes_of(found))
