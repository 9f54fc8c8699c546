"""The worker's end of a remote optimizer, over communicators inside this process."""

import pytest
import torch
from torch import nn

from ttlaunch.runtime.comm.in_process import InProcessWorld
from ttlaunch.runtime.model.flat import FlatParameters
from ttlaunch.runtime.parallel.tiers.gradient_aggregator import GradientAggregator
from ttlaunch.runtime.parallel.tiers.remote_optimizer import RemoteOptimizer

BLOCKS = {0: range(1), 1: range(1, 2)}


def serve(comm, workers, model, *, steps, rate):
    """Plain SGD on the mean over workers, each of which has a block of micro-batches."""
    aggregator, flat = (
        GradientAggregator(model.parameters(), ctx=comm, workers=workers),
        FlatParameters(model.parameters()),
    )
    aggregator.send_first_weights()
    for _ in range(steps):
        aggregator.begin_step()
        for bucket in aggregator.mean_gradients():
            bucket.of(flat.weights_N).sub_(bucket.of(flat.grads_N), alpha=rate)
            aggregator.send_weights(bucket)
        aggregator.end_step()


def make_model(seed):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 1))


def play(*lives):
    """Run `life(comm)` for every rank."""
    world = InProcessWorld(["rank"] * len(lives))
    outcome = world.run({rank: lambda rank=rank: lives[rank](world.communicator(rank)) for rank in range(len(lives))})
    assert ({}, []) == (outcome.errors, outcome.findings)
    return outcome


def test_the_loop_as_the_document_writes_it_trains():
    """A3, A4: workers that were seeded differently hold the optimizer's weights, and the loss falls."""
    torch.manual_seed(0)
    x, y = torch.randn(32, 3), torch.randn(32, 1)
    server, replicas = make_model(0), [make_model(seed) for seed in (1, 2)]
    losses, first_weights = {0: [], 1: []}, {}

    def worker(comm):
        rank = comm.rank
        model, part = replicas[rank], slice(16 * rank, 16 * rank + 16)
        remote = RemoteOptimizer(model.parameters(), 2, ctx=comm, block=range(rank, rank + 1))
        remote.receive_weights()
        first_weights[rank] = [parameter.detach().clone() for parameter in model.parameters()]
        for _ in range(40):
            remote.zero_grad()
            loss = nn.functional.mse_loss(model(x[part]), y[part])
            loss.backward()
            remote.step()
            losses[rank].append(loss.item())

    play(worker, worker, lambda comm: serve(comm, BLOCKS, server, steps=40, rate=0.3))
    for ours, theirs in zip(first_weights[0], first_weights[1], strict=True):
        assert torch.equal(ours, theirs)
    for replica in replicas:
        for ours, theirs in zip(replica.parameters(), server.parameters(), strict=True):
            assert torch.equal(ours, theirs)
    assert losses[0][-1] + losses[1][-1] < 0.9 * (losses[0][0] + losses[1][0])

    alone = make_model(0)
    for _ in range(40):
        alone.zero_grad()
        (nn.functional.mse_loss(alone(x), y)).backward()
        with torch.no_grad():
            for parameter in alone.parameters():
                parameter.sub_(0.3 * parameter.grad)
    torch.testing.assert_close(list(alone.parameters()), list(server.parameters()), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("by_micro_batch", [False, True])
def test_a_parameter_without_a_gradient_counts_as_zero(by_micro_batch):
    """A14: the original hangs. The hook of the second layer's weight never fires, in the document's loop and in ours."""
    model = nn.ModuleList([nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False)])
    server = make_same(model)
    before = server[1].weight.detach().clone()

    def worker(comm):
        remote = RemoteOptimizer(model.parameters(), 1, ctx=comm)
        remote.receive_weights()
        for _ in range(2):
            for parameter in model.parameters():
                parameter.grad = None
            if by_micro_batch:
                remote.expect(0, tokens=1, loss=1.0)
            model[0](torch.ones(1, 2)).sum().backward()
            if by_micro_batch:
                remote.accumulate(0, tokens=1, loss=1.0)
            remote.step()

    def aggregator(comm):
        serve(comm, {0: range(1)}, server, steps=2, rate=1.0)

    play(worker, aggregator)
    assert torch.equal(before, model[1].weight)
    assert torch.equal(server[0].weight, model[0].weight)
    assert not torch.equal(before, server[0].weight)


def make_same(model):
    twin = nn.ModuleList([nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False)])
    twin.load_state_dict(model.state_dict())
    return twin


def tensors_in(value, seen):
    """All tensors that an object of the runtime holds, through its attributes and containers."""
    if id(value) in seen:
        return
    seen[id(value)] = value
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from tensors_in(item, seen)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from tensors_in(item, seen)
    elif type(value).__module__.startswith("ttlaunch.runtime") and not isinstance(value, nn.Module):
        yield from tensors_in(vars(value), seen)


def test_it_keeps_no_optimizer_state():
    """A8: weights, gradients and the sums of a block of four, which wait for each other; nothing like Adam's moments."""
    model, end = make_model(0), InProcessWorld(["worker", "server"]).communicator(0)
    remote = RemoteOptimizer(model.parameters(), 1, ctx=end, block=range(4))
    for index in range(3):
        model(torch.ones(2, 3)).sum().backward()
        remote.accumulate(index, tokens=2, loss=1.0)
    size = len(FlatParameters(model.parameters()).weights_N)
    memories = {tensor.untyped_storage().data_ptr() for tensor in tensors_in(remote, {}) if tensor.numel() >= size}
    assert 2 + 2 == len(memories)  # weights, gradients; sums over 0-1 and 2


def test_a_step_moves_the_gradients_once():
    """A9, A12: k micro-batches, one message; loss and tokens in one more, and the size of buckets in the first step."""
    model = make_model(0)

    def worker(comm):
        remote = RemoteOptimizer(model.parameters(), 1, ctx=comm, block=range(4, 8))
        remote.receive_weights()
        for _ in range(3):
            remote.zero_grad()
            for index in range(4, 8):
                model(torch.ones(2, 3)).sum().backward()
                remote.accumulate(index, tokens=2, loss=1.0)
            remote.step()

    def first_half(comm):
        remote = RemoteOptimizer(make_model(1).parameters(), 1, ctx=comm, block=range(4))
        remote.receive_weights()
        for _ in range(3):
            remote.step()

    outcome = play(
        worker,
        lambda comm: serve(comm, {2: range(4), 0: range(4, 8)}, make_model(0), steps=3, rate=0.1),
        first_half,
    )
    size = 4 * len(FlatParameters(model.parameters()).weights_N)
    assert (3 * 2, 3 * (size + 32)) == (outcome.messages[0, 1], outcome.message_bytes[0, 1])
    assert (1 + 3 + 1, 4 * size + 16) == (outcome.messages[1, 0], outcome.message_bytes[1, 0])


def test_half_a_block_is_refused():
    remote = RemoteOptimizer(
        make_model(0).parameters(), 1, ctx=InProcessWorld(["worker", "server"]).communicator(0), block=range(2)
    )
    remote.accumulate(0, tokens=1, loss=0.0)
    with pytest.raises(ValueError, match="1 micro-batches were accumulated, the block has 2"):
        remote.step()


def test_an_already_flat_model_stays_where_it_is():
    model = make_model(0)
    first = FlatParameters(model.parameters())
    second = FlatParameters(model.parameters())
    assert first.weights_N.data_ptr() == second.weights_N.data_ptr()
    assert first.grads_N.data_ptr() == second.grads_N.data_ptr()
    assert all(parameter.data_ptr() % 64 == 0 for parameter in model.parameters())
