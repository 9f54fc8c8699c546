"""Gradients in buckets while others are computed, weights in buckets while others are used: the bits of one process."""

import contextlib
from functools import cache

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional

from tests.examples import examples
from ttlaunch.runtime.comm.in_process import InProcessWorld
from ttlaunch.runtime.comm.protocol import CommunicationError
from ttlaunch.runtime.comm.reduction import GradientTree, contiguous_blocks
from ttlaunch.runtime.model.flat import FlatParameters
from ttlaunch.runtime.parallel.gradients.buckets import cut_buckets
from ttlaunch.runtime.parallel.gradients.exchange import GradientExchange
from ttlaunch.runtime.parallel.tiers.aggregator_and_optimizer import AggregatorToOptimizer, OptimizerToAggregator
from ttlaunch.runtime.parallel.tiers.bucketed_update import BucketedUpdate, update_order
from ttlaunch.runtime.parallel.tiers.gradient_aggregator import GradientAggregator
from ttlaunch.runtime.parallel.tiers.remote_optimizer import RemoteOptimizer
from ttlaunch.runtime.training.optimizers import NotFiniteError, build_optimizer, global_norm
from ttlaunch.runtime.training.rank_model import build_model

STEPS, RATE = 3, 0.05
ONE_LAYER = 1.2e-3
"""Megabytes: about the size of the largest layer below."""


class LateCommunicator:
    """A message is there when it has been waited for and not before, as over a slow network."""

    def __init__(self, comm):
        self.rank, self._communicator = comm.rank, comm
        self.send, self.recv, self.isend = comm.send, comm.recv, comm.isend

    def irecv(self, tensor, *, source, tag=0):
        late = torch.full_like(tensor, -1)
        return LateMessage(tensor, late, self._communicator.irecv(late, source=source, tag=tag))


class LateMessage:
    def __init__(self, tensor, late, message):
        self._tensor, self._late, self._message = tensor, late, message

    def wait(self):
        self._message.wait()
        self._tensor.copy_(self._late)


class Tail(nn.Module):
    """Reads the parameters of its child without calling it, as a head whose matrix is another's does."""

    def __init__(self):
        super().__init__()
        self.bias, self.last = nn.Parameter(torch.zeros(23)), nn.Linear(23, 1)

    def forward(self, x):
        return functional.linear(x + self.bias, self.last.weight, self.last.bias)


class Layers(nn.Module):
    """Some layers, one of which is never used, and one in every second step only."""

    def __init__(self, seed):
        super().__init__()
        torch.manual_seed(seed)
        self.first, self.unused = nn.Linear(5, 11), nn.Linear(3, 3)
        self.blocks = nn.ModuleList([nn.Linear(11, 23), nn.Linear(23, 23)])
        self.tail = Tail()

    def forward(self, x, step):
        middle, seldom = self.blocks
        x = torch.tanh(middle(torch.tanh(self.first(x))))
        return self.tail(seldom(x) if step % 2 else x)


def batch(step, index):
    generator = torch.Generator().manual_seed(1000 * step + index)
    return torch.randn(2, 5, generator=generator), torch.randn(2, 1, generator=generator) * 10.0 ** (index % 5)


def loss_of(model, step, index):
    x, y = batch(step, index)
    return functional.mse_loss(model(x, step), y, reduction="sum")


@cache
def alone(micro_batches):
    """Weights and losses of one process."""
    model = Layers(0)
    flat, losses = FlatParameters(model.parameters()), []
    tree = GradientTree(len(flat.weights_N))
    for step in range(STEPS):
        for index in range(micro_batches):
            flat.grads_N.zero_()
            loss = loss_of(model, step, index)
            loss.backward()
            tree.add(index, flat.grads_N, tokens=index + 1, loss=loss.item())
        losses.append(tree.mean(flat.grads_N, micro_batches=micro_batches))
        flat.weights_N.sub_(flat.grads_N, alpha=RATE)
    return flat.weights_N, losses


def work(comm, server, blocks, members, watches, found):
    model = Layers(1 + comm.rank)
    optimizer = RemoteOptimizer(
        model.parameters(),
        server,
        ctx=comm,
        block=blocks[comm.rank],
        model=model if watches else None,
        members={rank: blocks[rank] for rank in members},
    )
    optimizer.receive_weights()
    for step in range(STEPS):
        optimizer.zero_grad()
        for index in blocks[comm.rank]:
            loss = loss_of(model, step, index)
            if watches:
                optimizer.expect(index, tokens=index + 1, loss=loss.item())
            loss.backward()
            optimizer.accumulate(index, tokens=index + 1, loss=loss.item())
        optimizer.step()
    optimizer.receive_weights()
    found[comm.rank] = FlatParameters(model.parameters()).weights_N


def aggregate(comm, workers, megabytes, optimizer, found):
    """One rank of two tiers, or the aggregator of three."""
    model, losses = Layers(0), []
    flat = FlatParameters(model.parameters())
    followers = [] if optimizer is None else [optimizer]
    aggregator = GradientAggregator(
        model.parameters(), ctx=comm, workers=workers, bucket_megabytes=megabytes, followers=followers
    )
    link = optimizer is not None and AggregatorToOptimizer(model.parameters(), ctx=comm, optimizer=optimizer)
    if link:
        link.receive_first_weights()
    aggregator.send_first_weights()
    for _ in range(STEPS):
        losses.append(aggregator.begin_step())
        if link:
            for bucket in aggregator.mean_gradients():
                link.send_gradient(bucket)
            updated = link.weights(aggregator.buckets)
        else:
            updated = updating(flat, aggregator.mean_gradients())
        for bucket in updated:
            aggregator.send_weights(bucket)
        aggregator.end_step()
    found[comm.rank] = flat.weights_N
    found["losses"] = losses


def updating(flat, arriving):
    for bucket in arriving:
        bucket.of(flat.weights_N).sub_(bucket.of(flat.grads_N), alpha=RATE)
        yield bucket


def optimize(comm, aggregator, found):
    model = Layers(0)
    flat, link = (
        FlatParameters(model.parameters()),
        OptimizerToAggregator(model.parameters(), ctx=comm, aggregator=aggregator),
    )
    link.send_first_weights()
    for _ in range(STEPS):
        for bucket in updating(flat, link.gradients()):
            link.send_weights(bucket)
        link.end_step()
    found[comm.rank] = flat.weights_N


def train(workers, local, micro_batches, megabytes, *, tiers, watches):
    """All ranks; returns weights by rank, the losses, and what was counted."""
    count, found = workers * local, {}
    blocks = dict(enumerate(contiguous_blocks(micro_batches, count)))
    firsts = range(0, count, local)
    joint = {first: range(blocks[first].start, blocks[first + local - 1].stop) for first in firsts}
    world = InProcessWorld(["worker"] * count + ["server"] * (tiers - 1))

    def life(rank):
        if rank < count:
            first = rank - rank % local
            members = range(first + 1, first + local) if rank == first else ()
            work(
                LateCommunicator(world.communicator(rank)),
                count if rank == first else first,
                blocks,
                members,
                watches,
                found,
            )
        elif rank == count:
            aggregate(
                LateCommunicator(world.communicator(rank)), joint, megabytes, count + 1 if tiers == 3 else None, found
            )
        else:
            optimize(LateCommunicator(world.communicator(rank)), count, found)

    ranks = range(count + tiers - 1)
    outcome = world.run({rank: lambda rank=rank: life(rank) for rank in ranks})
    assert ({}, []) == (outcome.errors, outcome.findings)
    return [found[rank] for rank in ranks], found["losses"], outcome


@settings(deadline=None, max_examples=examples(40))
@given(
    st.data(),
    st.integers(1, 6),
    st.integers(1, 3),
    st.sampled_from([1e-6, ONE_LAYER, 2 * ONE_LAYER, 1.0, None]),
    st.sampled_from([2, 3]),
    st.booleans(),
)
def test_any_ranks_and_buckets_give_the_bits_of_one_process(data, workers, local, megabytes, tiers, watches):
    """A5, A6, A9, A14: ragged blocks, several ranks a worker, buckets of a parameter and of everything, layers that
    get no gradient; with hooks that send while the backward pass runs, and without."""
    micro_batches = data.draw(st.integers(workers * local, max(workers * local, 12)))
    expected_N, losses = alone(micro_batches)
    weights, found, _ = train(workers, local, micro_batches, megabytes, tiers=tiers, watches=watches)
    assert losses == found
    for weights_N in weights:
        assert torch.equal(expected_N, weights_N)


@pytest.mark.parametrize("megabytes", [1e-6, ONE_LAYER, 1.0])
def test_two_workers_of_two_ranks_are_four_workers(megabytes):
    """A6, with 10 micro-batches: the blocks are ragged, and the joint ones are no nodes of the tree."""
    local = train(2, 2, 10, megabytes, tiers=2, watches=True)
    flat = train(4, 1, 10, megabytes, tiers=2, watches=True)
    assert local[1] == flat[1]
    for one_N, other_N in zip(local[0], flat[0], strict=True):
        assert torch.equal(one_N, other_N)
    assert (
        0 == local[2].messages[1, 4] == local[2].messages[3, 4]
    )  # only the first rank of each talks to the aggregator


@pytest.mark.parametrize("megabytes", [1e-6, ONE_LAYER, 1.0])
def test_the_edges_of_three_tiers_move_what_they_should(megabytes):
    """A12: six edges; gradients and weights once on each, in as many messages as there are buckets."""
    outcome = train(2, 1, 8, megabytes, tiers=3, watches=True)[2]
    flat = FlatParameters(Layers(0).parameters())
    buckets = len(cut_buckets(flat.starts, bucket_bytes=int(megabytes * 1e6)))
    size, edges = flat.weights_N.nbytes, {(0, 2), (1, 2), (2, 3), (3, 2), (2, 0), (2, 1)}
    assert edges == set(outcome.messages)
    for edge in edges:
        first = size if edge[1] < edge[0] else 0  # weights before the first step
        said = 16 if edge[0] == 2 else 0
        counts = 32 * STEPS if edge[1] == 2 and edge[0] < 2 else 0
        assert STEPS * size + first + said * (edge[1] != 2) + counts == outcome.message_bytes[edge]
        messages = STEPS * buckets + (first > 0) + (said > 0) + (STEPS if counts else 0)
        assert messages == outcome.messages[edge]


def test_gradients_leave_while_the_last_backward_pass_runs():
    """A13: the buckets of the last layers are under way before the first layer has its gradient; others only at the end."""
    model = Layers(0)
    before_first, world = [], InProcessWorld(["worker", "server"])

    def worker(comm):
        optimizer = RemoteOptimizer(model.parameters(), 1, ctx=comm, block=range(2), model=model)
        optimizer.receive_weights()
        model.first.weight.register_hook(lambda _: before_first.append(world._outcome.messages[0, 1]))
        for index in range(2):
            loss = loss_of(model, 1, index)
            optimizer.expect(index, tokens=1, loss=loss.item())
            loss.backward()
            optimizer.accumulate(index, tokens=1, loss=loss.item())
        optimizer.step()

    def server(comm):
        aggregator = GradientAggregator(
            model_of_server.parameters(), ctx=comm, workers={0: range(2)}, bucket_megabytes=1e-6
        )
        aggregator.send_first_weights()
        aggregator.begin_step()
        for bucket in aggregator.mean_gradients():
            aggregator.send_weights(bucket)
        aggregator.end_step()

    model_of_server = Layers(0)
    outcome = world.run({0: lambda: worker(world.communicator(0)), 1: lambda: server(world.communicator(1))})
    assert ({}, []) == (outcome.errors, outcome.findings)
    tail, seldom, middle = 3, 2, 2
    assert [0, 1 + tail + seldom + middle] == before_first  # counts, then each parameter; the unused layer comes later
    assert 1 + len(list(model.parameters())) == outcome.messages[0, 1]


def test_another_block_than_expected_is_named():
    world, model = InProcessWorld(["worker", "server"]), Layers(0)

    def worker(comm):
        optimizer = RemoteOptimizer(model.parameters(), 1, ctx=comm, block=range(2))
        optimizer.receive_weights()
        optimizer.step()

    def server(comm):
        aggregator = GradientAggregator(Layers(0).parameters(), ctx=comm, workers={0: range(1)})
        aggregator.send_first_weights()
        with pytest.raises(CommunicationError, match="rank 0 brings the sums over"):
            aggregator.begin_step()

    outcome = world.run({0: lambda: worker(world.communicator(0)), 1: lambda: server(world.communicator(1))})
    assert outcome.findings


@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
@pytest.mark.parametrize("clips", [True, False])
def test_an_update_by_buckets_has_the_bits_of_a_whole_one(make_cfg, make_context, optimizer, clips):
    """A8, D24: weights, moments, norm and rate; in the order in which they leave, and after a step without gradient."""
    training = {"optimizer": optimizer, "use_clip_grad_norm": clips, "clip_grad_norm_max_norm": 0.1}
    cfg = make_cfg(training=training)
    whole, cut = (build_model(cfg, make_context(cfg)) for _ in range(2))
    one, other = (build_optimizer(cfg, model, total_steps=9) for model in (whole, cut))
    update = BucketedUpdate(other, cfg=cfg, model=cut)
    starts = FlatParameters(cut.parameters()).starts
    for step, size in enumerate([0, 9000, 10**9, 20000], start=1):
        drawn_N = torch.randn(len(whole.grads_N), generator=torch.Generator().manual_seed(step)) * (step != 3)
        buckets = cut_buckets(starts, bucket_bytes=size)
        whole.grads_N.copy_(drawn_N)
        cut.grads_N.copy_(drawn_N)
        norm = global_norm(one.squared_norms())
        rate = one.step(step, norm=norm)
        assert update_order(cfg, buckets) == list(update.step(step, iter(buckets)))
        assert (norm, rate) == (update.norm, update.rate)
        assert torch.equal(whole.weights_N, cut.weights_N)
        for (name, ours), (_, theirs) in zip(one.named_state(), other.named_state(), strict=True):
            assert torch.equal(ours, theirs), name


@settings(deadline=None, max_examples=examples(40))
@given(
    st.data(),
    st.integers(1, 6),
    st.sampled_from([1e-6, ONE_LAYER, 2 * ONE_LAYER, 1.0, None]),
    st.booleans(),
    st.booleans(),
)
def test_an_all_reduce_in_buckets_has_the_bits_of_one_process(data, ranks, megabytes, watches, keeps_nodes):
    """A5, A9, A14 without a server: ragged blocks, shards smaller than ranks, layers that get no gradient."""
    micro_batches = data.draw(st.integers(ranks, 12))
    expected_N, losses = alone(micro_batches)
    world, found = InProcessWorld(["worker"] * ranks), {}

    def worker(rank):
        model = Layers(0)
        flat = FlatParameters(model.parameters())
        exchange = GradientExchange(
            model.parameters(),
            ctx=LateCommunicator(world.communicator(rank)),
            among=range(ranks),
            micro_batches=micro_batches,
            bucket_megabytes=megabytes,
            keeps_nodes=keeps_nodes,
        )
        means = []
        for step in range(STEPS):
            flat.grads_N.zero_()

            def enter(indices, step=step):
                for index in indices:
                    loss = loss_of(model, step, index)
                    if watches:
                        exchange.expect(index, tokens=index + 1, loss=loss.item())
                    loss.backward()
                    exchange.accumulate(index, tokens=index + 1, loss=loss.item())

            means.append(exchange.mean(step, enter))
            flat.weights_N.sub_(flat.grads_N, alpha=RATE)
        found[rank] = flat.weights_N, means

    outcome = world.run({rank: lambda rank=rank: worker(rank) for rank in range(ranks)})
    assert ({}, []) == (outcome.errors, outcome.findings)
    for weights_N, means in found.values():
        assert torch.equal(expected_N, weights_N)
        assert losses == means


class EndingCommunicator:
    """Some messages come, then the members of the run change: nothing arrives any more. Sends are over at once."""

    def __init__(self, rank, receives):
        self.rank, self._left = rank, receives

    def isend(self, tensor, *, dest, tag=0):
        return Over()

    def irecv(self, tensor, *, source, tag=0):
        self._left -= 1
        return Over(tensor.fill_(1) if self._left >= 0 else None)


class Over:
    def __init__(self, tensor=()):
        self._tensor = tensor

    def wait(self):
        if self._tensor is None:
            raise CommunicationError("the members change")


def differentiate(model, step, indices, exchange, *, enter="accumulate"):
    for index in indices:
        loss = loss_of(model, step, index)
        if enter == "accumulate":
            exchange.expect(index, tokens=index + 1, loss=loss.item())
        loss.backward()
        getattr(exchange, enter)(index, tokens=index + 1, loss=loss.item())


@settings(deadline=None, max_examples=examples(40))
@given(st.data(), st.integers(2, 5), st.sampled_from([1e-6, ONE_LAYER, 1.0]))
def test_an_interrupted_step_goes_on_among_other_ranks_with_the_bits_of_one_process(data, ranks, megabytes):
    """Each rank stops somewhere in its pass or in the exchange, one dies; what is lost is computed by any of the others."""
    micro_batches = data.draw(st.integers(ranks, 12))
    blocks = contiguous_blocks(micro_batches, ranks)
    # Each rank waits at least for the others' counts, their shares of its shard, and their shards of the mean.
    lives = [data.draw(st.integers(0, 3 * (ranks - 1) - 1)) for _ in range(ranks)]
    stops = [data.draw(st.integers(block.start, block.stop)) for block in blocks]
    models = [Layers(0) for _ in range(ranks)]
    exchanges, nodes = {}, {}
    for rank, model in enumerate(models):
        exchange = exchanges[rank] = GradientExchange(
            model.parameters(),
            ctx=EndingCommunicator(rank, lives[rank]),
            among=range(ranks),
            micro_batches=micro_batches,
            bucket_megabytes=megabytes,
            keeps_nodes=True,
        )
        with contextlib.suppress(CommunicationError):
            differentiate(model, 0, range(blocks[rank].start, stops[rank]), exchange)
            if stops[rank] == blocks[rank].stop:
                exchange.finish()
        nodes[rank] = exchange.interrupt()
        # The last micro-batch counts as soon as its backward pass is over, whatever became of the messages.
        assert list(range(blocks[rank].start, stops[rank])) == [leaf for node in nodes[rank] for leaf in node.leaves]

    living = list(range(ranks))
    living.remove(data.draw(st.sampled_from(living)))
    todo = {rank: [] for rank in living}
    for leaf in range(micro_batches):
        if not any(leaf in node.leaves for rank in living for node in nodes[rank]):
            todo[data.draw(st.sampled_from(living))].append(leaf)
    for rank in living:
        for leaf in todo[rank]:
            differentiate(models[rank], 0, [leaf], exchanges[rank], enter="add")
            nodes[rank] += exchanges[rank].interrupt()
        nodes[rank].sort(key=lambda node: node.start)
    layout = [[node.leaves for node in nodes[rank]] for rank in living]
    world, found = InProcessWorld(["worker"] * ranks), {}

    def go_on(rank):
        exchange = exchanges[rank]
        exchange._ctx = LateCommunicator(world.communicator(rank))
        exchange.divide(living, contiguous_blocks(micro_batches, len(living)))
        found[rank] = exchange.reduce(nodes[rank], layout)

    outcome = world.run({rank: (lambda rank=rank: go_on(rank)) if rank in living else print for rank in range(ranks)})
    assert ({}, []) == (outcome.errors, outcome.findings)
    expected_N, losses = first_mean(micro_batches)
    for rank in living:
        assert losses == found[rank]
        assert torch.equal(expected_N, exchanges[rank].mean_N)
        assert torch.equal(expected_N, FlatParameters(models[rank].parameters()).grads_N)


@cache
def first_mean(micro_batches):
    """The mean gradient of the first step in one process, and loss and tokens."""
    model = Layers(0)
    flat = FlatParameters(model.parameters())
    tree = GradientTree(len(flat.weights_N))
    for index in range(micro_batches):
        flat.grads_N.zero_()
        loss = loss_of(model, 0, index)
        loss.backward()
        tree.add(index, flat.grads_N, tokens=index + 1, loss=loss.item())
    found = tree.mean(flat.grads_N, micro_batches=micro_batches)
    return flat.grads_N, found


def test_an_exchange_that_does_not_keep_its_nodes_takes_no_others():
    comm = InProcessWorld(["worker"]).communicator(0)
    exchange = GradientExchange(Layers(0).parameters(), ctx=comm, among=[0], micro_batches=1)
    with pytest.raises(ValueError, match="only an exchange with `keeps_nodes`"):
        exchange.reduce([], [[]])


def test_an_incomplete_block_is_refused():
    comm = InProcessWorld(["worker"] * 2).communicator(0)
    exchange = GradientExchange(Layers(0).parameters(), ctx=comm, among=[0, 1], micro_batches=4)
    exchange.accumulate(0, tokens=1, loss=0.0)
    with pytest.raises(ValueError, match="the block of rank 0 ends with micro-batch 1, which is missing"):
        exchange.finish()


def test_no_bucket_is_updated_before_the_checkpoint_has_its_copy(make_cfg, make_context):
    """Whoever still reads the weights of the last step is waited for once, after the gradients have come."""
    cfg = make_cfg(training={"use_clip_grad_norm": False})
    model = build_model(cfg, make_context(cfg))
    optimizer = build_optimizer(cfg, model, total_steps=9)
    update = BucketedUpdate(optimizer, cfg=cfg, model=model)
    before_N, seen = model.weights_N.clone(), []
    optimizer.wait_before_update(lambda: seen.append(torch.equal(before_N, model.weights_N)))
    model.grads_N.fill_(1)
    buckets = cut_buckets(FlatParameters(model.parameters()).starts, bucket_bytes=0)
    for _ in update.step(1, iter(buckets)):
        assert [True] == seen
    assert [True] == seen


def test_without_clipping_no_bucket_with_a_value_that_is_no_number_is_updated(make_cfg, make_context):
    cfg = make_cfg(training={"use_clip_grad_norm": False})
    model = build_model(cfg, make_context(cfg))
    update = BucketedUpdate(build_optimizer(cfg, model, total_steps=9), cfg=cfg, model=model)
    buckets = cut_buckets(FlatParameters(model.parameters()).starts, bucket_bytes=0)
    model.grads_N.fill_(1)
    buckets[2].of(model.grads_N)[0] = torch.nan
    with pytest.raises(NotFiniteError):
        list(update.step(1, iter(buckets)))
    assert bool(model.weights_N.isfinite().all())
