"""Ranks that repeat what the code of three of them does: at exactly the times of ranks that all run, or not at all."""

from contextlib import suppress
from functools import partial

import pytest
import torch

from ttlaunch.runtime.comm.programs import Author, Compute, Post, Program, Step, repeat
from ttlaunch.runtime.comm.virtual_clock import Link, VirtualClock
from ttlaunch.runtime.comm.virtual_fates import Deed, FateOrder, Fates, RankEndedError
from ttlaunch.runtime.comm.virtual_world import NotAlikeError, VirtualWorld

WORKERS = range(1, 7)
LINK = Link(0.25, 16.0)


def server(comm, compute, _step):
    """Serve one worker after the other, with a check of what it says of itself."""
    for _ in range(2):
        for rank in WORKERS:
            block, gradient = torch.zeros(1, dtype=torch.int64), torch.zeros(4)
            comm.recv(block, source=rank)
            assert 3 * rank == block.item()
            comm.recv(gradient, source=rank)
            compute(0.1)
        for rank in WORKERS:
            comm.send(torch.tensor([7]), dest=rank)


def worker(comm, compute, step):
    for number in (1, 2):
        step(Step(number, begins=True))
        compute(1 / 3)
        comm.send(torch.tensor([3 * comm.rank]), dest=0)
        comm.send(torch.zeros(4), dest=0)
        order = torch.zeros(1, dtype=torch.int64)
        comm.recv(order, source=0)
        compute(float(order))
        step(Step(number, begins=False))


def play(worker, *, repeats, serve=server, orders=()):
    """Run the server and the workers; return what each worker's clock shows at its steps, how it spent its time, and whose code ran."""
    ranks, ran = [0, *WORKERS], set()
    clock = VirtualClock(ranks, slowness={3: 1.5})
    world = VirtualWorld(
        ["server", *["worker"] * len(WORKERS)],
        clock,
        LINK,
        carries=lambda one: one.dtype is torch.int64,
        fates=Fates(orders, ranks, clock),
    )
    seen = {rank: [] for rank in ranks}

    def write(author):
        ran.add(author.rank)
        worker(author.communicator, lambda seconds: author.deeds.append(Compute(seconds)), author.deeds.append)

    program = Program(list(WORKERS), write, carries=lambda one: one.dtype is torch.int64)

    def note_step(rank, deed):
        seen[rank].append((deed, clock.now_s(rank)))

    def repeating(rank):
        with suppress(RankEndedError):
            yield from repeat(program, rank, world, step=partial(note_step, rank), note=lambda _: None)

    def live(rank):
        def compute(seconds):
            world.compute(rank, seconds)

        step = partial(note_step, rank)
        with suppress(RankEndedError):
            (worker if rank else serve)(world.communicator(rank), compute, step)

    try:
        scripts = {rank: repeating(rank) for rank in (WORKERS if repeats else ())}
        outcome = world.run({rank: partial(live, rank) for rank in ranks if rank not in scripts}, scripts)
    finally:
        program.close()
    assert ({}, []) == (outcome.errors, outcome.findings)
    return [(seen[rank], clock.spent(rank)) for rank in ranks], ran


def test_ranks_that_repeat_have_exactly_the_times_of_ranks_that_run():
    repeated, ran = play(worker, repeats=True)
    run, _ = play(worker, repeats=False)
    assert run == repeated
    assert len(WORKERS) == len({spent.waiting_s for _, spent in run[1:]})  # so none could stand for another
    assert {1, 4, 6} == ran


STOPPED = [FateOrder(0, Deed.STOP, frozenset({2}), at_s=0.1), FateOrder(1, Deed.CONTINUE, frozenset({2}), at_s=7.0)]
KILLED = [FateOrder(0, Deed.END, frozenset({5}), at_s=9.0)]


@pytest.mark.parametrize(("orders", "hit", "steps"), [(STOPPED, 2, 4), (KILLED, 5, 1)])
def test_what_happens_to_a_rank_that_repeats_happens_as_to_one_that_runs(orders, hit, steps):
    repeated, _ = play(worker, repeats=True, orders=orders)
    run, _ = play(worker, repeats=False, orders=orders)
    assert run == repeated
    assert steps == len(run[hit][0])
    assert run != play(worker, repeats=False)[0]


def test_code_that_differs_in_the_middle_is_not_repeated():
    def other(comm, compute, step):
        compute(0.1 if comm.rank == 4 else 0.2)
        worker(comm, compute, step)

    with pytest.raises(NotAlikeError, match="the code of ranks 1, 4, 6 does not do the same from its operation 0 on"):
        play(other, repeats=True)


def test_values_that_do_not_grow_evenly_are_not_repeated():
    def other(comm, _compute, _step):
        comm.send(torch.tensor([comm.rank**2]), dest=0)

    with pytest.raises(NotAlikeError, match="from its operation 0 on"):
        play(other, repeats=True)


def test_code_that_asks_what_has_arrived_is_not_repeated():
    def other(comm, _compute, _step):
        comm.irecv(torch.zeros(4), source=0).test()

    with pytest.raises(NotAlikeError, match="depends on the order in which messages arrive"):
        play(other, repeats=True)


def test_ranks_that_receive_other_values_are_not_alike():
    def serve(comm, _compute, _step):
        for rank in WORKERS:
            comm.send(torch.tensor([rank == 5]).long(), dest=rank)

    def other(comm, _compute, _step):
        comm.recv(torch.zeros(1, dtype=torch.int64), source=0)

    with pytest.raises(NotAlikeError, match="rank 5 receives other values than ranks with the same code"):
        play(other, repeats=True, serve=serve)


def test_code_that_fails_is_left_to_ranks_that_run_all():
    def other(_comm, _compute, _step):
        raise LookupError("no such layer")

    with pytest.raises(NotAlikeError, match="LookupError: no such layer"):
        play(other, repeats=True)


def test_what_is_sent_has_the_values_it_had_when_it_was_sent():
    """One copy is kept for a tensor that goes to many ranks, until it changes; a view of the same memory is another tensor."""

    def live(author):
        numbers = torch.tensor([1, 2])
        for dest in (1, 2):
            author.communicator.isend(numbers, dest=dest)
        numbers[0] = 5
        author.communicator.isend(numbers, dest=1)
        author.communicator.isend(numbers[1:], dest=1)
        with torch.inference_mode():
            inferred = torch.tensor([7])
            author.communicator.isend(inferred, dest=1)
            inferred += 1
            author.communicator.isend(inferred, dest=1)

    author = Author(0, live, carries=lambda _: True)
    assert author.go_on() is None
    sent = [one.values for one in author.deeds if isinstance(one, Post)]
    assert [[1, 2], [1, 2], [5, 2], [2], [7], [8]] == [values.tolist() for values in sent]
    assert sent[0] is sent[1]
