"""What every transport promises, as functions that all ranks of a world run; each asserts what it finds.

`tests/runtime/test_communicators_in_process.py` runs them in threads, `tests/mpi/test_communicators.py` in real ranks.
"""

import torch

from ttlaunch.runtime.comm.collectives import (
    all_gather,
    all_reduce,
    barrier,
    broadcast,
    gather,
    reduce,
    reduce_scatter,
)
from ttlaunch.runtime.comm.protocol import DTYPES, CommunicationError
from ttlaunch.runtime.comm.reduction import contiguous_blocks

SIZES = (0, 1, 2, 5, 16, 1000, 4097, 20_000)


def messages_of_one_tag_keep_their_order(comm, among):
    after, before = neighbours(comm, among)
    sends = [comm.isend(torch.full((4,), value), dest=after, tag=3) for value in range(5)]
    for value in range(5):
        box = torch.empty(4, dtype=torch.int64)
        comm.recv(box, source=before, tag=3)
        assert torch.equal(torch.full((4,), value), box)
    for send in sends:
        send.wait()


def receives_match_in_the_order_in_which_they_were_posted(comm, among):
    after, before = neighbours(comm, among)
    boxes = [torch.empty(1) for _ in range(3)]
    receives = [comm.irecv(box, source=before) for box in boxes]
    sends = [comm.isend(torch.tensor([float(value)]), dest=after) for value in range(3)]
    for message in (*reversed(receives), *sends):
        message.wait()
    assert [0.0, 1.0, 2.0] == [box.item() for box in boxes]


def tags_are_apart(comm, among):
    after, before = neighbours(comm, among)
    sends = [comm.isend(torch.tensor([tag]), dest=after, tag=tag) for tag in (1, 2)]
    for tag in (2, 1):
        box = torch.empty(1, dtype=torch.int64)
        comm.recv(box, source=before, tag=tag)
        assert tag == box.item()
    for send in sends:
        send.wait()


def every_dtype_and_size_arrives_whole(comm, among):
    after, before = neighbours(comm, among)
    for dtype in DTYPES:
        for size in SIZES:
            sent = (torch.arange(size) % 7).to(dtype)
            sending = comm.isend(sent, dest=after)
            box = torch.ones(size, dtype=dtype)
            comm.recv(box, source=before)
            sending.wait()
            assert torch.equal(sent, box)


def shapes_of_many_dimensions_and_none_arrive(comm, among):
    after, before = neighbours(comm, among)
    for shape in ((), (1,) * 8, (2, 3, 4), (0, 3), (1, 0)):
        sending = comm.isend(torch.ones(shape), dest=after)
        box = torch.zeros(shape)
        comm.recv(box, source=before)
        sending.wait()
        assert torch.equal(torch.ones(shape), box)


def a_wait_may_be_repeated(comm, among):
    after, before = neighbours(comm, among)
    box = torch.zeros(2)
    receiving, sending = comm.irecv(box, source=before), comm.isend(torch.ones(2), dest=after)
    for message in (receiving, sending, receiving, sending):
        message.wait()
    assert torch.equal(torch.ones(2), box)


def whoever_comes_first_is_waited_for(comm, among):
    """Each rank sends three messages, small or large, to the first one, which takes them as they come."""
    for size in (3, 100_000):
        sends = [comm.isend(torch.full((size,), float(value)), dest=among[0], tag=5) for value in range(3)]
        if comm.rank == among[0]:
            boxes = {rank: torch.empty(size) for rank in among}
            asked = {rank: comm.irecv(box, source=rank, tag=5) for rank, box in boxes.items()}
            found = {rank: [] for rank in among}
            while asked:
                place = comm.wait_any(list(asked.values()))
                rank = list(asked)[place]
                message = asked.pop(rank)
                assert message.test()
                message.wait()
                found[rank].append(boxes[rank][-1].item())
                if len(found[rank]) < 3:
                    asked[rank] = comm.irecv(boxes[rank], source=rank, tag=5)
            assert {rank: [0.0, 1.0, 2.0] for rank in among} == found
        for send in sends:
            send.wait()
            assert send.test()


def a_wait_for_any_ends_when_its_time_is_over(comm, among):
    after, before = neighbours(comm, among)
    box = torch.zeros(2)
    receiving = comm.irecv(box, source=before, tag=6)
    for timeout_s in (0, 0.01):
        assert comm.wait_any([receiving], timeout_s=timeout_s) is None
    barrier(comm, among=among)
    sending = comm.isend(torch.ones(2), dest=after, tag=6)
    assert 0 == comm.wait_any([receiving])
    receiving.wait()
    sending.wait()
    assert torch.equal(torch.ones(2), box)


def part_of_a_tensor_is_filled_in_place(comm, among):
    after, before = neighbours(comm, among)
    whole = torch.zeros(100_000)
    sending = comm.isend(torch.ones(50_000), dest=after)
    comm.recv(whole[50_000:], source=before)
    sending.wait()
    assert (0.0, 50_000.0) == (whole[:50_000].sum().item(), whole[50_000:].sum().item())


def tensors_that_cannot_be_sent_are_refused_before_anything_is_sent(comm, among):
    peer = neighbours(comm, among)[0]
    for tensor in (torch.zeros(4, 4).T[1:], torch.zeros((1,) * 9), torch.zeros(2, dtype=torch.complex64)):
        for verb in (lambda t=tensor: comm.isend(t, dest=peer), lambda t=tensor: comm.irecv(t, source=peer)):
            try:
                verb()
            except ValueError:
                continue
            raise AssertionError(f"{tensor.shape} {tensor.dtype} was not refused")
    messages_of_one_tag_keep_their_order(comm, among)


def a_message_of_another_kind_is_named(comm, among):
    """Rank 0 of the world learns it; all combinations of small and large tensors."""
    small, large = 3, 100_000
    cases = [(small, small + 1), (small, large), (large, small), (large, large + 1)]
    for tag, (sent, expected) in enumerate(cases, start=10):
        if comm.rank == among[-1]:
            comm.isend(torch.zeros(sent), dest=among[0], tag=tag)
            comm.isend(torch.zeros(sent), dest=among[0], tag=tag)
        if comm.rank == among[0]:
            try:
                comm.recv(torch.zeros(expected), source=among[-1], tag=tag)
            except CommunicationError as error:
                found = str(error)
            assert f"sent float32 of shape ({sent},), expected float32 of shape ({expected},)" in found
            assert found.startswith(f"rank {among[-1]} (peer)")


def all_verbs_of_many_ranks_give_their_results(comm, among):
    place, count = among.index(comm.rank), len(among)
    for size in (1, 2, 7, 1000):
        barrier(comm, among=among)
        whole = torch.arange(size, dtype=torch.float32)
        tensor = whole + place
        broadcast(comm, tensor, root=among[-1], among=among)
        assert torch.equal(whole + count - 1, tensor)
        found = gather(comm, whole * place, root=among[0], among=among)
        assert [] == found or place == 0
        assert all(torch.equal(whole * other, part) for other, part in enumerate(found))
        mine = contiguous_blocks(size, count)[place]
        shared = torch.zeros(size)
        shared[mine.start : mine.stop] = whole[mine.start : mine.stop]
        all_gather(comm, shared, among=among)
        assert torch.equal(whole, shared)
        the_three_sums_agree(comm, among, size)


def the_three_sums_agree(comm, among, size):
    place, count = among.index(comm.rank), len(among)
    vectors = [leaf(size, other) for other in range(count)]
    expected, mine = tree_sum(vectors), contiguous_blocks(size, count)[place]
    vector = vectors[place].clone()
    shard = reduce_scatter(comm, vector, among=among)
    assert torch.equal(vectors[place], vector)
    assert torch.equal(expected[mine.start : mine.stop], shard)
    reduce(comm, vector, root=among[0], among=among)
    assert torch.equal(expected if place == 0 else vectors[place], vector)
    all_reduce(comm, vector if place else vectors[0], among=among)
    assert torch.equal(expected, vector if place else vectors[0])


def leaf(size, place):
    generator = torch.Generator().manual_seed(size * 100 + place)
    found = torch.randn(size, generator=generator, device="cpu").to(torch.get_default_device())
    return found * 10.0 ** ((place * 5) % 11 - 5)


def tree_sum(vectors):
    """The sum as the picture in `reduction.py` shows it, by recursion from the top: an independent definition."""
    if len(vectors) == 1:
        return vectors[0]
    half = 1 << (len(vectors) - 1).bit_length() - 1
    return tree_sum(vectors[:half]) + tree_sum(vectors[half:])


def neighbours(comm, among):
    place = among.index(comm.rank)
    return among[(place + 1) % len(among)], among[place - 1]


CONTRACT = [
    messages_of_one_tag_keep_their_order,
    receives_match_in_the_order_in_which_they_were_posted,
    tags_are_apart,
    every_dtype_and_size_arrives_whole,
    shapes_of_many_dimensions_and_none_arrive,
    a_wait_may_be_repeated,
    whoever_comes_first_is_waited_for,
    a_wait_for_any_ends_when_its_time_is_over,
    part_of_a_tensor_is_filled_in_place,
    tensors_that_cannot_be_sent_are_refused_before_anything_is_sent,
    all_verbs_of_many_ranks_give_their_results,
    a_message_of_another_kind_is_named,  # the last one: it leaves messages that nobody receives
]
